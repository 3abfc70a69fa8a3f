"""What is to be done about what has happened to a session: effects, in the imperative. Frozen, performed in order.

Those that are answered later name what the answer, a fact, will be about.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from banksman.core.dialects.meaning import Requested
from banksman.core.session.event import Entry
from banksman.core.session.facts import Subject
from banksman.core.session.outcome import Outcome, Receipt
from banksman.errors import BanksmanError


class Append(Struct, frozen=True):
    """Write these to the log, whole or not at all."""

    entries: Sequence[Entry]


class StartProcess(Struct, frozen=True):
    """Start the agent, as this number of process, when there is room for one. `conversation`: resume it; `forks`: only
    as the beginning of another. `settings`: what was changed since the session was opened."""

    process: int
    conversation: str | None
    forks: bool = False
    settings: tuple[tuple[str, str], ...] = ()


class StopProcess(Struct, frozen=True):
    """Walk the ladder."""

    process: int


class SweepTools(Struct, frozen=True):
    """End what the agent has started since then, and what that has started, but not the agent. `ends` False: only find
    out what there is. `SweepEnded` answers."""

    process: int
    since: float
    ends: bool


class WriteFrame(Struct, frozen=True):
    """One whole frame. The next one is not given before this one is taken."""

    process: int
    data: bytes


class StartTimer(Struct, frozen=True):
    at: float
    subject: Subject


class CancelTimer(Struct, frozen=True):
    """It will not be missed: for tidiness only, a late one is harmless."""

    subject: Subject


class Accept(Struct, frozen=True):
    """The ask is durable: it has its turn id, and will get an outcome."""

    turn: str


class Reject(Struct, frozen=True):
    """The ask was not accepted, and nothing is left of it."""

    turn: str
    error: BanksmanError


class Resolve(Struct, frozen=True):
    """The one outcome of an ask."""

    turn: str
    outcome: Outcome


class LeaveInLog(Struct, frozen=True):
    """The ask has no outcome from us, ever: it waits in the log, for whoever has the session next."""

    turn: str


class GiveReceipt(Struct, frozen=True):
    interrupt: str
    receipt: Receipt


class GrantHold(Struct, frozen=True):
    hold: str


class EndHold(Struct, frozen=True):
    """The hold is over, or will not be granted: it was idle too long, the session is closing or leaving, its log is
    broken."""

    hold: str
    error: BanksmanError | None = None


class AskHuman(Struct, frozen=True):
    """The agent has a question. `question` is our name for it; the agent's is in what was `asked`."""

    question: str
    asked: Requested
    turn: str | None


class CloseQuestion(Struct, frozen=True):
    """It needs no answer any more."""

    question: str


class TellAnswer(Struct, frozen=True):
    """The one answer of a question, once it is durable; `error`: it is over, and the log will never have its answer."""

    question: str
    answer: str
    by: str
    message: str | None = None
    error: BanksmanError | None = None


class CallBack(Struct, frozen=True):
    """The agent calls something that lives in the caller's process."""

    process: int
    asked: Requested


class EndTerminals(Struct, frozen=True):
    """End the commands that the agent has had us run since then: the turn (id) that they are of is to end. `ends`
    False: only tell what there is. `TerminalsEnded` answers, if there are any."""

    process: int
    turn: str
    since: float
    ends: bool


class CloseCallback(Struct, frozen=True):
    """Nobody waits for what it would give back."""

    request: str


class SettingTaken(Struct, frozen=True):
    """The agent has it, or will from its next process on; or it does not want it."""

    change: str
    error: BanksmanError | None = None


class HoldConversation(Struct, frozen=True):
    """From now on this is the session's conversation, and no other session may drive it; None: it has none."""

    conversation: str | None


class ReportReady(Struct, frozen=True):
    """The process has begun to listen: another may start."""

    process: int


class ReportIdle(Struct, frozen=True):
    """Nobody needs the process just now."""


class AskToSave(Struct, frozen=True):
    """The process is about to be replaced for its age: let it put down what it knows, with this prompt."""

    prompt: str


class Finish(Struct, frozen=True):
    """The session is closed, or has left: nothing of it is here any more."""


Effect = (
    Append
    | StartProcess
    | StopProcess
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
)
