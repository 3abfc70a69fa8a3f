"""Coalesced messages of the NATS log: frames wait for others, and calls that somebody waits for do not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.store.kit import Writer, data, everything, until

from banksman.cluster.log import ClusterLog, cluster_parts, session_queues
from banksman.cluster.log.journal import Journal
from banksman.cluster.log.journal_file import JournalRow
from banksman.cluster.log.message_codec import EVENTS_MAX
from banksman.cluster.store_address import parse
from banksman.core.session.event import RECITED, TURN_ENDED, UPDATE, Entry
from banksman.errors import StoreError
from banksman.testing.nats_servers import Servers

URGENT: Entry = ("t-1", TURN_ENDED, b"ended")


@pytest.fixture(autouse=True)
def endless_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let frames wait for longer than the test takes, so that only another call ends the wait."""
    monkeypatch.setattr(session_queues, "MESSAGE_COALESCE_SECONDS", 600.0)


@asynccontextmanager
async def opened(servers: Servers, folder: Path, prefix: str) -> AsyncGenerator[ClusterLog]:
    log = ClusterLog(parse(servers.store(prefix, lease=60)), folder)
    try:
        await log.ready()
        yield log
    finally:
        await log.close()


async def a_while() -> None:
    """Wait for several passes of the loop, and longer than a message takes."""
    await asyncio.sleep(0.1)


async def test_frames_of_a_window_are_one_message_with_the_call_that_ends_it(
    nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        writer = await Writer.claim(log)
        for frame in (b"a", b"b", b"c"):
            writer.append(("t-1", RECITED if frame == b"b" else UPDATE, frame))
            await a_while()
        assert writer.answers.given == []
        writer.append(URGENT)
        assert await writer.answers.all() == [None] * 4
        assert log.counters()["commits"] == 1
        assert data(await everything(log)) == [b"a", b"b", b"c", b"ended"]


async def test_call_that_cannot_wait_takes_frames_of_all_sessions_along(
    nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        one, other = await Writer.claim(log, "one"), await Writer.claim(log, "other")
        one.append(b"frame")
        await a_while()
        assert one.answers.given == []
        other.append(URGENT)
        assert await one.answers.all() == [None]
        assert await other.answers.all() == [None]


async def in_flight() -> None:
    """Return when an urgent message is in flight: one pass of the loop starts its queue, the next one sends it."""
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_frames_behind_a_message_in_flight_wait_unless_they_fill_a_message(
    nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    half = EVENTS_MAX // 2 + 1
    async with opened(nats_one, tmp_path, prefix) as log:
        writer = await Writer.claim(log)
        writer.append(URGENT)
        await in_flight()
        for _ in range(3):
            writer.append(*[b"x"] * half)
        # Two of them fill a message. The third one could share a message with more.
        await until(lambda: len(writer.answers.given) == 3)
        await a_while()
        assert len(writer.answers.given) == 3
        writer.append(URGENT)
        assert await writer.answers.all() == [None] * 5
        assert log.counters()["commits"] == 4


async def test_frame_behind_a_message_in_flight_is_stored_without_another_call(
    nats_one: Servers, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_queues, "MESSAGE_COALESCE_SECONDS", 0.01)
    async with opened(nats_one, tmp_path, prefix) as log:
        writer = await Writer.claim(log)
        writer.append(URGENT)
        await in_flight()
        writer.append(b"frame")
        async with asyncio.timeout(20):
            assert await writer.answers.all() == [None, None]


async def test_close_stores_frames_that_wait(nats_one: Servers, tmp_path: Path, prefix: str) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        writer = await Writer.claim(log)
        writer.append(b"waits")
        await a_while()
        assert writer.answers.given == []
    assert await writer.answers.all() == [None]
    async with opened(nats_one, tmp_path, prefix) as log:
        assert data(await everything(log)) == [b"waits"]


async def test_messages_behind_one_sequence_have_different_ids(nats_one: Servers, tmp_path: Path, prefix: str) -> None:
    """Servers deduplicate by the id. Two logs on one host must not share them either."""
    async with opened(nats_one, tmp_path, prefix) as log, opened(nats_one, tmp_path, prefix) as other:
        found = [each._lines._writing.nonces for each in (log, other)]  # pyright: ignore[reportPrivateUsage]
        nonces = [next(nonce) for nonce in found for _ in range(100)]
        assert len(set(nonces)) == 200
        assert not any("." in nonce for nonce in nonces)


async def test_tail_ends_when_this_host_no_longer_owns_the_session(
    nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        writer = await Writer.claim(log)
        writer.append(URGENT)
        assert await writer.answers.all() == [None]
        woken: list[bool] = []
        tail = log.tail("s", lambda: woken.append(True))
        assert tail is not None
        writer.release()
        async with asyncio.timeout(20):
            await until(lambda: not tail.is_live)
        assert woken == [True]
        # Another host may write now, so its readers ask the servers.
        assert log.tail("s", lambda: None) is None
        assert log.recent("s", 0, 10) is None


async def test_stopped_queue_does_not_start_again_for_frames_that_wait(
    nats_one: Servers, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_queues, "MESSAGE_COALESCE_SECONDS", 0.0)
    monkeypatch.setattr(cluster_parts, "CLOSE_SECONDS_MAX", 0.05)

    async def never(_: Journal, row: JournalRow) -> None:
        await asyncio.Event().wait()

    before = asyncio.all_tasks()
    async with asyncio.timeout(20), opened(nats_one, tmp_path, prefix) as log:
        writer = await Writer.claim(log)
        monkeypatch.setattr(Journal, "put", never)
        writer.append(URGENT)
        await a_while()  # The message is in flight.
        writer.append(b"frame")
    assert await writer.answers.all() == [StoreError, StoreError]
    await a_while()
    assert asyncio.all_tasks() == before
