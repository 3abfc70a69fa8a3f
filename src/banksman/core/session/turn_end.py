"""How a turn is stopped, and how it ends: with one outcome for each of its asks, whatever ended it."""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core import json_schema
from banksman.core.dialects.meaning import TurnOver
from banksman.core.session import ask_queue, questions, tool_cleanup, watchdogs
from banksman.core.session import event as kinds
from banksman.core.session import turn as turns
from banksman.core.session.effects import GiveReceipt, Resolve
from banksman.core.session.facts import Timer
from banksman.core.session.outcome import By, Kind, Outcome, Receipt
from banksman.core.session.state import AgentTurnEnded, Mode, ProcessPhase, Replacement
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Ask, Cause, Move, Turn, TurnPhase
from banksman.errors import AgentError, BanksmanError, Closed

# What a turn that was to end is called, by why.
KIND_OF = {
    Cause.INTERRUPT: Kind.INTERRUPTED,
    Cause.PREEMPT: Kind.PREEMPTED,
    Cause.CLOCK: Kind.INTERRUPTED,
    Cause.CLOSE: Kind.INTERRUPTED,
    Cause.REPLACE: Kind.FAILED,
}


def stop(work: Transition, turn: Turn, cause: Cause, clock: str | None = None) -> None:
    """Ask a turn to end. It ends by its boundary, or by the ladder when the drain is over; or at once, if not one byte
    of it was sent."""
    match turn.phase:
        case TurnPhase.STARTING:
            end(work, replace(turn, cause=cause, clock=clock), KIND_OF[cause], By.WITHDRAWN)
        case TurnPhase.RUNNING if turn.boundary is None:
            work.log(turn.id, kinds.TURN_INTERRUPTED, cause=cause.value, clock=clock)
            work.set_turn(replace(turn.moved(Move.STOP), cause=cause, clock=clock))
            # The interrupt first: an agent that is told "cancelled" before it knows that it is to stop takes it for an
            # answer, and goes on.
            interrupt(work, turn)
            questions.close(work, turn.id)
            tool_cleanup.end_terminals(work, turn)
            work.start_timer(work.state.config.drain_seconds, Timer.DRAIN, turn.key)
        case TurnPhase.INTERRUPTING if turn.cause is Cause.PREEMPT and cause is not Cause.PREEMPT:
            # Somebody wants it to end, and not only to give way: it is not to come back.
            work.set_turn(replace(turn, cause=cause, clock=clock))
        case TurnPhase.RUNNING if cause is not Cause.PREEMPT:
            # It seems to have ended. If that was another's boundary, the wish still stands. (Who is to give way is
            # looked at after every fact.)
            work.set_turn(replace(turn, wish=turn.wish or cause, clock=turn.clock or clock))
        case _:
            pass  # It is ending already.


def stop_if_unwanted(work: Transition) -> None:
    """A turn that nobody wants any more is stopped; one that was only granted passes the grant on."""
    turn = work.state.turn
    if turn is None or not all(ask.id in turn.unwanted for ask in turn.asks):
        return
    if turn.phase is TurnPhase.STARTING:
        end(work, turn, Kind.WITHDRAWN, By.WITHDRAWN)
    else:
        stop(work, turn, Cause.INTERRUPT)


def interrupt(work: Transition, turn: Turn) -> None:
    """Tell the agent. It acts on whatever the agent is doing, so it is only sent while that is this turn, and the next
    prompt is not sent before it is acknowledged."""
    process = work.state.process
    if process.phase is not ProcessPhase.READY:
        return
    request = f"interrupt-{turn.key}-{process.requests + 1}"
    unacknowledged = process.unacknowledged
    if work.state.config.dialect.acknowledges_interrupts:
        unacknowledged = (*unacknowledged, (request, turn.key))
    work.set_process(requests=process.requests + 1, unacknowledged=unacknowledged)
    work.speak(turn.id, lambda protocol: protocol.interrupt(request))


def end_by_boundary(work: Transition, turn: Turn, boundary: TurnOver) -> None:
    """The agent says that it is over. Whether it was stopped or finished is told by its flags and by the order of the
    acknowledgement, never by what it wrote."""
    # Of an agent that says from when on it takes interrupts, an acknowledgement before that means nothing.
    is_acknowledged = turn.is_acknowledged and (turn.can_interrupt or not work.state.process.announces)
    was_stopped = turn.cause is not None and (boundary.is_aborted or boundary.is_error or is_acknowledged)
    if was_stopped:
        assert turn.cause is not None
        kind = KIND_OF[turn.cause]
    else:
        kind = Kind.FAILED if boundary.is_aborted or boundary.is_error else Kind.DONE
    error = None
    if kind is Kind.FAILED:
        given_up = work.state.process.error if turn.cause is Cause.REPLACE else None
        if given_up is not None and (boundary.is_aborted or not boundary.error):
            error = given_up  # The agent has no reason of its own, or only says that we stopped it.
        else:
            error = AgentError(boundary.error or "the agent reports an error", turn=turn.id)
    elif kind is Kind.DONE and turn.ask is not None and turn.ask.schema is not None:
        fault = json_schema.fault(boundary.structured, turn.ask.schema)
        if fault is not None:
            # It may have said so in words. Whoever asked for a value and got none did not get what was asked for.
            kind = Kind.FAILED
            told = "the agent gave no value for the schema" if boundary.structured is None else fault
            error = AgentError(f"the answer does not fit its schema: {told}", turn=turn.id)
    end(work, turn, kind, By.BOUNDARY, boundary=boundary, error=error)


