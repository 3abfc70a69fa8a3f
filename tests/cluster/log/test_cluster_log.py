"""Promises of the NATS log alone: leases, the fence, the journal, and data too large for a message."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.leases import LEASE_SECONDS, end_lease
from tests.store.kit import Writer, chunk, data, everything, known, outcomes, until
from tests.thorough import one_in

from banksman import Host
from banksman.cluster import nats
from banksman.cluster.http.host_view import HostView
from banksman.cluster.interfaces import HostReport
from banksman.cluster.jetstream import BatchMessage, StreamMessage
from banksman.cluster.log import ClusterLog, publisher
from banksman.cluster.log.message_codec import MESSAGE_BYTES_MAX
from banksman.cluster.store_address import parse
from banksman.errors import NotFound, NotOwner, StoreDamaged, StoreError, Unanswered, Unreachable, UsageError
from banksman.testing.nats_servers import Servers

CLAIMERS = 50


class Guarded:
    """Records the calls of the log."""

    def __init__(self) -> None:
        self.held: list[tuple[float, float]] = []
        self.lost: list[tuple[float, float]] = []
        self.error: NotOwner | None = None

    def on_held(self, fence_at: float, dead_by: float) -> None:
        self.held.append((fence_at, dead_by))

    def on_lost(self, error: NotOwner, dead_by: float) -> None:
        self.error = error
        self.lost.append((time.monotonic(), dead_by))


@asynccontextmanager
async def opened(servers: Servers, folder: Path, prefix: str, lease: float = 10) -> AsyncGenerator[ClusterLog]:
    log = ClusterLog(parse(servers.store(prefix, lease=lease)), folder)
    try:
        await log.ready()
        yield log
    finally:
        await log.close()


@pytest.mark.parametrize("nodes", one_in(2, ["nats_one", "nats_three"]))
async def test_concurrent_claims_of_fifty_hosts_have_one_winner(
    nodes: str, request: pytest.FixtureRequest, tmp_path: Path, prefix: str
) -> None:
    servers: Servers = request.getfixturevalue(nodes)
    logs = [ClusterLog(parse(servers.store(prefix, lease=300)), tmp_path) for _ in range(CLAIMERS)]
    try:
        await asyncio.gather(*(log.ready() for log in logs))
        for number in range(3):
            got = await outcomes(*(log.claim(f"s{number}", agent="claude") for log in logs))
            winners = [index for index, one in enumerate(got) if isinstance(one, int)]
            assert len(winners) == 1, got
            assert {type(one) for one in got if not isinstance(one, int)} == {NotOwner}
            owner = known(logs[winners[0]], f"s{number}").owner
            assert owner is not None
            assert owner.is_here
    finally:
        await asyncio.gather(*(log.close() for log in logs))


# Unanswered requests.


@pytest.mark.thorough
async def test_unanswered_append_is_stored_exactly_once(tmp_path: Path, prefix: str) -> None:
    with Servers(1) as servers:
        async with opened(servers, tmp_path, prefix, lease=30) as log:
            writer = await Writer.claim(log)
            await writer.commit(b"before")
            servers.stop(0)
            try:
                writer.append(b"a")
                writer.append(b"b")
                done = asyncio.ensure_future(writer.answers.all())
                # Long enough for the append to be sent, given up and sent again, all into the same socket.
                await asyncio.sleep(2.5)
                assert not done.done()
            finally:
                servers.cont(0)
            assert await done == [None, None, None]
            await writer.commit(b"after")
            assert data(await everything(log)) == [b"before", b"a", b"b", b"after"]


@pytest.mark.thorough
async def test_cut_off_host_is_fenced_at_six_tenths_of_its_lease_and_registers_anew(
    tmp_path: Path, prefix: str
) -> None:
    lease = 3.0
    with Servers(1) as servers:
        async with opened(servers, tmp_path, prefix, lease=lease) as log:
            guard = Guarded()
            log.guard(guard)
            writer = await Writer.claim(log)
            await writer.commit(b"a")
            first = log.hosts.id
            servers.stop(0)
            try:
                fence_at, dead_by = guard.held[-1]
                assert dead_by - fence_at == pytest.approx(0.4 * lease)
                journal = log._journal  # pyright: ignore[reportPrivateUsage]
                writer.append(b"unheard")
                async with asyncio.timeout(10):
                    while not (await journal.rows())[0]:  # noqa: ASYNC110  No event reports the file.
                        await asyncio.sleep(0.01)
                    writer.append(b"waits")
                    while not (await journal.rows())[1]:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                async with asyncio.timeout(10):
                    await until(lambda: bool(guard.lost))
                    assert await writer.answers.last() is not None
                at, told = guard.lost[-1]
                fence_at, dead_by = guard.held[-1]
                assert fence_at <= at
                assert told == dead_by
                with pytest.raises(Unreachable):
                    await log.claim("t", agent="claude")
            finally:
                servers.cont(0)
            async with asyncio.timeout(20):
                await until(lambda: log.hosts.is_held)
            assert log.hosts.id != first
            # The host has lost its sessions until it claims them again. Here it can, since there was no other host.
            writer.append(b"late")
            assert isinstance(await writer.answers.last(), NotOwner)
            async with asyncio.timeout(20):
                while True:
                    try:
                        again = await Writer.claim(log)
                        break
                    except NotOwner:
                        await asyncio.sleep(0.1)
            assert again.epoch > writer.epoch
            await again.commit(b"b")
            # The caller got a failure for the append in flight. The append has still found its place before the new
            # claim, and so has the append behind it.
            assert data(await everything(log)) == [b"a", b"unheard", b"waits", b"b"]
            assert await journal.rows() == ([], [])


async def test_expired_lease_is_seen_by_other_hosts_which_may_claim_its_session(
    nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    """The first owner is another process, which is killed."""
    async with opened(nats_one, tmp_path, prefix, lease=LEASE_SECONDS) as log:
        gone: list[str] = []
        log.hosts.on_gone(gone.append)
        with _child(nats_one, tmp_path / "child", prefix, "commit", lease=LEASE_SECONDS) as child:
            assert child.stdout is not None
            assert (await asyncio.to_thread(child.stdout.readline)).strip() == b"committed"
            async with asyncio.timeout(20):
                await until(lambda: (found := log.find("s")) is not None and found.owner is not None)
            with pytest.raises(NotOwner):
                await log.claim("s")
            child.kill()
            owner = known(log).owner
            assert owner is not None
            host = owner.address.partition("@")[0]
            await end_lease(nats_one.store(prefix, lease=LEASE_SECONDS), host)
            async with asyncio.timeout(20):
                await until(lambda: bool(gone))
            assert gone == [host]
            writer = await Writer.claim(log)
            assert data(await everything(log)) == [b"one"]
            await writer.commit(b"two")


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["ended", "deleted"])
async def test_lease_ended_by_the_servers_is_lost_despite_our_clock(
    how: str, nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    """As after the sleep of a machine whose clock stood still, and as after an operator deleted the whole stream."""
    async with opened(nats_one, tmp_path, prefix, lease=4) as log:
        guard = Guarded()
        log.guard(guard)
        writer = await Writer.claim(log)
        first, nats = log.hosts.id, log._nats  # pyright: ignore[reportPrivateUsage]
        if how == "ended":
            await nats.api(f"STREAM.PURGE.{prefix}-hosts", {"filter": f"{prefix}.host.{first}"})
        else:
            await nats.api(f"STREAM.DELETE.{prefix}-hosts", {})
        async with asyncio.timeout(20):
            await until(lambda: bool(guard.lost))
            await until(lambda: log.hosts.is_held)
            await until(lambda: [one.id for one in log.hosts.all()] == [log.hosts.id])
        assert log.hosts.id != first
        writer.append(b"late")
        assert isinstance(await writer.answers.last(), NotOwner)
        again = await Writer.claim(log)
        await again.commit(b"a")


@pytest.mark.thorough
async def test_full_servers_are_reported_instead_of_the_network(tmp_path: Path, prefix: str) -> None:
    with Servers(1, file_bytes_max=1 << 20) as servers:
        async with opened(servers, tmp_path, prefix, lease=2) as log:
            guard = Guarded()
            log.guard(guard)
            nats = log._nats  # pyright: ignore[reportPrivateUsage]
            await nats.api("STREAM.CREATE.filler", {"name": "filler", "subjects": ["filler"], "storage": "file"})
            filling = [nats.publish("filler", bytes(100 << 10)) for _ in range(12)]
            assert any(isinstance(each, StoreError) for each in await outcomes(*filling))
            async with asyncio.timeout(20):
                await until(lambda: bool(guard.lost))
            assert "refused the heartbeat" in str(guard.error)
            assert "resources" in str(guard.error)
            assert "network" not in str(guard.error)


async def test_cut_off_host_view_shows_other_hosts_as_silent(tmp_path: Path, prefix: str) -> None:
    with Servers(1) as servers:
        async with opened(servers, tmp_path, prefix, lease=1) as log:
            fleet = HostView(log.hosts, lambda: HostReport("one"))
            (host,) = fleet.all()
            assert not fleet.is_silent(host)
            servers.stop(0)
            try:
                async with asyncio.timeout(10):
                    await until(lambda: fleet.is_silent(fleet.all()[0]))
            finally:
                servers.cont(0)


# The journal.


@pytest.mark.thorough
@pytest.mark.parametrize("is_claimed", [False, True])
async def test_journal_of_dead_host_is_replayed_or_becomes_a_report(
    is_claimed: bool, tmp_path: Path, prefix: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "journals"
    lease = 10  # A busy machine must not cost the child its lease before it has noted everything.
    with Servers(1) as servers:
        with _child(servers, folder, prefix, "journal", lease) as child:
            assert child.stdout is not None
            assert (await asyncio.to_thread(child.stdout.readline)).strip() == b"committed"
            servers.stop(0)
            assert child.stdin is not None
            child.stdin.write(b"go\n")
            child.stdin.flush()
            assert (await asyncio.to_thread(child.stdout.readline)).strip() == b"journalled"
            child.kill()
        servers.kill(0)  # Bytes that the child has sent and the server has not read die with the server.
        servers.restart(0)
        servers.wait_ready()
        if is_claimed:
            async with opened(servers, tmp_path / "other", prefix, lease=lease) as other:
                async with asyncio.timeout(60):
                    while True:
                        try:
                            await (await Writer.claim(other)).commit(b"another's")
                            break
                        except NotOwner:
                            await asyncio.sleep(0.1)
        async with opened(servers, folder, prefix, lease=lease) as log:
            async with asyncio.timeout(60):
                mine = log._journal.path  # pyright: ignore[reportPrivateUsage]
                await until(lambda: list(folder.glob("*.journal")) == [mine])
            stored = data(await everything(log))
            reports = list((folder / "reports").glob("*")) if (folder / "reports").exists() else []
            if is_claimed:
                assert stored == [b"one", b"another's"]
                told = {
                    report: [json.loads(line)["data"] for line in report.read_text().splitlines()] for report in reports
                }
                noted = [f"noted {number}" for number in range(300)]
                assert sorted(told.values()) == [noted, ["two", "three"]]
                # The operator finds each file by the log.
                words = "events of a former owner were refused and moved to a report"
                lines = [text for text in caplog.messages if text.startswith(words)]
                assert len(lines) == len(reports)
                assert all(any(f"report={report})" in line for line in lines) for report in reports)
            else:
                assert stored == [b"one", b"two", b"three", *(b"noted %d" % number for number in range(300))]
                assert reports == []
        assert list(folder.glob("*.journal")) == []


async def test_servers_that_lost_acknowledged_events_are_detected_and_append_reported(
    nats_one: Servers, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "SHORT_SECONDS_MAX", 0.2)
    async with opened(nats_one, tmp_path, prefix) as log:
        writer = await Writer.claim(log)
        await writer.commit(b"one")
        await log._nats.api(f"STREAM.PURGE.{prefix}-events", {})  # pyright: ignore[reportPrivateUsage]
        writer.append(b"two")
        async with asyncio.timeout(10):
            assert isinstance(await writer.answers.last(), StoreDamaged)
        await log._journal.rows()  # pyright: ignore[reportPrivateUsage]
        (report,) = (tmp_path / "reports").iterdir()
        assert json.loads(report.read_text())["data"] == "two"


# Large data.


async def test_chunk_too_large_for_a_message_is_read_like_any_other(
    nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    large = os.urandom(3 << 20)
    async with opened(nats_one, tmp_path, prefix) as log, opened(nats_one, tmp_path, prefix) as other:
        writer = await Writer.claim(log)
        await writer.commit(b"small")
        await writer.commit(large, snapshot=b"s" * (MESSAGE_BYTES_MAX + 1))
        await writer.commit(b"after")
        assert data(await everything(other)) == [b"small", large, b"after"]
        assert await other.snapshot("s") == (2, b"s" * (MESSAGE_BYTES_MAX + 1))
        blobs = await log._nats.api(f"STREAM.INFO.OBJ_{prefix}-blobs", {})  # pyright: ignore[reportPrivateUsage]
        assert blobs["state"]["bytes"] > len(large)
        await log.delete("s")
        blobs = await log._nats.api(f"STREAM.INFO.OBJ_{prefix}-blobs", {})  # pyright: ignore[reportPrivateUsage]
        assert blobs["state"]["bytes"] < len(large)


@pytest.mark.parametrize("fault", ["answer to the erasure is late", "purge fails"])
async def test_delete_finishes_what_an_earlier_try_began(
    nats_one: Servers, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """A delete removes the record first.

    A second attempt finds no record and must still remove the blobs and the events.
    """
    async with opened(nats_one, tmp_path, prefix) as log, opened(nats_one, tmp_path, prefix) as other:
        writer = Writer(log, "s", await log.claim("s", name="named", agent="claude"), 0)
        await writer.commit(os.urandom(3 << 20))
        nats = log._nats  # pyright: ignore[reportPrivateUsage]
        publish_all, api = nats.publish_all, nats.api
        faults = [fault]

        async def late(writes: Sequence[BatchMessage], **how: Any) -> int:
            answer = await publish_all(writes, **how)
            if faults == ["answer to the erasure is late"] and not writes[0].data:
                faults.clear()
                raise Unanswered("the answer is late")
            return answer

        async def failing(verb: str, body: dict[str, Any], **how: Any) -> Any:
            if faults == ["purge fails"] and verb.startswith("STREAM.PURGE"):
                faults.clear()
                raise StoreError("the host dies here")
            return await api(verb, body, **how)

        monkeypatch.setattr(nats, "publish_all", late)
        monkeypatch.setattr(nats, "api", failing)
        if fault == "purge fails":
            with pytest.raises(StoreError):
                await log.delete("s")
            await other.delete("s")
        else:
            await log.delete("s")
        assert not faults
        assert await nats.last(f"{prefix}-events", f"{prefix}.ev.s") is None
        blobs = await api(f"STREAM.INFO.OBJ_{prefix}-blobs", {})
        assert blobs["state"]["bytes"] < 1 << 20
        # The id and the name can be used again. A late second delete does no harm.
        await other.delete("s")
        again = Writer(other, "s", await other.claim("s", name="named", agent="claude"), 0)
        await again.commit(b"new")
        assert data(await everything(other)) == [b"new"]


async def test_second_delete_removes_what_the_first_left_and_raises_not_found(
    nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    """A delete removes the record first, so a second attempt does not find the session."""
    async with Host(nats_one.store(prefix, lease=LEASE_SECONDS)) as host:
        await host.ready()
        log = host.log
        assert isinstance(log, ClusterLog)
        await Writer(log, "s", await log.claim("s", agent="claude"), 0).commit(b"said")
        nats = log._nats  # pyright: ignore[reportPrivateUsage]
        # As if the host had died right after this.
        await nats.publish(f"{prefix}.rec.session.s", b"")
        await until(lambda: log.find("s") is None)
        with pytest.raises(NotFound):
            await host.delete("s")
        assert await nats.last(f"{prefix}-events", f"{prefix}.ev.s") is None


async def test_rename_succeeds_when_its_answer_is_late(
    nats_one: Servers, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        await log.claim("s", name="before", agent="claude")
        nats = log._nats  # pyright: ignore[reportPrivateUsage]
        publish_all = nats.publish_all

        async def late(writes: Sequence[BatchMessage], **how: Any) -> int:
            await publish_all(writes, **how)
            monkeypatch.undo()
            raise Unanswered("the answer is late")

        monkeypatch.setattr(nats, "publish_all", late)
        await log.rename("s", "after", expected="before")
        assert known(log, "s").name == "after"
        # Without an unanswered attempt, a rename with an outdated expected name is refused as always.
        with pytest.raises(UsageError):
            await log.rename("s", "after", expected="before")


async def test_claim_succeeds_when_its_write_arrives_after_it_was_given_up(
    nats_one: Servers, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write arrives between two reads of the next attempt.

    The session is missing still, and its name is taken already.
    """
    async with opened(nats_one, tmp_path, prefix) as log:
        nats = log._nats  # pyright: ignore[reportPrivateUsage]
        publish_all, last = nats.publish_all, nats.last
        given_up: list[Sequence[BatchMessage]] = []

        async def unanswered(writes: Sequence[BatchMessage], **how: Any) -> int:
            given_up.append(writes)
            monkeypatch.setattr(nats, "publish_all", publish_all)
            raise Unanswered("the answer is late")

        async def arriving(stream: str, subject: str) -> StreamMessage | None:
            if given_up and ".name." in subject:
                await publish_all(given_up.pop())
            return await last(stream, subject)

        monkeypatch.setattr(nats, "publish_all", unanswered)
        monkeypatch.setattr(nats, "last", arriving)
        await log.claim("s", name="fix-ci", agent="claude")
        assert not given_up
        assert known(log, "s").name == "fix-ci"


