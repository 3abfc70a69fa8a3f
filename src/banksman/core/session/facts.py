"""What happens to a session: facts, in the past tense. What is to be done about it is in effects.py.

They are frozen values. Times (`at`) are seconds of a monotonic clock. Everything that can arrive late names its
subject: a process by its number, a turn by its key (id and attempt), so that a late one is known for what it is.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from banksman.core.dialects.meaning import Meaning
from banksman.core.process_facts import Report, Swept
from banksman.core.session.permissions import Decision
from banksman.core.session.session_config import Config
from banksman.core.session.turn import Ask
from banksman.errors import BanksmanError


class Timer(enum.Enum):
    """What a timer is for. Together with its subject it names one wait; started again, only the new one counts."""

    DRAIN = "drain"  # an interrupted turn (key): its boundary and the acknowledgement are due
    SETTLE = "settle"  # a turn (key): its boundary was seen, what confirms it is due
    CLOCKS = "clocks"  # a turn (key): one of its watchdogs may have something to say
    START = "start"  # a process (number): it should be ready
    WRITE = "write"  # a frame (process and count): the agent should have taken it
    COLLECT = "collect"  # a turn (id): its window closes
    HOLD = "hold"  # a hold (id and count of its asks): it has been idle
    STORE = "store"  # a retry (count): the log may be back
    QUESTION = "question"  # a question (id): nobody has answered it
    SETTING = "setting"  # a change of a setting (its request): the agent should have answered
    IDLE = "idle"  # a process (and count): nobody has needed it
    AGE = "age"  # a process (number): it is old
    BACKOFF = "backoff"  # a process (number) that crashed: another may be tried
    SWEEP = "sweep"  # a process (number): what a turn left running should be gone
    LEAVE = "leave"  # the session: what runs in it may not go on any longer


Subject = tuple[Timer, str]


# -- from callers ----------------------------------------------------------------------------------------------------
class Begun(Struct, frozen=True):
    """The session has an owner from now on. Who waits in it since before is served."""

    at: float


class Asked(Struct, frozen=True):
    at: float
    ask: Ask


class AskWithdrawn(Struct, frozen=True):
    """The caller no longer wants it: it vanished while it waited to be accepted, or said so."""

    at: float
    turn: str


class InterruptAsked(Struct, frozen=True):
    """Somebody wants this turn to stop, and a receipt. `interrupt` names the receipt."""

    at: float
    turn: str
    interrupt: str


class AskMoved(Struct, frozen=True):
    """Somebody wants a queued ask before another of its class; None: at the head of its class."""

    at: float
    turn: str
    before: str | None = None


class HoldAsked(Struct, frozen=True):
    at: float
    hold: str
    priority: int


class HoldReleased(Struct, frozen=True):
    """The holder is done, or no longer wants it."""

    at: float
    hold: str


class QuestionAnswered(Struct, frozen=True):
    """Somebody has an answer to a question (our name for it). One that is over has its answer, and keeps it."""

    at: float
    question: str
    decision: Decision


class CallbackAnswered(Struct, frozen=True):
    """A callback of the caller's gave this back; None: it could not, for this reason."""

    at: float
    process: int
    request: str
    response: Mapping[str, Any] | None
    error: str = ""


class SettingAsked(Struct, frozen=True):
    """Somebody wants another model, or another permission mode. `change` names the promise to tell what came of it."""

    at: float
    change: str
    name: str
    value: str


class Reconfigured(Struct, frozen=True):
    """The session was opened again. `replaces`: in another way, so that what runs now is not what was asked for.
    `drops`: the settings that are what they were opened with again. `opened`: how, for the log, if that is not as the
    log has it; `change` names the promise to tell when it is."""

    at: float
    config: Config
    replaces: bool
    drops: tuple[str, ...] = ()
    opened: Mapping[str, Any] | None = None
    change: str = ""


class EvictAsked(Struct, frozen=True):
    """Another session needs the place of this one's process, if nobody needs the process."""

    at: float


class DrainAsked(Struct, frozen=True):
    """Take nothing new, finish what runs, then close."""

    at: float


class CloseAsked(Struct, frozen=True):
    at: float


class LeaveAsked(Struct, frozen=True):
    """Another host is to have it: take nothing new, finish what runs, but not beyond `by`, and let go. Who waits is
    kept in the log."""

    at: float
    by: float | None = None


# -- from the log ----------------------------------------------------------------------------------------------------
class Committed(Struct, frozen=True):
    """Everything up to this seq is durable."""

    at: float
    seq: int


class AppendFailed(Struct, frozen=True):
    """Nothing after the last `Committed` was written. `is_final`: another writer has the session."""

    at: float
    error: BanksmanError
    is_final: bool = False


# -- from the process ------------------------------------------------------------------------------------------------
class ProcessReported(Struct, frozen=True):
    """The session's process of this number has told this. `epoch`: under which the session was owned then. The store
    gives none twice, so that of `Started` names this one process in the session's whole history; its number does not,
    if the log loses it. The stderr of `ProcessGone` has no secrets any more: it is cut here."""

    at: float
    process: int
    report: Report
    epoch: int = 0


class FramesRead(Struct, frozen=True):
    """Lines from the agent, in order, and what some of them mean, by index, in order."""

    at: float
    process: int
    lines: Sequence[bytes]
    meanings: Sequence[tuple[int, Meaning]] = ()


class ConversationTaken(Struct, frozen=True):
    """Another session drives the conversation that this process has just named as its own. `held`: the one that is
    still ours."""

    at: float
    process: int
    error: BanksmanError
    held: str | None


class TerminalsEnded(Struct, frozen=True):
    """Commands that the agent has had us run in a turn (id) were ended with it, or, by policy, were not."""

    at: float
    process: int
    turn: str
    commands: tuple[Swept, ...]


class TimerFired(Struct, frozen=True):
    at: float
    subject: Subject


CallerFact = (
    Begun
    | Asked
    | AskWithdrawn
    | InterruptAsked
    | AskMoved
    | HoldAsked
    | HoldReleased
    | QuestionAnswered
    | CallbackAnswered
    | SettingAsked
    | Reconfigured
    | EvictAsked
    | DrainAsked
    | CloseAsked
    | LeaveAsked
)
# These name a process: of one that was given up they are late.
AgentFact = ProcessReported | FramesRead | ConversationTaken | TerminalsEnded
Fact = CallerFact | AgentFact | Committed | AppendFailed | TimerFired