def end_by_exit(work: Transition, turn: Turn, error: BanksmanError) -> None:
    """The process is gone, and everything it wrote was heard."""
    if turn.boundary is not None:
        end_by_boundary(work, turn, turn.boundary)
        return
    process = work.state.process
    by = By.LADDER if process.was_told_to_stop and not process.exited_by_itself else By.EXIT
    kind = Kind.FAILED if turn.cause is None else KIND_OF[turn.cause]
    end(work, turn, kind, by, error=error if kind is Kind.FAILED else None)


def end(
    work: Transition,
    turn: Turn,
    kind: Kind,
    by: By,
    *,
    boundary: TurnOver | None = None,
    error: BanksmanError | None = None,
) -> None:
    """Settle a turn that was granted. Nothing of it is left in the state afterwards."""
    turn.moved(Move.END)  # Asserts that it may.
    boundary = boundary or TurnOver()
    for timer in (Timer.DRAIN, Timer.SETTLE, Timer.CLOCKS):
        # An acknowledgement that is still owed keeps the next prompt back, so what waits for it stays: see `timing`.
        is_needed = timer is Timer.DRAIN and any(key == turn.key for _, key in work.state.process.unacknowledged)
        if turn.phase is not TurnPhase.STARTING and not is_needed:
            work.cancel_timer(timer, turn.key)
    is_stopped = kind in (Kind.INTERRUPTED, Kind.PREEMPTED)
    if by is By.BOUNDARY and not is_stopped and not boundary.is_aborted:
        questions.leave(work, turn.id)
    else:
        questions.close(work, turn.id)
    outcome = Outcome(
        kind=kind,
        stop_reason=boundary.stop_reason,
        text=boundary.text,
        structured=boundary.structured if kind is Kind.DONE else None,
        usage=boundary.usage,
        cost=boundary.cost,
        error=error,
        clock=turn.clock if is_stopped else None,
    )
    if turn.is_own:
        work.set(own=None)
        if work.state.turn is None or not work.state.turn.is_open:
            work.set(clocks=())
        # Many an agent says only at its end what a turn of its own was for.
        log_ended(work, turn.id, outcome, by, origin=boundary.origin or turn.origin)
        work.after_commit(AgentTurnEnded(turn.id, turn.seq))
    else:
        _end_ours(work, turn, outcome, by, boundary)
    if turn.cause is not None and by is By.BOUNDARY:
        # Whatever it is called: an agent may say that it had finished, and its tools may not have.
        tool_cleanup.after(work, turn)
    queued = tuple(ask.id for waiting in work.state.queue if isinstance(waiting, Turn) for ask in waiting.asks)
    for id in turn.interrupts:
        work.after_commit(GiveReceipt(id, Receipt(stopped=is_stopped, by=by, queued=queued)))


def _end_ours(work: Transition, turn: Turn, outcome: Outcome, by: By, boundary: TurnOver) -> None:
    assert turn.ask is not None
    state = work.state
    work.set(turn=None, clocks=())
    if turn.ask.is_last and outcome.kind in (Kind.DONE, Kind.FAILED):
        work.set_process(stale=max(state.process.stale, Replacement.WHEN_QUIET))
    if state.hold is not None and turn.ask.hold == state.hold.id:
        work.watch_hold()
    # A prompt that was added, and of which the agent has said nothing since, is still before it: it will come to it by
    # itself, and that is then the open turn.
    coming: tuple[Ask, ...] = ()
    if by is By.BOUNDARY and turn.names_prompts:
        named = (*turn.heard, *boundary.refs)
        coming = tuple(ask for ask in turn.steered if ask.ref not in named and ask.id not in turn.unsent)
    is_requeued = (
        outcome.kind is Kind.PREEMPTED
        and turn.ask.on_preempt == "requeue"
        and turn.attempt < state.config.attempts_max
        and work.keeps_queue
    )
    _requeue_unsent(work, turn)
    steered = tuple(ask for ask in turn.steered if ask not in coming and ask.id not in turn.unsent)
    for ask in steered if is_requeued else (turn.ask, *turn.joined, *steered):
        log_ended(work, ask.id, outcome, by)
        work.after_commit(Resolve(ask.id, outcome))
    if is_requeued:
        again = turn.requeued()
        work.log(turn.id, kinds.TURN_REQUEUED, attempt=again.attempt)
        work.set(queue=ask_queue.requeue(work.state.queue, again))
    if coming:
        first, *others = coming
        work.log(first.id, kinds.TURN_STARTED, attempt=1, joined=[ask.id for ask in others])
        following = Turn(
            id=first.id, ask=first, priority=first.priority, phase=TurnPhase.RUNNING, steered=tuple(others)
        )
        following = replace(following, granted_at=work.at, began_at=work.at)
        if state.mode in (Mode.CLOSING, Mode.PARTING):
            following = replace(following.moved(Move.STOP), cause=Cause.CLOSE)
        # The agent has it already, and names what it does: nothing else could be begun before it anyway.
        following = replace(following, names_prompts=True, unwanted=turn.unwanted)
        work.set(turn=following, clocks=watchdogs.wound(state.config.clocks, work.at))
        work.arm_clocks(following)
        stop_if_unwanted(work)