@pytest.mark.parametrize("which", [1, 2], ids=["reserve", "show"])
async def test_restore_succeeds_when_the_answer_to_a_write_is_late(
    nats_one: Servers, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch, which: int
) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        nats = log._nats  # pyright: ignore[reportPrivateUsage]
        publish_all = nats.publish_all
        written = 0

        async def late(writes: Sequence[BatchMessage], **how: Any) -> int:
            nonlocal written
            seq = await publish_all(writes, **how)
            written += 1
            if written == which:
                raise Unanswered("the answer is late")
            return seq

        monkeypatch.setattr(nats, "publish_all", late)
        await log.restore("s", name="restored", agent="claude", chunks=lambda: [chunk(1, b"a")])
        assert written >= 2
        assert known(log, "s").name == "restored"
        assert data((await log.read("s", 0)).events) == [b"a"]


async def test_second_read_returns_events_committed_since_the_first(
    nats_one: Servers, tmp_path: Path, prefix: str
) -> None:
    async with opened(nats_one, tmp_path, prefix) as log, opened(nats_one, tmp_path, prefix) as other:
        writer = await Writer.claim(log)
        await writer.commit(b"a", b"b")
        assert data((await other.read("s", 0)).events) == [b"a", b"b"]
        await writer.commit(b"c")
        await writer.commit(b"d")
        await until(lambda: other.head("s").seq == 4)
        assert data((await other.read("s", 0)).events) == [b"a", b"b", b"c", b"d"]
        assert data((await other.read("s", 1, 2)).events) == [b"b", b"c"]


