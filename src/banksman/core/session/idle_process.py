"""Retire idle, old and stale agent processes, and back off after crashes.

- An idle process is one that no turn, queue entry, question or background task needs. It is stopped
  after a long idle time, or when another session needs its place in the pool. The session lives on,
  and the next ask starts another process, which resumes the conversation.
- A stale process is replaced between two turns. It is old, or the next turn needs another one:
  another configuration, another schema, or a conversation that still fits the model. An old process
  may be asked first to save its knowledge.
- After several crashes in a row, processes are started at longer and longer intervals.
"""

from __future__ import annotations

from banksman.core.session import asks, budget_gate, fallback
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import Queue
from banksman.core.session.effects import AskToSave, ReportIdle
from banksman.core.session.facts import Timer
from banksman.core.session.outcome import Kind
from banksman.core.session.state import (
    Mode,
    ProcessPhase,
    ProcessState,
    Replacement,
    Session,
    Store,
)
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Turn, TurnPhase
from banksman.errors import AgentError


def look(work: Transition) -> None:
    """Check whether the process is idle now, and start or end its idle time."""
    state = work.state
    if _is_idle(state, work.at):
        if state.process.stale is not Replacement.NO:
            retire(work, "old" if state.process.stale is Replacement.WHEN_QUIET else "stale")
        elif state.idle_since is None:
            count = state.idle_count + 1
            work.set(idle_since=work.at, idle_count=count)
            if state.config.idle_seconds is not None:
                work.start_timer(state.config.idle_seconds, Timer.IDLE, _idle_key(work.state))
            work.do(ReportIdle())
    else:
        wake(work)


def wake(work: Transition) -> None:
    """End the idle time, if one has begun."""
    if work.state.idle_since is not None:
        work.cancel_timer(Timer.IDLE, _idle_key(work.state))
        work.set(idle_since=None)


def has_work(state: Session, at: float) -> bool:
    """Whether a turn, a hold or a queue entry needs a process, now or soon.

    Asks that wait for a budget, or for a limit of the account, need none.
    """
    if state.turn is not None or state.own is not None or state.hold is not None:
        return True
    return bool(state.queue and state.limit_wait is None and servable(state, state.queue, at))


def servable(state: Session, queue: Queue, at: float) -> Queue:
    """Return the queue without the turns that wait for a budget, or for the limit of one agent."""
    return fallback.servable(state, budget_gate.servable(state, queue, at))


def _is_idle(state: Session, at: float) -> bool:
    process = state.process
    is_there = (
        process.phase is ProcessPhase.READY
        and state.mode is Mode.OPEN
        and state.store is Store.WORKING
    )
    if not is_there or process.tasks or process.changes or process.unacknowledged or process.outbox:
        return False
    return not (state.questions or state.callbacks or has_work(state, at))


def _idle_key(state: Session) -> str:
    return f"{state.process.number}.{state.idle_count}"


def evict(work: Transition, reason: str) -> None:
    """Stop the process if it is idle."""
    if work.state.idle_since is not None:
        retire(work, reason)


def on_idle_long(work: Transition, key: str) -> None:
    """Stop a process whose idle time is over. The key makes an earlier timer stale."""
    if key == _idle_key(work.state):
        evict(work, "idle")


def retire(work: Transition, reason: str) -> None:
    """Stop the process while no turn is open. The next process resumes the conversation."""
    assert work.state.speaking is None
    work.log(None, kinds.PROCESS_RETIRED, process=work.state.process.number, reason=reason)
    work.stop_process()


# -- stale ---------------------------------------------------------------------------------------
def must_replace(state: Session, turn: Turn) -> str | None:
    """Return the reason why this turn needs another process; None if it can use the current one."""
    process = state.process
    assert process.phase is ProcessPhase.READY
    if process.stale is Replacement.NOW:
        return "stale"
    if process.stale is Replacement.WHEN_QUIET and not (
        process.tasks or state.questions or state.callbacks
    ):
        return "old"
    if turn.ask is None or turn.ask.is_last:
        return None  # The save prompt is for this process only, whatever schema its answers have.
    return None if process.schema == turn.ask.schema else "schema"


def on_old(work: Transition, subject: str) -> None:
    """Mark an old process for replacement, or ask it first to save its knowledge."""
    process = work.state.process
    config = work.state.config
    # Without `recycle_seconds`: the session was reopened without an age limit.
    if (
        subject != str(process.number)
        or process.phase is not ProcessPhase.READY
        or config.recycle_seconds is None
    ):
        return
    if process.stale is not Replacement.NO:
        return
    if config.save_prompt is None:
        work.set_process(stale=Replacement.WHEN_QUIET)
    else:
        if not any(turn.ask is not None and turn.ask.is_last for turn in _turns(work.state)):
            work.do(AskToSave(config.save_prompt))
        # If the queue is full, or that ask is dropped, the process is asked again after the same
        # time.
        work.start_timer(config.recycle_seconds, Timer.AGE, subject)


def grow_old(work: Transition) -> None:
    """Restart the age timer of the process."""
    process = work.state.process
    work.cancel_timer(Timer.AGE, str(process.number))
    if process.phase is ProcessPhase.READY and work.state.config.recycle_seconds is not None:
        work.start_timer(work.state.config.recycle_seconds, Timer.AGE, str(process.number))


def drop_saving(work: Transition) -> None:
    """Drop the save prompt of a process that is gone. The next process has nothing to save yet."""
    for turn in _turns(work.state):
        if turn.phase is TurnPhase.QUEUED and turn.ask is not None and turn.ask.is_last:
            error = AgentError("the process ended before it got the save prompt")
            asks.drop(work, turn, Kind.REFUSED, error)


def _turns(state: Session) -> list[Turn]:
    return [turn for turn in (state.turn, *state.queue) if isinstance(turn, Turn)]


# -- crashes -------------------------------------------------------------------------------------
def count_crash(work: Transition, process: ProcessState) -> None:
    """Count a crash. The first retry is immediate; the intervals of later ones double."""
    crashes = work.state.crashes + 1
    work.set(crashes=crashes)
    if crashes < 2:
        return
    config = work.state.config
    seconds = min(config.backoff_seconds * 2.0 ** min(crashes - 2, 16), config.backoff_seconds_max)
    work.set(is_backing_off=True)
    work.start_timer(seconds, Timer.BACKOFF, str(process.number))
    work.log(None, kinds.PROCESS_BACKED_OFF, crashes=crashes, seconds=seconds)


def on_backed_off(work: Transition, subject: str) -> None:
    """Allow the next start after a crash."""
    if subject == str(work.state.process.number):
        work.set(is_backing_off=False)
