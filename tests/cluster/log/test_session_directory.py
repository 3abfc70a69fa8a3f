"""Read many sessions from the end of the stream, and keep a position that is ahead of a lagging leader."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from banksman.cluster import store_address
from banksman.cluster.log import ClusterLog, session_directory
from banksman.cluster.log.event_reader import EventReader
from banksman.core.session.event import UPDATE
from banksman.errors import HistoryLost
from banksman.testing.nats_servers import Servers


async def test_read_many_of_no_sessions_returns_the_end_of_a_long_stream(
    nats_one: Servers, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream has more messages than the search for one page reads."""
    monkeypatch.setattr(session_directory, "PAGE_MESSAGES", 2)
    monkeypatch.setattr(session_directory, "LOOKED_MAX", 4)
    log = ClusterLog(store_address.parse(nats_one.store(prefix)), tmp_path)
    epoch = await log.claim("s", agent="claude")
    for seq in range(10):
        stored: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        log.append("s", epoch, seq, 1.0, [(None, UPDATE, b"{}")], stored.set_result)
        assert await stored is None
    end = (await log.read_many(None, 1, sessions=())).position
    assert not (await log.read_many(end)).events
    await log.close()


async def test_read_many_keeps_a_position_ahead_of_a_lagging_leader(
    nats_one: Servers, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A front end that has heard no message yet gets a client of another front end: as after a frozen leader."""
    log = ClusterLog(store_address.parse(nats_one.store(prefix)), tmp_path)
    epoch = await log.claim("s", agent="claude")
    stored: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    log.append("s", epoch, 0, 1.0, [(None, UPDATE, b"{}")], stored.set_result)
    assert await stored is None
    place = (await log.read_many(None)).position
    answers = iter([0, 0])
    real = EventReader.last_seq

    async def last_seq(reading: EventReader) -> int:
        answer = next(answers, None)
        return await real(reading) if answer is None else answer

    monkeypatch.setattr(session_directory, "BEHIND_SECONDS_BETWEEN", 0.01)
    other = ClusterLog(store_address.parse(nats_one.store(prefix)), tmp_path / "other")
    await other.ready()
    monkeypatch.setattr(EventReader, "last_seq", last_seq)
    looking = other._many  # pyright: ignore[reportPrivateUsage]
    looking._newest = looking._heads.newest = 0  # pyright: ignore[reportPrivateUsage]
    assert not (await other.read_many(place)).events
    assert next(answers, None) is None
    # A position of another store is refused in the end.
    monkeypatch.setattr(session_directory, "BEHIND_SECONDS_MAX", 0.05)
    with pytest.raises(HistoryLost):
        await other.read_many("ffff")
    await other.close()
    await log.close()
