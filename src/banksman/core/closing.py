"""The end of a session: nothing new is taken, what waits is refused, what runs is finished or stopped."""

from __future__ import annotations

from dataclasses import replace

from banksman.core import ending, resting
from banksman.core import event as kinds
from banksman.core.arbiter import Hold
from banksman.core.outcome import By, Kind
from banksman.core.session_effects import EndHold, Finish
from banksman.core.state import Mode, ProcessPhase
from banksman.core.turn import Cause, Move, Phase
from banksman.core.work import Work
from banksman.errors import Closed


def drain(work: Work) -> None:
    if work.is_open:
        work.set(mode=Mode.DRAINING)
        _refuse_queue(work)


def close(work: Work) -> None:
    if work.state.mode in (Mode.CLOSING, Mode.CLOSED):
        return
    work.set(mode=Mode.CLOSING)
    resting.look(work)
    _refuse_queue(work)
    turn = work.state.turn
    if turn is not None and turn.phase is Phase.STARTING:
        ending.end(work, turn, Kind.REFUSED, By.WITHDRAWN, error=_closing())
    for turn in (work.state.own, work.state.turn):
        if turn is not None and turn.phase is Phase.RUNNING and turn.boundary is None:
            work.set_turn(replace(turn.moved(Move.STOP), cause=Cause.CLOSE))
        elif turn is not None and turn.cause is Cause.PREEMPT:
            work.set_turn(replace(turn, cause=Cause.CLOSE))
    work.stop_process()


def _refuse_queue(work: Work) -> None:
    if work.state.hold is not None:
        work.do(EndHold(work.state.hold.id))
        work.set(hold=None)
    for waiting in work.state.queue:
        if isinstance(waiting, Hold):
            work.do(EndHold(waiting.id, _closing()))
        else:
            for ask in waiting.asks:
                ending.end_queued(work, ask, Kind.REFUSED, error=_closing())
    work.set(queue=(), collecting=())


def _closing() -> Closed:
    return Closed("the session was closed before this was sent", hint="ask again")


def finish(work: Work) -> None:
    state = work.state
    if state.process.phase is ProcessPhase.NONE:
        assert state.turn is None
        assert state.own is None
        work.log(None, kinds.SESSION_CLOSED)
        work.set(mode=Mode.CLOSED)
        work.after_commit(Finish())
