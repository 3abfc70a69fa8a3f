"""Limits, budgets and fall-backs over a planned restart: the next host waits, counts and falls back as the old one.

Both hosts are in this process. Each agent is one real process, for both hosts.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.sessions.helpers import QUICK, bodies, exists
from tests.sessions.test_fallback import Scene, answer, changes, events, limit, scene
from tests.sessions.test_hand_over import HOLD_SECONDS, state
from tests.sessions.test_limit_waits import LIMITED_ONCE, UNTIL, reset, waiting

from banksman import Host, Kind, Session
from banksman.core.session import event as kinds
from banksman.sessions import session_timers
from banksman.sessions.accounts import JITTER_SECONDS_MAX
from banksman.store.sqlite import SqliteLog
from banksman.testing import fake_agent
from banksman.testing.fake_agent import Evidence

__all__ = ["reset", "scene", "state"]


async def leave(host: Host) -> None:
    await host.drain(hand_over=True, hold_seconds=HOLD_SECONDS)


@asynccontextmanager
async def next_host(folder: Path, session: Session, **how: Any) -> AsyncGenerator[Session]:
    """Take the session up by another host, with the process that it has."""
    async with Host(f"sqlite:{folder / 'log.db'}", **how) as host:
        await host.take_up()
        (again,) = host.our_sessions()
        assert again.id == session.id
        yield again
        await again.close()
        assert len(bodies(await events(again), kinds.PROCESS_ADOPTED)) == 1


def command(folder: Path, script: Any = ()) -> list[str]:
    return fake_agent.command(script, evidence=folder / "evidence")


def prompts(folder: Path) -> int:
    """Return how many prompts the agent got, which is one process."""
    (process,) = Evidence(folder / "evidence").processes
    return sum(frame["type"] == "user" for frame in process.frames)


async def test_ask_that_waits_for_the_end_of_a_limit_waits_at_the_next_host(
    state: Path, reset: Callable[[], None]
) -> None:
    async with Host(f"sqlite:{state / 'log.db'}") as host:
        session = await host.open("claude", command=command(state, LIMITED_ONCE), options=QUICK, on_limit="wait")
        turn = await session.ask("one")
        await waiting(session)
        await leave(host)
    async with next_host(state, session) as again:
        assert again.status().waits_for_limit
        assert prompts(state) == 1
        reset()
        outcome = await (await again.turn(turn.id)).outcome()
        assert (outcome.kind, outcome.text) == (Kind.DONE, "fine")
        assert prompts(state) == 2


@pytest.mark.thorough
async def test_budget_counts_what_a_turn_uses_on_both_sides_of_a_restart(state: Path) -> None:
    go, reached = state / "go", state / "reached"
    async with Host(f"sqlite:{state / 'log.db'}") as host:
        budget = {"tokens": 100, "turns": 2}
        session = await host.open("claude", command=command(state), options=QUICK, budget=budget)
        turn = await session.ask(f"@@used 60 0\n@@touch {reached}\n@@wait {go}\n@@used 60 0")
        later = await session.ask("@@say later")
        await exists(reached)
        await leave(host)
    async with next_host(state, session) as again:
        assert {use.unit: use.used for use in again.status().budget} == {"tokens": 60, "turns": 0}
        go.touch()
        assert (await (await again.turn(turn.id)).outcome()).kind is Kind.DONE
        assert {use.unit: use.used for use in again.status().budget} == {"tokens": 120, "turns": 1}
        # The cap holds it back, with an idle process.
        assert [each.turn for each in again.status().queue] == [later.id]
        assert (await (await again.turn(later.id)).interrupt()).stopped
        assert prompts(state) == 1


@pytest.mark.parametrize(("decision", "kind"), [("raise", Kind.DONE), ("stop", Kind.INTERRUPTED)])
async def test_question_about_a_budget_is_answered_at_the_next_host(state: Path, decision: str, kind: Kind) -> None:
    go = state / "go"
    async with Host(f"sqlite:{state / 'log.db'}") as host:
        how: dict[str, Any] = {"budget": {"tokens": 10}, "on_budget": "ask"}
        session = await host.open("claude", command=command(state), options=QUICK, **how)
        turn = await session.ask(f"@@used 10 0\n@@wait {go}\n@@say over")
        async for event in session.events(0, waits=True):
            if event.kind == kinds.QUESTION_ASKED:
                break
        (asked,) = session.questions()
        await leave(host)
    async with next_host(state, session) as again:
        (question,) = again.questions()
        assert (question.id, question.wants) == (asked.id, "budget")
        await again.answer(question.id, decision)
        if decision == "raise":
            go.touch()
        assert (await (await again.turn(turn.id)).outcome()).kind is kind
        assert len(bodies(await events(again), kinds.QUESTION_ASKED)) == 1


async def test_budget_of_a_caller_stops_a_turn_at_the_next_host(state: Path) -> None:
    go, reached = state / "go", state / "reached"
    how: dict[str, Any] = {"caller_budgets": {"alice": {"tokens": 100}}}
    async with Host(f"sqlite:{state / 'log.db'}", **how) as host:
        session = await host.open("claude", command=command(state), options=QUICK, on_budget="stop")
        turn = await session.ask(f"@@used 60 0\n@@touch {reached}\n@@wait {go}\n@@used 60 0\n@@hang", caller="alice")
        await exists(reached)
        await leave(host)
    async with next_host(state, session, **how) as again:
        go.touch()
        outcome = await (await again.turn(turn.id)).outcome()
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "budget")


@pytest.mark.thorough
async def test_turn_of_a_second_agent_continues_and_the_first_one_gets_the_next_turn(scene: Scene, state: Path) -> None:
    go, reached = state / "go", state / "reached"
    async with Host(scene.store) as host:
        session = await scene.open(host)
        kind, _ = await answer(session, limit())
        assert kind is Kind.FAILED
        turn = await session.ask(f"@@text one\n@@touch {reached}\n@@wait {go}\n@@text two")
        await exists(reached)
        await leave(host)
    async with next_host(state, session) as again:
        assert again.status().agent == "codex"
        claude, codex = again.status().fallback
        assert claude.limited_until is not None
        assert claude.limited_until > time.time()
        assert codex.limited_until is None
        go.touch()
        assert (await (await again.turn(turn.id)).outcome()).text == "two"
        assert await answer(again, "three") == (Kind.DONE, "you said: three")
        assert await changes(again) == [("claude", "codex", "limited")]
        assert len(Evidence(scene.folder / "codex").processes) == 1


async def asked_about_budget(session: Session) -> str:
    async for event in session.events(0, waits=True):
        if event.kind == kinds.QUESTION_ASKED:
            break
    (question,) = session.questions()
    return question.id


async def test_question_about_a_budget_needs_no_process(state: Path) -> None:
    """Without a process, the session leaves. Its next host has the same question."""
    options = {**QUICK, "idle_seconds": 0.0}
    async with Host(f"sqlite:{state / 'log.db'}") as host:
        how: dict[str, Any] = {"budget": {"tokens": 10}, "on_budget": "ask"}
        # The second process knows the conversation of the first one.
        agent = fake_agent.command((), evidence=state / "evidence", memory=state / "memory")
        session = await host.open("claude", command=agent, options=options, **how)
        assert (await (await session.ask("@@used 10 0\n@@say one")).outcome()).text == "one"
        asked = await asked_about_budget(session)
        turn = await session.ask("@@say two")
        async for event in session.events(0, waits=True):
            if event.kind == kinds.PROCESS_EXITED:
                break
        await leave(host)
    async with Host(f"sqlite:{state / 'log.db'}") as host:
        await host.take_up()
        (again,) = host.our_sessions()
        assert [question.id for question in again.questions()] == [asked]
        found = await events(again)
        assert len(bodies(found, kinds.QUESTION_ASKED)) == len(bodies(found, kinds.SESSION_LEFT)) == 1
        assert (await again.answer(asked, "raise")).is_first
        assert (await (await again.turn(turn.id)).outcome()).text == "two"
        await again.close()


@pytest.mark.parametrize("caps", [{"budget": {"tokens": 10}}, {"caller_budgets": {"alice": {"tokens": 10}}}])
async def test_question_about_a_shared_budget_is_answered_at_the_next_host(
    state: Path, monkeypatch: pytest.MonkeyPatch, caps: dict[str, Any]
) -> None:
    """The next host has not read yet what was used on this day, when it takes the session up."""
    async with Host(f"sqlite:{state / 'log.db'}", **caps) as host:
        session = await host.open("claude", command=command(state), options=QUICK, on_budget="ask")
        turn = await session.ask("@@used 10 0\n@@hang", caller="alice")
        asked = await asked_about_budget(session)
        await leave(host)
    usage, may_read, has_read = SqliteLog.usage, asyncio.Event(), asyncio.Event()

    async def usage_later(*words: Any, **more: Any) -> Any:
        await may_read.wait()
        try:
            return await usage(*words, **more)
        finally:
            asyncio.get_running_loop().call_soon(has_read.set)

    monkeypatch.setattr(SqliteLog, "usage", usage_later)
    async with next_host(state, session, **caps) as again:
        for event in (may_read, has_read):
            (question,) = again.questions()
            assert (question.id, question.wants) == (asked, "budget")
            may_read.set()
            await event.wait()
        assert (await again.answer(asked, "stop")).is_first
        assert (await (await again.turn(turn.id)).outcome()).kind is Kind.INTERRUPTED
        found = await events(again)
        assert len(bodies(found, kinds.QUESTION_ASKED)) == 1
        assert len(bodies(found, kinds.BUDGET_EXCEEDED)) == 1


async def test_budget_of_a_host_and_its_day_counts_on_both_sides_of_a_restart(state: Path) -> None:
    go, reached = state / "go", state / "reached"
    how: dict[str, Any] = {"budget": {"tokens": 100, "turns": 2}}
    async with Host(f"sqlite:{state / 'log.db'}", **how) as host:
        session = await host.open("claude", command=command(state), options=QUICK, on_budget="stop")
        assert (await (await session.ask("@@say one")).outcome()).kind is Kind.DONE
        turn = await session.ask(f"@@used 60 0\n@@touch {reached}\n@@wait {go}\n@@used 60 0\n@@hang")
        waits = await session.ask("@@say more")
        await exists(reached)
        await leave(host)
    async with next_host(state, session, **how) as again:
        go.touch()
        outcome = await (await again.turn(turn.id)).outcome()
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "budget")
        # Both caps of the day hold it back: two turns, and 120 tokens.
        assert [each.turn for each in again.status().queue] == [waits.id]
        assert prompts(state) == 2
        await (await again.turn(waits.id)).interrupt()


async def test_limit_that_ends_while_no_host_is_there_is_over_for_the_next_host(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Host(f"sqlite:{state / 'log.db'}") as host:
        session = await host.open("claude", command=command(state, LIMITED_ONCE), options=QUICK, on_limit="wait")
        turn = await session.ask("one")
        await waiting(session)
        await leave(host)
    monkeypatch.setattr(session_timers, "time", SimpleNamespace(time=lambda: UNTIL + JITTER_SECONDS_MAX))
    async with next_host(state, session) as again:
        outcome = await (await again.turn(turn.id)).outcome()
        assert (outcome.kind, outcome.text) == (Kind.DONE, "fine")
        assert prompts(state) == 2


@pytest.mark.thorough
async def test_working_time_counts_on_both_sides_of_a_restart(state: Path) -> None:
    """The agent works while no host is there, and the timer of the budget is due at the next one."""
    reached = state / "reached"
    async with Host(f"sqlite:{state / 'log.db'}") as host:
        budget = {"working_seconds": 1.0}
        session = await host.open("claude", command=command(state), options=QUICK, budget=budget, on_budget="stop")
        turn = await session.ask(f"@@touch {reached}\n@@hang")
        await exists(reached)
        await leave(host)
    async with next_host(state, session) as again:
        outcome = await (await again.turn(turn.id)).outcome()
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "budget")
        assert len(bodies(await events(again), kinds.BUDGET_EXCEEDED)) == 1
