"""Lookup of a turn by its id: the number of events read does not grow with the log."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.helpers import QUICK, opened

from banksman import Host, Kind, NotFound
from banksman.store.log_values import READ_EVENTS_MAX, Page
from banksman.store.memory import MemoryLog
from banksman.store.sqlite import SqliteLog
from banksman.testing import fake_agent


@contextmanager
def counting_reads(engine: type[MemoryLog] | type[SqliteLog]) -> Generator[list[int]]:
    """Record the number of events of each read."""
    read, counts = engine.read, list[int]()

    async def counted(self: Any, *args: Any, **how: Any) -> Page:
        page = await read(self, *args, **how)
        counts.append(len(page.events))
        return page

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "read", counted)
        yield counts


@pytest.mark.parametrize("engine", [MemoryLog, SqliteLog])
async def test_turn_lookup_reads_no_more_with_longer_history(
    tmp_path: Path, engine: type[MemoryLog] | type[SqliteLog]
) -> None:
    store = "memory:" if engine is MemoryLog else f"sqlite:{tmp_path / 'store.db'}"
    async with Host(store) as host, opened(tmp_path, host=host) as case:
        turn = await case.ask("first")
        await case.outcome(turn)
        read: list[tuple[int, int]] = []
        for _ in range(2):
            await case.answer(f"@@stream {READ_EVENTS_MAX + 500} 0")
            with counting_reads(engine) as found:
                outcome = await (await case.session.turn(turn.id)).outcome()
            assert outcome.kind is Kind.DONE
            with counting_reads(engine) as missed, pytest.raises(NotFound):
                await case.session.turn("t-unknown")
            read.append((sum(found), sum(missed)))
        # The page in which the turn ended, and the events behind it.
        assert read[0] == read[1]
        assert read[1][0] <= READ_EVENTS_MAX
        assert read[1][1] == 0


async def test_turn_lookup_reads_long_turn_from_its_end(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        turn = await case.ask(f"@@stream {READ_EVENTS_MAX * 2} 0")
        outcome = await case.outcome(turn)
        with counting_reads(SqliteLog) as found:
            assert await (await case.session.turn(turn.id)).outcome() == outcome
        assert sum(found) < 10


async def test_turn_lookup_in_unowned_session_reads_from_its_end(tmp_path: Path) -> None:
    store = f"sqlite:{tmp_path / 'store.db'}"
    async with Host(store) as host:
        session = await host.open("claude", command=fake_agent.command(), options=QUICK, name="s")
        turn = await session.ask(f"@@stream {READ_EVENTS_MAX * 2} 0")
        outcome = await turn.outcome()
        async with Host(store) as other:
            found = await other.session("s").turn(turn.id)
            with counting_reads(SqliteLog) as reads:
                assert (await found.outcome()).kind is outcome.kind
            assert sum(reads) < 10


async def test_question_lookup_does_not_read_whole_log(tmp_path: Path) -> None:
    async with opened(tmp_path) as case:
        for _ in range(6):
            await case.answer("@@stream 2000 0")
        with counting_reads(SqliteLog) as reads, pytest.raises(NotFound):
            await case.session.answer("made-up", "allow")
        assert sum(reads) <= 10_000
        with counting_reads(SqliteLog) as reads, pytest.raises(NotFound):
            await case.session.answer("q-1.5", "allow")
        assert sum(reads) <= READ_EVENTS_MAX
