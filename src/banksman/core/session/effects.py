"""Effects of the session state machine: its outputs, frozen values in the imperative.

`sessions/driver.py` performs them in order, and passes those for callers to
`sessions/outcome_listener.py`. An effect with a later result names the subject of the fact that
will report it. The inputs are in `facts.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from banksman.core.dialects.meaning import Requested
from banksman.core.session.account_limits import Windows
from banksman.core.session.event import Entry
from banksman.core.session.facts import Subject
from banksman.core.session.outcome import Outcome, Receipt
from banksman.errors import AgentError, BanksmanError


class Append(Struct, frozen=True):
    """Write these entries to the log atomically."""

    entries: Sequence[Entry]


class StartProcess(Struct, frozen=True):
    """Start the agent as process number `process`, once the pool has room.

    `conversation`: the conversation to resume. `forks`: start a copy of it instead. `settings`: the
    settings that were changed since the session was opened. `agent`: which agent of the session;
    empty: the session has only one. `traceparent`: the trace of the turn that needs the process.
    """

    process: int
    conversation: str | None
    forks: bool = False
    settings: tuple[tuple[str, str], ...] = ()
    agent: str = ""
    traceparent: str | None = None


class StopProcess(Struct, frozen=True):
    """Stop the process by the ladder."""

    process: int


class HandOver(Struct, frozen=True):
    """Hand the process over to the next host. `HandedOver` or `HandOverFailed` reports the result.

    Until then, no other fact but those of the log.
    """

    process: int


class SweepTools(Struct, frozen=True):
    """End the processes that the agent started since a moment, and their descendants.

    The agent itself continues. `ends` False: only find them. `SweepEnded` reports the result.
    """

    process: int
    since: float
    ends: bool


class WriteFrame(Struct, frozen=True):
    """Write one whole frame. The next frame follows only after this one is written."""

    process: int
    data: bytes


class StartTimer(Struct, frozen=True):
    """Start a timer, or restart it. `TimerFired` reports it."""

    at: float
    subject: Subject


class CancelTimer(Struct, frozen=True):
    """Cancel a timer, for tidiness only: a stale timer is harmless."""

    subject: Subject


class Accept(Struct, frozen=True):
    """Tell the caller that the ask is durable: it has its turn id, and will get an outcome."""

    turn: str


class Reject(Struct, frozen=True):
    """Tell the caller that the ask was not accepted, and left no trace."""

    turn: str
    error: BanksmanError


class Resolve(Struct, frozen=True):
    """Give an ask its one outcome."""

    turn: str
    outcome: Outcome


class LeaveInLog(Struct, frozen=True):
    """Leave the ask in the log for the session's next owner. It gets no outcome from this host."""

    turn: str


class GiveReceipt(Struct, frozen=True):
    """Give the caller of an interrupt its receipt.

    `error`: there is none, because the turn continues at another host.
    """

    interrupt: str
    receipt: Receipt
    error: BanksmanError | None = None


class GrantHold(Struct, frozen=True):
    """Tell the holder that its hold begins."""

    hold: str


class EndHold(Struct, frozen=True):
    """End a hold, or refuse it.

    The hold was idle too long, the session is closing or leaving, or its log is broken.
    """

    hold: str
    error: BanksmanError | None = None


class AskHuman(Struct, frozen=True):
    """Show a question of the agent to a human.

    `question`: the name that the session gave the question. The agent's own id is in `asked`.
    """

    question: str
    asked: Requested
    turn: str | None


class CloseQuestion(Struct, frozen=True):
    """Withdraw a question, which needs no answer now."""

    question: str


class TellAnswer(Struct, frozen=True):
    """Report the one answer of a question, once it is durable.

    `error`: the question is over, and the log will never hold its answer.
    """

    question: str
    answer: str
    by: str
    message: str | None = None
    error: BanksmanError | None = None
    caller: str | None = None


class CallBack(Struct, frozen=True):
    """Call a function in the caller's process for the agent."""

    process: int
    asked: Requested


class EndTerminals(Struct, frozen=True):
    """End the commands that the agent made the host run in a turn that is to end.

    `turn`: the id of that turn. `since`: the beginning of the turn. `ends` False: only report the
    commands. `TerminalsEnded` reports the result, if there are any.
    """

    process: int
    turn: str
    since: float
    ends: bool


class CloseCallback(Struct, frozen=True):
    """Cancel a callback whose result is not needed now."""

    request: str


class SettingTaken(Struct, frozen=True):
    """Report that the agent has a setting, or will have it from its next process on.

    `error`: the agent refused the setting.
    """

    change: str
    error: BanksmanError | None = None


class HoldConversation(Struct, frozen=True):
    """Reserve this conversation for the session. No other session may drive it.

    `conversation`: None releases the reserved one.
    """

    conversation: str | None


class ReportReady(Struct, frozen=True):
    """Report that the process has completed its handshake, so that another one may start."""

    process: int


class ReportIdle(Struct, frozen=True):
    """Report that the process is idle."""


class AskToSave(Struct, frozen=True):
    """Ask the process to save its knowledge with this prompt, before it is replaced for its age."""

    prompt: str


class WaitUntil(Struct, frozen=True):
    """Start a timer that is due at a wall clock time plus the jitter of the account.

    `TimerFired` reports it, and never before that time, even if the machine is suspended or its
    clock is set. `agent`: whose account; empty: the session has only one. `seconds_min`: how long
    to wait if that time has passed already.
    """

    wall: float
    subject: Subject
    agent: str = ""
    seconds_min: float = 0.0


class ReportLimit(Struct, frozen=True):
    """Tell the other sessions of the agent's account until when it is limited.

    `until`: wall clock; None: the account answers again. `agent`: which agent of the session;
    empty: the session has only one.
    """

    until: float | None
    agent: str = ""


class CallOnLimit(Struct, frozen=True):
    """Let the caller decide whether the waiting asks wait for the end of a limit, or fail.

    `LimitDecided` with the same `key` reports the decision. `agent`: the agent that is limited.
    """

    key: str
    error: AgentError
    windows: Windows
    waiting: tuple[str, ...]
    agent: str


class ClaimBudget(Struct, frozen=True):
    """Claim a part of the shared budgets for a granted turn (key). `BudgetClaimed` reports it.

    `caller`: the caller under which the turn counts. The claim ends with the turn.
    """

    key: str
    caller: str | None


class Finish(Struct, frozen=True):
    """Report that the session is closed or has left: nothing of it remains on this host."""


Effect = (
    Append
    | StartProcess
    | StopProcess
    | HandOver
    | SweepTools
    | WriteFrame
    | StartTimer
    | CancelTimer
    | Accept
    | Reject
    | Resolve
    | LeaveInLog
    | GiveReceipt
    | GrantHold
    | EndHold
    | AskHuman
    | CloseQuestion
    | TellAnswer
    | CallBack
    | CloseCallback
    | EndTerminals
    | SettingTaken
    | HoldConversation
    | ReportReady
    | ReportIdle
    | AskToSave
    | Finish
    | WaitUntil
    | ReportLimit
    | CallOnLimit
    | ClaimBudget
)
