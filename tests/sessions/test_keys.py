"""Idempotency keys across restarts: also of what retention has taken."""

from __future__ import annotations

import asyncio
from pathlib import Path

from banksman import Host, Kind
from banksman.testing import fake_agent


async def test_a_key_whose_turn_retention_has_taken_still_says_how_it_ended(tmp_path: Path) -> None:
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


async def test_a_turn_of_another_host_is_waited_for_until_it_ends(tmp_path: Path) -> None:
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
