"""Decide to which turn the start, the boundary and the confirmations of the agent belong.

The main decision is whether a boundary belongs to the *granted* turn, the one that serves an ask.
An agent may finish a turn that it opened unprompted while the prompt is on its way. It may also
send a boundary twice, or late. None of these boundaries may answer an ask.

An agent that names prompts makes the decision certain. The boundary belongs to the granted turn if
it names the prompt, or if the agent has announced that it began with the prompt. An agent that
names none (yet) is believed only after a short wait, in which it can still contradict. If it
announces the prompt after the supposed boundary, that boundary ended an agent-initiated turn. Once
the agent has shown that it names no prompts, its boundaries are believed without the wait. It must
then have announced the turn, unless it announces no turns at all.

`turn_end.py` ends the turns.
"""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core.dialects.meaning import PromptSettled, ProviderFailure, TurnOpened, TurnOver
from banksman.core.session import agent_conversation, ask_queue, turn_end, watchdogs
from banksman.core.session import event as kinds
from banksman.core.session import turn as turns
from banksman.core.session.facts import Timer
from banksman.core.session.state import PromptNaming, Store
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Turn, TurnPhase
from banksman.core.session.usage import Meter
from banksman.errors import ErrorKind

# Limit on the wait for quiet after a boundary, in multiples of `quiet_seconds`.
QUIET_TIMES_MAX = 10
# Only a boundary says whether the turn succeeded. Without a boundary the outcome is an error.
_UNTOLD = TurnOver(
    is_error=True,
    error="the agent finished the prompt without a result",
    failure=ProviderFailure(ErrorKind.PROTOCOL),
)


def on_opened(work: Transition, opened: TurnOpened) -> None:
    if opened.conversation is not None:
        work.set(is_adopted=False)
        agent_conversation.learn(work, opened.conversation)
    if opened.can_interrupt:
        work.set_process(announces=True)
    turn = work.state.turn
    if turn is not None and _seems_over(work, turn) and not set(opened.refs) & set(turn.refs):
        # The agent is done with the prompt and has begun other work. So no later frame will confirm
        # the end.
        _end_ours(work, turn, turn.boundary or _UNTOLD)
        turn = work.state.turn
    if opened.refs:
        work.set_process(naming=PromptNaming.PRESENT)
        is_ours = our_prompt_was_named(work, opened.refs, is_opened=True)
    else:
        # The frame names no prompt. If this agent names prompts, the granted turn cannot begin
        # before its prompt is named.
        is_ours = (
            turn is not None
            and turn.is_open
            and opened.origin is None
            and work.state.own is None
            and (turn.is_opened or work.state.process.naming is not PromptNaming.PRESENT)
        )
    if not is_ours:
        if work.state.own is None:
            open_own(work, opened.origin, opened.refs)
        return
    if opened.can_interrupt:
        turn = work.state.turn
        assert turn is not None
        # An acknowledgement from before the agent could take an interrupt does not count.
        is_acknowledged = turn.is_acknowledged and turn.can_interrupt
        turn = replace(turn, can_interrupt=True, is_acknowledged=is_acknowledged)
        work.set_turn(turn)
        if turn.phase is TurnPhase.INTERRUPTING:
            turn_end.interrupt(work, turn)


