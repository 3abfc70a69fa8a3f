"""Status of a session at one moment, built from its driver, a listing or its log.

A `Status` is a read-only value, and building it changes nothing. It has the phase, the queue, the
clocks and the open requests. `state_of` sums the phase up, and shows a session that seems stuck.
`Session.status` and `Session.look` return it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from banksman.core.dialects.dialect import Prompt
from banksman.core.dialects.meaning import LimitWindow
from banksman.core.session import budget_gate, fallback, limit_wait
from banksman.core.session.agent_output import HANDSHAKE
from banksman.core.session.budget import CapUse
from banksman.core.session.facts import Timer
from banksman.core.session.history import SessionHistory
from banksman.core.session.state import Mode, ProcessPhase, Session, Store
from banksman.core.session.turn import Turn, TurnPhase
from banksman.sessions.containment import ContainmentStatus, containment_of
from banksman.sessions.driver import Driver
from banksman.sessions.turn_status import (
    HoldStatus,
    WaitingAsk,
    holding,
    holds,
    preview,
    waiting_asks,
)
from banksman.store.log_values import KnownSession, Owner

# An agent that is silent for this long, without a known reason to wait, is shown as stuck.
QUIET_SECONDS_MAX = 60.0
# Phases of a session in the store that has no live owner.
UNOWNED_PHASES = ("asleep", "lost")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockStatus:
    """Watchdog of the current turn: its name, its limit and the time that is left."""

    name: str
    seconds: float
    left: float
    is_running: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnansweredRequest:
    """Request to the agent outside of turns that the agent has not answered.

    `seconds`: the time since the request; None if unknown.
    """

    id: str
    kind: str
    seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryStatus:
    """Model call that failed and that the agent repeats by itself.

    `seconds`: time until the retry; 0 if it is due or the delay is unknown. `cause`: the agent's
    words. `error`: an `ErrorKind`.
    """

    attempt: int
    attempts_max: int | None
    seconds: float
    cause: str
    error: str
    status: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentStatus:
    """Agent of a session with fall-backs.

    `limited_until`: when its limit ends, in wall clock seconds; None if it is not limited now.
    `is_missing`: its program was not found.
    """

    name: str
    limited_until: float | None
    is_missing: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Status of a session.

    `phase`: idle, backing_off, starting, running, interrupting, stopping, draining, closing,
    closed, leaving, parting, left (see `Session.leave`), failed, or fenced. Fenced: another writer
    has claimed the session, and this host cannot write to it. A session that this host does not own
    is deleted, closed (only in `look`), elsewhere (a live host has it: `owner`), lost (its host
    died), or asleep (it has no owner).

    `state`: a summary of the phase for lists of many sessions. See `state_of`.

    `holder`: the granted turn, or the turn that the agent started without an ask. `holder_prompt`:
    the beginning of its prompt. `holder_caller`: the person or program that asked for it.
    `holder_since`: the wall clock time of the grant; None if unknown. `hold`: the granted hold.
    `holds`: that one and the waiting ones; empty if this host does not own the session.
    `waits_for_place`: a process is due, and other sessions occupy all slots for processes or for
    starts. `requests`: requests that the agent has not answered.

    `limits`: usage windows of the agent's account, as the agent last reported them.
    `limited_until`: when its limit ends, in wall clock seconds; None if it is not limited now.
    `retry`: the retry that the running turn waits for. `waits_for_limit`: the queue waits until the
    limit has ended (`on_limit`), or an ask of it that only a limited agent supports.

    `budget`: the caps of the session and what is used of them, and the shared caps that hold it
    back. A cap with `is_reached` is over.

    `containment`: the control group of the agent. None if this host does not own the session.

    `agent`: the agent that serves the session now. `fallback`: its agents in order of preference,
    the first one included; empty if it has only one, or if this host does not own it.
    """

    id: str
    name: str | None
    agent: str
    phase: str
    state: str
    holder: str | None
    hold: str | None
    queue: tuple[WaitingAsk, ...]
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
    holder_prompt: str | None = None
    holder_caller: str | None = None
    holder_since: float | None = None
    requests: tuple[UnansweredRequest, ...] = ()
    limits: tuple[LimitWindow, ...] = ()
    limited_until: float | None = None
    retry: RetryStatus | None = None
    waits_for_limit: bool = False
    budget: tuple[CapUse, ...] = ()
    fallback: tuple[AgentStatus, ...] = ()
    containment: ContainmentStatus | None = None
    holds: tuple[HoldStatus, ...] = ()


