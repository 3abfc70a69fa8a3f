"""Facts of the session state machine: its inputs, frozen values in the past tense.

They come from callers, the log, the process and the timers. `process_facts.py` has the reports of a
process, and `effects.py` has the outputs. Times (`at`) are seconds of a monotonic clock. Each fact
that can arrive late names its subject: a process by its number, a turn by its key (id and attempt).
So the state machine can recognise a stale fact.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from banksman.core.dialects.dialect import Decision, Prompt
from banksman.core.dialects.meaning import Meaning
from banksman.core.process_facts import Report, Swept
from banksman.core.session.budget import CapUse
from banksman.core.session.session_config import Config
from banksman.core.session.turn import Ask
from banksman.errors import BanksmanError


class Timer(enum.StrEnum):
    """Purpose of a timer.

    Purpose and subject together name one wait. After a restart only the new timer counts.
    """

    DRAIN = "drain"  # an interrupted turn (key): its boundary and the acknowledgement are due
    SETTLE = "settle"  # a turn (key): its boundary was seen, the confirmation is due
    CLOCKS = "clocks"  # a turn (key): one of its watchdogs may be due
    START = "start"  # a process (number): its handshake is due
    WRITE = "write"  # a frame (process and count): the agent should have read it
    COLLECT = "collect"  # a turn (id): its collect window closes
    HOLD = "hold"  # a hold (id and count of its asks): it was idle too long
    STORE = "store"  # a retry (count): the log may work again
    QUESTION = "question"  # a question (id): it got no answer in time
    SETTING = "setting"  # a change of a setting (its request): the agent's reply is due
    IDLE = "idle"  # a process (and count): it was idle too long
    AGE = "age"  # a process (number): it is old
    BACKOFF = "backoff"  # a process (number) that crashed: another one may be started
    SWEEP = "sweep"  # a process (number): the sweep after a turn should be over
    LEAVE = "leave"  # the session: the deadline of the running turn before the session leaves
    DEADLINE = "deadline"  # an ask (id): it should be over
    BACKGROUND = "background"  # the session: a drain has waited long enough for background tasks
    LIMIT = "limit"  # a wait (key): the limit of the account should be over
    BUDGET = "budget"  # the session: its working time may have reached a cap
    FALLBACK = "fallback"  # an agent and the end of its limit: it may serve again


Subject = tuple[Timer, str]


# -- from callers --------------------------------------------------------------------------------
class Begun(Struct, frozen=True):
    """The session has an owner now, which serves the asks that already wait in it."""

    at: float


class Asked(Struct, frozen=True):
    """A caller wants a turn."""

    at: float
    ask: Ask


class AskWithdrawn(Struct, frozen=True):
    """The caller withdrew its ask, or disconnected before the ask was accepted."""

    at: float
    turn: str


class InterruptAsked(Struct, frozen=True):
    """A caller wants this turn to stop, and waits for a receipt. `interrupt` names the receipt.

    `caller`: the name of that caller.
    """

    at: float
    turn: str
    interrupt: str
    caller: str | None = None


class AskMoved(Struct, frozen=True):
    """A caller wants a queued ask before another one of its class.

    `before` None: at the head of its class. `caller`: the name of that caller.
    """

    at: float
    turn: str
    before: str | None = None
    caller: str | None = None


class AskEdited(Struct, frozen=True):
    """A caller wants another prompt or another class for a queued ask. None: as before.

    `caller`: the caller that edits it. `change` names the future that gets the result.
    """

    at: float
    change: str
    turn: str
    prompt: Prompt | None = None
    priority: int | None = None
    caller: str | None = None


class HoldAsked(Struct, frozen=True):
    """A caller wants exclusive use of the session."""

    at: float
    hold: str
    priority: int
    caller: str | None = None


class HoldReleased(Struct, frozen=True):
    """The holder released its hold, or gave up waiting for it. `caller`: the one that released."""

    at: float
    hold: str
    caller: str | None = None


class QuestionAnswered(Struct, frozen=True):
    """A caller answered a question, which is named by the session's own id.

    A question that is over keeps the answer that it has.
    """

    at: float
    question: str
    decision: Decision


class CallbackAnswered(Struct, frozen=True):
    """A callback of the caller returned. `response` None: it failed with `error`."""

    at: float
    process: int
    request: str
    response: Mapping[str, Any] | None
    error: str = ""


class SettingAsked(Struct, frozen=True):
    """A caller wants another model, or another permission mode.

    `change` names the future that gets the result.
    """

    at: float
    change: str
    name: str
    value: str
    caller: str | None = None


class Reconfigured(Struct, frozen=True):
    """The session was opened again.

    `replaces`: the new spec differs, so the running process does not match it. `drops`: the
    settings that have their opening values again. `opened`: the spec for the log, if the log has
    another one. `change` names the future that is resolved once the log has it.
    """

    at: float
    config: Config
    replaces: bool
    drops: tuple[str, ...] = ()
    opened: Mapping[str, Any] | None = None
    change: str = ""


class ShareAsked(Struct, frozen=True):
    """The session is shared with exactly these callers from now on.

    `caller`: the caller that shares it. `change` names the future that is resolved once the log has
    it.
    """

    at: float
    change: str
    shared: tuple[str, ...]
    caller: str | None = None


class EvictAsked(Struct, frozen=True):
    """Another session needs the place of this session's process, if the process is idle."""

    at: float


