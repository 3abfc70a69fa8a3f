"""The event `turn.ended`: the outcome of a turn, the usage that it adds, and its costs.

`turn_end.py` decides the outcome. Other events that add usage take the same members from here.
"""

from __future__ import annotations

from typing import Any

from banksman.core.session import account_limits, turn_usage
from banksman.core.session import event as kinds
from banksman.core.session.outcome import By, Outcome
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Turn
from banksman.core.session.usage import Usage
from banksman.errors import AgentError


def counted(work: Transition, turn: Turn | None, used: Usage | None) -> dict[str, Any]:
    """Return the members by which the end of a turn adds to the usage of the session.

    None: the end of another ask of the same turn adds it.
    """
    if turn is None or used is None:
        return {"added": None, "caller": None, "used_by": None}
    return {
        "added": used.minus(turn.meter.logged),
        "caller": turn_usage.caller_of(turn),
        "used_by": work.state.agent,
    }


def costs(work: Transition) -> dict[str, Any]:
    """Return the members with the cost of the conversation and of the session."""
    return {"spent": work.state.spent, "cost_in_all": work.state.cost}


def add(work: Transition, counted: dict[str, Any]) -> None:
    """Add what `counted` has returned to the usage of the session, once it is logged."""
    if counted["added"] is not None:
        turn_usage.count(work, counted["caller"], counted["added"])


def log_ended(
    work: Transition,
    id: str,
    outcome: Outcome,
    by: By,
    *,
    counts: Turn | None = None,
    stopped_by: str | None = None,
    **more: object,
) -> None:
    """Log the end of a turn or an ask with its outcome.

    `counts`: the turn whose usage this event adds. Several asks may end with one turn, and its
    usage is added once. `stopped_by`: the caller that has interrupted or withdrawn it.
    """
    if stopped_by is not None:
        more["stopped_by"] = stopped_by
    usage = counted(work, counts, outcome.used)
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
        **costs(work),
        error=None if outcome.error is None else str(outcome.error),
        clock=outcome.clock,
        background=outcome.background,
        **more,
        used=outcome.used,
        **usage,
        failure=outcome.failure,
        used_tools=outcome.used_tools,
    )
    add(work, usage)
    told = outcome.error.limited_until if isinstance(outcome.error, AgentError) else None
    until = account_limits.limited_after(work.state.limited_until, outcome.kind, told)
    work.set(limited_until=until)
