"""Handle expired timers of a session. A stale timer has no effect.

Each timer names its subject. The timers of interrupts, watchdogs, process starts, writes and holds
are decided here. The others are passed to the module that set them. The driver runs the timers, and
`watchdogs.py` has the clocks of a turn.
"""

from __future__ import annotations

from banksman.core.dialects.dialect import StatelessProtocol
from banksman.core.session import (
    asks,
    budget_gate,
    durability,
    fallback,
    idle_process,
    limit_wait,
    questions,
    settings,
    shutdown,
    tool_cleanup,
    turn_boundary,
    turn_end,
    watchdogs,
)
from banksman.core.session import event as kinds
from banksman.core.session.ask_queue import Hold
from banksman.core.session.effects import EndHold
from banksman.core.session.facts import Timer
from banksman.core.session.state import OVER, ProcessPhase, Stdin, Store
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Cause, Turn, TurnPhase
from banksman.errors import AgentError

# Interval at which a handshake is checked for a step that it can skip.
HURRY_SECONDS = 5.0


def fire(work: Transition, timer: Timer, subject: str) -> None:
    """Handle one expired timer."""
    state = work.state
    match timer:
        case Timer.DRAIN | Timer.SETTLE | Timer.CLOCKS:
            _of_turn(work, timer, subject)
        case Timer.START | Timer.WRITE | Timer.IDLE | Timer.AGE | Timer.BACKOFF:
            _of_process(work, timer, subject)
        case Timer.QUESTION:
            questions.expire(work, subject)
        case Timer.SWEEP:
            tool_cleanup.expire(work, subject)
        case Timer.SETTING:
            settings.expire(work, subject)
        case Timer.COLLECT:
            work.set(collecting=tuple(id for id in state.collecting if id != subject))
        case Timer.HOLD:
            _on_hold_idle(work, subject)
        case Timer.STORE:
            is_due = state.store is Store.BROKEN and state.mode not in OVER
            if is_due and subject == str(state.store_retries):
                durability.retry(work)
        case Timer.LEAVE | Timer.BACKGROUND:
            shutdown.expire(work, (timer, subject))
        case Timer.DEADLINE:
            # A session that has left keeps its queue for the next owner, which has this timer too.
            if state.mode not in OVER:
                asks.expire(work, subject)
        case Timer.LIMIT | Timer.FALLBACK:
            on_end = limit_wait.expire if timer is Timer.LIMIT else fallback.on_reset
            on_end(work, subject)
        case Timer.BUDGET:
            budget_gate.on_timer(work)


def _of_turn(work: Transition, timer: Timer, key: str) -> None:
    state = work.state
    turn = next(
        (turn for turn in (state.own, state.turn) if turn is not None and turn.key == key), None
    )
    match timer:
        case Timer.DRAIN:
            # If the turn only waits for quiet after its boundary, the boundary has come, so no stop
            # is due.
            is_due = (
                turn is not None
                and turn.phase is TurnPhase.INTERRUPTING
                and turn.quiet_until is None
            )
            if is_due or any(other == key for _, other in state.process.unacknowledged):
                work.stop_process()
        case Timer.SETTLE:
            if turn is not None and not turn.is_own:
                turn_boundary.settle(work, turn)
        case _:
            if turn is not None and turn.is_open:
                _look_at_clocks(work, turn)


def _of_process(work: Transition, timer: Timer, subject: str) -> None:
    config, process = work.state.config, work.state.process
    match timer:
        case Timer.START:
            if (
                subject == str(process.number)
                and process.phase is ProcessPhase.STARTING
                and not _may_hurry(work)
            ):
                seconds = config.start_seconds
                work.stop_process(
                    AgentError(f"the agent was not ready within {seconds:g} s (the clock `start`)")
                )
        case Timer.WRITE:
            if subject == f"{process.number}.{process.frames_sent}" and process.stdin is Stdin.BUSY:
                seconds = config.write_seconds
                work.break_stdin(AgentError(f"the agent did not read its stdin for {seconds:g} s"))
        case Timer.IDLE:
            idle_process.on_idle_long(work, subject)
        case Timer.AGE:
            idle_process.on_old(work, subject)
        case _:
            idle_process.on_backed_off(work, subject)


def _may_hurry(work: Transition) -> bool:
    """Let a handshake skip an optional step that does not complete. Return whether it may continue.

    This is checked at intervals and not only at the deadline: no caller should wait a minute for an
    optional step.
    """
    process = work.state.process
    if process.protocol is None or isinstance(process.protocol, StatelessProtocol):
        return False
    work.speak(None, lambda protocol: protocol.hurry())
    left = process.start_due - work.at
    if left <= 0 and work.state.process.protocol is process.protocol:
        return False
    work.start_timer(
        min(HURRY_SECONDS, left) if left > 0 else HURRY_SECONDS, Timer.START, str(process.number)
    )
    return True


def _look_at_clocks(work: Transition, turn: Turn) -> None:
    ran_out = watchdogs.expired(work.state.clocks, work.at)
    if ran_out is not None and turn.phase is TurnPhase.RUNNING:
        turn_end.stop(work, turn, Cause.CLOCK, ran_out.name)
        return
    wound, warnings = watchdogs.warn(work.state.clocks, work.at)
    work.set(clocks=wound)
    for clock in warnings:
        left = clock.seconds - clock.elapsed(work.at)
        work.log(turn.id, kinds.CLOCK_WARNING, clock=clock.name, seconds=clock.seconds, left=left)
    work.arm_clocks(turn)


def _on_hold_idle(work: Transition, subject: str) -> None:
    state = work.state
    hold = state.hold
    if hold is None or subject != f"{hold.id}#{state.hold_asks}":
        return
    if _is_in_use(work, hold):
        work.watch_hold()
        return
    work.end_hold("idle")
    work.do(EndHold(hold.id))


def _is_in_use(work: Transition, hold: Hold) -> bool:
    # An ask that waits for a budget or a limit may wait for days. It does not keep the others out.
    queue = idle_process.servable(work.state, work.state.queue, work.at)
    turns = [work.state.turn, *(waiting for waiting in queue if isinstance(waiting, Turn))]
    return any(
        turn is not None and turn.ask is not None and turn.ask.hold == hold.id for turn in turns
    )