def find_turn(state: Session, id: str) -> Turn | None:
    """Return the queued or granted turn of an ask; None if the turn is over."""
    turns = [
        state.turn,
        state.own,
        *(waiting for waiting in state.queue if isinstance(waiting, Turn)),
    ]
    for turn in turns:
        if turn is not None and (turn.id == id or any(ask.id == id for ask in turn.asks)):
            return turn
    return None


def phase(driver: Driver) -> str:
    """Return the phase of an owned session."""
    state = driver.state
    if driver.error is not None:
        return "failed"
    if state.mode is Mode.HANDING:
        return "leaving"
    if state.mode is not Mode.OPEN:
        return state.mode.name.lower()
    if state.store is Store.LOST:
        return "fenced"
    turn = state.own or state.turn
    if turn is not None:
        return turn.phase
    if state.is_backing_off and state.queue:
        return "backing_off"
    return {"NONE": "idle", "READY": "idle"}.get(
        state.process.phase.name, state.process.phase.name.lower()
    )


def state_of(driver: Driver, phase: str, *, has_question: bool, stop_seconds_max: float) -> str:
    """Return the summary of a session's phase.

    - asks: a question waits for an answer
    - wedged: the session cannot continue, or seems unable to
    - running
    - queued: asks wait and nothing runs
    - idle
    - gone
    """
    if phase in ("closed", "left"):
        return "gone"
    if has_question:
        return "asks"
    if phase in ("failed", "fenced", "backing_off") or _is_stuck(driver, stop_seconds_max):
        return "wedged"
    if phase == "idle" or (phase == "starting" and driver.process.waits_for_place):
        return "queued" if driver.state.queue else "idle"
    return "running"


def _is_stuck(driver: Driver, stop_seconds_max: float) -> bool:
    """Return whether the session seems stuck.

    Either the stop of its process is overdue. Or its agent has been silent for long without a known
    reason to wait. The result is only displayed: the watchdogs act independently of it.
    """
    now = driver.now()
    if driver.process.stopping_since is not None:
        return now - driver.process.stopping_since > stop_seconds_max
    turn = driver.state.own or driver.state.turn
    if turn is None or turn.phase is not TurnPhase.RUNNING or turn.tools:
        return False
    due = 0.0 if turn.retry is None else turn.retry.due
    return now - max(driver.last_in or 0.0, turn.began_at, due) > QUIET_SECONDS_MAX


def _requests(driver: Driver, now: float) -> tuple[UnansweredRequest, ...]:
    """Return the requests that the agent has not answered.

    The running timers give the time since each request.
    """
    process, config = driver.state.process, driver.state.config

    def since(timer: Timer, subject: str, seconds: float) -> float | None:
        due = driver.timers.get((timer, subject))
        return None if due is None else max(0.0, seconds - (due - now))

    is_starting = process.phase is ProcessPhase.STARTING and process.is_there
    begun = max(0.0, now - (process.start_due - config.start_seconds))
    return (
        *(
            (
                UnansweredRequest(
                    id=f"{HANDSHAKE}-{process.number}", kind="handshake", seconds=begun
                ),
            )
            if is_starting
            else ()
        ),
        *(
            UnansweredRequest(
                id=request, kind="interrupt", seconds=since(Timer.DRAIN, key, config.drain_seconds)
            )
            for request, key in process.unacknowledged
        ),
        *(
            UnansweredRequest(
                id=change.request,
                kind=f"set {change.name}",
                seconds=since(Timer.SETTING, change.request, config.setting_seconds),
            )
            for change in process.changes
        ),
    )


