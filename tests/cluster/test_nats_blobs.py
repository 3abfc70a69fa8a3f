"""Blobs on a real server: a read returns the whole blob or None, and never waits without an end."""

from __future__ import annotations

import asyncio
import os

import pytest
from tests.cluster.lines import SECONDS_MAX, Line, lines

from banksman.errors import StoreFull
from banksman.testing.nats_servers import Servers

PAGES_BYTES = 9 << 20  # More than two pages of a read, and not a whole number of parts.


async def chunks(line: Line, bucket: str) -> dict[str, int]:
    info = await line.nats.api(f"STREAM.INFO.OBJ_{bucket}", {"subjects_filter": f"$O.{bucket}.C.>"})
    return info["state"].get("subjects") or {}


async def test_blob_round_trips_large_and_empty_data(nats_one: Servers, prefix: str) -> None:
    bucket = f"{prefix}-blobs"
    data = os.urandom(PAGES_BYTES + 1)
    async with lines(nats_one, prefix, 1) as (line,):
        await line.nats.put_blob(bucket, "large", data)
        await line.nats.put_blob(bucket, "empty", b"")
        assert await line.nats.get_blob(bucket, "large") == data
        assert await line.nats.get_blob(bucket, "empty") == b""
        assert await line.nats.get_blob(bucket, "another") is None
        await line.nats.delete_blob(bucket, "large")
        assert await line.nats.get_blob(bucket, "large") is None


async def test_get_blob_returns_none_when_its_chunks_are_gone(nats_one: Servers, prefix: str) -> None:
    """As after an operator's purge, or when a session is deleted during a read."""
    bucket = f"{prefix}-blobs"
    async with lines(nats_one, prefix, 1) as (line,):
        await line.nats.put_blob(bucket, "large", bytes(PAGES_BYTES))
        ((subject, count),) = (await chunks(line, bucket)).items()
        for keep in (count - 1, 0):
            await line.nats.api(f"STREAM.PURGE.OBJ_{bucket}", {"filter": subject, "keep": keep})
            async with asyncio.timeout(SECONDS_MAX):
                assert await line.nats.get_blob(bucket, "large") is None


async def test_put_blob_raises_when_the_server_is_full(prefix: str) -> None:
    """A retry would wait until an operator makes room, and no operator would know of it."""
    bucket = f"{prefix}-blobs"
    with Servers(1, file_bytes_max=4 << 20) as servers:
        async with lines(servers, prefix, 1) as (line,):
            await line.nats.put_blob(bucket, "first", bytes(3 << 20))
            with pytest.raises(StoreFull, match="max_file_store"):
                await line.nats.put_blob(bucket, "second", bytes(3 << 20))
            await line.nats.delete_blob(bucket, "first")
            await line.nats.put_blob(bucket, "second", bytes(3 << 20))
