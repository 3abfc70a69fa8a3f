"""Stop, end and requeue turns, with exactly one outcome for each ask.

A turn ends by the agent's boundary, by the end of the process, or before its prompt was sent. This
module decides the outcome, checks an answer against its schema, and gives the receipts of
interrupts. `turn_log.py` logs the end. An ask of which no byte was sent, or that was preempted, may
return to the queue. `turn_boundary.py` detects the boundary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from banksman.core import json_schema
from banksman.core.dialects.meaning import Replied, TurnOver
from banksman.core.session import (
    ask_queue,
    fallback,
    limit_wait,
    provider_limits,
    questions,
    tool_cleanup,
    turn_log,
    turn_usage,
    watchdogs,
)
from banksman.core.session import event as kinds
from banksman.core.session import turn as turns
from banksman.core.session.effects import GiveReceipt, Resolve
from banksman.core.session.facts import Timer
from banksman.core.session.outcome import By, Kind, Outcome, Receipt
from banksman.core.session.state import AgentTurnEnded, LimitWait, Mode, ProcessPhase, Replacement
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Ask, Cause, Move, Turn, TurnPhase
from banksman.errors import AgentError, BanksmanError, Closed

# Outcome of a stopped turn, by the cause of the stop.
KIND_OF = {
    Cause.INTERRUPT: Kind.INTERRUPTED,
    Cause.PREEMPT: Kind.PREEMPTED,
    Cause.CLOCK: Kind.INTERRUPTED,
    Cause.CLOSE: Kind.INTERRUPTED,
    Cause.REPLACE: Kind.FAILED,
    Cause.BUDGET: Kind.INTERRUPTED,
}


def stop(
    work: Transition,
    turn: Turn,
    cause: Cause,
    clock: str | None = None,
    *,
    caller: str | None = None,
) -> None:
    """Request the end of a turn.

    `caller`: the caller that wants it, or whose more urgent ask preempts the turn, for the log. The
    turn ends by its boundary, or by the ladder when the drain time is over. If no byte of it was
    sent, it ends immediately.
    """
    if cause is not Cause.PREEMPT:
        turn = replace(turn, stopped_by=turn.stopped_by or caller)
        caller = turn.stopped_by
    match turn.phase:
        case TurnPhase.STARTING:
            end(work, replace(turn, cause=cause, clock=clock), KIND_OF[cause], By.WITHDRAWN)
        case TurnPhase.RUNNING if turn.boundary is None:
            told = {"cause": cause, "clock": clock, **kinds.named(caller)}
            work.log(turn.id, kinds.TURN_INTERRUPTED, **told)
            work.set_turn(replace(turn.moved(Move.STOP), cause=cause, clock=clock))
            # The interrupt goes first. An agent that gets "cancelled" for a question before it
            # knows of the interrupt takes that for an answer, and continues.
            interrupt(work, turn)
            questions.close(work, turn.id)
            tool_cleanup.end_terminals(work, turn)
            work.start_timer(work.state.config.drain_seconds, Timer.DRAIN, turn.key)
        case TurnPhase.INTERRUPTING if turn.cause is Cause.PREEMPT and cause is not Cause.PREEMPT:
            # The turn was only to be preempted, and now a caller wants it to end: it must not be
            # requeued.
            work.set_turn(replace(turn, cause=cause, clock=clock))
        case TurnPhase.RUNNING if cause is not Cause.PREEMPT:
            # The turn seems to have ended. If that boundary belonged to another turn, the wish to
            # stop this one still stands. (A preemption needs no wish: it is checked after every
            # fact.)
            work.set_turn(replace(turn, wish=turn.wish or cause, clock=turn.clock or clock))
        case _:
            pass  # It is already ending.


def stop_if_unwanted(
    work: Transition, cause: Cause = Cause.INTERRUPT, clock: str | None = None
) -> None:
    """Stop a turn that all its callers have withdrawn, or whose deadlines have passed.

    A turn that was only granted ends immediately, and the next one is granted.
    """
    turn = work.state.turn
    if turn is None or not all(ask.id in turn.unwanted for ask in turn.asks):
        return
    if turn.phase is TurnPhase.STARTING:
        end(work, replace(turn, clock=clock), Kind.WITHDRAWN, By.WITHDRAWN)
    else:
        stop(work, turn, cause, clock)


def interrupt(work: Transition, turn: Turn) -> None:
    """Send an interrupt to the agent.

    It acts on whatever the agent is doing. So it is sent only during this turn, and the next prompt
    waits for its acknowledgement.
    """
    process = work.state.process
    if process.phase is not ProcessPhase.READY:
        return
    request = f"interrupt-{turn.key}-{process.requests + 1}"
    unacknowledged = process.unacknowledged
    if work.state.config.dialect.acknowledges_interrupts:
        unacknowledged = (*unacknowledged, (request, turn.key))
    work.set_process(requests=process.requests + 1, unacknowledged=unacknowledged)
    work.speak(turn.id, lambda protocol: protocol.interrupt(request))


def on_interrupt_reply(work: Transition, reply: Replied) -> None:
    """Note that the agent has acknowledged an interrupt."""
    process = work.state.process
    key = dict(process.unacknowledged).get(reply.request)
    if key is None:
        return  # Late or unknown: a reply affects only the request that it names.
    owed = tuple(pair for pair in process.unacknowledged if pair[0] != reply.request)
    work.set_process(unacknowledged=owed)
    for turn in (work.state.own, work.state.turn):
        if turn is not None and turn.key == key:
            # Some agents acknowledge an interrupt that came before they could take one, and
            # continue. That reply proves nothing about the turn; the interrupt is sent again once
            # the agent can take it. A reply after the boundary came too late to stop anything. A
            # refused interrupt was not taken.
            is_in_time = turn.boundary is None and turn.settled is None and reply.error is None
            if is_in_time and (turn.can_interrupt or not process.announces):
                work.set_turn(replace(turn, is_acknowledged=True))
            return
    if not any(other == key for _, other in owed):
        work.cancel_timer(Timer.DRAIN, key)


def end_by_boundary(work: Transition, turn: Turn, boundary: TurnOver) -> None:
    """End a turn by the agent's boundary.

    The flags of the boundary and the order of the acknowledgement decide whether the turn was
    stopped or finished, never the agent's text.
    """
    # If an agent announces when it takes interrupts, an earlier acknowledgement means nothing.
    is_acknowledged = turn.is_acknowledged and (
        turn.can_interrupt or not work.state.process.announces
    )
    was_stopped = turn.cause is not None and (
        boundary.is_aborted or boundary.is_error or is_acknowledged
    )
    if was_stopped:
        assert turn.cause is not None
        kind = KIND_OF[turn.cause]
    else:
        kind = Kind.FAILED if boundary.is_aborted or boundary.is_error else Kind.DONE
    error = None
    if kind is Kind.FAILED:
        given_up = work.state.process.error if turn.cause is Cause.REPLACE else None
        if given_up is not None and (boundary.is_aborted or not boundary.error):
            error = given_up  # The agent gives no reason, or only reports the stop itself.
        else:
            error = provider_limits.error_of(work, boundary, turn.id)
    elif kind is Kind.DONE and turn.ask is not None and turn.ask.schema is not None:
        fault = json_schema.fault(boundary.structured, turn.ask.schema)
        if fault is not None:
            # The answer may be in the text. But the caller asked for a value, and did not get one.
            kind = Kind.FAILED
            told = (
                "the agent gave no value for the schema" if boundary.structured is None else fault
            )
            error = AgentError(f"the answer does not match its schema: {told}", turn=turn.id)
    end(work, turn, kind, By.BOUNDARY, boundary=boundary, error=error)


def end_by_exit(work: Transition, turn: Turn, error: BanksmanError) -> None:
    """End a turn whose process is gone. All of its output was read before."""
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
    """End a granted turn, and remove it from the state."""
    turn.moved(Move.END)  # Asserts that the phase allows it.
    boundary = boundary or TurnOver()
    used = None if by is By.WITHDRAWN else turn_usage.final(turn, boundary, work.at)
    for timer in (Timer.DRAIN, Timer.SETTLE, Timer.CLOCKS):
        # An acknowledgement that is still pending holds back the next prompt. So its timer stays:
        # see `timers`.
        is_needed = timer is Timer.DRAIN and any(
            key == turn.key for _, key in work.state.process.unacknowledged
        )
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
        clock=turn.clock if is_stopped or kind is Kind.WITHDRAWN else None,
        background=work.state.process.tasks if by is By.BOUNDARY else (),
        used=used,
        used_tools=turn.used_tools,
    )
    limit_wait.on_outcome(work, turn, outcome)
    if turn.is_own:
        work.set(own=None)
        if work.state.turn is None or not work.state.turn.is_open:
            work.set(clocks=())
        # Many agents name the origin of their own turn only at its end.
        origin = boundary.origin or turn.origin
        stopped_by = _stopped_by(turn, outcome)
        turn_log.log_ended(
            work, turn.id, outcome, by, counts=turn, stopped_by=stopped_by, origin=origin
        )
        work.after_commit(AgentTurnEnded(turn.id, turn.seq))
    else:
        _end_ours(work, turn, outcome, by, boundary)
    if turn.cause is not None and by is By.BOUNDARY:
        # Sweep whatever the outcome is: an agent may report that it had finished while its tools
        # still run.
        tool_cleanup.after(work, turn)
    queued = tuple(
        ask.id for waiting in work.state.queue if isinstance(waiting, Turn) for ask in waiting.asks
    )
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
    # A steered prompt that the agent has not mentioned since is still in its queue. The agent will
    # reach it unprompted, so it becomes the open turn now.
    coming: tuple[Ask, ...] = ()
    if by is By.BOUNDARY and turn.names_prompts:
        named = (*turn.heard, *boundary.refs)
        coming = tuple(
            ask for ask in turn.steered if ask.ref not in named and ask.id not in turn.unsent
        )
    is_preempted = (
        outcome.kind is Kind.PREEMPTED
        and turn.ask.on_preempt == "requeue"
        and turn.attempt < state.config.attempts_max
        and work.keeps_queue
    )
    wait = limit_wait.retry_of(work, turn, outcome)
    _requeue_unsent(work, turn)
    steered = tuple(ask for ask in turn.steered if ask not in coming and ask.id not in turn.unsent)
    if wait is not None:
        _requeue_for_limit(work, turn, steered, outcome, wait)
    elif is_preempted:
        _end_asks(work, turn, steered, outcome, by)
        again = replace(turn.requeued(), agent=fallback.owner(state))
        counted = turn_log.counted(work, turn, outcome.used)
        told = {"agent": again.agent, **turn_log.costs(work)}
        work.log(turn.id, kinds.TURN_REQUEUED, attempt=again.attempt, **counted, **told)
        turn_log.add(work, counted)
        work.set(queue=ask_queue.requeue(work.state.queue, again))
    else:
        _end_asks(work, turn, (turn.ask, *turn.joined, *steered), outcome, by)
    if coming:
        first, *others = coming
        work.log(first.id, kinds.TURN_STARTED, attempt=1, joined=[ask.id for ask in others])
        following = Turn(
            id=first.id,
            ask=first,
            priority=first.priority,
            phase=TurnPhase.RUNNING,
            steered=tuple(others),
        )
        following = replace(
            following, granted_at=work.at, began_at=work.at, limited_until=turn.limited_until
        )
        if state.mode in (Mode.CLOSING, Mode.PARTING):
            following = replace(following.moved(Move.STOP), cause=Cause.CLOSE)
        # The agent already has the prompt and names its work. No other prompt could begin before it
        # anyway.
        following = replace(following, names_prompts=True, unwanted=turn.unwanted)
        work.set(turn=following, clocks=watchdogs.wound(state.config.clocks, work.at))
        work.arm_clocks(following)
        clock = _passed_deadline(work, following.asks)
        stop_if_unwanted(work, Cause.INTERRUPT if clock is None else Cause.CLOCK, clock)


def _end_asks(
    work: Transition, turn: Turn, ended: tuple[Ask, ...], outcome: Outcome, by: By
) -> None:
    for ask in ended:
        counts, caller = turn if ask is turn.ask else None, _stopped_by(turn, outcome)
        _end_ask(work, ask, outcome, by, counts=counts, caller=caller)


def _stopped_by(turn: Turn, outcome: Outcome) -> str | None:
    return turn.stopped_by if outcome.kind in (Kind.INTERRUPTED, Kind.WITHDRAWN) else None


def _requeue_for_limit(
    work: Transition, turn: Turn, steered: tuple[Ask, ...], outcome: Outcome, wait: LimitWait
) -> None:
    """Requeue a turn that a limit of the account has failed, and the asks steered into it."""
    told: dict[str, Any] = {"reason": "limit", "limited_until": wait.until}
    for ask in reversed(steered):
        work.log(ask.id, kinds.TURN_REQUEUED, attempt=2, **told)
        alone = replace(turns.queued(ask), attempt=2, limit_waits=1)
        work.set(queue=ask_queue.requeue(work.state.queue, alone))
    again = replace(turn.requeued(), limit_waits=turn.limit_waits + 1)
    counted = turn_log.counted(work, turn, outcome.used)
    told |= turn_log.costs(work)
    work.log(turn.id, kinds.TURN_REQUEUED, attempt=again.attempt, **counted, **told)
    turn_log.add(work, counted)
    work.set(queue=ask_queue.requeue(work.state.queue, again))
    limit_wait.begin_retry(work, wait)


def end_steered(work: Transition, turn: Turn, boundary: TurnOver) -> None:
    """End the steered asks that a boundary names, while the turn itself continues."""
    named = [ask for ask in turn.steered if ask.ref in boundary.refs]
    failed = boundary.is_aborted or boundary.is_error
    error = provider_limits.error_of(work, boundary, turn.id) if failed else None
    outcome = Outcome(
        kind=Kind.FAILED if failed else Kind.DONE,
        stop_reason=boundary.stop_reason,
        text=boundary.text,
        usage=boundary.usage,
        cost=boundary.cost,
        error=error,
        background=work.state.process.tasks,
        used_tools=turn.used_tools,
    )
    limit_wait.on_outcome(work, turn, outcome)
    turn = replace(turn, meter=turn.meter.bounded(boundary))
    for ask in named:
        _end_ask(work, ask, outcome, By.BOUNDARY)
    work.set_turn(
        replace(turn, boundary=None, steered=tuple(ask for ask in turn.steered if ask not in named))
    )


def _requeue_unsent(work: Transition, turn: Turn) -> None:
    """Requeue the steered asks of which no byte was sent. They become ordinary asks again."""
    for ask in reversed([ask for ask in turn.steered if ask.id in turn.unsent]):
        _requeue(work, ask)


def _requeue(work: Transition, ask: Ask) -> None:
    """Requeue an ask that was to be steered into a turn and is not part of it."""
    if work.keeps_queue:
        work.log(ask.id, kinds.TURN_REQUEUED, attempt=2)
        work.set(queue=ask_queue.requeue(work.state.queue, replace(turns.queued(ask), attempt=2)))
    else:
        error = Closed("the session was closed before the ask was sent")
        end_queued(work, ask, Kind.REFUSED, error=error)


def _passed_deadline(work: Transition, asks: Sequence[Ask]) -> str | None:
    """Return the name of the deadline as a clock, if that of one of the asks has passed."""
    is_late = any(ask.due is not None and ask.due <= work.at for ask in asks)
    return watchdogs.DEADLINE if is_late else None


def give_back(work: Transition, turn: Turn, ask: Ask) -> None:
    """Return a steered prompt that the agent did not take."""
    if ask.id in turn.unwanted:
        end_queued(work, ask, Kind.WITHDRAWN, clock=_passed_deadline(work, (ask,)))
    else:
        _requeue(work, ask)
    work.set_turn(replace(turn, steered=tuple(other for other in turn.steered if other is not ask)))


def give_back_all(work: Transition, turn: Turn) -> None:
    """Return the prompt of a turn, and its steered prompts, because the agent did not take them."""
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
    """Put the granted turn back into the queue, as this attempt."""
    work.log(again.id, kinds.TURN_REQUEUED, attempt=again.attempt)
    work.set(turn=None, queue=ask_queue.requeue(work.state.queue, again))


def end_queued(
    work: Transition,
    ask: Ask,
    kind: Kind,
    *,
    error: BanksmanError | None = None,
    clock: str | None = None,
    caller: str | None = None,
) -> None:
    """End an ask that was never granted. It is no longer in the queue.

    `caller`: the caller that has withdrawn it.
    """
    outcome = Outcome(kind=kind, error=error, clock=clock)
    _end_ask(work, ask, outcome, By.WITHDRAWN, caller=caller)


def _end_ask(
    work: Transition,
    ask: Ask,
    outcome: Outcome,
    by: By,
    *,
    counts: Turn | None = None,
    caller: str | None = None,
) -> None:
    turn_log.log_ended(work, ask.id, outcome, by, counts=counts, stopped_by=caller)
    work.after_commit(Resolve(ask.id, outcome))
    forget_deadline(work, ask)


def forget_deadline(work: Transition, ask: Ask) -> None:
    """Cancel the deadline of an ask that is over."""
    if ask.due is not None:
        work.cancel_timer(Timer.DEADLINE, ask.id)
