"""Fold a session's log into its state: `replay(events)`.

Only durable state comes back: the queue and its order, the open turn, and the agent's name for the
conversation. Holds, uncommitted writes and all clocks were lost with their process. The caller
decides about an open turn, which may have been completed or not. All functions are pure.
`history.py` adds what the state does not have, and snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from banksman.core.dialects.dialect import Verdict
from banksman.core.dialects.meaning import BackgroundTask
from banksman.core.session import account_limits, ask_queue, fallback
from banksman.core.session import budget as budgets
from banksman.core.session import event as kinds
from banksman.core.session.budget import RaisedBudget
from banksman.core.session.event import Event
from banksman.core.session.outcome import Kind, tasks_of
from banksman.core.session.session_config import Config
from banksman.core.session.state import AgentState, Mode, ProcessState, Session
from banksman.core.session.turn import Ask, Turn, TurnPhase, queued
from banksman.core.session.usage import USAGE_KINDS, Meter, Usage, addition

_Agent = TypeVar("_Agent", Session, AgentState)


def replay(events: Iterable[Event], config: Config, after: Session | None = None) -> Session:
    """Return the state after these events, as their writer had it.

    `after`: the state that the earlier events produced.
    """
    state = Session(config=config) if after is None else after
    head = state.head
    for event in events:
        assert event.seq == head + 1, f"event {event.seq} does not follow {head}"
        head = event.seq
        if not event.is_frame:
            state = fold_event(state, event, event.body)
    return replace(state, head=head, committed=head)


def fold_event(state: Session, event: Event, body: dict[str, Any]) -> Session:
    """Apply one event of Banksman's own kinds to the state. Its seq is not checked.

    `body`: the body of the event, which each access decodes again.
    """
    return _fold_event(_use(state, event), event, body)


def _use(state: Session, event: Event) -> Session:
    """Add the usage in an event to the sum of the session."""
    if event.kind not in USAGE_KINDS:
        return state
    found = addition(event.kind, event.data)
    return state if found is None else replace(state, used=state.used.plus(found.usage))


def _fold_event(state: Session, event: Event, body: dict[str, Any]) -> Session:
    turn = event.turn
    match event.kind:
        case kinds.TURN_QUEUED:
            assert turn is not None
            return _queue(state, turn, body)
        case kinds.TURN_STARTED:
            assert turn is not None
            return _start(state, turn, body)
        case kinds.TURN_REQUEUED:
            assert state.turn is not None
            if turn != state.turn.id:
                return _requeue_unsent(state, state.turn, turn, body)
            # The same as `Turn.requeued`, except that a steered prompt stays with the agent.
            rest = _led_by_next(state.turn, state.turn.steered)
            again = _again(state.turn.requeued(), body)
            state = _with_costs(_limited_by(state, body), body)
            return replace(state, turn=rest, queue=ask_queue.requeue(state.queue, again))
        case kinds.TURN_INTERRUPTED:
            for name in ("turn", "own"):
                open_turn: Turn | None = getattr(state, name)
                if open_turn is not None and open_turn.id == turn:
                    return replace(
                        state, **{name: replace(open_turn, phase=TurnPhase.INTERRUPTING)}
                    )
            return state
        case kinds.TURN_ENDED:
            assert turn is not None
            # An agent that has completed a turn knows its conversation.
            is_adopted = state.is_adopted and body["outcome"] != Kind.DONE
            ended = _end_turn(state, turn)
            failure: Mapping[str, Any] = body.get("failure") or {}
            return replace(
                ended,
                spent=body["spent"],
                cost=body["cost_in_all"],
                is_adopted=is_adopted,
                limited_until=account_limits.limited_after(
                    state.limited_until, Kind(body["outcome"]), failure.get("limited_until")
                ),
            )
        case kinds.USAGE_REPORTED:
            return _count(state, turn, body)
        case kinds.QUEUE_CHANGED:
            assert turn is not None
            return replace(state, queue=ask_queue.move(state.queue, turn, body["before"]))
        case kinds.TURN_EDITED:
            assert turn is not None
            queue = ask_queue.edit(state.queue, turn, body["prompt"], body["priority"])
            return replace(state, queue=queue)
        case kinds.PROCESS_STARTED:
            return replace(state, process=ProcessState(number=body["process"]))
        case kinds.TASKS_CHANGED:
            return _with_tasks(state, tasks_of(body["tasks"]))
        case _:
            return _fold_session(state, event.kind, body)


def _with_tasks(state: Session, tasks: tuple[BackgroundTask, ...]) -> Session:
    return replace(state, process=replace(state.process, tasks=tasks))


def _fold_session(state: Session, kind: str, body: dict[str, Any]) -> Session:
    """Apply an event that concerns the session as a whole."""
    match kind:
        case kinds.SESSION_OPENED:
            return _open(state, body)
        case kinds.SESSION_IMPORTED:
            # An imported session is a copy. Its open and waiting asks are served at the origin, and
            # so is its conversation. The copy forks that conversation.
            left = replace(
                _with_tasks(state, ()),
                queue=(),
                turn=None,
                own=None,
                agents=tuple((name, _copied(agent)) for name, agent in state.agents),
            )
            return _copied(left)
        case kinds.SESSION_CONVERSATION:
            state = _with_costs(state, body)
            return replace(state, conversation=body["conversation"], is_adopted=False)
        case kinds.SESSION_CONTEXT_LOST:
            return replace(state, conversation=None, fork_of=None, spent=0.0, is_adopted=False)
        case kinds.SESSION_SETTING:
            return fallback.with_setting(state, body["name"], body["value"], body.get("agent"))
        case kinds.LIMITS_CHANGED:
            told = {
                "limits": account_limits.from_json(body["windows"]),
                "limited_until": body["limited_until"],
            }
            other = body.get("agent")
            return replace(state, **told) if other is None else fallback.noted(state, other, **told)
        case kinds.SESSION_FELL_BACK:
            return fallback.switched(state, body["from"], body["to"])
        case kinds.BUDGET_WARNING | kinds.BUDGET_EXCEEDED:
            if body["scope"] != "session":
                return state
            cap = (kind, body["unit"], float(body["cap"]))  # As a snapshot has it.
            return replace(state, told=budgets.with_told(state.told, cap))
        case kinds.BUDGET_RAISED:
            return replace(state, raised=msgspec.convert(body, RaisedBudget))
        case kinds.SESSION_CLOSED:
            return replace(state, mode=Mode.CLOSED)
        case kinds.SESSION_STORE_RETURNED:
            # The process was stopped when the log broke, and could not log the end of its tasks.
            return _with_tasks(state, ())
        case _:
            return state


def _copied(state: _Agent) -> _Agent:
    """Return the state of an agent in an imported copy, which forks the conversation."""
    origin = state.conversation or state.fork_of
    left = replace(
        state,
        settings=(),
        conversation=None,
        fork_of=origin,
        # The agent may use another account here.
        limits=(),
        limited_until=None,
    )
    return left if origin is None else replace(left, spent=None, is_adopted=True)


def _open(state: Session, body: dict[str, Any]) -> Session:
    state = replace(state, mode=Mode.OPEN)
    if body["resume"] is None:
        return state
    # The conversation began elsewhere. Its cost so far is unknown, and so is whether it exists at
    # all.
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
        # Events of earlier versions lack these.
        deadline=body.get("deadline"),
        caller=body.get("caller"),
        trace=body.get("trace"),
    )
    if body.get("into") is not None:
        return replace(state, queue=ask_queue.join(state.queue, body["into"], ask))
    return replace(state, queue=ask_queue.enqueue(state.queue, queued(ask)))


def _start(state: Session, id: str, body: dict[str, Any]) -> Session:
    if "origin" in body:
        own = Turn(
            id=id,
            ask=None,
            priority=ask_queue.OWN_PRIORITY,
            origin=body["origin"],
            phase=TurnPhase.RUNNING,
        )
        return replace(state, own=own, own_count=state.own_count + 1)
    if state.turn is not None and state.turn.id == id:
        # The ask was steered into a turn that is over, and the agent reached its prompt unprompted.
        return replace(state, turn=replace(state.turn, attempt=body["attempt"], limit_waits=0))
    waiting = ask_queue.find(state.queue, id)
    assert waiting is not None, f"turn {id} was never queued"
    queue = ask_queue.remove(state.queue, waiting.id)
    if "into" in body:
        assert state.turn is not None
        assert waiting.ask is not None
        return replace(
            state, queue=queue, turn=replace(state.turn, steered=(*state.turn.steered, waiting.ask))
        )
    return replace(
        state, queue=queue, turn=replace(waiting, phase=TurnPhase.STARTING, attempt=body["attempt"])
    )


def _count(state: Session, id: str | None, body: dict[str, Any]) -> Session:
    """Add a report of usage to the open turn that it belongs to."""
    state = _with_costs(state, body)
    added = msgspec.convert(body["added"], Usage)
    for name in ("turn", "own"):
        turn: Turn | None = getattr(state, name)
        if turn is not None and turn.id == id:
            meter = replace(turn.meter, logged=turn.meter.logged.plus(added))
            return replace(state, **{name: replace(turn, meter=meter)})
    return state


def _with_costs(state: Session, body: dict[str, Any]) -> Session:
    """Take the costs in an event. Some events of earlier versions lack them."""
    return replace(
        state, spent=body.get("spent", state.spent), cost=body.get("cost_in_all", state.cost)
    )


def _requeue_unsent(state: Session, turn: Turn, id: str | None, body: dict[str, Any]) -> Session:
    """Requeue a steered ask: its prompt was not sent, or a limit of the account failed it."""
    ask = next((ask for ask in turn.steered if ask.id == id), None)
    assert ask is not None, f"{id} was not to be added to {turn.id}"
    again = _again(queued(ask), body)
    rest = replace(turn, steered=tuple(other for other in turn.steered if other is not ask))
    state = _limited_by(state, body)
    return replace(state, turn=rest, queue=ask_queue.requeue(state.queue, again))


def _again(turn: Turn, body: dict[str, Any]) -> Turn:
    """Return a requeued turn. Only a limit of the account is a logged reason."""
    waits = turn.limit_waits + (body.get("reason") == "limit")
    # The agent that got the prompt, if the session has several.
    agent = body.get("agent") or turn.agent
    return replace(turn, attempt=body["attempt"], limit_waits=waits, agent=agent)


def _limited_by(state: Session, body: dict[str, Any]) -> Session:
    until = body.get("limited_until")
    return state if until is None else replace(state, limited_until=until)


def _end_turn(state: Session, id: str) -> Session:
    if state.own is not None and state.own.id == id:
        return replace(state, own=None)
    turn = state.turn
    if turn is not None and any(ask.id == id for ask in turn.asks):
        return replace(state, turn=_without(turn, id))
    waiting = ask_queue.find(state.queue, id)
    assert waiting is not None, f"turn {id} ended twice, or was never queued"
    rest = _without(waiting, id)
    kept = () if rest is None else (rest,)
    index = state.queue.index(waiting)
    return replace(state, queue=(*state.queue[:index], *kept, *state.queue[index + 1 :]))


def _without(turn: Turn, id: str) -> Turn | None:
    """Return a turn without one of its asks, led by the next one; None if no ask is left."""
    if turn.ask is None:
        return None
    if turn.id != id:
        joined = tuple(ask for ask in turn.joined if ask.id != id)
        return replace(
            turn, joined=joined, steered=tuple(ask for ask in turn.steered if ask.id != id)
        )
    # If the leading ask ends, the whole turn is over, and the endings of the other asks follow.
    # Steered prompts continue.
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
        # The turn that is over has counted its usage.
        meter=Meter(),
    )