class DrainAsked(Struct, frozen=True):
    """Refuse new asks, finish the running turn, then close."""

    at: float


class CloseAsked(Struct, frozen=True):
    """A caller wants the session closed. `caller`: its name."""

    at: float
    caller: str | None = None


class LeaveAsked(Struct, frozen=True):
    """Another host is to own the session.

    Refuse new asks, finish the running turn, but not beyond `by`, and release the session. The
    waiting asks stay in the log.
    """

    at: float
    by: float | None = None


class HandOverAsked(Struct, frozen=True):
    """The next host of the machine is to own the session, and to take over its process.

    If that cannot begin before `by`, the session leaves as after a `LeaveAsked`.
    """

    at: float
    by: float


class AccountLimited(Struct, frozen=True):
    """Another session of the agent's account learned until when the account is limited.

    `until`: wall clock; None: the account answers again. `agent`: which agent of the session;
    empty: the one that serves it now.
    """

    at: float
    until: float | None
    agent: str = ""


class LimitDecided(Struct, frozen=True):
    """The caller decided about a wait for a limit, which is named by its key.

    `fails` False: the asks wait.
    """

    at: float
    key: str
    fails: bool


# -- from the host's budgets ---------------------------------------------------------------------
class BudgetChanged(Struct, frozen=True):
    """These shared caps are reached now, and no others."""

    at: float
    reached: tuple[CapUse, ...]


class BudgetWarned(Struct, frozen=True):
    """Usage of this session has brought a shared cap near its end."""

    at: float
    use: CapUse


class BudgetClaimed(Struct, frozen=True):
    """The host decided whether a granted turn (key) may spend from the shared budgets.

    `reached`: as in `BudgetChanged`. If the turn may not spend, a cap among them is the reason.
    """

    at: float
    key: str
    granted: bool
    reached: tuple[CapUse, ...] = ()


# -- from the log --------------------------------------------------------------------------------
class Committed(Struct, frozen=True):
    """Everything up to this seq is durable."""

    at: float
    seq: int


class AppendFailed(Struct, frozen=True):
    """Nothing after the last `Committed` was written. `is_final`: another host owns the session."""

    at: float
    error: BanksmanError
    is_final: bool = False


# -- from the process ----------------------------------------------------------------------------
class ProcessReported(Struct, frozen=True):
    """The session's process of this number reported a fact.

    `epoch`: the epoch under which this host owned the session then. The store issues no epoch
    twice. So the epoch of `Started` identifies this process in the session's whole history. The
    process number does not, because the log may lose it. The stderr of `ProcessGone` is already
    redacted, because the session truncates it, and a cut could hide a secret from redaction.
    """

    at: float
    process: int
    report: Report
    epoch: int = 0


class HandedOver(Struct, frozen=True):
    """The keeper holds this process for the next host. `about`: what the log tells that host."""

    at: float
    process: int
    about: Mapping[str, Any]


class HandOverFailed(Struct, frozen=True):
    """The process could not be handed over, and this host still has it.

    `is_final`: it will not be possible later either.
    """

    at: float
    process: int
    is_final: bool


class FramesRead(Struct, frozen=True):
    """Lines from the agent in order, and the meanings of some of them, by index and in order."""

    at: float
    process: int
    lines: Sequence[bytes]
    meanings: Sequence[tuple[int, Meaning]] = ()


class ConversationTaken(Struct, frozen=True):
    """The process has joined a conversation that another session drives.

    `held`: the conversation that this session still holds.
    """

    at: float
    process: int
    error: BanksmanError
    held: str | None


class TerminalsEnded(Struct, frozen=True):
    """Commands that the agent made the host run in a turn (id) were ended with it.

    By policy they may have been left running instead.
    """

    at: float
    process: int
    turn: str
    commands: tuple[Swept, ...]


class TimerFired(Struct, frozen=True):
    """A timer is due."""

    at: float
    subject: Subject


CallerFact = (
    Begun
    | Asked
    | AskWithdrawn
    | InterruptAsked
    | AskMoved
    | AskEdited
    | HoldAsked
    | HoldReleased
    | QuestionAnswered
    | CallbackAnswered
    | SettingAsked
    | Reconfigured
    | ShareAsked
    | EvictAsked
    | DrainAsked
    | CloseAsked
    | LeaveAsked
    | HandOverAsked
    | AccountLimited
    | LimitDecided
)
# These name a process. A fact about a process that was replaced is stale.
AgentFact = ProcessReported | FramesRead | ConversationTaken | TerminalsEnded
HandOverFact = HandedOver | HandOverFailed
BudgetFact = BudgetChanged | BudgetWarned | BudgetClaimed
Fact = CallerFact | AgentFact | HandOverFact | BudgetFact | Committed | AppendFailed | TimerFired
