"""What a session is, as one frozen value. Everything that decides is here; everything that waits is outside."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from banksman.core.arbiter import Hold, Queue
from banksman.core.clocks import Clocks
from banksman.core.dialects.dialect import Dialect
from banksman.core.event import Entry
from banksman.core.session_facts import Accept, Finish, GiveReceipt, Resolve
from banksman.core.turn import Turn
from banksman.errors import BanksmanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What does not change while the session lives. Seconds, unless it says otherwise."""

    dialect: Dialect
    drain_seconds: float = 5.0
    # After a boundary, how long what confirms it may be missing.
    settle_seconds: float = 0.5
    start_seconds: float = 60.0
    # How long a frame may wait to be taken by the agent. Tools that run for minutes do not read, so it is long.
    write_seconds: float = 60.0
    ageing_seconds: float = 300.0
    hold_idle_seconds: float = 60.0
    collect_seconds: float = 0.3
    queue_max: int = 256
    # When the queue is full: "refuse" the newcomer, or "drop" the last of the lowest class below it.
    when_full: str = "refuse"
    # How often one ask may be sent: one that gave way so often does not come back.
    attempts_max: int = 1000
    store_retry_seconds: float = 1.0
    store_retry_seconds_max: float = 30.0
    # The watchdogs of a turn, by name; None or missing: there is none.
    clocks: Mapping[str, float | None] = field(default_factory=dict[str, "float | None"])


class Mode(enum.Enum):
    OPEN = enum.auto()
    DRAINING = enum.auto()
    CLOSING = enum.auto()
    CLOSED = enum.auto()


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


class Naming(enum.Enum):
    """Whether this process says which prompt it is working on. Not before it has spoken do we know."""

    UNKNOWN = enum.auto()
    PRESENT = enum.auto()
    ABSENT = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """The agent's process, as far as the session cares. `number` counts them; a fact of another one is late."""

    number: int = 0
    phase: ProcessPhase = ProcessPhase.NONE
    stdin: Stdin = Stdin.FREE
    outbox: tuple[bytes, ...] = ()
    frames_sent: int = 0
    naming: Naming = Naming.UNKNOWN
    # It says when it is done with a prompt, as far as we know.
    settles: bool = True
    # It has announced a turn at least once: one that never does is taken at its boundary's word.
    announces: bool = False
    # Interrupts that it has not acknowledged, each with the key of the turn it was for.
    unacknowledged: tuple[tuple[str, str], ...] = ()
    requests: int = 0
    is_resuming: bool = False
    was_ready: bool = False
    was_told_to_stop: bool = False
    exited_by_itself: bool = False
    was_killed: bool = False
    exit: str | None = None
    # Why we gave it up, if we did.
    error: BanksmanError | None = None


@dataclass(frozen=True, slots=True)
class Question:
    """Something the agent asks us; `turn` None: while nobody's turn was open."""

    id: str
    turn: str | None


class Store(enum.Enum):
    WORKING = enum.auto()
    # The last append failed. Endings are kept, and written when it is back.
    BROKEN = enum.auto()
    # Another writer has the session.
    LOST = enum.auto()


@dataclass(frozen=True, slots=True)
class MayWrite:
    """The intent to send the prompt of this turn (key) is durable."""

    key: str


@dataclass(frozen=True, slots=True)
class OwnOver:
    """A turn of the agent's own is over: nobody waits for it, but it must not be left open if its end is lost."""

    turn: str
    # Where the log says that it began.
    seq: int


@dataclass(frozen=True, slots=True)
class MaySteer:
    """The intent to add this ask's prompt to the turn (key) is durable."""

    key: str
    ask: str


# What is held back until the log has what it rests on.
Deferred = Accept | Resolve | GiveReceipt | MayWrite | OwnOver | Finish | MaySteer


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    config: Config
    mode: Mode = Mode.OPEN
    # The agent's own name for the conversation; a new process resumes it.
    conversation: str | None = None
    resume_failures: int = 0
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
    process: Process = Process()
    questions: tuple[Question, ...] = ()
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

    @property
    def is_busy(self) -> bool:
        return self.turn is not None or self.own is not None or self.hold is not None or bool(self.queue)
