"""Count the usage of a turn while it is open, log it, and add it to the sum of the session.

The boundary of a turn decides, unless it has less than the reports had: see `Meter`.
"""

from __future__ import annotations

from msgspec.structs import replace

from banksman.core.dialects.meaning import TurnOver, UsageReported
from banksman.core.dialects.tokens import NO_TOKENS
from banksman.core.session import event as kinds
from banksman.core.session.transition import Transition
from banksman.core.session.turn import Turn
from banksman.core.session.usage import Counted, Usage

# Differences of floats are not exact.
_USD_TOLERANCE = 1e-6


def count(work: Transition, caller: str | None, added: Usage) -> None:
    """Add usage to the sum of the session, after the event that adds it was logged."""
    work.set(used=work.state.used.plus(added))
    work.after_commit(Counted(caller, work.state.agent, added))


def caller_of(turn: Turn) -> str | None:
    """Return the caller that the usage of a turn belongs to: the caller of its first ask."""
    return None if turn.ask is None else turn.ask.caller


def report(work: Transition, report: UsageReported) -> None:
    """Count a report of the agent during a turn, and log what it adds.

    Without an open turn nothing is counted: the next boundary includes that work.
    """
    turn = work.state.speaking
    if turn is None:
        return
    usd, before = None, work.state.spent
    # After a boundary that is still uncertain, the next boundary includes the cost.
    if report.spent is not None and before is not None and turn.boundary is None:
        usd = cost_of(turn, report.spent, before)
        work.set(spent=report.spent)
    meter = turn.meter.reported(report, usd)
    used = meter.used(turn.began_at, work.at)
    added = used.minus(meter.logged)
    if added.tokens == NO_TOKENS and not added.usd:
        work.set_turn(replace(turn, meter=meter))
        return
    work.set_turn(replace(turn, meter=replace(meter, logged=used)))
    caller = caller_of(turn)
    work.log(
        turn.id,
        kinds.USAGE_REPORTED,
        caller=caller,
        used_by=work.state.agent,
        added=added,
        used=used,
        spent=work.state.spent,
    )
    count(work, caller, added)


def cost_of(turn: Turn | None, total: float, before: float) -> float:
    """Return the cost of a turn since its last boundary, from the total of the conversation.

    `before`: the total that was known until now. Reports during the turn may be part of it. If the
    total is smaller than at that boundary, the agent counts from 0 again.
    """
    counted = 0.0 if turn is None else turn.meter.usd or 0.0
    is_restarted = total < before - counted - _USD_TOLERANCE
    return counted + (total if is_restarted else total - before)


def final(turn: Turn, boundary: TurnOver, at: float) -> Usage | None:
    """Return the whole usage of a turn that ends; None if its prompt was not sent."""
    if not turn.is_open:
        return None
    return replace(turn.meter.bounded(boundary).used(turn.began_at, at), turns=1)
