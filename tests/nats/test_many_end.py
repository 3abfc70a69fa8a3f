"""Who reads many sessions from now on begins at the end, however long the stream is."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from banksman.core.event import UPDATE
from banksman.store import address
from banksman.store.cluster import ClusterLog, many
from banksman.testing.nats_servers import Servers


async def test_the_place_behind_all_is_behind_all(
    nats_one: Servers, prefix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More messages than are looked through for one page."""
    monkeypatch.setattr(many, "PAGE_MESSAGES", 2)
    monkeypatch.setattr(many, "LOOKED_MAX", 4)
    log = ClusterLog(address.parse(nats_one.store(prefix)), tmp_path)
    epoch = await log.claim("s", agent="claude")
    for seq in range(10):
        stored: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
        log.append("s", epoch, seq, 1.0, [(None, UPDATE, b"{}")], stored.set_result)
        assert await stored is None
    end = (await log.read_many(None, 1, sessions=())).position
    assert not (await log.read_many(end)).events
    await log.close()
