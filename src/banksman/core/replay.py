"""A session's log, folded to what the session was: `replay(events)`, pure, with no effects.

Only what is durable comes back: who waits and in which order, which turn was open, the agent's own name for the
conversation. Who held the session, what was written but not committed, and every clock died with the process that knew
them. What to do about a turn that was open is the caller's to decide: it may have been done or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from banksman.core import arbiter
from banksman.core import event as kinds
from banksman.core.config import Config
from banksman.core.event import Event
from banksman.core.outcome import Kind
from banksman.core.rules import Verdict
from banksman.core.state import Mode, Process, Session
from banksman.core.turn import Ask, Phase, Turn, queued


def replay(events: Iterable[Event], config: Config, after: Session | None = None) -> Session:
    """The state after these events, as the one who wrote them had it. `after`: what the events before them made."""
    state = Session(config=config) if after is None else after
    head = state.head
    for event in events:
        assert event.seq == head + 1, f"event {event.seq} does not follow {head}"
        head = event.seq
        if not event.is_frame:
            state = fold(state, event)
    return replace(state, head=head, committed=head)


def fold(state: Session, event: Event) -> Session:
    """What one event of our own kinds makes of it; its place is not looked at."""
    turn = event.turn
    match event.kind:
        case kinds.TURN_QUEUED:
            assert turn is not None
            return _queue(state, turn, event.body)
        case kinds.TURN_STARTED:
            assert turn is not None
            return _start(state, turn, event.body)
        case kinds.TURN_REQUEUED:
            assert state.turn is not None
            if turn != state.turn.id:
                return _requeue_unsent(state, state.turn, event)
            # Requeued as `Turn.requeued` does; a prompt that was added to it stays with the agent.
            rest = _led_by_next(state.turn, state.turn.steered)
            again = replace(state.turn.requeued(), attempt=event.body["attempt"])
            return replace(state, turn=rest, queue=arbiter.requeue(state.queue, again))
        case kinds.TURN_INTERRUPTED:
            for name in ("turn", "own"):
                open_turn: Turn | None = getattr(state, name)
                if open_turn is not None and open_turn.id == turn:
                    return replace(state, **{name: replace(open_turn, phase=Phase.INTERRUPTING)})
            return state
        case kinds.TURN_ENDED:
            assert turn is not None
            body = event.body
            # Who has answered knows its conversation.
            is_adopted = state.is_adopted and body["outcome"] != Kind.DONE
            ended = _end(state, turn)
            return replace(ended, spent=body["spent"], cost=body["cost_in_all"], is_adopted=is_adopted)
        case kinds.QUEUE_CHANGED:
            assert turn is not None
            return replace(state, queue=arbiter.move(state.queue, turn, event.body["before"]))
        case kinds.PROCESS_STARTED:
            return replace(state, process=Process(number=event.body["process"]))
        case _:
            return _fold_session(state, event)


def _fold_session(state: Session, event: Event) -> Session:
    """What is said of the session as a whole."""
    match event.kind:
        case kinds.SESSION_OPENED:
            return _open(state, event.body)
        case kinds.SESSION_IMPORTED:
            # A copy: what was open or waited is served where it came from, and its conversation is gone on with there.
            origin = state.conversation or state.fork_of
            left = replace(state, queue=(), turn=None, own=None, settings=(), conversation=None, fork_of=origin)
            return left if origin is None else replace(left, spent=None, is_adopted=True)
        case kinds.SESSION_CONVERSATION:
            return replace(state, conversation=event.body["conversation"], is_adopted=False)
        case kinds.SESSION_CONTEXT_LOST:
            return replace(state, conversation=None, fork_of=None, spent=0.0, is_adopted=False)
        case kinds.SESSION_SETTING:
            name, value = event.body["name"], event.body["value"]
            kept = tuple(pair for pair in state.settings if pair[0] != name)
            return replace(state, settings=kept if value is None else (*kept, (name, value)))
        case kinds.SESSION_CLOSED:
            return replace(state, mode=Mode.CLOSED)
        case _:
            return state


def _open(state: Session, body: dict[str, Any]) -> Session:
    state = replace(state, mode=Mode.OPEN)
    if body["resume"] is None:
        return state
    # Begun elsewhere: what it has cost until now nobody has told us, nor whether there is such a conversation at all.
    conversation, fork_of = (None, body["resume"]) if body["fork"] else (body["resume"], None)
    return replace(state, conversation=conversation, fork_of=fork_of, spent=None, is_adopted=True)


def _queue(state: Session, id: str, body: dict[str, Any]) -> Session:
    prompt: Any = body["prompt"]
    ask = Ask(
        id=id,
        ref=body["ref"],
        prompt=prompt,
        priority=body["priority"],
        on_busy=body["on_busy"],
        on_preempt=body["on_preempt"],
        key=body["key"],
        rules=tuple((name, Verdict(verdict)) for name, verdict in body["rules"]),
        schema=body["schema"],
        is_last=body["is_last"],
    )
    if body.get("into") is not None:
        return replace(state, queue=arbiter.join(state.queue, body["into"], ask))
    return replace(state, queue=arbiter.enqueue(state.queue, queued(ask)))


def _start(state: Session, id: str, body: dict[str, Any]) -> Session:
    if "origin" in body:
        own = Turn(id=id, ask=None, priority=arbiter.OWN_PRIORITY, origin=body["origin"], phase=Phase.RUNNING)
        return replace(state, own=own, own_count=state.own_count + 1)
    if state.turn is not None and state.turn.id == id:
        # It was added to a turn that is over, and the agent came to it by itself.
        return replace(state, turn=replace(state.turn, attempt=body["attempt"]))
    waiting = arbiter.find(state.queue, id)
    assert waiting is not None, f"turn {id} was never queued"
    queue = arbiter.remove(state.queue, waiting.id)
    if "into" in body:
        assert state.turn is not None
        assert waiting.ask is not None
        return replace(state, queue=queue, turn=replace(state.turn, steered=(*state.turn.steered, waiting.ask)))
    return replace(state, queue=queue, turn=replace(waiting, phase=Phase.STARTING, attempt=body["attempt"]))


def _requeue_unsent(state: Session, turn: Turn, event: Event) -> Session:
    """It was to be added to the turn, and nothing of it was sent before the turn was over."""
    ask = next((ask for ask in turn.steered if ask.id == event.turn), None)
    assert ask is not None, f"{event.turn} was not to be added to {turn.id}"
    again = replace(queued(ask), attempt=event.body["attempt"])
    rest = replace(turn, steered=tuple(other for other in turn.steered if other is not ask))
    return replace(state, turn=rest, queue=arbiter.requeue(state.queue, again))


def _end(state: Session, id: str) -> Session:
    if state.own is not None and state.own.id == id:
        return replace(state, own=None)
    turn = state.turn
    if turn is not None and any(ask.id == id for ask in turn.asks):
        return replace(state, turn=_without(turn, id))
    waiting = arbiter.find(state.queue, id)
    assert waiting is not None, f"turn {id} ended twice, or was never queued"
    rest = _without(waiting, id)
    kept = () if rest is None else (rest,)
    index = state.queue.index(waiting)
    return replace(state, queue=(*state.queue[:index], *kept, *state.queue[index + 1 :]))


def _without(turn: Turn, id: str) -> Turn | None:
    """A turn after one of its asks has ended: the others', under the first one's name; None if there are none."""
    if turn.ask is None:
        return None
    if turn.id != id:
        joined = tuple(ask for ask in turn.joined if ask.id != id)
        return replace(turn, joined=joined, steered=tuple(ask for ask in turn.steered if ask.id != id))
    # A turn that had begun is over as a whole: its other endings follow. Prompts that were added to it live on.
    return _led_by_next(turn, (*turn.joined, *turn.steered))


def _led_by_next(turn: Turn, rest: tuple[Ask, ...]) -> Turn | None:
    if not rest:
        return None
    first, *others = rest
    return replace(
        turn,
        id=first.id,
        ask=first,
        joined=tuple(a for a in others if a in turn.joined),
        steered=tuple(a for a in others if a in turn.steered),
    )