def our_prompt_was_named(work: Transition, refs: tuple[str, ...], *, is_opened: bool) -> bool:
    """Whether one of `refs` is a prompt of the granted turn. If so, record what that proves."""
    turn = work.state.turn
    if turn is None or not turn.is_open or not set(refs) & set(turn.refs):
        return False
    if is_opened and work.state.own is not None:
        # The agent works on the prompt now, so its previous turn is over, with or without a
        # boundary.
        turn_end.end_by_boundary(work, work.state.own, TurnOver())
    if not turn.names_prompts:
        # This is the first time that the prompt is named. So earlier announcements and
        # acknowledgements concerned other work.
        turn = replace(turn, names_prompts=True, can_interrupt=False, is_acknowledged=False)
    turn = replace(turn, is_opened=turn.is_opened or (is_opened and turn.ref in refs))
    if is_opened:
        turn = replace(
            turn,
            heard=(
                *turn.heard,
                *(ref for ref in refs if ref in turn.refs and ref not in turn.heard),
            ),
        )
    boundary = turn.boundary
    if boundary is not None and not boundary.refs and turn.settled is None and turn.ref in refs:
        # The supposed boundary came before the agent had begun with the prompt. It ended other
        # work.
        meter = turn.meter
        turn = replace(turn, boundary=None, meter=Meter())
        work.cancel_timer(Timer.SETTLE, turn.key)
        work.set_turn(replace(turn, wish=None))
        _log_own_episode(work, boundary, meter)
        if turn.wish is not None:
            turn_end.stop(work, replace(turn, wish=None), turn.wish, turn.clock)
        return True
    work.set_turn(turn)
    return True


def open_own(work: Transition, origin: str | None, refs: tuple[str, ...] = ()) -> None:
    if work.state.store is not Store.WORKING:
        # The log lacks the start of this turn, so it must not contain its end either. The process
        # is being stopped anyway.
        return
    count = work.state.own_count + 1
    seq = work.state.head + len(work.entries) + 1
    turn = turns.own(
        f"own-{count}",
        origin or "agent",
        ask_queue.OWN_PRIORITY,
        seq=seq,
        heard=refs,
        at=work.at,
        limited_until=work.state.limited_until,
    )
    work.set(own=turn, own_count=count)
    if work.state.turn is None or not work.state.turn.is_open:
        work.set(clocks=watchdogs.wound(work.state.config.clocks, work.at))
        work.arm_clocks(turn)
    work.log(turn.id, kinds.TURN_STARTED, origin=turn.origin, attempt=1)


def _log_own_episode(work: Transition, boundary: TurnOver, meter: Meter | None = None) -> None:
    """Log an agent-initiated turn whose boundary is the first sign of it.

    `meter`: what was counted for the granted turn until now, and belongs to this one.
    """
    if work.state.own is None:
        open_own(work, boundary.origin, boundary.refs)
    own = work.state.own
    if own is not None and meter is not None:
        own = replace(own, meter=meter)
        work.set_turn(own)
    # If the boundary names a prompt that this turn never named, it repeats the end of an older
    # turn.
    if own is not None and (not boundary.refs or set(boundary.refs) & set(own.heard)):
        turn_end.end_by_boundary(work, own, boundary)


def on_over(work: Transition, over: TurnOver) -> None:
    state = work.state
    turn = state.turn
    if over.conversation is not None and not over.is_error:
        agent_conversation.learn(work, over.conversation)
    if not over.refs or over.refs != state.process.last_over:
        work.set_process(last_over=over.refs, has_served=True)
        work.set(crashes=0)
        over = agent_conversation.with_cost(work, over)
        agent_conversation.notice_overflow(work, over)
    if turn is None or not is_ours(work, over):
        _log_own_episode(work, over)
        return
    if over.refs and state.own is not None:
        # The agent has merged the prompt into its own turn, and both are over.
        turn_end.end_by_boundary(work, state.own, TurnOver())
    is_certain = _is_certain(work, turn, over)
    # Steered prompts are distinguished by their own confirmations, so the turn always waits for
    # those.
    will_settle = turn.names_prompts and (state.process.settles or bool(turn.steered))
    if not is_certain or (turn.settled is None and will_settle):
        # The agent is about to confirm that it is done with the prompt, or that it only now begins
        # with it.
        work.set_turn(replace(turn, boundary=over))
        work.start_timer(state.config.settle_seconds, Timer.SETTLE, turn.key)
    elif state.config.quiet_seconds:
        # Some agents send a few more frames after the boundary.
        until = work.at + state.config.quiet_seconds * QUIET_TIMES_MAX
        work.set_turn(replace(turn, boundary=over, quiet_until=until))
        work.start_timer(state.config.quiet_seconds, Timer.SETTLE, turn.key)
    else:
        _end_ours(work, turn, over)


