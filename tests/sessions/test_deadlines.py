"""Deadlines of asks with a real process: in the queue, in a running turn, with a key, and after a restart."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest
from tests.sessions.helpers import QUICK, SHORT_DRAIN, bodies, exists, let_pass, opened, prompts

from banksman import Host, Kind, UsageError
from banksman.core.session import event as kinds
from banksman.testing import fake_agent


async def test_queued_ask_ends_at_its_deadline_and_is_never_sent(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.running("one")
        late = await case.ask("two", deadline=60)
        let_pass(60)
        outcome = await case.outcome(late)
        assert (outcome.kind, outcome.clock) == (Kind.WITHDRAWN, "deadline")
        await first.interrupt()
        await case.outcome(first)
        assert prompts(case) == ["one"]


@pytest.mark.parametrize("steps", ["@@hang", "@@on_interrupt ignored\n@@hang"])
async def test_running_turn_is_stopped_at_its_deadline(tmp_path: Path, steps: str) -> None:
    async with opened(tmp_path, memory=True, options=SHORT_DRAIN) as case:
        turn = await case.reaches(f"one\n@@say half\n{steps}", deadline=60)
        let_pass(60)
        outcome = await case.outcome(turn)
        assert (outcome.kind, outcome.clock) == (Kind.INTERRUPTED, "deadline")
        assert bodies(await case.events(), kinds.TURN_INTERRUPTED) == [{"cause": "clock", "clock": "deadline"}]
        assert (await case.answer("@@say next")).text == "next"


async def test_ask_that_is_over_in_time_leaves_no_timer(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        before = time.time()
        assert (await case.answer("@@say in time", deadline=600)).text == "in time"
        [queued] = bodies(await case.events(), kinds.TURN_QUEUED)
        assert before + 600 <= queued["deadline"] <= time.time() + 600
        assert not any(name.startswith("deadline") for name in case.session.status().timers)


async def test_repeated_ask_keeps_the_deadline_of_the_first(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        first = await case.ask("one\n@@hang", key="k", deadline=600)
        assert (await case.ask("one\n@@hang", key="k", deadline=0.001)) is first
        assert [name for name in case.session.status().timers if name.startswith("deadline")] == [
            f"deadline {first.id}"
        ]
        await first.interrupt()
        assert (await case.outcome(first)).clock is None


@pytest.mark.parametrize("deadline", [0, -1, 1e9, 10**400, float("nan"), "5", True])
async def test_ask_refuses_deadline_that_is_no_positive_number(tmp_path: Path, deadline: float) -> None:
    async with opened(tmp_path) as case:
        with pytest.raises(UsageError, match="deadline cannot be") as caught:
            await case.ask("one", deadline=deadline)
        assert caught.value.hint == "use seconds from now, more than 0 and at most 100000000, or None"


async def test_deadline_survives_a_restart_of_the_host(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    command = fake_agent.command((), evidence=tmp_path / "evidence")
    async with Host(store=store) as host:
        session = await host.open("claude", name="it", command=command, options=QUICK)
        await session.ask(f"one\n@@touch {tmp_path / 'mark'}\n@@hang")
        await exists(tmp_path / "mark")
        asked = time.time()
        late, patient = await session.ask("two", deadline=0.5), await session.ask("three", deadline=600)
        await session.leave(0.0)
    # A test cannot move the wall clock.
    await asyncio.sleep(max(0.0, asked + 0.5 - time.time()))
    async with Host(store=store) as host:
        session = await host.open("claude", name="it", command=command, options=QUICK)
        outcome = await (await session.turn(late.id)).outcome()
        assert (outcome.kind, outcome.clock) == (Kind.WITHDRAWN, "deadline")
        assert (await (await session.turn(patient.id)).outcome()).text == "three"
