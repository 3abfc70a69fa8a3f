"""Foreign messages under the subjects of a store damage their session and no other."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.cluster.lines import until
from tests.cluster.log.test_cluster_log import opened
from tests.store.kit import Writer, data, everything, everything_placed

from banksman.cluster.log import ClusterLog
from banksman.cluster.log.message_codec import HEADER, MESSAGE_BYTES_MAX
from banksman.cluster.nats import Nats
from banksman.errors import StoreDamaged
from banksman.testing.nats_servers import Servers

NONE_OF_OURS: list[dict[str, str]] = [{}, {HEADER: "something else"}, {HEADER: "1 2 3 4 five -"}]


def nats_of(log: ClusterLog) -> Nats:
    return log._nats  # pyright: ignore[reportPrivateUsage]


async def removed(log: ClusterLog, stream: str, seq: object) -> None:
    """Remove a message as the hint says."""
    assert (await nats_of(log).api(f"STREAM.MSG.DELETE.{stream}", {"seq": seq})).get("success")


@asynccontextmanager
async def two(servers: Servers, folder: Path, prefix: str) -> AsyncGenerator[tuple[ClusterLog, ClusterLog]]:
    async with opened(servers, folder, prefix) as log, opened(servers, folder, prefix) as another:
        yield log, another


@pytest.mark.parametrize("headers", NONE_OF_OURS)
async def test_foreign_last_message_damages_its_session_until_removed(
    nats_one: Servers, tmp_path: Path, prefix: str, headers: dict[str, str]
) -> None:
    async with two(nats_one, tmp_path, prefix) as (log, another):
        writer = await Writer.claim(log)
        await writer.commit(b"a")
        await nats_of(log).publish(f"{prefix}.ev.s", b"garbage", headers=headers)
        # The owner that appends, a reader, and the next claimer.
        writer.append(b"b")
        refused = await writer.answers.last()
        assert isinstance(refused, StoreDamaged)
        assert refused.ids["subject"] == f"{prefix}.ev.s"
        assert f"rmm {prefix}-events {refused.ids['seq']}" in refused.hint
        with pytest.raises(StoreDamaged, match="it is foreign or incomplete"):
            await another.read("s", 0)
        log.release("s", writer.epoch)
        with pytest.raises(StoreDamaged):
            await log.claim("s")
        # The failed claim leaves it without an owner.
        await removed(log, f"{prefix}-events", refused.ids["seq"])
        writer = await Writer.claim(another)
        await writer.commit(b"c")
        assert data(await everything(another)) == data(await everything(log)) == [b"a", b"c"]


async def test_malformed_body_in_stream_raises_store_damaged(nats_one: Servers, tmp_path: Path, prefix: str) -> None:
    async with two(nats_one, tmp_path, prefix) as (log, another):
        writer = await Writer.claim(log)
        await nats_of(log).publish(f"{prefix}.ev.s", b"\xc1", headers={HEADER: f"{writer.epoch} 1 1 0 1.0 -"})
        with pytest.raises(StoreDamaged):
            await another.read("s", 0)
        assert not (await another.read_many(None)).events


async def test_read_many_skips_foreign_messages_and_logs_once(
    nats_one: Servers, tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with two(nats_one, tmp_path, prefix) as (log, another):
        writer = await Writer.claim(log)
        await writer.commit(b"a")
        for part, headers in (("nobody", {}), ("s2", {HEADER: "?"}), ("nobody", {})):
            await nats_of(log).publish(f"{prefix}.ev.{part}", b"garbage", headers=headers)
        other = await Writer.claim(log, "s3")
        await other.commit(b"b")
        with caplog.at_level(logging.WARNING, "banksman"):
            for _ in range(3):
                assert data([placed.event for placed in await everything_placed(another)]) == [b"a", b"b"]
            # Foreign subjects: no session has this name.
            assert not caplog.messages
            position = (await another.read_many(None)).position
            waiting = asyncio.ensure_future(another.wait_past_position(position))
            seq = await nats_of(log).publish(f"{prefix}.ev.s3", b"garbage", headers={})
            await until(lambda: [text for text in caplog.messages if f"message {seq} " in text])
            assert not waiting.done()
            await writer.commit(b"c")
            await waiting
            for _ in range(3):
                assert data([placed.event for placed in await everything_placed(another)]) == [b"a", b"b", b"c"]
            assert len(caplog.messages) == 1


async def test_unreadable_session_can_be_deleted_with_its_blobs(nats_one: Servers, tmp_path: Path, prefix: str) -> None:
    async with two(nats_one, tmp_path, prefix) as (log, another):
        writer = await Writer.claim(log)
        await writer.commit(b"x" * 2 * MESSAGE_BYTES_MAX)
        await nats_of(log).publish(f"{prefix}.ev.s", b"garbage", headers={})
        await log.delete("s")
        blobs = await nats_of(log).api(f"STREAM.INFO.OBJ_{prefix}-blobs", {"subjects_filter": f"$O.{prefix}-blobs.C.>"})
        assert not blobs["state"].get("subjects")
        writer = await Writer.claim(another)
        await writer.commit(b"a")
        assert data(await everything(log)) == [b"a"]


async def test_malformed_session_record_damages_only_its_session(
    nats_one: Servers, tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with two(nats_one, tmp_path, prefix) as (log, another):
        await Writer.claim(log)
        subject = f"{prefix}.rec.session.s"
        seq = await nats_of(log).publish(subject, b"{garbage")
        for _ in range(3):
            with pytest.raises(StoreDamaged, match=subject):
                await another.claim("s")
        with pytest.raises(StoreDamaged, match=subject):
            await another.rename("s", "name", expected=None)
        # The reason for the missing owner names the damaged record, not a missing session.
        assert subject in (another.stuck_of("s") or "")
        assert another.find("s") is not None
        lines = [text for text in caplog.messages if subject in text]
        assert len(lines) <= 2, "one of each handle"
        assert all(text.startswith("session record ignored: ") for text in lines)
        # A host that starts later reports damage too, not an unknown session.
        async with opened(nats_one, tmp_path, prefix) as late:
            with pytest.raises(StoreDamaged, match=subject):
                await late.look_for("s")
        writer = await Writer.claim(another, "s2")
        await writer.commit(b"a")
        await removed(log, f"{prefix}-records", seq)
        await another.look_for("s")


@pytest.mark.parametrize("garbage", [b"\xff\xfe", b"nobody"])
async def test_malformed_name_record_raises_damage_until_removed(
    nats_one: Servers, tmp_path: Path, prefix: str, garbage: bytes
) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        subject = f"{prefix}.rec.name.blue"
        seq = await nats_of(log).publish(subject, garbage)
        with pytest.raises(StoreDamaged, match=subject):
            await log.claim("s", name="blue", agent="claude")
        await log.claim("s2", name="green", agent="claude")
        await removed(log, f"{prefix}-records", seq)
        await log.claim("s", name="blue", agent="claude")


async def test_malformed_lease_record_damages_only_its_key(nats_one: Servers, tmp_path: Path, prefix: str) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        writer, other = await Writer.claim(log), await Writer.claim(log, "s2")
        await nats_of(log).publish(f"{prefix}.rec.lease.talk", b"5")
        assert isinstance(await writer.take("talk"), StoreDamaged)
        assert await other.take("another") is None


async def test_malformed_epoch_floor_is_damage_until_repaired(nats_one: Servers, tmp_path: Path, prefix: str) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        writer = await Writer.claim(log)
        subject = f"{prefix}.rec.meta.deleted"
        await nats_of(log).publish(subject, b"x")
        with pytest.raises(StoreDamaged, match=subject) as caught:
            await log.claim("s2", agent="claude")
        assert f"nats pub {subject} 1000000" in caught.value.hint
        # Existing sessions continue.
        await writer.commit(b"a")
        await nats_of(log).publish(subject, b"1000000")
        assert await log.claim("s2", agent="claude") == 1_000_001
