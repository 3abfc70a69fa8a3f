"""Idempotency keys across restarts, also for turns that retention dropped."""

from __future__ import annotations

import asyncio
import gc
import weakref
from pathlib import Path
from typing import cast

from banksman import Host, Kind
from banksman.core.session.idempotency import IdempotencyKey
from banksman.core.session.turn import TurnPhase
from banksman.sessions.caller_futures import TURNS_MAX, KeyedTurns
from banksman.sessions.turn import Turn
from banksman.testing import fake_agent


async def test_key_still_tells_outcome_after_retention_took_its_turn(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path}/store.db?keep_bytes=2000"
    command = fake_agent.command(memory=tmp_path / "memory")
    async with Host(store) as host:
        session = await host.open("claude", name="a", command=command)
        first = await session.ask("first", key="k")
        assert (await first.outcome()).kind is Kind.DONE
        for _ in range(6):
            await (await session.ask("@@flood 300 200")).outcome()
    async with Host(store) as host, asyncio.timeout(10):
        session = await host.open("claude", name="a", command=command)
        again = await session.ask("first", key="k")
        assert again.id == first.id
        outcome = await again.outcome()
        assert (outcome.kind, outcome.text) == (Kind.DONE, None)
        assert "retention" in str(outcome.error)
        assert [update async for update in again] == []


async def test_old_turns_leave_memory_and_are_found_by_key(tmp_path: Path) -> None:
    async with Host(f"sqlite:{tmp_path}/store.db") as host:
        session = await host.open("claude", name="a", command=fake_agent.command())
        first = await session.ask("@@say first", key="first")
        id, reference = first.id, weakref.ref(first)
        del first
        for number in range(TURNS_MAX + 1):
            await (await session.ask(f"@@say {number}", key=f"k{number}")).outcome()
        gc.collect()
        assert reference() is None
        again = await session.ask("@@say first", key="first")
        assert again.id == id
        assert (await again.outcome()).text == "first"


async def test_key_of_waiting_turn_stays_in_memory_despite_later_keys(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    async with Host(f"sqlite:{tmp_path}/store.db") as host:
        session = await host.open("claude", name="a", command=fake_agent.command())
        first = await session.ask(f"@@wait {go_on}", key="first")
        others = [await session.ask("@@say so", key=f"k{number}") for number in range(TURNS_MAX + 1)]
        assert await session.ask(f"@@wait {go_on}", key="first") is first
        go_on.touch()
        assert {(await turn.outcome()).kind for turn in (first, *others)} == {Kind.DONE}


async def test_turn_whose_end_was_not_stored_does_not_keep_later_turns_in_memory() -> None:
    keys = KeyedTurns(())
    turns = [_Over(is_durable=number > 0) for number in range(2 * TURNS_MAX)]
    for number, turn in enumerate(turns):
        keys.remember(f"k{number}", (cast("Turn", turn), asyncio.get_running_loop().create_future()))
    assert len(keys._asked) == TURNS_MAX  # pyright: ignore[reportPrivateUsage]
    assert keys.get("k0") is not None


class _Over:
    """Ended turn."""

    state = TurnPhase.ENDED

    def __init__(self, *, is_durable: bool) -> None:
        self._is_durable = is_durable

    def stored_as(self, key: str) -> IdempotencyKey | None:
        return IdempotencyKey(key, "t-1", 0, Kind.DONE) if self._is_durable else None


async def test_turn_of_another_host_is_awaited_until_it_ends(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path}/store.db"
    go_on = tmp_path / "go-on"
    async with Host(store) as one, Host(store) as two:
        session = await one.open("claude", name="a", command=fake_agent.command())
        turn = await session.ask(f"@@wait {go_on}\n@@say so it is")
        there = await two.session("a").turn(turn.id)
        waiting = asyncio.ensure_future(there.outcome())
        go_on.touch()
        assert (await waiting).text == (await turn.outcome()).text == "so it is"
        assert there.state == "ended"