def from_driver(
    driver: Driver,
    *,
    name: str | None,
    agent: str,
    stop_seconds_max: float = math.inf,
    preview: Callable[[Prompt], str] = preview,
    limits: Mapping[str, Any] | None = None,
) -> Status:
    """Return the status of an owned session. `limits`: of its processes.

    `stop_seconds_max`: the longest time that a stop of its process takes.
    """
    state = driver.state
    now, wall = driver.now(), time.time()
    current = phase(driver)
    questions = (
        *(question.id for question in state.questions),
        *(question.id for question in state.kept if question.decision is None),
        *(() if state.budget_question is None else (state.budget_question.id,)),
    )
    granted = state.own or state.turn
    return Status(
        id=driver.id,
        name=name,
        agent=state.agent or agent,
        phase=current,
        state=state_of(
            driver, current, has_question=bool(questions), stop_seconds_max=stop_seconds_max
        ),
        **holding(state, wall, now, preview),
        hold=None if state.hold is None else state.hold.id,
        holds=holds(state, wall, now),
        queue=waiting_asks(state, wall, now, preview),
        clocks=tuple(
            ClockStatus(
                name=c.name,
                seconds=c.seconds,
                left=c.seconds - c.elapsed(now),
                is_running=c.is_running,
            )
            for c in state.clocks
        ),
        timers={f"{t.value} {subject}": due - now for (t, subject), due in driver.timers.items()},
        questions=questions,
        pids=() if driver.process.pid is None else (driver.process.pid,),
        waits_for_place=driver.process.waits_for_place,
        conversation=state.conversation,
        epoch=driver.epoch,
        seq=state.head,
        counters={name: getattr(driver.counters, name) for name in driver.counters.__slots__},
        seconds_since_in=None if driver.last_in is None else now - driver.last_in,
        seconds_since_out=None if driver.last_out is None else now - driver.last_out,
        cost=state.cost,
        requests=_requests(driver, now),
        limits=state.limits,
        limited_until=_in_future(state.limited_until, wall),
        retry=_retry(granted, now),
        waits_for_limit=_waits_for_limit(state),
        budget=(*budget_gate.own_uses(state, now), *budget_gate.shared_holding(state)),
        fallback=_fallback(state, wall),
        containment=containment_of(limits, driver.process.pid),
    )


def _waits_for_limit(state: Session) -> bool:
    turns = (turn for turn in state.queue if isinstance(turn, Turn))
    return state.limit_wait is not None or any(
        limit_wait.wait_of(state, turn) is not None for turn in turns
    )


def _fallback(state: Session, wall: float) -> tuple[AgentStatus, ...]:
    if len(state.config.roster) < 2:
        return ()
    return tuple(
        AgentStatus(
            name=each.agent,
            limited_until=_in_future(fallback.limited_until(state, each.agent), wall),
            is_missing=each.agent in state.missing,
        )
        for each in state.config.roster
    )


def _retry(turn: Turn | None, now: float) -> RetryStatus | None:
    if turn is None or turn.retry is None:
        return None
    told = turn.retry.told
    return RetryStatus(
        attempt=told.attempt,
        attempts_max=told.attempts_max,
        seconds=max(0.0, turn.retry.due - now),
        cause=told.cause,
        error=told.kind,
        status=told.status,
    )


def _in_future(at: float | None, wall: float) -> float | None:
    return at if at is not None and at > wall else None


def from_listing(known: KnownSession | None, id: str, *, name: str | None, agent: str) -> Status:
    """Return the status of a session that this host does not own, from a listing.

    `known`: None if the session was deleted.
    """
    owner = None if known is None else known.owner
    if owner is not None and owner.is_here:
        owner = None  # This host has released the session, and the listing is not updated yet.
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
        state="elsewhere" if phase == "elsewhere" else "gone",
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


def from_log(past: SessionHistory, seen: Status) -> Status:
    """Extend a status from a listing by the state in the log."""
    state = past.session
    has_asks = any(isinstance(each, Turn) for each in state.queue)
    is_closed = seen.phase == "asleep" and state.mode is Mode.CLOSED
    return replace(
        seen,
        phase="closed" if is_closed else seen.phase,
        # An accepted ask waits for the next owner, so the session is not gone.
        state="queued" if has_asks and seen.phase in UNOWNED_PHASES else seen.state,
        **holding(state, None, 0.0, preview),
        queue=waiting_asks(state, None, 0.0, preview),
        questions=tuple(question.id for question in past.questions),
        pids=() if past.process is None or seen.phase != "elsewhere" else (past.process.pid,),
        conversation=state.conversation,
        seq=state.head,
        cost=state.cost,
        limits=state.limits,
        limited_until=_in_future(state.limited_until, time.time()),
        agent=state.agent or seen.agent,
    )
