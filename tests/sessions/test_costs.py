"""Cost and usage of a turn: as the agent reports them, or as the growth of its total."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import Case, bodies, ended, opened

from banksman import Kind, Outcome
from banksman.core.session import event as kinds


def costing(total: Any, **members: Any) -> str:
    return f"@@say done\n@@boundary {json.dumps({'total_cost_usd': total, **members})}"


def models(**costs: float | None) -> dict[str, Any]:
    return {"model_usage_since_last_result": {name: {"costUSD": cost} for name, cost in costs.items()}}


async def spend(case: Case, *prompts: str) -> list[float | None]:
    """Run turns with these prompts, and return their costs, rounded."""
    outcomes: list[Outcome] = [await case.answer(prompt) for prompt in prompts]
    return [None if outcome.cost is None else round(outcome.cost, 6) for outcome in outcomes]


def total(case: Case) -> float | None:
    cost = case.session.status().cost
    return None if cost is None else round(cost, 6)


async def test_turn_cost_is_the_one_the_agent_reports(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        assert total(case) is None
        turn = await case.ask(costing(9.5, **models(big=0.25, small=0.01), usage={"input_tokens": 7}))
        outcome = await case.outcome(turn)
        assert (outcome.cost, outcome.usage) == (0.26, {"input_tokens": 7})
        assert (total(case), ended(await case.events(), turn)["cost"]) == (0.26, 0.26)
        # The total does not count here, because its beginning is unknown.
        assert await spend(case, costing(9.6, **models(big=0.5))) == [0.5]
        assert total(case) == 0.76


async def test_turn_cost_is_growth_of_total_without_own_figure(tmp_path: Path) -> None:
    async with opened(tmp_path, memory=True) as case:
        assert await spend(case, costing(0.1), costing(0.25), costing(0.25)) == [0.1, 0.15, 0.0]
        # One of several models reports no cost.
        assert await spend(case, costing(0.45, **models(big=0.1, small=None))) == [0.2]
        assert total(case) == 0.45
        # The total continues through a resume, and restarts if the agent has lost it.
        assert (await case.answer("@@exit 1")).kind is Kind.FAILED
        assert await spend(case, costing(0.5), costing(0.02), costing(0.05)) == [0.05, 0.02, 0.03]
        assert total(case) == 0.55
        # Without a number the cost is unknown.
        assert await spend(case, costing(None), costing("much"), costing(True)) == [None, None, None]
        assert await spend(case, costing(0.1)) == [0.05]
        assert total(case) == 0.6


@pytest.mark.parametrize("members", [{}, models(big=0.2)])
async def test_failed_or_stopped_turn_has_its_cost(tmp_path: Path, members: dict[str, Any]) -> None:
    async with opened(tmp_path) as case:
        failed = await case.answer(costing(0.2, is_error=True, result="overloaded", **members))
        assert (failed.kind, failed.cost) == (Kind.FAILED, 0.2)
        turn = await case.running("hangs")
        await turn.interrupt()
        # The fake agent reports the same small total each time. It is less than before, so the total has restarted.
        assert (await case.outcome(turn)).cost == 0.0001
        assert total(case) == 0.2001


async def test_first_turn_cost_is_unknown_when_conversation_was_resumed(tmp_path: Path) -> None:
    async with opened(tmp_path / "a", memory=True) as case:
        await spend(case, costing(5.0))
        conversation = case.session.status().conversation
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "memory").rename(tmp_path / "b" / "memory")
    async with opened(tmp_path / "b", memory=True, resume=conversation) as case:
        assert await spend(case, costing(5.5), costing(5.75)) == [None, 0.25]
        assert total(case) == 0.25


async def test_agent_initiated_turn_cost_is_not_charged_to_next_turn(tmp_path: Path) -> None:
    own = f"own task-notification boundary {json.dumps({'total_cost_usd': 0.3})}"
    script = {"prompt 1": [f"boundary {json.dumps({'total_cost_usd': 0.1})}", f"at idle {own}"]}
    async with opened(tmp_path, script) as case:
        assert await spend(case, "one") == [0.1]
        over = await case.wait_event(lambda e: e.kind == kinds.TURN_ENDED and "origin" in e.body)
        assert round(over.body["cost"], 6) == 0.2
        assert await spend(case, costing(0.35)) == [0.05]
        # The session's total includes it.
        assert total(case) == 0.35
        assert [round(body["cost"], 6) for body in bodies(await case.events(), kinds.TURN_ENDED)] == [0.1, 0.2, 0.05]
