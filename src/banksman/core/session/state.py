"""State of a session as one frozen value, with its parts: process, questions and log.

All decisions depend on this state and the current fact alone. Timers, I/O and waiting are outside,
in `sessions/driver.py`. `not_open` builds the error for a request that reaches a closing or leaving
session. Turns are in `turn.py`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from banksman.core.dialects.dialect import Decision, ProtocolState
from banksman.core.dialects.meaning import BackgroundTask, Requested
from banksman.core.session.account_limits import Windows
from banksman.core.session.ask_queue import Hold, Queue
from banksman.core.session.budget import CapUse, LoggedCaps, RaisedBudget
from banksman.core.session.effects import (
    Accept,
    Finish,
    GiveReceipt,
    LeaveInLog,
    Resolve,
    SettingTaken,
    TellAnswer,
)
from banksman.core.session.event import Entry
from banksman.core.session.session_config import Config
from banksman.core.session.turn import Turn
from banksman.core.session.usage import NO_USAGE, Counted, Usage
from banksman.core.session.watchdogs import Watchdogs
from banksman.errors import BanksmanError, Closed, Moving, Refused


class Mode(enum.StrEnum):
    """Lifecycle of a session. Snapshots store these values.

    Two ways lead out of OPEN: DRAINING, CLOSING, CLOSED refuses the waiting asks; LEAVING, PARTING,
    LEFT leaves them in the log. See shutdown.py. HANDING leads to LEFT too: see hand_over.py.
    """

    OPEN = "open"
    # New asks are refused; the running turn may finish.
    DRAINING = "draining"
    LEAVING = "leaving"
    # As LEAVING, but the process and its turn continue: the next host takes them over.
    HANDING = "handing"
    # The process is being stopped, and the running turn with it.
    CLOSING = "closing"
    PARTING = "parting"
    # The log has the last event, or is about to.
    CLOSED = "closed"
    LEFT = "left"


# Modes in which waiting asks are not refused: they wait here, or in the log.
KEEPING = frozenset((Mode.OPEN, Mode.LEAVING, Mode.HANDING, Mode.PARTING, Mode.LEFT))
OVER = frozenset((Mode.CLOSED, Mode.LEFT))


class ProcessPhase(enum.Enum):
    """Phase of the agent's process."""

    NONE = enum.auto()
    # Requested; the handshake is not complete.
    STARTING = enum.auto()
    READY = enum.auto()
    # A stop was requested, or its leader has exited. No frame is written, but its output is still
    # read.
    STOPPING = enum.auto()


class Stdin(enum.Enum):
    """State of the pipe to the agent."""

    FREE = enum.auto()
    # A frame is being written; no other may begin.
    BUSY = enum.auto()
    # A frame may have been cut. No frame is ever written after it.
    BROKEN = enum.auto()


class Replacement(enum.IntEnum):
    """Whether to replace the process, and how urgently."""

    NO = 0
    # It is old. Its background tasks may finish first.
    WHEN_QUIET = 1
    # It does not fit the next turn, which gets another process.
    NOW = 2


class PromptNaming(enum.Enum):
    """Whether this process names the prompt that it works on. Unknown until its first output."""

    UNKNOWN = enum.auto()
    PRESENT = enum.auto()
    ABSENT = enum.auto()


class PendingSetting(Struct, frozen=True):
    """A change of a setting that the agent was sent, under this request id.

    `id` names the future that gets the result; empty if no caller waits.
    """

    request: str
    id: str
    name: str
    value: str
    caller: str | None = None


