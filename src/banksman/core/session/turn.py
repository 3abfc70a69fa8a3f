"""`Ask` and `Turn` as values, and the transition table of a turn's phases.

    QUEUED ──grant──► STARTING ──write──► RUNNING ──stop──► INTERRUPTING
      ▲  │               │ │                │ │                  │ │
      │  └──end──┐   ┌end┘ └─requeue─┐  ┌end┘ └─requeue─┐    end─┘ └─requeue─┐
      │          ▼   ▼               │  ▼               │     ▼              │
      │          ENDED ◄─────────────┼──┴───────────────┼─────┘              │
      └──────────────────────────────┴──────────────────┴────────────────────┘

- QUEUED: accepted. Another turn runs, or the agent is not ready.
- STARTING: granted. The intent is on its way to the log, and no byte was sent to the agent. A stop
  in this phase sends nothing at all.
- RUNNING: the prompt was handed to the pipe. From here on, only a boundary or the end of the
  process ends the turn. Only an agent that reports the prompt as not taken requeues it.
- INTERRUPTING: a stop was requested. The agent's output still belongs to this turn.

A requeued turn is the same ask with another `attempt`. Every deferred item names both (`key`), so
that a late timer or reply of one attempt cannot affect the next.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.dialect import Prompt
from banksman.core.dialects.meaning import PromptSettled, Retrying, TurnOver
from banksman.core.session.permissions import Rules
from banksman.core.session.usage import Meter


class TurnPhase(enum.StrEnum):
    """Phase of a turn."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    INTERRUPTING = "interrupting"
    ENDED = "ended"


class Move(enum.StrEnum):
    """Transition of a turn between two phases."""

    GRANT = enum.auto()
    WRITE = enum.auto()
    STOP = enum.auto()
    REQUEUE = enum.auto()
    END = enum.auto()


TABLE: dict[TurnPhase, dict[Move, TurnPhase]] = {
    TurnPhase.QUEUED: {Move.GRANT: TurnPhase.STARTING, Move.END: TurnPhase.ENDED},
    TurnPhase.STARTING: {
        Move.WRITE: TurnPhase.RUNNING,
        Move.REQUEUE: TurnPhase.QUEUED,
        Move.END: TurnPhase.ENDED,
    },
    TurnPhase.RUNNING: {
        Move.STOP: TurnPhase.INTERRUPTING,
        Move.REQUEUE: TurnPhase.QUEUED,
        Move.END: TurnPhase.ENDED,
    },
    TurnPhase.INTERRUPTING: {Move.REQUEUE: TurnPhase.QUEUED, Move.END: TurnPhase.ENDED},
    TurnPhase.ENDED: {},
}


class Cause(enum.StrEnum):
    """Reason to stop a turn early."""

    INTERRUPT = "interrupt"
    PREEMPT = "preempt"
    CLOCK = "clock"
    CLOSE = "close"
    # The session replaces the process, for example because it does not read a frame.
    REPLACE = "replace"
    # A budget is used up.
    BUDGET = "budget"


class Ask(Struct, frozen=True, kw_only=True):
    """A caller's request for one turn.

    Its id is the id of the turn. `ref` names its prompt to the agent.
    """

    id: str
    ref: str
    prompt: Prompt
    priority: int
    on_busy: str = "enqueue"
    on_preempt: str = "end"
    key: str | None = None
    hold: str | None = None
    at: float = 0.0
    # For this turn only: permission rules, and the schema of its answer.
    rules: Rules = ()
    schema: Mapping[str, Any] | None = None
    # The process is replaced after this ask, which makes it save its knowledge.
    is_last: bool = False
    # When the ask is to be over: in Unix time for the log, and in the time of `at`. The log has no
    # `due`, because another process has another clock: see `ask_queue.restart_waits`.
    deadline: float | None = None
    due: float | None = None
    # The person or program that wants the turn. Its usage is counted under this name.
    caller: str | None = None
    # The W3C `traceparent` of the ask: see trace_context.py.
    trace: str | None = None


class PendingRetry(Struct, frozen=True):
    """A model call that failed and that the agent will repeat. `due`: when, if that is known."""

    told: Retrying
    due: float


