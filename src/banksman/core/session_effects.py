"""What is to be done about what has happened to a session: effects, in the imperative. Frozen, performed in order.

Those that are answered later name what the answer, a fact, will be about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from banksman.core.event import Entry
from banksman.core.meaning import Requested
from banksman.core.outcome import Outcome, Receipt
from banksman.core.session_facts import Subject
from banksman.errors import BanksmanError


@dataclass(frozen=True, slots=True)
class Append:
    """Write these to the log, whole or not at all."""

    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class StartProcess:
    """Start the agent, as this number of process, when there is room for one. `conversation`: resume it; `forks`: only
    as the beginning of another. `settings`: what was changed since the session was opened."""

    process: int
    conversation: str | None
    forks: bool = False
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class StopProcess:
    """Walk the ladder."""

    process: int


@dataclass(frozen=True, slots=True)
class SweepTools:
    """End what the agent has started since then, and what that has started, but not the agent. `ends` False: only find
    out what there is. `ProcessSwept` answers."""

    process: int
    since: float
    ends: bool


@dataclass(frozen=True, slots=True)
class WriteFrame:
    """One whole frame. The next one is not given before this one is taken."""

    process: int
    data: bytes


@dataclass(frozen=True, slots=True)
class StartTimer:
    at: float
    subject: Subject


@dataclass(frozen=True, slots=True)
class CancelTimer:
    """It will not be missed: for tidiness only, a late one is harmless."""

    subject: Subject


@dataclass(frozen=True, slots=True)
class Accept:
    """The ask is durable: it has its turn id, and will get an outcome."""

    turn: str


@dataclass(frozen=True, slots=True)
class Reject:
    """The ask was not accepted, and nothing is left of it."""

    turn: str
    error: BanksmanError


@dataclass(frozen=True, slots=True)
class Resolve:
    """The one outcome of an ask."""

    turn: str
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class PassOn:
    """The ask has no outcome from us, ever: it waits in the log, for whoever has the session next."""

    turn: str


@dataclass(frozen=True, slots=True)
class GiveReceipt:
    interrupt: str
    receipt: Receipt


@dataclass(frozen=True, slots=True)
class GrantHold:
    hold: str


@dataclass(frozen=True, slots=True)
class EndHold:
    """The hold is over, or will not be granted: it was idle too long, the session is closing or leaving, its log is
    broken."""

    hold: str
    error: BanksmanError | None = None


@dataclass(frozen=True, slots=True)
class AskHuman:
    """The agent has a question. `question` is our name for it; the agent's is in what was `asked`."""

    question: str
    asked: Requested
    turn: str | None


@dataclass(frozen=True, slots=True)
class CloseQuestion:
    """It needs no answer any more."""

    question: str


@dataclass(frozen=True, slots=True)
class TellAnswer:
    """The one answer of a question, once it is durable; `error`: it is over, and the log will never have its answer."""

    question: str
    answer: str
    by: str
    message: str | None = None
    error: BanksmanError | None = None


@dataclass(frozen=True, slots=True)
class CallBack:
    """The agent calls something that lives in the caller's process."""

    process: int
    asked: Requested


@dataclass(frozen=True, slots=True)
class EndTerminals:
    """End the commands that the agent has had us run since then: the turn (id) that they are of is to end. `ends`
    False: only tell what there is. `TerminalsEnded` answers, if there are any."""

    process: int
    turn: str
    since: float
    ends: bool


@dataclass(frozen=True, slots=True)
class CloseCallback:
    """Nobody waits for what it would give back."""

    request: str


@dataclass(frozen=True, slots=True)
class SettingTaken:
    """The agent has it, or will from its next process on; or it does not want it."""

    change: str
    error: BanksmanError | None = None


@dataclass(frozen=True, slots=True)
class HoldConversation:
    """From now on this is the session's conversation, and no other session may drive it; None: it has none."""

    conversation: str | None


@dataclass(frozen=True, slots=True)
class BeReady:
    """The process has begun to listen: another may start."""

    process: int


@dataclass(frozen=True, slots=True)
class BeIdle:
    """Nobody needs the process just now."""


@dataclass(frozen=True, slots=True)
class AskToSave:
    """The process is about to be replaced for its age: let it put down what it knows, with this prompt."""

    prompt: str


@dataclass(frozen=True, slots=True)
class Finish:
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
    | PassOn
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
    | BeReady
    | BeIdle
    | AskToSave
    | Finish
)
