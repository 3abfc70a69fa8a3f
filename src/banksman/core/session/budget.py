"""Budgets as values: caps on tokens, cost, working time and turns, and what is used of them.

Tokens and working time are exact as far as the agent reports them. The cost is the agent's own
figure, an estimate. `budget_gate.py` applies the budget of a session, and `sessions/budgets.py`
the budgets that sessions share.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal, cast

from msgspec import Struct

from banksman.core.session.usage import Usage
from banksman.errors import UsageError

Unit = Literal["tokens", "usd", "working_seconds", "turns"]
Scope = Literal["session", "host", "caller"]
OnBudget = Literal["ask", "stop", "queue"]

# Answers to the question of "ask", by the id of their option.
RAISE, FINISH, STOP = "raise", "finish", "stop"

UNITS: tuple[Unit, ...] = ("tokens", "usd", "working_seconds", "turns")
# A warning is due when this part of a cap is used.
WARNING_PART = 0.8
# Differences of floats are not exact. A smaller remainder counts as none.
TOLERANCE = 1e-6
_COUNTS = ("tokens", "turns")
_NAMES = {"usd": "US dollars (estimate)", "working_seconds": "seconds of work"}
# A larger cap could not be counted exactly in JSON.
CAP_MAX = 2**53


# Caps that the log has as nearly or fully used: event kind, unit and cap.
LoggedCaps = tuple[tuple[str, Unit, float], ...]


class Budget(Struct, frozen=True, omit_defaults=True):
    """Caps on usage; None: no cap.

    `tokens`: tokens of all kinds. `usd`: the agent's own figure, an estimate. `working_seconds`:
    time in which a turn is open and waits for no answer. `turns`: turns that are sent.
    """

    tokens: int | None = None
    usd: float | None = None
    working_seconds: float | None = None
    turns: int | None = None

    @property
    def caps(self) -> dict[Unit, float]:
        """The caps by unit, without the missing ones."""
        found: dict[Unit, float | None] = {unit: getattr(self, unit) for unit in UNITS}
        return {unit: cap for unit, cap in found.items() if cap is not None}


class CapUse(Struct, frozen=True):
    """One cap, and what is used of it.

    `scope`: the session, all sessions of the host on this day, or one caller on this day. `caller`:
    that caller; None: asks without a caller.
    """

    scope: Scope
    unit: Unit
    used: float
    cap: float
    caller: str | None = None

    @property
    def is_reached(self) -> bool:
        return self.cap - self.used <= (0 if self.unit in _COUNTS else TOLERANCE)

    @property
    def is_near(self) -> bool:
        """Whether the warning is due."""
        return self.cap * WARNING_PART - self.used <= TOLERANCE

    @property
    def stops_turns(self) -> bool:
        """Whether the cap concerns running turns. A cap on turns only concerns the next ones."""
        return self.unit != "turns"

    def concerns(self, caller: str | None) -> bool:
        """Whether the cap holds back turns of this caller."""
        return self.scope != "caller" or self.caller == caller

    @property
    def text(self) -> str:
        """The use of the cap for people: `1,200 of 1,000 tokens`."""
        what = _NAMES.get(self.unit, self.unit)
        return f"{_number(self.used)} of {_number(self.cap)} {what}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:,.2f}"


class RaisedBudget(Struct, frozen=True):
    """The budget of a session after a person has raised it.

    `base`: the configured budget that was raised. A reopen with another budget ends the raise.
    """

    base: Budget
    budget: Budget


def parse(value: Any, what: str = "budget") -> Budget | None:
    """Check a budget that a caller gives as a mapping or as a value. Raises `UsageError`."""
    if value is None:
        return None
    hint = f"use a mapping from {', '.join(UNITS)} to numbers, such as {{'tokens': 100000}}"
    if isinstance(value, Budget):
        value = value.caps
    if not isinstance(value, Mapping):
        raise UsageError(f"{what} cannot be {value!r:.60}", hint=hint)
    caps = {unit: cap for unit, cap in cast(Mapping[Any, Any], value).items() if cap is not None}
    for unit in caps:
        if unit not in UNITS:
            raise UsageError(f"{what} cannot have a cap on {unit!r:.60}", hint=hint)
    if not caps:
        raise UsageError(f"{what} has no cap", hint=hint)
    return Budget(**{unit: _checked(what, unit, cap) for unit, cap in caps.items()})


def _checked(what: str, unit: str, cap: Any) -> Any:
    is_number = isinstance(cap, int | float) and not isinstance(cap, bool)
    if not is_number or not math.isfinite(cap) or not 0 <= cap <= CAP_MAX:
        hint = "use a number, 0 or more"
        raise UsageError(f"the {unit} of {what} cannot be {cap!r:.60}", hint=hint)
    if unit not in _COUNTS:
        return float(cap)
    if int(cap) != cap:
        raise UsageError(f"the {unit} of {what} cannot be {cap!r:.60}", hint="use a whole number")
    return int(cap)


def parse_words(text: str, what: str = "budget") -> Budget | None:
    """Parse a budget of a command line: `tokens=100000,usd=5`."""
    hint = f"use UNIT=NUMBER,…, with the units {', '.join(UNITS)}"
    caps: dict[str, float] = {}
    for word in text.split(","):
        unit, equals, number = word.strip().partition("=")
        try:
            caps[unit] = float(number)
        except ValueError as exc:
            raise UsageError(f"{what} cannot be {text!r:.60}", hint=hint) from exc
        if not equals:
            raise UsageError(f"{what} cannot be {text!r:.60}", hint=hint)
    return parse(caps, what)


def amount(usage: Usage, unit: Unit) -> float:
    """Return the amount of one unit in a usage."""
    match unit:
        case "tokens":
            return usage.tokens.total
        case "usd":
            return usage.usd or 0.0
        case "working_seconds":
            return usage.working_seconds
        case "turns":
            return usage.turns


def measure(
    budget: Budget, used: Usage, scope: Scope = "session", caller: str | None = None
) -> tuple[CapUse, ...]:
    """Return the use of each cap of a budget."""
    return tuple(
        CapUse(scope, unit, amount(used, unit), cap, caller) for unit, cap in budget.caps.items()
    )


def raised(base: Budget, now: Budget, used: Usage) -> Budget:
    """Return the budget with the base cap added to what is used, for each cap that is reached."""
    reached = {use.unit for use in measure(now, used) if use.is_reached}
    caps = {
        # A cap of 0 is raised too, so that the answer has an effect.
        unit: amount(used, unit) + (base.caps[unit] or 1) if unit in reached else cap
        for unit, cap in now.caps.items()
    }
    return Budget(**cast("dict[str, Any]", caps))


def held(reached: Iterable[CapUse], caller: str | None) -> CapUse | None:
    """Return the first reached cap that holds back turns of this caller."""
    return next((use for use in reached if use.concerns(caller)), None)


def with_told(before: LoggedCaps, told: tuple[str, Unit, float]) -> LoggedCaps:
    """Add a cap that the log has. It replaces an earlier cap of this kind and unit."""
    return (*(other for other in before if other[:2] != told[:2]), told)
