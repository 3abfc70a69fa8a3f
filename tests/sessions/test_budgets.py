"""Budgets with real processes: a cap is passed by one report at most, and a killed host forgets nothing."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import wait_pass
from tests.sessions.crash_host import remote
from tests.sessions.helpers import QUICK, opened
from tests.thorough import one_in

from banksman import Budget, Host, Kind, UsageError
from banksman.testing import fake_agent


def using(calls: list[int], folder: Path) -> str:
    """Reports, each followed by a wait for a file."""
    return "\n".join(f"@@used {tokens} 0\n@@wait {folder / str(number)}" for number, tokens in enumerate(calls))


@pytest.mark.parametrize("seed", one_in(100, range(100)))
async def test_turn_is_stopped_within_one_report_of_its_cap(tmp_path: Path, seed: int) -> None:
    lot = random.Random(seed)
    calls = [lot.randrange(1, 1000) for _ in range(lot.randrange(2, 12))]
    cap = lot.randrange(1, sum(calls) + 500)
    reached = next((index for index in range(len(calls)) if sum(calls[: index + 1]) >= cap), None)
    async with opened(tmp_path, budget={"tokens": cap}, on_budget="stop") as case:
        turn = await case.ask(using(calls, tmp_path))
        number = 0
        async for event in case.session.events(0, waits=True):
            if event.kind == "usage.reported":
                if number == reached:
                    break  # The agent waits for a file that never comes: only the budget ends the turn.
                case.path(str(number)).touch()
                number += 1
            if number == len(calls):
                break
        outcome = await turn.outcome()
        assert outcome.used is not None
        used = outcome.used.tokens.total
        if reached is None:
            assert (outcome.kind, used) == (Kind.DONE, sum(calls))
        else:
            assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "budget")
            assert used == sum(calls[: reached + 1])
        waiting = await case.ask("@@say hello")
        assert case.session.status().queue if reached is not None else await waiting.outcome()


async def test_budget_is_shown_and_a_larger_one_continues(tmp_path: Path) -> None:
    async with opened(tmp_path, name="budgeted", budget=Budget(tokens=100)) as case:
        await case.answer("@@used 90 0")
        [use] = case.session.status().budget
        assert (use.unit, use.used, use.cap, use.is_reached) == ("tokens", 90, 100, False)
        assert (await case.kinds()).count("budget.warning") == 1
        assert (await case.answer("@@used 30 0")).kind is Kind.DONE
        turn = await case.ask("@@say hello")
        [use] = case.session.status().budget
        assert use.is_reached
        command = fake_agent.command(evidence=tmp_path / "evidence")
        await case.host.open("claude", name="budgeted", command=command, options=QUICK, budget={"tokens": 1000})
        assert (await turn.outcome()).kind is Kind.DONE


@pytest.mark.parametrize(("answer", "kind"), [("raise", Kind.DONE), ("finish", Kind.DONE), ("stop", Kind.INTERRUPTED)])
async def test_person_decides_about_budget(tmp_path: Path, answer: str, kind: Kind) -> None:
    async with opened(tmp_path, budget={"tokens": 10}, on_budget="ask") as case:
        go = case.path("go")
        turn = await case.ask(f"@@used 10 0\n@@wait {go}")
        asked = await case.wait_kind("question.asked")
        [question] = case.session.questions()
        assert (question.id, question.wants) == (asked.body["question"], "budget")
        with pytest.raises(UsageError):
            await case.session.answer(question.id, "more")
        assert (await case.session.answer(question.id, answer)).answer == ("deny" if answer == "stop" else "allow")
        if answer != "stop":
            go.touch()
        assert (await turn.outcome()).kind is kind
        after = await case.ask("@@say hello")
        if answer == "raise":
            assert (await after.outcome()).kind is Kind.DONE
        else:
            assert len(case.session.status().queue) == 1


@pytest.mark.parametrize(
    "arguments",
    [{"budget": {"euro": 5}}, {"budget": {}}, {"budget": {"tokens": -1}}, {"on_budget": "beg"}, {"budget": 5}],
    ids=repr,
)
async def test_wrong_budget_is_refused(tmp_path: Path, arguments: dict[str, Any]) -> None:
    async with Host("memory:") as host:
        with pytest.raises(UsageError, match="budget"):
            await host.open("claude", command=fake_agent.command(), **arguments)
    if "on_budget" not in arguments:
        with pytest.raises(UsageError, match="budget"):
            Host("memory:", **arguments)
        with pytest.raises(UsageError, match="budget"):
            Host("memory:", caller_budgets={"alice": arguments["budget"]})
    with pytest.raises(UsageError, match="caller"):
        Host("memory:", caller_budgets={"": {"tokens": 5}})


async def test_budget_counts_all_turns_after_kill_of_host(tmp_path: Path, marker: str) -> None:
    store = tmp_path / "store.db"
    agent = fake_agent.command(memory=tmp_path / "memory")
    async with Host(f"sqlite:{store}") as reader:
        async with remote(store, marker) as there:
            await there.open(name="one", command=agent, options=QUICK, budget={"tokens": 100})
            assert await there.outcome(await there.ask("one", "@@used 60 0")) == "done"
            turn = await there.ask("one", "@@used 30 0\n@@hang")
            async for event in reader.session("one").follow():
                if event.turn == turn and event.kind == "usage.reported":
                    break
            there.kill()
        session = await reader.open("claude", name="one", command=agent, options=QUICK, budget={"tokens": 100})
        [use] = session.status().budget
        assert use.used == 90
        assert (await (await session.ask("@@used 10 0")).outcome()).kind is Kind.DONE
        await session.ask("@@say hello")
        assert [use.used for use in session.status().budget] == [100]
        assert len(session.status().queue) == 1


# -- shared budgets --------------------------------------------------------------------------------------------------
async def held(host: Host, name: str) -> None:
    """Wait until the session has an ask that a budget holds back."""
    async for event in host.session(name).follow(0):
        if event.kind == "budget.exceeded":
            return


async def test_sessions_of_caller_share_its_budget(tmp_path: Path) -> None:
    agent = fake_agent.command()
    budgets = {"alice": {"tokens": 100}, "*": {"turns": 1}}
    async with Host("memory:", caller_budgets=budgets) as host:
        one, two = [await host.open("claude", name=name, command=agent, options=QUICK) for name in ("one", "two")]
        assert (await (await one.ask("@@used 60 0", caller="alice")).outcome()).kind is Kind.DONE
        assert (await (await two.ask("@@used 50 0", caller="alice")).outcome()).kind is Kind.DONE
        assert "budget.warning" not in [event.kind async for event in one.events(0, waits=False)]
        waiting = await one.ask("@@say hello", caller="alice")
        await held(host, "one")
        assert (await (await one.ask("@@say hello", caller="bob")).outcome()).kind is Kind.DONE
        assert [turn.turn for turn in one.status().queue] == [waiting.id]
        [use] = [use for use in host.budget_uses() if use.caller == "alice"]
        assert (use.used, use.cap) == (110, 100)


async def test_hold_whose_asks_wait_for_a_budget_ends_when_it_is_idle(tmp_path: Path) -> None:
    options = {**QUICK, "hold_idle_seconds": 0.1}
    async with Host("memory:", caller_budgets={"alice": {"turns": 1}}) as host:
        session = await host.open("claude", name="one", command=fake_agent.command(), options=options)
        hold = await session.begin_hold(caller="alice")
        assert (await (await session.ask("first", caller="alice", hold=hold)).outcome()).kind is Kind.DONE
        waiting = await session.ask("second", caller="alice", hold=hold)
        assert (await (await session.ask("other", caller="bob")).outcome()).text == "other"
        assert session.status().holds == ()
        assert [turn.turn for turn in session.status().queue] == [waiting.id]


async def test_two_sessions_do_not_both_take_the_last_turn(tmp_path: Path) -> None:
    agent = fake_agent.command()
    async with Host("memory:", caller_budgets={"*": {"turns": 3}}) as host:
        sessions = [await host.open("claude", name=f"s{n}", command=agent, options=QUICK) for n in range(5)]
        turns = await asyncio.gather(*(session.ask("@@say hello", caller="alice") for session in sessions))
        outcomes = [asyncio.ensure_future(turn.outcome()) for turn in turns]
        done = 0
        async with asyncio.timeout(60):
            for next_one in asyncio.as_completed(outcomes):
                done += (await next_one).kind is Kind.DONE
                if done == 3:
                    break
        # The claims of the others were refused before: their turns wait.
        await asyncio.gather(*(held(host, session.name or "") for session in sessions if session.status().queue))
        assert sum(len(session.status().queue) for session in sessions) == 2
        [use] = host.budget_uses()
        assert use.used == 3
        for waiting in outcomes:
            waiting.cancel()


async def test_shared_budget_stops_running_turns_of_both_sessions(tmp_path: Path) -> None:
    agent = fake_agent.command()
    async with Host("memory:", budget={"tokens": 100}) as host:
        one, two = [
            await host.open("claude", name=name, command=agent, options=QUICK, on_budget="stop")
            for name in ("one", "two")
        ]
        first = await one.ask("@@used 60 0\n@@hang")
        async for event in one.follow(0):
            if event.kind == "usage.reported":
                break
        second = await two.ask("@@used 60 0\n@@hang")
        for turn in (first, second):
            outcome = await turn.outcome()
            assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "budget")


async def test_two_hosts_of_one_store_share_budget_of_caller(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    agent = fake_agent.command()
    budgets = {"alice": {"tokens": 100}}
    async with Host(store, caller_budgets=budgets) as here, Host(store, caller_budgets=budgets) as there:
        one = await here.open("claude", name="one", command=agent, options=QUICK)
        two = await there.open("claude", name="two", command=agent, options=QUICK, on_budget="stop")
        assert (await (await one.ask("@@used 60 0", caller="alice")).outcome()).kind is Kind.DONE
        running = await two.ask("@@used 30 0\n@@hang", caller="alice")
        async for event in two.follow(0):
            if event.kind == "usage.reported":
                break
        # The turn on the other host is open, and learns of this usage by itself.
        assert (await (await one.ask("@@used 10 0", caller="alice")).outcome()).kind is Kind.DONE
        assert (await running.outcome()).clock == "budget"
        await one.ask("@@say hello", caller="alice")
        await held(here, "one")
        assert len(one.status().queue) == 1


async def test_restarted_host_knows_usage_of_the_day(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    agent = fake_agent.command()
    async with Host(store, budget={"tokens": 100}) as host:
        session = await host.open("claude", name="one", command=agent, options=QUICK)
        assert (await (await session.ask("@@used 100 0")).outcome()).kind is Kind.DONE
    async with Host(store, budget={"tokens": 100}) as host:
        session = await host.open("claude", name="two", command=agent, options=QUICK)
        await session.ask("@@say hello")
        await held(host, "two")
        assert len(session.status().queue) == 1


async def test_restarted_host_shows_usage_before_its_first_session(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with Host(store, budget={"tokens": 100}) as host:
        session = await host.open("claude", name="one", command=fake_agent.command(), options=QUICK)
        assert (await (await session.ask("@@used 40 0")).outcome()).kind is Kind.DONE
    async with Host(store, budget={"tokens": 100}) as host, asyncio.timeout(60):
        await wait_pass(lambda: [use.used for use in host.budget_uses()] == [40])