class ProcessState(Struct, frozen=True, kw_only=True):
    """The agent's process, as the session sees it.

    `number` counts the processes; a fact with another number is stale. `epoch`: see
    `ProcessReported`.
    """

    number: int = 0
    epoch: int = 0
    phase: ProcessPhase = ProcessPhase.NONE
    stdin: Stdin = Stdin.FREE
    outbox: tuple[bytes, ...] = ()
    frames_sent: int = 0
    naming: PromptNaming = PromptNaming.UNKNOWN
    # Whether it confirms the end of a prompt; assumed until it fails to.
    settles: bool = True
    # It has announced a turn at least once. The boundaries of an agent that never does are
    # believed.
    announces: bool = False
    # The prompts that the last boundary named: a repetition is not counted twice.
    last_over: tuple[str, ...] = ()
    # Interrupts that it has not acknowledged, each with the key of its turn.
    unacknowledged: tuple[tuple[str, str], ...] = ()
    requests: int = 0
    # Changes of settings that it has not answered.
    changes: tuple[PendingSetting, ...] = ()
    # Its background tasks, whether a turn is open or not.
    tasks: tuple[BackgroundTask, ...] = ()
    # The schema of its answers, if it was started with one.
    schema: Mapping[str, Any] | None = None
    stale: Replacement = Replacement.NO
    # Protocol state of its dialect.
    protocol: ProtocolState | None = None
    # The conversation that it was started to resume, or to fork.
    resumes: str | None = None
    forks: bool = False
    # It has reported that it does not know that conversation.
    has_forgotten: bool = False
    # Stopped turns (id), each with its start: the sweep after each looks for leftover tools, one at
    # a time.
    sweeps: tuple[tuple[str, float], ...] = ()
    # It has a pid, so the handshake is due; and the deadline for it.
    is_there: bool = False
    start_due: float = 0.0
    was_ready: bool = False
    # It has completed a turn, so its end is not a failed start.
    has_served: bool = False
    # Its conversation was given up, so that name is not recorded again.
    has_overflowed: bool = False
    was_told_to_stop: bool = False
    exited_by_itself: bool = False
    was_killed: bool = False
    exit: str | None = None
    # The session's reason to give it up, if it did.
    error: BanksmanError | None = None


class AgentRequest(Struct, frozen=True):
    """A question of the agent.

    `turn` None: no turn was open. `id`: the session's name for it; see questions.py.
    """

    id: str
    turn: str | None
    asked: Requested


class KeptQuestion(Struct, frozen=True):
    """A question whose process is gone, and the answer that it got since. See questions.py."""

    id: str
    asked: Requested
    decision: Decision | None = None


class AgentState(Struct, frozen=True, kw_only=True):
    """The state of one agent of a session while another one serves it. Names as in `Session`."""

    conversation: str | None = None
    fork_of: str | None = None
    is_adopted: bool = False
    spent: float | None = 0.0
    overflows: int = 0
    settings: tuple[tuple[str, str], ...] = ()
    limits: Windows = ()
    limited_until: float | None = None
    resume_failures: int = 0
    crashes: int = 0


class AgentLimit(Struct, frozen=True):
    """A limit of an agent whose end a timer waits for. `is_over`: the limit has ended."""

    agent: str
    until: float
    is_over: bool = False

    @property
    def key(self) -> str:
        """Name of this wait in timers."""
        return f"{self.agent} {self.until!r}"


class Store(enum.Enum):
    """State of the session's log."""

    WORKING = enum.auto()
    # The last append failed. Endings are kept, and written once the log works again.
    BROKEN = enum.auto()
    # Another host owns the session.
    LOST = enum.auto()


class LimitWait(Struct, frozen=True):
    """The wait of the queue for the end of a limit of the agent's account. See limit_wait.py.

    `key` names it in its timer and in the caller's decision. `until`: when the limit ends (wall
    clock); None if the provider named only a delay (`retry_after`, seconds).
    """

    key: str
    until: float | None
    retry_after: float | None = None


class MayWrite(Struct, frozen=True):
    """The intent to send the prompt of this turn (key) is durable."""

    key: str


class AgentTurnEnded(Struct, frozen=True):
    """An agent-initiated turn is over.

    No caller waits for it. But if the log loses its end, the turn must be ended again.
    """

    turn: str
    # The seq of its start.
    seq: int


class MaySteer(Struct, frozen=True):
    """The intent to add this ask's prompt to the turn (key) is durable."""

    key: str
    ask: str


# Effects that are deferred until the events before them are durable.
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
    | Counted
)


