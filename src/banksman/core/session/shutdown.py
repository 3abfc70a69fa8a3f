"""Shutdown of a session on this host, in two ways: it is closed, or it leaves for another host.

    OPEN ──drain──► DRAINING ──► CLOSING ──► CLOSED      refuses the queue, logs `session.closed`
      └────leave──► LEAVING  ──► PARTING ──► LEFT        hands the queue over, logs `session.left`

`hand_over.py` has a third way, on which the process goes on.

Both ways refuse new asks, let the running turn finish, wait for the agent's background tasks
(`background_seconds` at most), stop the process, and release the session. A session that leaves
continues elsewhere. Its waiting asks stay in the log, just as after the death of a host, and the
next owner serves them. So these asks get no outcome from this host, not even an invented one. A
granted turn of which no byte was sent waits again.

A close overrides a leave: the waiting asks are refused after all. Until `session.left` is durable,
leaving can be revoked: a withdrawal or a close that arrives before the commit still counts.
"""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core.session import ask_queue, idle_process, turn_end
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import Hold
from banksman.core.session.effects import Accept, EndHold, Finish, LeaveInLog, StartTimer
from banksman.core.session.facts import (
    AskMoved,
    AskWithdrawn,
    CallerFact,
    CloseAsked,
    InterruptAsked,
    Subject,
    Timer,
)
from banksman.core.session.outcome import By, Kind
from banksman.core.session.state import OVER, Mode, ProcessPhase, Session, Store, not_open
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Cause, Move, Turn, TurnPhase
from banksman.errors import Closed

# A session leaves a host at most once, so one subject suffices.
LEAVE = (Timer.LEAVE, "session")
BACKGROUND = (Timer.BACKGROUND, "session")


# -- requests ------------------------------------------------------------------------------------
def drain(work: Transition) -> None:
    """Refuse the queue, and close the session after the running turn."""
    if work.is_open:
        work.set(mode=Mode.DRAINING)
        _refuse_queue(work)


def close(work: Transition, caller: str | None = None) -> None:
    """Refuse the queue, stop the running turn, and close the session.

    `caller`: the caller that closes it, for the log.
    """
    if work.state.mode in (Mode.CLOSING, Mode.CLOSED):
        return
    work.set(mode=Mode.CLOSING, closed_by=caller)
    idle_process.look(work)
    _refuse_queue(work)
    turn = work.state.turn
    if turn is not None and turn.phase is TurnPhase.STARTING:
        turn_end.end(work, turn, Kind.REFUSED, By.WITHDRAWN, error=_closing())
    _stop_open(work)
    # A preempted turn would be requeued at its end, but this queue is closed.
    for turn in (work.state.own, work.state.turn):
        if turn is not None and turn.cause is Cause.PREEMPT:
            work.set_turn(replace(turn, cause=Cause.CLOSE))
    work.stop_process()


def leave(work: Transition, by: float | None) -> None:
    """Hand the session over after the running turn, or by a deadline.

    The earliest deadline counts. It also bounds a close that is under way.
    """
    if work.is_open:
        work.set(mode=Mode.LEAVING)
        idle_process.look(work)
        put_down(work)
    if by is None or work.state.mode in OVER:
        return
    if by <= work.at:
        hurry(work)
    elif work.state.leave_by is None or by < work.state.leave_by:
        work.set(leave_by=by)
        work.do(StartTimer(by, LEAVE))


def put_down(work: Transition) -> None:
    """Put back what was granted and not sent, and end what only callers of this host know."""
    _end_holds(work)
    turn = work.state.turn
    if turn is not None and turn.phase is TurnPhase.STARTING:
        turn_end.put_back(work, turn.requeued())
    work.set(collecting=())


def expire(work: Transition, subject: Subject) -> None:
    """Handle an expired timer of the shutdown."""
    if subject == LEAVE:
        hurry(work)
    elif subject == BACKGROUND:
        stop_waiting_for_tasks(work)


def hurry(work: Transition) -> None:
    """Stop waiting for the running turn: its deadline has passed."""
    if not work.is_open and work.state.mode not in OVER:
        work.set(is_overdue=True)
        end(work)


def end(work: Transition) -> None:
    """Stop the process, because the running turn has ended or must end now."""
    if work.state.mode is Mode.DRAINING:
        close(work)
    elif work.state.mode in (Mode.LEAVING, Mode.HANDING):
        work.set(mode=Mode.PARTING)
        idle_process.look(work)
        # A preempted turn that is to be requeued is requeued in the log, for the next owner.
        _stop_open(work)
        work.stop_process()


