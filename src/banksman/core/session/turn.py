"""The turn: one ask on its way through the agent, as a value, and the table of its phases.

    QUEUED ──grant──► STARTING ──write──► RUNNING ──stop──► INTERRUPTING
      ▲  │               │ │                │ │                  │ │
      │  └──end──┐   ┌end┘ └─requeue─┐  ┌end┘ └─requeue─┐    end─┘ └─requeue─┐
      │          ▼   ▼               │  ▼               │     ▼              │
      │          ENDED ◄─────────────┼──┴───────────────┼─────┘              │
      └──────────────────────────────┴──────────────────┴────────────────────┘

- QUEUED: accepted; somebody else speaks, or nobody can yet.
- STARTING: granted; the intent is on its way to the log, and not one byte on its way to the agent. A stop here sends
  nothing at all.
- RUNNING: the prompt is handed to the pipe. Only a boundary or the end of the process ends it from here on; only an
  agent that says it has not taken it sends it back.
- INTERRUPTING: it was asked to stop. What it still says is still its own.

A turn that is requeued is the same ask with another `attempt`. Everything deferred names both (`key`), so that a late
timer or reply of one attempt cannot act on the next.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.dialect import Prompt
from banksman.core.dialects.meaning import PromptSettled, TurnOver
from banksman.core.session.permissions import Rules


class TurnPhase(enum.StrEnum):
    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    INTERRUPTING = "interrupting"
    ENDED = "ended"


class Move(enum.Enum):
    GRANT = enum.auto()
    WRITE = enum.auto()
    STOP = enum.auto()
    REQUEUE = enum.auto()
    END = enum.auto()


TABLE: dict[TurnPhase, dict[Move, TurnPhase]] = {
    TurnPhase.QUEUED: {Move.GRANT: TurnPhase.STARTING, Move.END: TurnPhase.ENDED},
    TurnPhase.STARTING: {Move.WRITE: TurnPhase.RUNNING, Move.REQUEUE: TurnPhase.QUEUED, Move.END: TurnPhase.ENDED},
    TurnPhase.RUNNING: {Move.STOP: TurnPhase.INTERRUPTING, Move.REQUEUE: TurnPhase.QUEUED, Move.END: TurnPhase.ENDED},
    TurnPhase.INTERRUPTING: {Move.REQUEUE: TurnPhase.QUEUED, Move.END: TurnPhase.ENDED},
    TurnPhase.ENDED: {},
}


class Cause(enum.Enum):
    """Why a turn is to end before its time."""

    INTERRUPT = "interrupt"
    PREEMPT = "preempt"
    CLOCK = "clock"
    CLOSE = "close"
    # The process is being replaced for a reason of ours: a frame that it does not take, say.
    REPLACE = "replace"


class Ask(Struct, frozen=True, kw_only=True):
    """A caller's wish for one turn. Its id is the turn's id; `ref` names its prompt to the agent."""

    id: str
    ref: str
    prompt: Prompt
    priority: int
    on_busy: str = "enqueue"
    on_preempt: str = "end"
    key: str | None = None
    hold: str | None = None
    at: float = 0.0
    # What holds for this turn only: which tools it may use, and what its answer must look like.
    rules: Rules = ()
    schema: Mapping[str, Any] | None = None
    # The process is replaced after it: it was asked to put down what it knows.
    is_last: bool = False


class Turn(Struct, frozen=True, kw_only=True):
    """`ask` None: the agent opened it by itself, for the reason `origin`."""

    id: str
    ask: Ask | None
    priority: int
    origin: str | None = None
    phase: TurnPhase = TurnPhase.QUEUED
    attempt: int = 1
    # How often a process has died under it before anything was sent.
    restarts: int = 0
    # The class that it was chosen in, for its age perhaps above its own; None: its own. And when that was.
    standing: int | None = None
    granted_at: float = 0.0
    # When its prompt was sent; of the agent's own, when we heard of it.
    began_at: float = 0.0
    # Asks that end with this turn: collected before it began, or added to it while it ran.
    joined: tuple[Ask, ...] = ()
    steered: tuple[Ask, ...] = ()
    # Those of the latter (ids) whose prompt is not sent yet: the intent to send it is on its way to the log.
    unsent: tuple[str, ...] = ()
    # Those of all (ids) whose caller no longer wants it.
    unwanted: tuple[str, ...] = ()
    # Why it is to end, and the clock that said so.
    cause: Cause | None = None
    clock: str | None = None
    # Why it was to end, asked while its boundary was seen and not yet certain.
    wish: Cause | None = None
    # Interrupts that wait for their receipt.
    interrupts: tuple[str, ...] = ()
    # The intent to send its prompt is in the log.
    may_write: bool = False
    # Where the log says that it began; only of the agent's own turns.
    seq: int = 0
    # What the agent has said about it so far: that it began, that it names what it works on, and what it has named;
    # that it takes interrupts, that it took ours; that it is done with the prompt; and the boundary, while it is not
    # yet certain that it is this turn's.
    is_opened: bool = False
    names_prompts: bool = False
    heard: tuple[str, ...] = ()
    # The tools of the agent that it waits for now.
    tools: tuple[str, ...] = ()
    can_interrupt: bool = False
    is_acknowledged: bool = False
    settled: PromptSettled | None = None
    boundary: TurnOver | None = None
    # Until when what still comes after it puts off the end; None: the end is not put off.
    quiet_until: float | None = None

    @property
    def key(self) -> str:
        return f"{self.id}#{self.attempt}"

    @property
    def ref(self) -> str:
        """The prompt's name to the agent. Another attempt is another prompt: an agent may drop one it has seen."""
        if self.ask is None:
            return ""
        return self.ask.ref if self.attempt == 1 else f"{self.ask.ref[:-4]}{self.attempt % 0x10000:04x}"

    @property
    def refs(self) -> tuple[str, ...]:
        return (self.ref, *(ask.ref for ask in self.steered))

    @property
    def asks(self) -> tuple[Ask, ...]:
        return (*((self.ask,) if self.ask else ()), *self.joined, *self.steered)

    @property
    def prompt(self) -> Prompt:
        """What is sent: the prompts that were collected, in order, as one."""
        asks = (*((self.ask,) if self.ask else ()), *self.joined)
        texts = [ask.prompt for ask in asks if isinstance(ask.prompt, str)]
        if len(texts) == len(asks):
            return "\n\n".join(texts)
        blocks = ([{"type": "text", "text": p}] if isinstance(p := ask.prompt, str) else p for ask in asks)
        return [block for some in blocks for block in some]

    @property
    def is_own(self) -> bool:
        return self.ask is None

    @property
    def is_open(self) -> bool:
        """Between the prompt and the boundary."""
        return self.phase in (TurnPhase.RUNNING, TurnPhase.INTERRUPTING)

    def moved(self, move: Move) -> Turn:
        following = TABLE[self.phase].get(move)
        assert following is not None, f"{move} in {self.phase}: {self.id}"
        return replace(self, phase=following)

    def requeued(self) -> Turn:
        """The same ask, as if it had never begun, but for the count. Those steered into it do not come back with it."""
        assert self.ask is not None
        again = self.moved(Move.REQUEUE)
        return Turn(
            id=again.id,
            ask=again.ask,
            priority=again.priority,
            phase=again.phase,
            attempt=self.attempt + 1,
            joined=self.joined,
            unwanted=self.unwanted,
            restarts=self.restarts,
        )


def queued(ask: Ask) -> Turn:
    return Turn(id=ask.id, ask=ask, priority=ask.priority)


def own(id: str, origin: str, priority: int, *, seq: int, heard: tuple[str, ...], at: float) -> Turn:
    """A turn that the agent opened by itself: it runs from the moment we hear of it."""
    return Turn(
        id=id,
        ask=None,
        priority=priority,
        origin=origin,
        phase=TurnPhase.RUNNING,
        seq=seq,
        began_at=at,
        is_opened=True,
        heard=heard,
        can_interrupt=True,
    )
