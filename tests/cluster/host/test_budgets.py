"""Budgets of callers over the hosts of a cluster."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.members import QUICK, store
from tests.thorough import thorough

from banksman import Host, Kind
from banksman.testing import fake_agent
from banksman.testing.nats_servers import Servers

pytestmark = thorough


async def test_two_hosts_of_a_cluster_share_budget_of_caller(nats_one: Servers, prefix: str, tmp_path: Path) -> None:
    url = store(nats_one, prefix)
    agent = fake_agent.command()
    budgets = {"alice": {"tokens": 100}}
    async with Host(url, caller_budgets=budgets) as here, Host(url, caller_budgets=budgets) as there:
        one = await here.open("claude", name="one", command=agent, options=QUICK)
        two = await there.open("claude", name="two", command=agent, options=QUICK, on_budget="stop")
        assert (await (await one.ask("@@used 60 0", caller="alice")).outcome()).kind is Kind.DONE
        running = await two.ask("@@used 30 0\n@@hang", caller="alice")
        async for event in two.follow(0):
            if event.kind == "usage.reported":
                break
        # The turn on the other host is open, and learns of this usage by itself.
        assert (await (await one.ask("@@used 10 0", caller="alice")).outcome()).kind is Kind.DONE
        outcome = await running.outcome()
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "budget")
        waiting = await one.ask("@@say hello", caller="alice")
        async for event in one.follow(0):
            if event.kind == "budget.exceeded":
                break
        assert [turn.turn for turn in one.status().queue] == [waiting.id]
        assert (await (await one.ask("@@say hello", caller="bob")).outcome()).kind is Kind.DONE
