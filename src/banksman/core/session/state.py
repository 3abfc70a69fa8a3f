"""What a session is, as one frozen value. Everything that decides is here; everything that waits is outside."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from banksman.core.dialects.dialect import ProtocolState
from banksman.core.dialects.meaning import Requested
from banksman.core.session.ask_queue import Hold, Queue
from banksman.core.session.effects import Accept, Finish, GiveReceipt, LeaveInLog, Resolve, SettingTaken, TellAnswer
from banksman.core.session.event import Entry
from banksman.core.session.permissions import Decision
from banksman.core.session.session_config import Config
from banksman.core.session.turn import Turn
from banksman.core.session.watchdogs import Clocks
from banksman.errors import BanksmanError, Closed, Moving, Refused


class Mode(enum.Enum):
    """By these words it is in snapshots, too. Two ways lead out of OPEN: DRAINING, CLOSING, CLOSED refuses who waits;
    LEAVING, PARTING, LEFT leaves them in the log. See shutdown.py."""

    OPEN = "open"
    # Nothing new is taken; what runs may finish.
    DRAINING = "draining"
    LEAVING = "leaving"
    # The process is being stopped, and what runs with it.
    CLOSING = "closing"
    PARTING = "parting"
    # The log says so, or is about to.
    CLOSED = "closed"
    LEFT = "left"


# In these who waits goes on waiting: here, or in the log.
KEEPING = frozenset((Mode.OPEN, Mode.LEAVING, Mode.PARTING, Mode.LEFT))
OVER = frozenset((Mode.CLOSED, Mode.LEFT))


class ProcessPhase(enum.Enum):
    NONE = enum.auto()
    # Asked for; it has not answered the handshake.
    STARTING = enum.auto()
    READY = enum.auto()
    # Told to stop, or its leader has exited. Nothing is written to it, but it is still heard.
    STOPPING = enum.auto()


class Stdin(enum.Enum):
    FREE = enum.auto()
    # A frame is on its way; no other may begin.
    BUSY = enum.auto()
    # A frame may have been cut. Nothing is ever written after it.
    BROKEN = enum.auto()


class Replacement(enum.IntEnum):
    """Whether the process is to be replaced, and how much that may cost."""

    NO = 0
    # It is old. What runs in its background is let to its end.
    WHEN_QUIET = 1
    # It is not what the next turn needs: the next turn gets another one.
    NOW = 2


class PromptNaming(enum.Enum):
    """Whether this process says which prompt it is working on. Not before it has spoken do we know."""

    UNKNOWN = enum.auto()
    PRESENT = enum.auto()
    ABSENT = enum.auto()


class PendingSetting(Struct, frozen=True):
    """A setting that the agent was told to change, by this request; `id` names the promise to tell what came of it, and
    is empty where nobody waits."""

    request: str
    id: str
    name: str
    value: str


class ProcessState(Struct, frozen=True, kw_only=True):
    """The agent's process, as far as the session cares. `number` counts them; a fact of another one is late. `epoch`:
    see `ProcessReported`."""

    number: int = 0
    epoch: int = 0
    phase: ProcessPhase = ProcessPhase.NONE
    stdin: Stdin = Stdin.FREE
    outbox: tuple[bytes, ...] = ()
    frames_sent: int = 0
    naming: PromptNaming = PromptNaming.UNKNOWN
    # It says when it is done with a prompt, as far as we know.
    settles: bool = True
    # It has announced a turn at least once: one that never does is taken at its boundary's word.
    announces: bool = False
    # What the last boundary named: said once more, it is not counted again.
    last_over: tuple[str, ...] = ()
    # Interrupts that it has not acknowledged, each with the key of the turn it was for.
    unacknowledged: tuple[tuple[str, str], ...] = ()
    requests: int = 0
    # Changes of settings that it has not answered.
    changes: tuple[PendingSetting, ...] = ()
    # What runs in its background, whether a turn is open or not.
    tasks: tuple[str, ...] = ()
    # What its answers look like, if that was asked for at its start.
    schema: Mapping[str, Any] | None = None
    stale: Replacement = Replacement.NO
    # What it was told and has said so far, as far as its dialect must know it.
    protocol: ProtocolState | None = None
    # The conversation that it was started to go on with; or, if it forks, to begin with.
    resumes: str | None = None
    forks: bool = False
    # It has said that it does not know that one.
    has_forgotten: bool = False
    # Turns (id) that were stopped, and since when: what their tools have left running is looked for, one at a time.
    sweeps: tuple[tuple[str, float], ...] = ()
    # It has a pid: from here on it is the agent that is waited for; and until when.
    is_there: bool = False
    start_due: float = 0.0
    was_ready: bool = False
    # It has brought a turn to its boundary: whatever ends it now is no failed start.
    has_served: bool = False
    # It holds a conversation that was given up: what it calls it is not learnt again.
    has_overflowed: bool = False
    was_told_to_stop: bool = False
    exited_by_itself: bool = False
    was_killed: bool = False
    exit: str | None = None
    # Why we gave it up, if we did.
    error: BanksmanError | None = None


class AgentRequest(Struct, frozen=True):
    """Something the agent asks us; `turn` None: while nobody's turn was open. `id` is ours: see questions.py."""

    id: str
    turn: str | None
    asked: Requested