def end_steered(work: Transition, turn: Turn, boundary: TurnOver) -> None:
    """The agent is over with prompts that were added to a turn, and not with the turn."""
    named = [ask for ask in turn.steered if ask.ref in boundary.refs]
    failed = boundary.is_aborted or boundary.is_error
    error = AgentError(boundary.error or "the agent reports an error", turn=turn.id) if failed else None
    outcome = Outcome(
        kind=Kind.FAILED if failed else Kind.DONE,
        stop_reason=boundary.stop_reason,
        text=boundary.text,
        usage=boundary.usage,
        cost=boundary.cost,
        error=error,
    )
    for ask in named:
        log_ended(work, ask.id, outcome, By.BOUNDARY)
        work.after_commit(Resolve(ask.id, outcome))
    work.set_turn(replace(turn, boundary=None, steered=tuple(ask for ask in turn.steered if ask not in named)))


def _requeue_unsent(work: Transition, turn: Turn) -> None:
    """Prompts that were to be added, and of which not one byte was sent, are asks like any other again."""
    for ask in reversed([ask for ask in turn.steered if ask.id in turn.unsent]):
        _requeue(work, ask)


def _requeue(work: Transition, ask: Ask) -> None:
    """One that was to be added to a turn, and is not a part of it."""
    if work.keeps_queue:
        work.log(ask.id, kinds.TURN_REQUEUED, attempt=2)
        work.set(queue=ask_queue.requeue(work.state.queue, replace(turns.queued(ask), attempt=2)))
    else:
        end_queued(work, ask, Kind.REFUSED, error=Closed("the session was closed before this was sent"))


def give_back(work: Transition, turn: Turn, ask: Ask) -> None:
    """A prompt that was added to a turn was not taken."""
    if ask.id in turn.unwanted:
        end_queued(work, ask, Kind.WITHDRAWN)
    else:
        _requeue(work, ask)
    work.set_turn(replace(turn, steered=tuple(other for other in turn.steered if other is not ask)))


def give_back_all(work: Transition, turn: Turn) -> None:
    """The prompt of a turn was not taken, and neither were those that were added to it."""
    while turn.steered:
        give_back(work, turn, turn.steered[-1])
        assert work.state.turn is not None
        turn = work.state.turn
    assert turn.ask is not None
    if turn.cause is not None or not work.keeps_queue or turn.ask.id in turn.unwanted:
        end(work, turn, Kind.WITHDRAWN if turn.cause is None else KIND_OF[turn.cause], By.WITHDRAWN)
        return
    for timer in (Timer.DRAIN, Timer.SETTLE, Timer.CLOCKS):
        work.cancel_timer(timer, turn.key)
    work.set(clocks=())
    put_back(work, turn.requeued())


def put_back(work: Transition, again: Turn) -> None:
    """The granted turn waits again, as this attempt."""
    work.log(again.id, kinds.TURN_REQUEUED, attempt=again.attempt)
    work.set(turn=None, queue=ask_queue.requeue(work.state.queue, again))


def end_queued(work: Transition, ask: Ask, kind: Kind, *, error: BanksmanError | None = None) -> None:
    """Settle an ask that was never granted. The caller has taken it out of the queue."""
    outcome = Outcome(kind=kind, error=error)
    log_ended(work, ask.id, outcome, By.WITHDRAWN)
    work.after_commit(Resolve(ask.id, outcome))


def log_ended(work: Transition, id: str, outcome: Outcome, by: By, **more: object) -> None:
    work.log(
        id,
        kinds.TURN_ENDED,
        outcome=outcome.kind,
        by=by,
        stop_reason=outcome.stop_reason,
        text=outcome.text,
        structured=outcome.structured,
        usage=outcome.usage,
        cost=outcome.cost,
        spent=work.state.spent,
        cost_in_all=work.state.cost,
        error=None if outcome.error is None else str(outcome.error),
        clock=outcome.clock,
        **more,
    )