def _is_certain(work: Transition, turn: Turn, over: TurnOver) -> bool:
    """Whether no later frame can show that this boundary belongs to another turn."""
    return bool(over.refs) or turn.is_opened or work.state.process.naming is PromptNaming.ABSENT


def _seems_over(work: Transition, turn: Turn) -> bool:
    return turn.settled is not None or (
        turn.boundary is not None and _is_certain(work, turn, turn.boundary)
    )


def is_ours(work: Transition, over: TurnOver) -> bool:
    """Whether this can be the boundary of the granted turn."""
    turn = work.state.turn
    return (
        turn is not None and turn.is_open and turn.boundary is None and _may_be_of(work, turn, over)
    )


def _may_be_of(work: Transition, turn: Turn, over: TurnOver) -> bool:
    if over.origin is not None:
        return False
    if over.refs:
        return bool(set(over.refs) & set(turn.refs))
    if turn.is_opened:
        return True
    process = work.state.process
    if process.naming is PromptNaming.PRESENT or work.state.own is not None:
        return False
    return turn.can_interrupt or not process.announces


def on_settled(work: Transition, settled: PromptSettled) -> None:
    turn = work.state.turn
    if turn is None or not turn.is_open or settled.ref not in turn.refs:
        return
    if turn.settled is not None and settled.ref == turn.ref:
        return  # A repetition: it must not restart the timer that is already running.
    turn = replace(turn, names_prompts=True, heard=(*turn.heard, settled.ref))
    work.set_turn(turn)
    work.set_process(settles=True)
    if settled.ref != turn.ref:
        return
    turn = replace(turn, settled=settled)
    work.set_turn(turn)
    if turn.boundary is not None:
        _end_ours(work, turn, turn.boundary)
    else:
        # The agent is done with the prompt, but has sent no boundary. The boundary may be late, but
        # the wait is bounded. After a cancellation the wait is short, because the outcome is known.
        config = work.state.config
        seconds = config.settle_seconds if settled.is_cancelled else config.drain_seconds
        work.start_timer(seconds, Timer.SETTLE, turn.key)


def on_refused(work: Transition, ref: str) -> None:
    """Requeue a prompt that was added to a turn too late: it becomes an ordinary ask again."""
    turn = work.state.turn
    if turn is None or not turn.is_open or ref not in turn.refs:
        return
    if ref == turn.ref:
        # The turn that it was added to is over, and the prompt leads its own turn already.
        turn_end.give_back_all(work, turn)
    else:
        turn_end.give_back(work, turn, next(ask for ask in turn.steered if ask.ref == ref))


def settle(work: Transition, turn: Turn) -> None:
    """End the turn: the time to confirm or to contradict its boundary is over."""
    boundary = turn.boundary
    if boundary is None and turn.settled is None:
        return
    if (
        boundary is not None
        and turn.settled is None
        and boundary.refs
        and turn.ref not in boundary.refs
    ):
        # The boundary names only steered prompts, and the agent has not confirmed the end of the
        # others.
        turn_end.end_steered(work, turn, boundary)
        return
    if work.state.process.naming is PromptNaming.UNKNOWN:
        work.set_process(naming=PromptNaming.ABSENT)
    if turn.settled is None:
        # This agent sends no confirmation, so the next turn does not wait for one.
        work.set_process(settles=False)
    _end_ours(work, turn, turn.boundary or _UNTOLD)


def _end_ours(work: Transition, turn: Turn, boundary: TurnOver) -> None:
    if turn.settled is not None and turn.settled.is_cancelled:
        boundary = replace(boundary, is_aborted=True)
    turn_end.end_by_boundary(work, turn, boundary)
