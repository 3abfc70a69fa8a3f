"""Hand a session over together with its process, so that the next host continues its open turn.

    OPEN ──hand over──► HANDING ──► LEFT        logs `session.handed_over`
                           └──────► LEAVING     no process, or it cannot be handed over

As a session that leaves, it accepts and grants nothing new, and its waiting asks stay in the log.
But its agent continues to work. The driver hands the process over at the first moment at which this
host owes nothing: no frame is on its way to the agent, and no result waits for the log or a caller.
`may_hand_over` names that moment. If it does not come before the deadline, or if there is no
process to hand over, the session leaves (`shutdown.py`).

From the effect `HandOver` to its result, the driver holds all facts back but those of the log. So
the state that the driver encodes (`live_state.py`) is the state in which the session leaves.
"""

from __future__ import annotations

from banksman.core.session import event as kinds
from banksman.core.session import idle_process, shutdown
from banksman.core.session.ask_queue import Hold
from banksman.core.session.effects import Finish, GiveReceipt, HandOver, LeaveInLog, StartTimer
from banksman.core.session.facts import HandedOver, HandOverFact
from banksman.core.session.outcome import By, Receipt
from banksman.core.session.state import Mode, ProcessPhase, Session, Stdin, Store
from banksman.core.session.transition import Transition
from banksman.core.session.turn import TurnPhase
from banksman.errors import Moved


def begin(work: Transition, by: float) -> None:
    """Hand the session over as soon as possible. `by`: when it leaves instead."""
    if not work.is_open or by <= work.at:
        shutdown.leave(work, by)
        return
    work.set(mode=Mode.HANDING, leave_by=by)
    work.do(StartTimer(by, shutdown.LEAVE))
    shutdown.put_down(work)


def look(work: Transition) -> None:
    """Hand the process over if that is possible now. Leave if it never will be."""
    state = work.state
    if state.process.phase is not ProcessPhase.READY:
        # Without a process, no turn is open. A process that starts has not got a prompt yet, and
        # one that is being stopped will not answer it.
        _fall_back(work)
    elif not state.is_handing and may_hand_over(state):
        work.set(is_handing=True)
        work.do(HandOver(state.process.number))


def may_hand_over(state: Session) -> bool:
    """Whether the process can be handed over in this state, because this host owes nothing."""
    process, turn = state.process, state.turn
    return (
        state.mode is Mode.HANDING
        and process.phase is ProcessPhase.READY
        # A frame has only one writer.
        and process.stdin is Stdin.FREE
        and not process.outbox
        # A sweep, a setting and a callback are served by this host, for its callers.
        and not process.sweeps
        and not process.changes
        and not state.callbacks
        # What waits for the log would be lost with this host.
        and state.store is Store.WORKING
        and not state.deferred
        and not state.unwritten
        and (turn is None or turn.phase in (TurnPhase.RUNNING, TurnPhase.INTERRUPTING))
    )


def on_result(work: Transition, fact: HandOverFact) -> None:
    """Leave with the process, or keep it."""
    state = work.state
    if not state.is_handing or fact.process != state.process.number:
        return
    work.set(is_handing=False)
    if state.mode is not Mode.HANDING:
        return
    if isinstance(fact, HandedOver):
        _leave(work, fact)
    elif fact.is_final:
        _fall_back(work)


def _fall_back(work: Transition) -> None:
    """Leave without the process."""
    work.set(mode=Mode.LEAVING)
    idle_process.look(work)


def _leave(work: Transition, fact: HandedOver) -> None:
    state = work.state
    turns = [turn for turn in (state.own, state.turn) if turn is not None]
    asks = [ask.id for turn in turns for ask in turn.asks]
    waiting = [ask.id for turn in state.queue if not isinstance(turn, Hold) for ask in turn.asks]
    work.log(
        None,
        kinds.SESSION_HANDED_OVER,
        **fact.about,
        process=fact.process,
        open=[turn.id for turn in turns],
        queued=waiting,
    )
    work.set(mode=Mode.LEFT)
    for id in (*asks, *waiting):
        work.after_commit(LeaveInLog(id))
    for turn in turns:
        for interrupt in turn.interrupts:
            work.after_commit(no_receipt(interrupt))
    work.after_commit(Finish())


def has_taken(state: Session, turn: str) -> bool:
    """Whether the next host has this turn, together with the process."""
    turns = (state.own, state.turn, *state.queue)
    return state.is_handed_over and any(
        turn in (each.id, *(ask.id for ask in each.asks))
        for each in turns
        if each is not None and not isinstance(each, Hold)
    )


def no_receipt(interrupt: str) -> GiveReceipt:
    """Return the answer to an interrupt of a turn that continues at another host."""
    message = "the session was handed over, and the turn continues at its next host"
    error = Moved(message, hint="interrupt it again in a moment")
    return GiveReceipt(interrupt, Receipt(stopped=False, by=By.ALREADY_OVER), error)
