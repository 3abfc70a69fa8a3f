"""Scheduler: grant the next turn or hold, send the prompt, and start the process it needs.

No other module grants a turn, sends the prompt that opens a turn, or starts a process. `advance`
runs after every fact that could have made one of these possible, so no code path can forget it. It
also preempts a running turn for a more urgent entry, and continues a shutdown. `ask_queue.py` has
the rules of the choice.
"""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core.dialects.meaning import TurnOver
from banksman.core.session import (
    agent_conversation,
    ask_queue,
    asks,
    budget_gate,
    fallback,
    hand_over,
    idle_process,
    limit_wait,
    shutdown,
    trace_context,
    turn_end,
    watchdogs,
)
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import Hold, Queue, Waiting
from banksman.core.session.effects import GrantHold
from banksman.core.session.facts import Timer
from banksman.core.session.outcome import Kind
from banksman.core.session.state import (
    MayWrite,
    Mode,
    ProcessPhase,
    Replacement,
    Session,
    Stdin,
    Store,
)
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Cause, Move, Turn, TurnPhase
from banksman.core.session.turn_usage import caller_of
from banksman.errors import AgentError


def advance(work: Transition) -> None:
    """Do everything that has become possible."""
    budget_gate.look(work)
    if work.state.mode is Mode.HANDING:
        hand_over.look(work)
    state = work.state
    if state.mode is Mode.HANDING:
        return
    if state.mode in (Mode.DRAINING, Mode.LEAVING):
        if state.own is not None:
            # No caller waits for it, and it could last forever.
            turn_end.stop(work, state.own, Cause.CLOSE)
        elif state.turn is None and not shutdown.waits_for_tasks(work):
            shutdown.end(work)
    if work.state.mode in (Mode.CLOSING, Mode.PARTING):
        shutdown.finish(work)
        return
    if state.store is not Store.WORKING:
        return
    if work.state.mode is Mode.OPEN:
        fallback.watch_limits(work)
    limit_wait.look(work)
    if work.state.queue and work.state.mode is Mode.OPEN:
        _make_room(work)
    turn = work.state.turn
    if turn is not None and turn.phase is TurnPhase.STARTING:
        _write_prompt(work, turn)
        if work.state.turn is not turn:
            # The turn is open now, or waits again. So a shared cap concerns it from here on, and
            # its working time counts.
            budget_gate.look(work)
    if work.state.mode is Mode.OPEN:
        if work.state.queue:
            _grant(work)
        if work.state.process.phase is ProcessPhase.STARTING:
            _give_up_start(work)
    idle_process.look(work)


def _make_room(work: Transition) -> None:
    """Preempt the running turns if a more urgent entry is ready.

    This includes a turn that the agent opened unprompted, or reached, while the entry waited. An
    entry that waits for a limit of the account could not be served, so it preempts nothing.
    """
    state = work.state
    if state.limit_wait is not None:
        return
    for turn in (state.own, state.turn):
        if turn is not None:
            queue = idle_process.servable(state, state.queue, work.at)
            ready = ask_queue.ready(queue, hold=state.hold, collecting=state.collecting)
            urgent = [waiting for waiting in ready if ask_queue.displaces(waiting, turn)]
            if urgent:
                first = max(urgent, key=lambda waiting: waiting.priority)
                caller = caller_of(first) if isinstance(first, Turn) else None
                turn_end.stop(work, turn, Cause.PREEMPT, caller=caller)


def _write_prompt(work: Transition, turn: Turn) -> None:
    """Send the prompt of the granted turn, once its intent is durable.

    If the agent has opened its own turn in the meantime, the prompt waits for the end of that turn.
    """
    state = work.state
    if not turn.may_write:
        return
    is_limited = limit_wait.wait_of(state, turn) is not None
    if work.is_open and (is_limited or fallback.must_leave(state, turn)):
        # The limit became known after the grant.
        turn_end.put_back(work, turn.requeued())
        return
    if not turn.may_spend or not _is_free(state):
        return
    assert turn.ask is not None
    if state.process.stale is Replacement.NOW or budget_gate.must_wait(work, turn):
        # The process became stale after the grant, or a budget was used up. No byte of the prompt
        # was sent, so the turn can wait again.
        turn_end.put_back(work, turn.requeued())
        return
    turn = replace(turn.moved(Move.WRITE), began_at=work.at, limited_until=state.limited_until)
    work.set(turn=turn, clocks=watchdogs.wound(state.config.clocks, work.at))
    agent_conversation.learn_before_prompt(work)
    unsaid = TurnOver(refs=(turn.ref,), is_error=True)
    work.speak(turn.id, lambda protocol: protocol.prompt(turn.ref, turn.prompt), unsaid)
    work.arm_clocks(turn)