class Turn(Struct, frozen=True, kw_only=True):
    """A turn and everything known about it.

    `ask` None: the agent opened it unprompted, for the reason `origin`.
    """

    id: str
    ask: Ask | None
    priority: int
    origin: str | None = None
    phase: TurnPhase = TurnPhase.QUEUED
    attempt: int = 1
    # How often a process died during this turn before any byte was sent.
    restarts: int = 0
    # The class in which it was chosen: above its own if it has aged; None: its own. And the time of
    # that.
    standing: int | None = None
    granted_at: float = 0.0
    # When its prompt was sent, or when an agent-initiated turn was first seen.
    began_at: float = 0.0
    # Asks that end with this turn: collected before it began, or steered into it while it ran.
    joined: tuple[Ask, ...] = ()
    steered: tuple[Ask, ...] = ()
    # Steered asks (ids) whose prompt is not sent yet: the intent is on its way to the log.
    unsent: tuple[str, ...] = ()
    # Asks (ids) whose caller has withdrawn.
    unwanted: tuple[str, ...] = ()
    # Why it is to end, and the watchdog that decided it.
    cause: Cause | None = None
    clock: str | None = None
    # The caller that has stopped it; None: it has no name, or no caller has.
    stopped_by: str | None = None
    # A reason to end that came after a boundary which is not certain yet.
    wish: Cause | None = None
    # Interrupts that wait for their receipt.
    interrupts: tuple[str, ...] = ()
    # The intent to send its prompt is durable.
    may_write: bool = False
    # The host has granted it a part of the shared budgets, or there are none. See budget_gate.py.
    may_spend: bool = True
    # The seq of its start; only for agent-initiated turns.
    seq: int = 0
    # Reports of the agent about the turn:
    #
    # - `is_opened`: it began. `names_prompts`, `heard`: it names its prompts, and which.
    # - `can_interrupt`: it takes interrupts. `is_acknowledged`: it took one.
    # - `settled`: it is done with the prompt.
    # - `boundary`: the boundary, until it certainly belongs to this turn.
    is_opened: bool = False
    names_prompts: bool = False
    heard: tuple[str, ...] = ()
    # The tool calls that the agent waits for now.
    tools: tuple[str, ...] = ()
    can_interrupt: bool = False
    is_acknowledged: bool = False
    settled: PromptSettled | None = None
    boundary: TurnOver | None = None
    # Until this time, further frames delay the end; None: they do not.
    quiet_until: float | None = None
    # Its usage until now.
    meter: Meter = Meter()
    # The agent has used a tool in this turn.
    used_tools: bool = False
    # The agent repeats a model call, and when it will. None: it works.
    retry: PendingRetry | None = None
    # How often it was requeued because the account was limited.
    limit_waits: int = 0
    # The agent that got an earlier attempt of the prompt, if the session has several: its tools may
    # have run, so no other agent gets the prompt.
    agent: str | None = None
    # The known limit of the agent's account (its end) when the turn began. An answer proves only
    # that this limit is over, not one that became known since. Not in the log.
    limited_until: float | None = None

    @property
    def key(self) -> str:
        """Id and attempt: names this attempt in timers and deferred effects."""
        return f"{self.id}#{self.attempt}"

    @property
    def ref(self) -> str:
        """Name of the prompt to the agent.

        Each attempt gets another name, because an agent may ignore a name that it has seen.
        """
        if self.ask is None:
            return ""
        return (
            self.ask.ref
            if self.attempt == 1
            else f"{self.ask.ref[:-4]}{self.attempt % 0x10000:04x}"
        )

    @property
    def refs(self) -> tuple[str, ...]:
        """Names of all prompts of the turn, the steered ones included."""
        return (self.ref, *(ask.ref for ask in self.steered)) if self.steered else (self.ref,)

    @property
    def asks(self) -> tuple[Ask, ...]:
        """All asks of the turn: its own, the collected ones and the steered ones."""
        return (*((self.ask,) if self.ask else ()), *self.joined, *self.steered)

    @property
    def prompt(self) -> Prompt:
        """The prompt to send: the collected prompts in order, joined."""
        asks = (*((self.ask,) if self.ask else ()), *self.joined)
        texts = [ask.prompt for ask in asks if isinstance(ask.prompt, str)]
        if len(texts) == len(asks):
            return "\n\n".join(texts)
        blocks = (
            [{"type": "text", "text": p}] if isinstance(p := ask.prompt, str) else p for ask in asks
        )
        return [block for some in blocks for block in some]

    @property
    def is_own(self) -> bool:
        """Whether the agent opened this turn unprompted."""
        return self.ask is None

    @property
    def is_open(self) -> bool:
        """Whether the turn is between its prompt and its boundary."""
        phase = self.phase
        return phase is TurnPhase.RUNNING or phase is TurnPhase.INTERRUPTING

    def moved(self, move: Move) -> Turn:
        """Return the turn in the phase that `move` leads to."""
        following = TABLE[self.phase].get(move)
        assert following is not None, f"{move} in {self.phase}: {self.id}"
        return replace(self, phase=following)

    def requeued(self) -> Turn:
        """Return the same ask as a fresh queued turn with the next attempt.

        Asks that were steered into this turn are not part of it.
        """
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
            limit_waits=self.limit_waits,
            agent=self.agent,
        )


def queued(ask: Ask) -> Turn:
    """Return a new queued turn for an ask."""
    return Turn(id=ask.id, ask=ask, priority=ask.priority)


def own(
    id: str,
    origin: str,
    priority: int,
    *,
    seq: int,
    heard: tuple[str, ...],
    at: float,
    limited_until: float | None = None,
) -> Turn:
    """Return an agent-initiated turn. It runs from the moment that the session learns of it."""
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
        limited_until=limited_until,
    )