class Session(Struct, frozen=True, kw_only=True):
    """Complete state of one session."""

    config: Config
    mode: Mode = Mode.OPEN
    # The caller that closes it, for the log.
    closed_by: str | None = None
    # The deadline to leave, if there is one, and whether it has passed.
    leave_by: float | None = None
    is_overdue: bool = False
    # The process is being handed over to the next host, and no fact about it can come.
    is_handing: bool = False
    # Until when a drain waits for background tasks; None: it has not begun to wait.
    tasks_by: float | None = None
    # The agent's name for the conversation, which a new process resumes.
    conversation: str | None = None
    # The conversation to fork, until the session has its own; None: start empty.
    fork_of: str | None = None
    # The conversation began elsewhere, and the agent has not shown yet that it knows it.
    is_adopted: bool = False
    # The agent's total cost of the conversation; None: unknown, because it began elsewhere.
    spent: float | None = 0.0
    # The cost of all turns, agent-initiated ones included, as far as the agent reported it.
    cost: float | None = None
    # Turns in a row that overflowed the model.
    overflows: int = 0
    # Settings that were changed since the session was opened.
    settings: tuple[tuple[str, str], ...] = ()
    # Usage windows of the agent's account, and until when (wall clock) it is limited; None: it is
    # not known to be limited.
    limits: Windows = ()
    limited_until: float | None = None
    resume_failures: int = 0
    # Processes that crashed in a row, and whether starts are suspended for a while.
    crashes: int = 0
    is_backing_off: bool = False
    # Start of the idle time; None: the process is needed, or there is no process.
    idle_since: float | None = None
    idle_count: int = 0
    queue: Queue = ()
    collecting: tuple[str, ...] = ()
    hold: Hold | None = None
    hold_asks: int = 0
    # The granted turn, and the turn that the agent opened unprompted. Both exist only if the agent
    # opened its own turn while the prompt was on its way. The prompt is then in the agent's queue,
    # and the output belongs to the agent's turn.
    turn: Turn | None = None
    own: Turn | None = None
    own_count: int = 0
    clocks: Watchdogs = ()
    process: ProcessState = ProcessState()
    questions: tuple[AgentRequest, ...] = ()
    kept: tuple[KeptQuestion, ...] = ()
    # Requests of the agent that callbacks of the caller are serving.
    callbacks: tuple[Requested, ...] = ()
    # The log: the last appended seq, the last durable seq, and the effects that wait for
    # durability.
    head: int = 0
    committed: int = 0
    deferred: tuple[tuple[int, Deferred], ...] = ()
    store: Store = Store.WORKING
    store_error: BanksmanError | None = None
    store_retries: int = 0
    unwritten: tuple[Entry, ...] = ()
    # The queue waits for the end of a limit. And the last limits (wall clock) that need no wait:
    # the end has passed, or the caller decided to fail. `limit_met`: the last one that failed a
    # turn here.
    limit_wait: LimitWait | None = None
    limit_passed: float | None = None
    limit_failed: float | None = None
    limit_met: float | None = None
    # The usage of the session over its whole life: the sum of what the log adds. See
    # budget_gate.py for the following ones.
    used: Usage = NO_USAGE
    raised: RaisedBudget | None = None
    # Caps of the session that the log has as nearly or fully used: event kind, unit and cap.
    told: LoggedCaps = ()
    # Shared caps that are reached, and those of them that the log of this session has.
    shared: tuple[CapUse, ...] = ()
    shared_told: tuple[tuple[str, str, str | None], ...] = ()
    # The question to a person about a budget that is used up, and whether it was answered.
    budget_question: AgentRequest | None = None
    is_budget_answered: bool = False
    # When the working time is to be compared with its cap.
    budget_due: float | None = None
    # The agent that serves the session; None: the first one, which was never left. And the state of
    # the other agents that have served it. See fallback.py.
    agent: str | None = None
    agents: tuple[tuple[str, AgentState], ...] = ()
    # Agents whose program was not found, and limits of agents that a timer waits for.
    missing: tuple[str, ...] = ()
    agent_limits: tuple[AgentLimit, ...] = ()

    @property
    def is_handed_over(self) -> bool:
        """Whether the session has left with its process, which the next host takes over."""
        return self.mode is Mode.LEFT and self.process.phase is not ProcessPhase.NONE

    @property
    def speaking(self) -> Turn | None:
        """The turn that the agent's output belongs to now."""
        if self.own is not None:
            return self.own
        return self.turn if self.turn is not None and self.turn.is_open else None

    def open_question(self, id: str) -> AgentRequest | KeptQuestion | None:
        """Return the question with this name, if it waits for an answer."""
        waiting = (
            *self.questions,
            *(kept for kept in self.kept if kept.decision is None),
            *(() if self.budget_question is None else (self.budget_question,)),
        )
        return next((question for question in waiting if question.id == id), None)

    @property
    def is_busy(self) -> bool:
        """Whether a turn, a hold or a queue entry uses the session."""
        return (
            self.turn is not None
            or self.own is not None
            or self.hold is not None
            or bool(self.queue)
        )


# Errors for requests that reach a closing or leaving session: retry elsewhere, or wait.


def not_open(state: Session, **ids: object) -> Refused:
    """Return the error for a request that this session does not accept. Nothing was begun."""
    is_over = state.mode in OVER
    if state.mode in KEEPING:
        where = "has left this host" if is_over else "is leaving this host"
        message = f"the session {where} and did not accept the request"
        return Moving(message, hint="ask again in a moment", **ids)
    where = "is closed" if is_over else "is closing and accepts nothing new"
    return Closed(f"the session {where}", hint="open it again by its id or its name", **ids)