class KeptQuestion(Struct, frozen=True):
    """A question whose process is gone, and what was answered to it since. See questions.py."""

    id: str
    asked: Requested
    decision: Decision | None = None


class Store(enum.Enum):
    WORKING = enum.auto()
    # The last append failed. Endings are kept, and written when it is back.
    BROKEN = enum.auto()
    # Another writer has the session.
    LOST = enum.auto()


class MayWrite(Struct, frozen=True):
    """The intent to send the prompt of this turn (key) is durable."""

    key: str


class AgentTurnEnded(Struct, frozen=True):
    """A turn of the agent's own is over: nobody waits for it, but it must not be left open if its end is lost."""

    turn: str
    # Where the log says that it began.
    seq: int


class MaySteer(Struct, frozen=True):
    """The intent to add this ask's prompt to the turn (key) is durable."""

    key: str
    ask: str


# What is held back until the log has what it rests on.
Deferred = (
    Accept
    | Resolve
    | LeaveInLog
    | GiveReceipt
    | MayWrite
    | AgentTurnEnded
    | Finish
    | MaySteer
    | SettingTaken
    | TellAnswer
)


class Session(Struct, frozen=True, kw_only=True):
    config: Config
    mode: Mode = Mode.OPEN
    # By when it is to have left, if somebody has said so; and whether that has passed.
    leave_by: float | None = None
    is_overdue: bool = False
    # The agent's own name for the conversation; a new process resumes it.
    conversation: str | None = None
    # The one that it begins as a copy of, as long as it has none of its own; None: with nothing.
    fork_of: str | None = None
    # It began before we heard of it, and the agent has not shown yet that it knows it.
    is_adopted: bool = False
    # What the conversation has cost until now, as the agent counts; None: it began before we heard of it.
    spent: float | None = 0.0
    # What all turns have cost, those of the agent's own too, as far as it said so.
    cost: float | None = None
    # Turns in a row for which it was too long for the model.
    overflows: int = 0
    # What was changed since the session was opened, by name.
    settings: tuple[tuple[str, str], ...] = ()
    resume_failures: int = 0
    # Processes in a row that came to nothing; and whether no other is started for a while.
    crashes: int = 0
    is_backing_off: bool = False
    # Since when nobody has needed the process; None: somebody does, or there is none.
    idle_since: float | None = None
    idle_count: int = 0
    queue: Queue = ()
    collecting: tuple[str, ...] = ()
    hold: Hold | None = None
    hold_asks: int = 0
    # The turn that was granted, and the one that the agent opened by itself. Both are there only if the agent opened
    # its own while our prompt was on its way: ours is in the agent's queue then, and what is heard is of its own.
    turn: Turn | None = None
    own: Turn | None = None
    own_count: int = 0
    clocks: Clocks = ()
    process: ProcessState = ProcessState()
    questions: tuple[AgentRequest, ...] = ()
    kept: tuple[KeptQuestion, ...] = ()
    # Requests of the agent that callbacks of the caller are answering.
    callbacks: tuple[Requested, ...] = ()
    # The log: the last seq that was appended, the last that is durable, and what waits for that.
    head: int = 0
    committed: int = 0
    deferred: tuple[tuple[int, Deferred], ...] = ()
    store: Store = Store.WORKING
    store_error: BanksmanError | None = None
    store_retries: int = 0
    unwritten: tuple[Entry, ...] = ()

    @property
    def speaking(self) -> Turn | None:
        """The turn that what the agent says now belongs to."""
        if self.own is not None:
            return self.own
        return self.turn if self.turn is not None and self.turn.is_open else None

    def open_question(self, id: str) -> AgentRequest | KeptQuestion | None:
        """The question of this name, if it waits for an answer."""
        waiting = (*self.questions, *(kept for kept in self.kept if kept.decision is None))
        return next((question for question in waiting if question.id == id), None)

    @property
    def is_busy(self) -> bool:
        return self.turn is not None or self.own is not None or self.hold is not None or bool(self.queue)


# What whoever wants something new is told in a session that takes nothing new: whether to go elsewhere, or to wait.


def not_open(state: Session, **ids: object) -> Refused:
    """Nothing of what was asked for is begun."""
    is_over = state.mode in OVER
    if state.mode in KEEPING:
        where = "has left this host" if is_over else "is leaving this host"
        return Moving(f"the session {where}, and this was not accepted", hint="ask again in a moment", **ids)
    where = "is closed" if is_over else "is being closed and takes nothing new"
    return Closed(f"the session {where}", hint="open another", **ids)
