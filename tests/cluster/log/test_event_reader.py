"""Reads of a follower on another host than the owner's."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from tests.store.kit import Writer

from banksman.cluster.log import ClusterLog
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import parse
from banksman.testing.nats_servers import Servers

EVENTS = 10


async def test_follower_reads_each_message_once_beside_other_sessions(
    nats_one: Servers, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = parse(nats_one.store(prefix, lease=60))
    owner, follower = ClusterLog(address, tmp_path), ClusterLog(address, tmp_path)
    reads: list[int] = []
    read = Nats.read

    async def counted(self: Nats, stream: str, first: int, subject: str, count: int, **more: int) -> object:
        reads.append(first)
        return await read(self, stream, first, subject, count, **more)

    try:
        await asyncio.gather(owner.ready(), follower.ready())
        writers = [await Writer.claim(owner, f"s{number}") for number in range(5)]
        for writer in writers:
            await writer.commit(b"first")
        await follower.wait_past("s2", 0)
        assert len((await follower.read("s2", 0)).events) == 1
        monkeypatch.setattr(Nats, "read", counted)
        for seq in range(1, EVENTS + 1):
            for writer in writers:
                await writer.commit(b"%d" % seq)
            async with asyncio.timeout(30):
                await follower.wait_past("s2", seq)
            (event,) = (await follower.read("s2", seq)).events
            assert event.data == b"%d" % seq
        # One read for each message: no search for the place of an event that follows the last one.
        assert len(reads) == EVENTS
    finally:
        await asyncio.gather(owner.close(), follower.close())