def waits_for_tasks(work: Transition) -> bool:
    """Whether the shutdown still waits for background tasks. The first call starts the wait.

    A task may be a server that never ends, so the wait is bounded even if the drain is not.
    """
    state = work.state
    if not state.process.tasks or state.process.phase is not ProcessPhase.READY:
        return False
    if state.tasks_by is None:
        by = work.at + state.config.background_seconds
        work.set(tasks_by=by)
        work.do(StartTimer(by, BACKGROUND))
        return by > work.at
    return work.at < state.tasks_by


def stop_waiting_for_tasks(work: Transition) -> None:
    """Continue the shutdown although background tasks run. `grants.advance` does the rest."""
    if work.state.tasks_by is not None:
        work.set(tasks_by=work.at)


# -- effect on turns, holds and the queue --------------------------------------------------------
def _stop_open(work: Transition) -> None:
    for turn in (work.state.own, work.state.turn):
        if turn is not None and turn.phase is TurnPhase.RUNNING and turn.boundary is None:
            work.set_turn(replace(turn.moved(Move.STOP), cause=Cause.CLOSE))


def _end_holds(work: Transition) -> None:
    """End all holds: their holders are callers of this host."""
    if work.state.hold is not None:
        work.do(EndHold(work.state.hold.id))
        work.end_hold("shutdown")
    for waiting in work.state.queue:
        if isinstance(waiting, Hold):
            work.do(EndHold(waiting.id, not_open(work.state)))
    turns = tuple(waiting for waiting in work.state.queue if isinstance(waiting, Turn))
    work.set(queue=turns)


def _refuse_queue(work: Transition) -> None:
    _end_holds(work)
    for waiting in work.state.queue:
        assert isinstance(waiting, Turn)
        for ask in waiting.asks:
            turn_end.end_queued(work, ask, Kind.REFUSED, error=_closing())
    work.set(queue=(), collecting=())


def _closing() -> Closed:
    return Closed("the session was closed before the ask was sent", hint="ask again")


# -- the end -------------------------------------------------------------------------------------
def finish(work: Transition) -> None:
    """Close or hand over the session, once its process is gone."""
    state = work.state
    if state.process.phase is not ProcessPhase.NONE:
        return
    assert state.turn is None
    assert state.own is None
    if state.mode is Mode.CLOSING:
        work.log(None, kinds.SESSION_CLOSED, **kinds.named(state.closed_by))
        work.set(mode=Mode.CLOSED)
        work.after_commit(Finish())
    elif _may_go(state):
        waiting = [ask.id for turn in state.queue if isinstance(turn, Turn) for ask in turn.asks]
        work.log(None, kinds.SESSION_LEFT, queued=waiting)
        work.set(mode=Mode.LEFT)
        for id in waiting:
            work.after_commit(LeaveInLog(id))
        work.after_commit(Finish())


def _may_go(state: Session) -> bool:
    """Whether the session may leave now.

    It waits until the last ask is known to be accepted, so that its caller could have withdrawn it.
    It also waits until the log has the endings that callers got when the log failed. Otherwise the
    next owner would serve those asks again. But if the log does not recover, the session leaves at
    its deadline.
    """
    if any(isinstance(deferred, Accept) for _, deferred in state.deferred):
        return False
    return state.store is not Store.BROKEN or state.is_overdue


def _is_going(state: Session) -> bool:
    """Whether `session.left` is not durable yet. Until then this host owns the session."""
    return state.mode is Mode.LEFT and any(
        isinstance(deferred, Finish) for _, deferred in state.deferred
    )


def has_gone(state: Session) -> bool:
    """Whether the session has left, so that its queue belongs to another host."""
    return state.mode is Mode.LEFT and not _is_going(state)


def take_back(work: Transition) -> None:
    """Revoke the departure. `session.left` is logged again when the session does leave."""
    if _is_going(work.state):
        kept = tuple(
            pair for pair in work.state.deferred if not isinstance(pair[1], LeaveInLog | Finish)
        )
        work.set(mode=Mode.PARTING, deferred=kept)


def takes_back(work: Transition, fact: CallerFact) -> bool:
    """Revoke the departure if this fact requires it. Return whether it did."""
    match fact:
        case AskWithdrawn(turn=id) | InterruptAsked(turn=id) | AskMoved(turn=id):
            is_reason = ask_queue.find(work.state.queue, id) is not None
        case CloseAsked():
            is_reason = True
        case _:
            is_reason = False
    if not is_reason or not _is_going(work.state) or work.state.is_handed_over:
        return False
    take_back(work)
    return True
