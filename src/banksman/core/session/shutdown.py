"""The end of a session here. There are two: it is closed, or it leaves.

    OPEN ──drain──► DRAINING ──► CLOSING ──► CLOSED      who waits is refused, and the log says `session.closed`
      └────leave──► LEAVING  ──► PARTING ──► LEFT        who waits is passed on, and the log says `session.left`

Either takes nothing new, lets what runs come to its end, stops the process, and lets go. A session that leaves goes on
elsewhere: what waits in it stays in the log as a host's death would leave it, and whoever claims the session next
serves it. So its asks have no outcome from us, and none is made up for them. One that was granted, and of which not one
byte was sent, waits again.

Who closes a session that is leaving means it: what waits is refused after all. Until `session.left` is durable it can
be taken back: a withdrawal or a close that comes while it is on its way to the log still counts.
"""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core.session import ask_queue, idle_process, turn_end
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import Hold
from banksman.core.session.effects import Accept, EndHold, Finish, LeaveInLog, StartTimer
from banksman.core.session.facts import AskMoved, AskWithdrawn, CallerFact, CloseAsked, InterruptAsked, Timer
from banksman.core.session.outcome import By, Kind
from banksman.core.session.state import OVER, Mode, ProcessPhase, Session, Store, not_open
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Cause, Move, Turn, TurnPhase
from banksman.errors import Closed

# There is one such wait in a session's life here.
LEAVE = (Timer.LEAVE, "session")


# -- what is wanted --------------------------------------------------------------------------------------------------
def drain(work: Transition) -> None:
    if work.is_open:
        work.set(mode=Mode.DRAINING)
        _refuse_queue(work)


def close(work: Transition) -> None:
    if work.state.mode in (Mode.CLOSING, Mode.CLOSED):
        return
    work.set(mode=Mode.CLOSING)
    idle_process.look(work)
    _refuse_queue(work)
    turn = work.state.turn
    if turn is not None and turn.phase is TurnPhase.STARTING:
        turn_end.end(work, turn, Kind.REFUSED, By.WITHDRAWN, error=_closing())
    _stop_open(work)
    for turn in (work.state.own, work.state.turn):
        if turn is not None and turn.cause is Cause.PREEMPT:
            work.set_turn(replace(turn, cause=Cause.CLOSE))
    work.stop_process()


def leave(work: Transition, by: float | None) -> None:
    """Of several deadlines the first one counts. One that is being closed is not waited for longer, either."""
    if work.is_open:
        work.set(mode=Mode.LEAVING)
        idle_process.look(work)
        _end_holds(work)
        turn = work.state.turn
        if turn is not None and turn.phase is TurnPhase.STARTING:
            turn_end.put_back(work, turn.requeued())
        work.set(collecting=())
    if by is None or work.state.mode in OVER:
        return
    if by <= work.at:
        hurry(work)
    elif work.state.leave_by is None or by < work.state.leave_by:
        work.set(leave_by=by)
        work.do(StartTimer(by, LEAVE))


def hurry(work: Transition) -> None:
    """What runs has had its time."""
    if not work.is_open and work.state.mode not in OVER:
        work.set(is_overdue=True)
        end(work)


def end(work: Transition) -> None:
    """What was to come to its end has, or may not go on any longer."""
    if work.state.mode is Mode.DRAINING:
        close(work)
    elif work.state.mode is Mode.LEAVING:
        work.set(mode=Mode.PARTING)
        # One that was to give way and to come back does so, elsewhere.
        _stop_open(work)
        work.stop_process()


# -- what it means for who runs, holds and waits ---------------------------------------------------------------------
def _stop_open(work: Transition) -> None:
    for turn in (work.state.own, work.state.turn):
        if turn is not None and turn.phase is TurnPhase.RUNNING and turn.boundary is None:
            work.set_turn(replace(turn.moved(Move.STOP), cause=Cause.CLOSE))


def _end_holds(work: Transition) -> None:
    """They are their holders', who are here."""
    if work.state.hold is not None:
        work.do(EndHold(work.state.hold.id))
    for waiting in work.state.queue:
        if isinstance(waiting, Hold):
            work.do(EndHold(waiting.id, not_open(work.state)))
    turns = tuple(waiting for waiting in work.state.queue if isinstance(waiting, Turn))
    work.set(hold=None, queue=turns)


def _refuse_queue(work: Transition) -> None:
    _end_holds(work)
    for waiting in work.state.queue:
        assert isinstance(waiting, Turn)
        for ask in waiting.asks:
            turn_end.end_queued(work, ask, Kind.REFUSED, error=_closing())
    work.set(queue=(), collecting=())


def _closing() -> Closed:
    return Closed("the session was closed before this was sent", hint="ask again")


# -- the end ---------------------------------------------------------------------------------------------------------
def finish(work: Transition) -> None:
    state = work.state
    if state.process.phase is not ProcessPhase.NONE:
        return
    assert state.turn is None
    assert state.own is None
    if state.mode is Mode.CLOSING:
        work.log(None, kinds.SESSION_CLOSED)
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
    """Not before whoever asked last knows that it was accepted, and could have changed its mind. Nor before the log has
    the endings that callers were told when it failed: whoever has the session next would serve those asks again. But
    for a log that does not come back nobody waits longer than was said."""
    if any(isinstance(deferred, Accept) for _, deferred in state.deferred):
        return False
    return state.store is not Store.BROKEN or state.is_overdue


def _is_going(state: Session) -> bool:
    """`session.left` is on its way to the log, and it is ours until it is there."""
    return state.mode is Mode.LEFT and any(isinstance(deferred, Finish) for _, deferred in state.deferred)


def has_gone(state: Session) -> bool:
    """What is still in its queue is another's."""
    return state.mode is Mode.LEFT and not _is_going(state)


def take_back(work: Transition) -> None:
    """It has not left yet, after all, and says so again when it does."""
    if _is_going(work.state):
        kept = tuple(pair for pair in work.state.deferred if not isinstance(pair[1], LeaveInLog | Finish))
        work.set(mode=Mode.PARTING, deferred=kept)


def takes_back(work: Transition, fact: CallerFact) -> bool:
    """Whether this is a reason to, and it was done."""
    match fact:
        case AskWithdrawn(turn=id) | InterruptAsked(turn=id) | AskMoved(turn=id):
            is_reason = ask_queue.find(work.state.queue, id) is not None
        case CloseAsked():
            is_reason = True
        case _:
            is_reason = False
    if not is_reason or not _is_going(work.state):
        return False
    take_back(work)
    return True