def _is_free(state: Session) -> bool:
    """Whether a prompt that is written now opens a turn: no turn speaks, and the agent reads."""
    process = state.process
    return (
        process.phase is ProcessPhase.READY
        and process.stdin is Stdin.FREE
        and not process.unacknowledged
        and not process.changes
        and not process.sweeps
        and state.own is None
    )


def _give_up_start(work: Transition) -> None:
    """Stop a process that has no pid yet, if the ask that needed it is gone.

    The process may still wait for a place in the pool, or take one from another session. So also
    if the ask waits for a limit of the account.
    """
    state = work.state
    if state.process.is_there:
        return
    if state.limit_wait is not None or not idle_process.has_work(state, work.at):
        work.stop_process()


def choose(work: Transition, queue: Queue) -> Waiting | None:
    """Return the entry of this queue to serve next, with the session's hold and settings.

    A turn that a budget or the limit of its agent holds back is not served.
    """
    state = work.state
    seconds = state.config.ageing_seconds
    queue = idle_process.servable(state, queue, work.at)
    return ask_queue.choose(
        queue, work.at, hold=state.hold, ageing_seconds=seconds, collecting=state.collecting
    )


def _grant(work: Transition) -> None:
    while work.state.turn is None and work.state.own is None and work.state.queue:
        state = work.state
        chosen = choose(work, state.queue)
        match chosen:
            case None:
                return
            case Hold():
                asks.take_out(work, chosen)
                if state.hold is not None:
                    # A more urgent hold preempts this one, which becomes the next of its class
                    # again.
                    work.cancel_timer(Timer.HOLD, f"{state.hold.id}#{state.hold_asks}")
                    again = replace(state.hold, granted_at=None)
                    work.set(queue=ask_queue.requeue(work.state.queue, again))
                    work.end_hold("preempted")
                work.set(hold=replace(chosen, granted_at=work.at))
                told = {"hold": chosen.id, "priority": chosen.priority}
                work.log(None, kinds.HOLD_GRANTED, **told, **kinds.named(chosen.caller))
                work.do(GrantHold(chosen.id))
                work.watch_hold()
            case Turn() if fallback.is_lost(state, chosen):
                message = f"{chosen.agent} had begun with the ask and left the session's agents"
                asks.drop(work, chosen, Kind.FAILED, AgentError(message, hint="ask again"))
            case Turn():
                _grant_turn(work, chosen)
                return


def _grant_turn(work: Transition, chosen: Turn) -> None:
    """Grant a turn, or prepare the process that it needs."""
    state = work.state
    agent = fallback.choose(state, chosen)
    is_other = agent != fallback.current(state)
    if is_other and state.process.phase is ProcessPhase.NONE:
        fallback.switch(work, agent)
        limit_wait.look(work)
        state = work.state
        is_other = False
    if not is_other and state.limit_wait is not None:
        return
    if state.process.phase is ProcessPhase.NONE:
        if not state.is_backing_off:
            assert chosen.ask is not None
            traceparent = trace_context.of_agent(chosen.ask.trace, chosen.id)
            work.start_process(chosen.ask.schema, traceparent)
        return
    if is_other and not state.process.is_there:
        work.stop_process()  # It may still wait for a place in the pool.
    if not _is_free(state):
        return
    reason = "fallback" if is_other else idle_process.must_replace(state, chosen)
    if reason is not None:
        idle_process.retire(work, reason)
        return
    asks.take_out(work, chosen)
    standing = ask_queue.standing(chosen, work.at, state.config.ageing_seconds)
    turn = replace(chosen.moved(Move.GRANT), standing=standing, granted_at=work.at)
    turn = budget_gate.claim(work, turn)
    work.set(turn=turn)
    work.log(
        turn.id,
        kinds.TURN_STARTED,
        attempt=turn.attempt,
        joined=[ask.id for ask in turn.joined],
    )
    work.after_commit(MayWrite(turn.key))
