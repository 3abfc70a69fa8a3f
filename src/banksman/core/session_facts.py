"""What happens to a session: facts, in the past tense. What is to be done about it is in session_effects.py.

They are frozen values. Times (`at`) are seconds of a monotonic clock. Everything that can arrive late names its
subject: a process by its number, a turn by its key (id and attempt), so that a late one is known for what it is.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from banksman.core.config import Config
from banksman.core.decision import Decision
from banksman.core.facts import Rung, Survivor, Swept
from banksman.core.meaning import Meaning
from banksman.core.turn import Ask
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
@dataclass(frozen=True, slots=True)
class Begun:
    """The session has an owner from now on. Who waits in it since before is served."""

    at: float


@dataclass(frozen=True, slots=True)
class Asked:
    at: float
    ask: Ask


@dataclass(frozen=True, slots=True)
class AskWithdrawn:
    """The caller no longer wants it: it vanished while it waited to be accepted, or said so."""

    at: float
    turn: str


@dataclass(frozen=True, slots=True)
class InterruptAsked:
    """Somebody wants this turn to stop, and a receipt. `interrupt` names the receipt."""

    at: float
    turn: str
    interrupt: str


@dataclass(frozen=True, slots=True)
class AskMoved:
    """Somebody wants a queued ask before another of its class; None: at the head of its class."""

    at: float
    turn: str
    before: str | None = None


@dataclass(frozen=True, slots=True)
class HoldAsked:
    at: float
    hold: str
    priority: int


@dataclass(frozen=True, slots=True)
class HoldReleased:
    """The holder is done, or no longer wants it."""

    at: float
    hold: str


@dataclass(frozen=True, slots=True)
class QuestionAnswered:
    """Somebody has an answer to a question (our name for it). One that is over has its answer, and keeps it."""

    at: float
    question: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class CallbackAnswered:
    """A callback of the caller's gave this back; None: it could not, for this reason."""

    at: float
    process: int
    request: str
    response: Mapping[str, Any] | None
    error: str = ""


@dataclass(frozen=True, slots=True)
class SettingAsked:
    """Somebody wants another model, or another permission mode. `change` names the promise to tell what came of it."""

    at: float
    change: str
    name: str
    value: str


@dataclass(frozen=True, slots=True)
class Reconfigured:
    """The session was opened again. `replaces`: in another way, so that what runs now is not what was asked for.
    `drops`: the settings that are what they were opened with again. `opened`: how, for the log, if that is not as the
    log has it; `change` names the promise to tell when it is."""

    at: float
    config: Config
    replaces: bool
    drops: tuple[str, ...] = ()
    opened: Mapping[str, Any] | None = None
    change: str = ""


@dataclass(frozen=True, slots=True)
class EvictAsked:
    """Another session needs the place of this one's process, if nobody needs the process."""

    at: float


@dataclass(frozen=True, slots=True)
class DrainAsked:
    """Take nothing new, finish what runs, then close."""

    at: float


@dataclass(frozen=True, slots=True)
class CloseAsked:
    at: float


@dataclass(frozen=True, slots=True)
class LeaveAsked:
    """Another host is to have it: take nothing new, finish what runs, but not beyond `by`, and let go. Who waits is
    kept in the log."""

    at: float
    by: float | None = None


# -- from the log ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Committed:
    """Everything up to this seq is durable."""

    at: float
    seq: int


@dataclass(frozen=True, slots=True)
class AppendFailed:
    """Nothing after the last `Committed` was written. `is_final`: another writer has the session."""

    at: float
    error: BanksmanError
    is_final: bool = False


# -- from the process ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ProcessStarted:
    """`born`: by what it can be known later, by another host. `epoch`: under which it was started. The store gives none
    twice, so it names this one process in the session's whole history; its number does not, if the log loses it."""

    at: float
    process: int
    pid: int
    born: tuple[str, int, int, int, int, int, int] | None = None
    epoch: int = 0


@dataclass(frozen=True, slots=True)
class ProcessFailed:
    """It could not be started: nothing runs."""

    at: float
    process: int
    error: BanksmanError


@dataclass(frozen=True, slots=True)
class FramesRead:
    """Lines from the agent, in order, and what some of them mean, by index, in order."""

    at: float
    process: int
    lines: Sequence[bytes]
    meanings: Sequence[tuple[int, Meaning]] = ()


@dataclass(frozen=True, slots=True)
class ConversationTaken:
    """Another session drives the conversation that this process has just named as its own. `held`: the one that is
    still ours."""

    at: float
    process: int
    error: BanksmanError
    held: str | None


@dataclass(frozen=True, slots=True)
class FrameWritten:
    """The pipe has taken the whole frame."""

    at: float
    process: int


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The agent takes no more. What it had of the frame is unknown."""

    at: float
    process: int
    error: BanksmanError


@dataclass(frozen=True, slots=True)
class ProcessExited:
    """The leader has ended; its tree and its output may not have."""

    at: float
    process: int
    code: int | None = None
    signal: int | None = None


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """Its tree is gone or named, and everything it wrote has been told. `ladder`: the rungs that were taken with it."""

    at: float
    process: int
    swept: tuple[Swept, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    drained: bool = True
    stderr: str = ""
    ladder: tuple[Rung, ...] = ()


@dataclass(frozen=True, slots=True)
class ProcessSwept:
    """What the last turn had left running is gone or named; or, where it was only looked for, it is all here."""

    at: float
    process: int
    swept: tuple[Swept, ...] = ()
    survivors: tuple[Survivor, ...] = ()


@dataclass(frozen=True, slots=True)
class TerminalsEnded:
    """Commands that the agent has had us run in a turn (id) were ended with it, or, by policy, were not."""

    at: float
    process: int
    turn: str
    commands: tuple[Swept, ...]


@dataclass(frozen=True, slots=True)
class TimerFired:
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
ProcessFact = (
    ProcessStarted
    | ProcessFailed
    | FramesRead
    | ConversationTaken
    | FrameWritten
    | WriteFailed
    | ProcessExited
    | ProcessGone
    | ProcessSwept
    | TerminalsEnded
)
Fact = CallerFact | ProcessFact | Committed | AppendFailed | TimerFired
