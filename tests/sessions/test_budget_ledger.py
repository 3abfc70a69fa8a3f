"""Ledger of shared budgets in every order of claims, ends and reads: no cap on turns is ever exceeded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from banksman.core.dialects.tokens import Tokens
from banksman.core.session.budget import Budget
from banksman.core.session.usage import NO_USAGE, Usage
from banksman.sessions import budget_ledger
from banksman.sessions.budget_ledger import BudgetClaim, Ledger, SharedBudgets

DAY = "2026-11-18"
SESSIONS = ("one", "two", "three")
CAP = 2
# A session claims a turn, then the turn ends, or it is withdrawn. The log is read at any time.
PHASES = ("idle", "claimed", "over")
State = tuple[Ledger, tuple[str, ...], int, int]


def first() -> State:
    return Ledger(SharedBudgets(None, {"*": Budget(turns=CAP)}), DAY), ("idle",) * len(SESSIONS), 0, 0


def moves(state: State) -> Iterator[State]:
    """Yield what may happen next. The state has the sent turns, and those of them that the log has."""
    ledger, phases, sent, logged = state
    for index, session in enumerate(SESSIONS):
        claim = BudgetClaim(session, f"{session}#1", "alice")

        def moved(phase: str, *, at: int = index) -> tuple[str, ...]:
            return (*phases[:at], phase, *phases[at + 1 :])

        if phases[index] == "idle":
            after, granted = budget_ledger.claim(ledger, claim)
            if granted:
                yield after, moved("claimed"), sent + 1, logged
        elif phases[index] == "claimed":
            released = budget_ledger.release(ledger, session)
            yield budget_ledger.add(released, "alice", Usage(turns=1)), moved("over"), sent, logged
            # Withdrawn before its prompt was sent.
            yield released, moved("over"), sent - 1, logged
    own = ledger.own.get("alice", NO_USAGE).turns
    if logged < own:
        yield ledger, phases, sent, logged + 1
    yield budget_ledger.read(ledger, {"alice": Usage(turns=logged)}), phases, sent, logged


def explore() -> int:
    """Visit every state, and return how many there are."""
    seen: set[object] = set()
    stack = [first()]
    while stack:
        state = stack.pop()
        ledger, phases, sent, logged = state
        key = (tuple(ledger.own.items()), tuple(ledger.others.items()), ledger.claims, phases, sent, logged)
        if key in seen:
            continue
        seen.add(key)
        assert sent <= CAP, f"{sent} turns were sent"
        used = sum(use.used for use in budget_ledger.uses(ledger))
        assert used == sent, f"{sent} turns were sent, and {used} are counted"
        stack += moves(state)
    return len(seen)


def test_no_order_of_claims_exceeds_a_cap_on_turns() -> None:
    assert explore() > 50


Wrong = Callable[..., Any]


def _spends_last_unit_twice(ledger: Ledger, wanted: BudgetClaim) -> tuple[Ledger, bool]:
    """Compare only what is used, and not what is claimed."""
    _, granted = right_claim(replace(ledger, claims=frozenset()), wanted)
    return replace(ledger, claims=ledger.claims | {wanted}) if granted else ledger, granted


def _forgets_release(ledger: Ledger, session: str, keep: str | None = None) -> Ledger:
    return ledger


def _adds_own_usage_again(ledger: Ledger, logged: dict[str | None, Usage]) -> Ledger:
    return replace(ledger, others=logged)


right_claim = budget_ledger.claim


@pytest.mark.parametrize(
    ("function", "wrong"),
    [("claim", _spends_last_unit_twice), ("release", _forgets_release), ("read", _adds_own_usage_again)],
    ids=["last unit spent twice", "claim never released", "own usage counted twice"],
)
def test_exploration_finds_mistake_in_ledger(function: str, wrong: Wrong) -> None:
    with mock.patch.object(budget_ledger, function, wrong), pytest.raises(AssertionError):
        explore()


def test_host_counts_all_callers_and_caller_only_its_own() -> None:
    ledger = Ledger(SharedBudgets(Budget(tokens=100), {"alice": Budget(tokens=50), "*": Budget(turns=1)}), DAY)
    ledger = budget_ledger.add(ledger, "alice", Usage(Tokens(40), turns=3))
    ledger = budget_ledger.read(ledger, {"alice": Usage(Tokens(45), turns=4), None: Usage(Tokens(20), turns=1)})
    uses = {(use.scope, use.caller, use.unit): use.used for use in budget_ledger.uses(ledger)}
    assert uses == {("host", None, "tokens"): 65, ("caller", None, "turns"): 1, ("caller", "alice", "tokens"): 45}
    assert [(use.scope, use.caller) for use in budget_ledger.reached(ledger)] == [("caller", None)]


def test_usage_of_others_never_falls_and_a_new_day_begins_empty() -> None:
    ledger = Ledger(SharedBudgets(Budget(tokens=100)), DAY)
    ledger = budget_ledger.read(ledger, {"alice": Usage(Tokens(30))})
    ledger = budget_ledger.add(ledger, "alice", Usage(Tokens(10)))
    # The own usage is not durable yet, so the log lacks it.
    ledger = budget_ledger.read(ledger, {"alice": Usage(Tokens(30))})
    assert [use.used for use in budget_ledger.uses(ledger)] == [40]
    ledger, granted = budget_ledger.claim(ledger, BudgetClaim("one", "t#1", "alice"))
    assert granted
    ledger = budget_ledger.on_day(ledger, "2026-11-19")
    assert [use.used for use in budget_ledger.uses(ledger)] == [0]
    assert ledger.claims


def test_correction_between_kinds_of_tokens_counts_once() -> None:
    ledger = Ledger(SharedBudgets(Budget(tokens=1000)), DAY)
    reported, corrected = Usage(Tokens(input=100)), Usage(Tokens(input=20, cache_read=80))
    ledger = budget_ledger.add(ledger, None, reported)
    ledger = budget_ledger.add(ledger, None, corrected.minus(reported))
    # The log does not have the correction yet, and then it does.
    for logged in (reported, corrected):
        ledger = budget_ledger.read(ledger, {None: logged})
        [use] = budget_ledger.uses(ledger)
        assert use.used == 100
