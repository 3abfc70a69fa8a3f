"""Ledger of shared budgets, as a value: the usage of a day by caller, and the turns that it allows.

A budget of the host caps all turns of a day, and a budget of a caller caps the turns of that caller
(`"*"`: of each other caller). Days are days in UTC. The ledger has the usage in two parts: `own`,
what the sessions of this host have added since it started, and `others`, the rest of the log. A
granted turn counts from its claim on, so that two sessions cannot both take the last one.

All functions are pure. `budgets.py` keeps the ledger of a host.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from banksman.core.session import budget as budgets
from banksman.core.session.budget import Budget, CapUse
from banksman.core.session.usage import NO_USAGE, Usage

# The budget of each caller that has no other one. Asks without a caller count as one caller.
ANY_CALLER = "*"

ByCaller = Mapping[str | None, Usage]


class SharedBudgets(NamedTuple):
    """Budgets per day: of the host, and of callers by name."""

    host: Budget | None = None
    callers: Mapping[str, Budget] = {}

    def of_caller(self, caller: str | None) -> Budget | None:
        named = None if caller is None else self.callers.get(caller)
        return self.callers.get(ANY_CALLER) if named is None else named


class BudgetClaim(NamedTuple):
    """The part of the budgets that a granted turn (key) of a session holds."""

    session: str
    key: str
    caller: str | None


class Ledger(Struct, frozen=True):
    """The shared budgets, and what is used of them on one day."""

    budgets: SharedBudgets
    day: str
    own: ByCaller = {}
    others: ByCaller = {}
    claims: frozenset[BudgetClaim] = frozenset()


def uses(ledger: Ledger) -> tuple[CapUse, ...]:
    """Return the use of every cap, by the host first and then by callers."""
    names = {*ledger.own, *ledger.others, *(claim.caller for claim in ledger.claims)}
    names |= {name for name in ledger.budgets.callers if name != ANY_CALLER}
    used = {name: _used(ledger, name) for name in names}
    found: list[CapUse] = []
    if ledger.budgets.host is not None:
        found += budgets.measure(ledger.budgets.host, _sum(used.values()), "host")
    for name in sorted(names, key=lambda name: (name is not None, name or "")):
        budget = ledger.budgets.of_caller(name)
        if budget is not None:
            found += budgets.measure(budget, used[name], "caller", name)
    return tuple(found)


def _used(ledger: Ledger, caller: str | None) -> Usage:
    # A claimed turn counts as a turn that was sent, until its end is counted.
    claimed = sum(claim.caller == caller for claim in ledger.claims)
    used = ledger.own.get(caller, NO_USAGE).plus(ledger.others.get(caller, NO_USAGE))
    return used.plus(Usage(turns=claimed))


def _sum(usages: Iterable[Usage]) -> Usage:
    total = NO_USAGE
    for usage in usages:
        total = total.plus(usage)
    return total


def reached(ledger: Ledger) -> tuple[CapUse, ...]:
    """Return the caps that are reached."""
    return tuple(use for use in uses(ledger) if use.is_reached)


def claim(ledger: Ledger, wanted: BudgetClaim) -> tuple[Ledger, bool]:
    """Claim a part of the budgets for a turn, if no cap that concerns it is reached."""
    if wanted in ledger.claims:
        return ledger, True
    if budgets.held(reached(ledger), wanted.caller) is not None:
        return ledger, False
    return replace(ledger, claims=ledger.claims | {wanted}), True


def release(ledger: Ledger, session: str, keep: str | None = None) -> Ledger:
    """Release the claims of a session, except that of its open turn (key)."""
    claims = frozenset(
        claim for claim in ledger.claims if claim.session != session or claim.key == keep
    )
    return ledger if claims == ledger.claims else replace(ledger, claims=claims)


def add(ledger: Ledger, caller: str | None, usage: Usage) -> Ledger:
    """Add usage of a session of this host."""
    own = {**ledger.own, caller: ledger.own.get(caller, NO_USAGE).plus(usage)}
    return replace(ledger, own=own)


def read(ledger: Ledger, logged: ByCaller) -> Ledger:
    """Take the usage of the day from the log.

    The log has what others have used, and all or most of the own usage: the last events may not be
    durable yet. So the difference is never more than what others have used. Their usage never
    falls, so the largest difference counts. Tokens are compared by their total: a correction may
    move tokens from one kind to another, and the log has it later.
    """
    others = dict(ledger.others)
    for caller, usage in logged.items():
        rest = usage.minus(ledger.own.get(caller, NO_USAGE))
        before = others.get(caller, NO_USAGE)
        tokens = max(before.tokens, rest.tokens, key=lambda tokens: tokens.total)
        others[caller] = replace(rest.most(before), tokens=tokens)
    return replace(ledger, others=others)


def on_day(ledger: Ledger, day: str) -> Ledger:
    """Return the ledger of a day. A new day begins with no usage; open turns stay claimed."""
    return ledger if day == ledger.day else replace(ledger, day=day, own={}, others={})