async def test_read_many_waits_for_a_lagging_replica(
    nats_one: Servers, tmp_path: Path, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(nats_one, tmp_path, prefix) as log:
        writer = await Writer.claim(log)
        await writer.commit(b"a")
        await writer.commit(b"b")
        nats = log._nats  # pyright: ignore[reportPrivateUsage]
        read, lags = nats.read, [0, 1, 0, 0]

        async def lagging(stream: str, first: int, subject: str, count: int) -> tuple[list[StreamMessage], int]:
            found, left = await read(stream, first, subject, count)
            return (found[: lags.pop(0)], 0) if lags else (found, left)

        monkeypatch.setattr(nats, "read", lagging)
        assert data([placed.event for placed in (await log.read_many(None, 10)).events]) == [b"a", b"b"]
        assert not lags


# Refusals.


async def test_host_with_another_lease_length_is_refused(nats_one: Servers, tmp_path: Path, prefix: str) -> None:
    async with opened(nats_one, tmp_path, prefix, lease=5):
        late = ClusterLog(parse(nats_one.store(prefix, lease=6)), tmp_path)
        with pytest.raises(UsageError, match="lease"):
            await late.ready()
        await late.close()


async def test_unreachable_cluster_raises_unreachable(tmp_path: Path) -> None:
    log = ClusterLog(parse("nats://127.0.0.1:1/nobody"), tmp_path)
    with pytest.raises(StoreError, match="not connected yet"):
        log.sessions()
    with pytest.raises(Unreachable, match=r"^cannot reach nats://127.0.0.1:1/nobody: connection refused \(start "):
        await log.ready()
    await log.close()


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connect call failed ('127.0.0.1', 1)"), "connection refused"),
        (OSError("Multiple exceptions: [Errno 111] Connect …, [Errno 111] Connect …"), "connection refused"),
        (
            OSError("Multiple exceptions: [Errno 111] a, [Errno 101] b"),
            "Multiple exceptions: [Errno 111] a, [Errno 101] b",
        ),
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "Name or service not known"),
        (TimeoutError(), "no answer in time"),
        (ValueError("odd"), "odd"),
        (ValueError(), "ValueError"),
    ],
)
def test_reason_of_a_failed_connection_is_in_words(error: Exception, words: str) -> None:
    assert nats._reason(error) == words  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize(
    "address",
    [
        "nats://",
        "nats://h:x",
        "nats://h/a b",
        "nats://h?lease=0",
        "nats://h?replicas=2",
        "nats://h?what=1",
        "nats://h,",
    ],
)
def test_address_parser_refuses_invalid_address(address: str) -> None:
    with pytest.raises(UsageError):
        parse(address)


