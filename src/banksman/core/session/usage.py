"""Usage of turns: tokens, cost, working time. Count it while a turn is open, and log it.

The log holds usage as additions. The events `usage.reported`, `turn.ended` and `turn.requeued` have
a member `added`, and the sum of all of them is the usage of the session. So a reader needs no state
to count, and a host that dies loses at most what the agent has not reported yet.

`Meter` is the running count of one turn. An agent reports the tokens of each model call, often
several times while the call runs, and the tokens and the cost of the whole turn at its boundary.
The boundary decides, unless it has less than the calls had: some agents report nothing at the end
of an interrupted turn.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.dialects.meaning import TurnOver, UsageReported
from banksman.core.dialects.tokens import NO_TOKENS, Tokens
from banksman.core.session import event as kinds

if TYPE_CHECKING:
    from banksman.core.session.transition import Transition
    from banksman.core.session.turn import Turn

# Model calls of one turn that may be open at once: the agent and its subagents.
CALLS_MAX = 16
# Differences of floats are not exact.
_USD_TOLERANCE = 1e-6


class Usage(Struct, frozen=True):
    """Usage of a turn, or a sum of many.

    `usd`: the agent's own figure, an estimate; None: no agent reported one. `working_seconds`: time
    in which a turn was open and did not wait for an answer to a question. `turns`: turns that were
    sent, or that the agent began unprompted.
    """

    tokens: Tokens = NO_TOKENS
    usd: float | None = None
    working_seconds: float = 0.0
    turns: int = 0

    def plus(self, other: Usage) -> Usage:
        """Return the sum."""
        return Usage(
            self.tokens.plus(other.tokens),
            other.usd if self.usd is None else self.usd + (other.usd or 0.0),
            self.working_seconds + other.working_seconds,
            self.turns + other.turns,
        )

    def minus(self, other: Usage) -> Usage:
        """Return the difference."""
        return Usage(
            self.tokens.minus(other.tokens),
            None if self.usd is None else self.usd - (other.usd or 0.0),
            self.working_seconds - other.working_seconds,
            self.turns - other.turns,
        )

    def most(self, other: Usage) -> Usage:
        """Return the larger number of each kind."""
        usds = [usd for usd in (self.usd, other.usd) if usd is not None]
        return Usage(
            self.tokens.most(other.tokens),
            max(usds, default=None),
            max(self.working_seconds, other.working_seconds),
            max(self.turns, other.turns),
        )


NO_USAGE = Usage()


class Meter(Struct, frozen=True):
    """Running count of one open turn.

    - `logged`: the part that the log has.
    - `over`: tokens and cost of boundaries inside the turn, of steered prompts.
    - `calls`: the latest model calls since then, by their id. `older`: the sum of all others.
    - `usd`: the cost since then, if the agent reports it during the turn.
    - `waited`: seconds of waiting for answers. `asked_at`: the beginning of the current wait.
    """

    logged: Usage = NO_USAGE
    over: Usage = NO_USAGE
    calls: tuple[tuple[str, Tokens], ...] = ()
    older: Tokens = NO_TOKENS
    usd: float | None = None
    waited: float = 0.0
    asked_at: float | None = None

    @property
    def tokens(self) -> Tokens:
        """Tokens since the last boundary."""
        total = self.older
        for _, tokens in self.calls:
            total = total.plus(tokens)
        return total

    def reported(self, report: UsageReported, usd: float | None) -> Meter:
        """Return the meter after a report. `usd`: the cost since the last boundary, if known."""
        older, calls = self.older, dict(self.calls)
        if report.tokens is not None:
            calls[report.call] = calls.get(report.call, NO_TOKENS).most(report.tokens)
        if len(calls) > CALLS_MAX:
            older = older.plus(calls.pop(next(iter(calls))))
        usd = self.usd if usd is None else usd
        return replace(self, older=older, calls=tuple(calls.items()), usd=usd)

    def bounded(self, boundary: TurnOver) -> Meter:
        """Return the meter after a boundary."""
        tokens = self.tokens
        if boundary.tokens is not None and boundary.tokens.total >= tokens.total:
            tokens = boundary.tokens
        usd = self.usd if boundary.cost is None else boundary.cost
        over = self.over.plus(Usage(tokens, usd))
        return replace(self, over=over, calls=(), older=NO_TOKENS, usd=None)

    def paused(self, at: float, *, has_question: bool) -> Meter:
        """Return the meter after a question came or went."""
        if has_question == (self.asked_at is not None):
            return self
        if has_question:
            return replace(self, asked_at=at)
        return replace(self, waited=self._waited(at), asked_at=None)

    def used(self, began_at: float, at: float) -> Usage:
        """Return the usage of the turn until now."""
        seconds = max(0.0, at - began_at - self._waited(at))
        return self.over.plus(Usage(self.tokens, self.usd, working_seconds=seconds))

    def _waited(self, at: float) -> float:
        return self.waited if self.asked_at is None else self.waited + at - self.asked_at


class Counted(Struct, frozen=True):
    """Usage in an event that is not durable yet. If the log loses the event, it is logged again."""

    caller: str | None
    added: Usage


def count(work: Transition, caller: str | None, added: Usage) -> None:
    """Add usage to the sum of the session, after the event that adds it was logged."""
    work.set(used=work.state.used.plus(added))
    work.after_commit(Counted(caller, added))


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
