"""What a session is doing, at a moment: a value for whoever wants to look. Looking changes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from banksman.core.arbiter import Hold
from banksman.core.past import Past
from banksman.core.state import Mode, Session, Store
from banksman.core.turn import Turn
from banksman.run.sessions.driver import Driver
from banksman.store.log import Known, Owner


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """An ask in the queue."""

    turn: str
    priority: int
    seconds: float
    attempt: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStatus:
    name: str
    seconds: float
    left: float
    is_running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """What a session is doing, at this moment.

    `phase`: idle, backing_off, starting, running, interrupting, stopping, draining, closing, closed, failed, or
    fenced (another writer has claimed it, and nothing can be said in it here any more). Of a session that is not ours:
    deleted, closed (as `look` says), elsewhere (a live host has it: `owner`), lost (its host died), or asleep (nobody
    has it).

    `holder`: the turn that is granted, or the agent's own; `hold`: the hold that is granted. `waits_for_place`: it is
    to start a process, and those of other sessions have all the places, or all that may start at once.
    """

    id: str
    name: str | None
    agent: str
    phase: str
    holder: str | None
    hold: str | None
    queue: tuple[Waiting, ...]
    clocks: tuple[ClockStatus, ...]
    timers: Mapping[str, float]
    questions: tuple[str, ...]
    pids: tuple[int, ...]
    waits_for_place: bool
    conversation: str | None
    epoch: int
    seq: int
    counters: Mapping[str, int]
    seconds_since_in: float | None
    seconds_since_out: float | None
    cost: float | None
    owner: Owner | None = None


def find_turn(state: Session, id: str) -> Turn | None:
    """The turn of this ask, queued or granted; None: it is over."""
    turns = [state.turn, state.own, *(waiting for waiting in state.queue if isinstance(waiting, Turn))]
    for turn in turns:
        if turn is not None and (turn.id == id or any(ask.id == id for ask in turn.asks)):
            return turn
    return None


def holder(state: Session) -> str | None:
    """The turn that is granted, or that the agent opened by itself."""
    turn = state.own or state.turn
    return None if turn is None else turn.id


def phase(driver: Driver) -> str:
    state = driver.state
    if driver.error is not None:
        return "failed"
    if state.mode is not Mode.OPEN:
        return state.mode.name.lower()
    if state.store is Store.LOST:
        return "fenced"
    turn = state.own or state.turn
    if turn is not None:
        return turn.phase
    if state.is_backing_off and state.queue:
        return "backing_off"
    return {"NONE": "idle", "READY": "idle"}.get(state.process.phase.name, state.process.phase.name.lower())


def take(driver: Driver, *, name: str | None, agent: str) -> Status:
    state = driver.state
    now = driver.now()
    return Status(
        id=driver.id,
        name=name,
        agent=agent,
        phase=phase(driver),
        holder=holder(state),
        hold=None if state.hold is None else state.hold.id,
        queue=tuple(
            Waiting(turn=turn.id, priority=turn.priority, seconds=now - turn.ask.at, attempt=turn.attempt)
            for turn in state.queue
            if not isinstance(turn, Hold) and turn.ask is not None
        ),
        clocks=tuple(
            ClockStatus(name=c.name, seconds=c.seconds, left=c.seconds - c.elapsed(now), is_running=c.is_running)
            for c in state.clocks
        ),
        timers={f"{t.value} {subject}": timer.when() - now for (t, subject), timer in driver.timers.items()},
        questions=(
            *(question.id for question in state.questions),
            *(question.id for question in state.kept if question.decision is None),
        ),
        pids=() if driver.pid is None else (driver.pid,),
        waits_for_place=driver.waits_for_place,
        conversation=state.conversation,
        epoch=driver.epoch,
        seq=state.head,
        counters={name: getattr(driver.counters, name) for name in driver.counters.__slots__},
        seconds_since_in=None if driver.last_in is None else now - driver.last_in,
        seconds_since_out=None if driver.last_out is None else now - driver.last_out,
        cost=state.cost,
    )


def glance(known: Known | None, id: str, *, name: str | None, agent: str) -> Status:
    """Of a session that is not ours: what a listing says. None: it is not there any more."""
    owner = None if known is None else known.owner
    if owner is not None and owner.is_here:
        owner = None  # We have let go of it, and the store will say so in a moment.
    if known is None:
        phase = "deleted"
    elif owner is None:
        phase = "asleep"
    else:
        phase = "elsewhere" if owner.is_alive else "lost"
    return Status(
        id=id,
        name=name if known is None else known.name,
        agent=agent,
        phase=phase,
        holder=None,
        hold=None,
        queue=(),
        clocks=(),
        timers={},
        questions=(),
        pids=(),
        waits_for_place=False,
        conversation=None,
        epoch=0 if known is None else known.epoch,
        seq=0 if known is None else known.seq,
        counters={},
        seconds_since_in=None,
        seconds_since_out=None,
        cost=None,
        owner=owner,
    )


def told(past: Past, seen: Status) -> Status:
    """What a log says of a session, with what was seen of it at a glance."""
    state = past.session
    waiting = [turn for turn in state.queue if isinstance(turn, Turn)]
    is_closed = seen.phase == "asleep" and state.mode is Mode.CLOSED
    return replace(
        seen,
        phase="closed" if is_closed else seen.phase,
        holder=holder(state),
        queue=tuple(
            Waiting(turn=turn.id, priority=turn.priority, seconds=0.0, attempt=turn.attempt) for turn in waiting
        ),
        questions=tuple(question.id for question in past.questions),
        pids=() if past.process is None or seen.phase != "elsewhere" else (past.process.pid,),
        conversation=state.conversation,
        seq=state.head,
        cost=state.cost,
    )