def test_address_is_printed_without_credentials() -> None:
    address = parse("nats://me:secret@one:4222,two/team?lease=20&replicas=3")
    assert address.servers == ("nats://me:secret@one:4222", "nats://me:secret@two:4222")
    assert (address.prefix, address.lease, address.replicas) == ("team", 20.0, 3)
    assert "secret" not in str(address)


CHILD = """
import asyncio, sys
from pathlib import Path
from banksman.cluster.http.host_view import HostView
from banksman.cluster.store_address import parse
from banksman.cluster.log import ClusterLog
from tests.store.kit import Writer

async def main():
    log = ClusterLog(parse(sys.argv[1]), Path(sys.argv[2]))
    await log.ready()
    writer = await Writer.claim(log)
    await writer.commit(b"one")
    print("committed", flush=True)
    if sys.argv[3] == "journal":
        await asyncio.to_thread(sys.stdin.readline)
        writer.append(b"two")
        writer.append(b"three")
        while not (await log._journal.rows())[0]:
            await asyncio.sleep(0.01)
        for number in range(300):
            writer.append(b"noted %d" % number)
        while len((await log._journal.rows())[1]) < 300:
            await asyncio.sleep(0.01)
        print("journalled", flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def _child(servers: Servers, folder: Path, prefix: str, what: str, lease: float) -> subprocess.Popen[bytes]:
    """Start a host in another process. It lives for a minute at most."""
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, servers.store(prefix, lease=lease), str(folder), what],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[3],
    )
