"""Streams of a store: some are recreated after a deletion, and others must not be."""

from __future__ import annotations

import asyncio
import base64
from functools import partial
from pathlib import Path

import pytest
from tests.cluster.lines import SECONDS_MAX, until
from tests.cluster.log.test_cluster_log import opened
from tests.store.kit import Writer, chunk, data, everything

from banksman.cluster.log import ClusterLog, placement
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import parse
from banksman.errors import StoreDamaged, UsageError
from banksman.testing.nats_servers import Servers


def nats_of(log: ClusterLog) -> Nats:
    return log._nats  # pyright: ignore[reportPrivateUsage]


async def deleted(nats: Nats, stream: str) -> None:
    assert (await nats.api(f"STREAM.DELETE.{stream}", {})).get("success")


async def is_there(log: ClusterLog, stream: str) -> bool:
    return "error" not in await nats_of(log).api(f"STREAM.INFO.{stream}", {})


async def serve(log: ClusterLog) -> None:
    while True:
        job = await log.placement.next(["gpu"])
        assert await job.is_wanted()
        await job.done(b"here")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry soon after a queue did not answer."""
    monkeypatch.setattr(placement, "AGAIN_SECONDS", 0.05)


@pytest.mark.usefixtures("quick")
async def test_deleted_work_stream_is_recreated_by_placement(nats_one: Servers, tmp_path: Path, prefix: str) -> None:
    async with opened(nats_one, tmp_path, prefix) as front, opened(nats_one, tmp_path, prefix) as host:
        serving = asyncio.create_task(serve(host))
        try:
            assert await front.placement.place("s-1", ["gpu"], b"it", timeout=SECONDS_MAX) == b"here"
            await deleted(nats_of(front), f"{prefix}-work")
            assert await front.placement.place("s-2", ["gpu"], b"it", timeout=SECONDS_MAX) == b"here"
        finally:
            serving.cancel()
            await asyncio.wait((serving,))


@pytest.mark.usefixtures("quick")
async def test_deleted_work_stream_is_recreated_by_a_pull(nats_one: Servers, tmp_path: Path, prefix: str) -> None:
    async with opened(nats_one, tmp_path, prefix) as front, opened(nats_one, tmp_path, prefix) as host:
        await front.placement.resume("s-1", ["gpu"], 1)
        async with asyncio.timeout(SECONDS_MAX):
            await (await host.placement.next(["gpu"])).done()
            await deleted(nats_of(front), f"{prefix}-work")
            taking = asyncio.create_task(host.placement.next(["gpu"]))
            await until(partial(is_there, front, f"{prefix}-work"))
            await front.placement.resume("s-2", ["gpu"], 1)
            assert (await taking).session == "s-2"


async def refused(servers: Servers, folder: Path, prefix: str, missing: str) -> None:
    late = ClusterLog(parse(servers.store(prefix, lease=10)), folder)
    try:
        with pytest.raises(StoreDamaged, match=f": {prefix}-{missing} was deleted, and") as caught:
            await late.ready()
        assert "backup" in caught.value.hint
    finally:
        await late.close()


@pytest.mark.parametrize("missing", ["events", "records"])
async def test_store_missing_a_stream_is_refused_and_not_taken_as_empty(
    missing: str, nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        await (await Writer.claim(log)).commit(b"a")
    nats = Nats(parse(nats_one.store(prefix)), name="operator")
    await nats.connect()
    try:
        await deleted(nats, f"{prefix}-{missing}")
        await refused(nats_one, tmp_path, prefix, missing)
        # The refused start made no stream: the next start is refused in the same way.
        await refused(nats_one, tmp_path, prefix, missing)
        await deleted(nats, f"{prefix}-{'records' if missing == 'events' else 'events'}")
    finally:
        await nats.close()
    async with opened(nats_one, tmp_path, prefix) as log:
        await (await Writer.claim(log)).commit(b"b")
        assert data(await everything(log)) == [b"b"]


@pytest.mark.parametrize("missing", ["events", "records"])
async def test_store_with_an_interrupted_first_start_opens(
    missing: str, nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    """One of the two streams exists, and it is empty or holds only deleted sessions."""
    async with opened(nats_one, tmp_path, prefix) as log:
        if missing == "events":
            await (await Writer.claim(log)).commit(b"a")
            await log.delete("s")
    nats = Nats(parse(nats_one.store(prefix)), name="operator")
    await nats.connect()
    try:
        await deleted(nats, f"{prefix}-{missing}")
    finally:
        await nats.close()
    async with opened(nats_one, tmp_path, prefix) as log:
        await (await Writer.claim(log)).commit(b"b")


async def test_claim_and_restore_refuse_session_id_in_host_form(nats_one: Servers, tmp_path: Path, prefix: str) -> None:
    """Such a session would receive the questions to the host: the bus addresses both in the same way."""
    async with opened(nats_one, tmp_path, prefix) as log:
        id = f"host:{log.hosts.id}"
        with pytest.raises(UsageError, match="id of a host"):
            await log.claim(id, agent="claude")
        with pytest.raises(UsageError, match="id of a host"):
            await log.restore(id, name=None, agent="claude", chunks=lambda: [chunk(1, b"a")])
        assert log.sessions() == []


async def test_blob_of_session_never_collides_with_a_transcript(nats_one: Servers, tmp_path: Path, prefix: str) -> None:
    async with opened(nats_one, tmp_path, prefix) as log, opened(nats_one, tmp_path, prefix) as other:
        writer = await Writer.claim(log, "transcript")
        large = b"x" * (2 << 20)
        await writer.commit(large)
        listed = await nats_of(log).api(
            f"STREAM.INFO.OBJ_{prefix}-blobs", {"subjects_filter": f"$O.{prefix}-blobs.M.>"}
        )
        (meta,) = listed["state"]["subjects"]
        name = base64.urlsafe_b64decode(meta.rpartition(".")[2]).decode()
        assert name.startswith("transcript.")
        await log.transcripts.put(name.removeprefix("transcript."), b"another's")
        # Read by another handle: the writer has the data in memory.
        assert data(await everything(other, "transcript")) == [large]


@pytest.mark.parametrize("lease", [4.1, 8.2, 16.9, 32.3])
async def test_fractional_lease_is_accepted_by_the_second_host(
    nats_one: Servers, tmp_path: Path, prefix: str, lease: float
) -> None:
    """The float 4.1 is slightly more than 4.1. Truncated to whole nanoseconds it differed from the requested lease."""
    async with opened(nats_one, tmp_path, prefix, lease), opened(nats_one, tmp_path, prefix, lease):
        pass
    with pytest.raises(UsageError, match="lease"):
        async with opened(nats_one, tmp_path, prefix, lease + 0.1):
            pass
