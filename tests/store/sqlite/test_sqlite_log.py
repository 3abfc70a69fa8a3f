"""Log in an SQLite file: the conformance suite, and the behaviour that is specific to this engine.

`test_open_file` covers the creation, opening, migration and refusal of the file. `test_sqlite_log_processes` covers
several processes, and `test_crash` their death.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import threading
import time
import weakref
from collections.abc import Collection, Iterator
from operator import itemgetter
from pathlib import Path

import pytest

from banksman.errors import NotOwner, StoreBusy, StoreDamaged, StoreError, StoreFull
from banksman.store.log import Log
from banksman.store.log_values import Chunk, Head, Snapshot
from banksman.store.sqlite import SqliteLog, open_file
from banksman.store.sqlite.operations import LOST_CHUNKS_MAX, WriterContext
from banksman.store.sqlite.pages import CHUNK_BYTES

pytest.register_assert_rewrite("tests.store.conformance")

from tests.store.conformance import (  # noqa: E402
    AT,
    Answers,
    LogConformance,
    SharedLogConformance,
    Writer,
    chunk,
    data,
    everything,
    everything_placed,
    follow,
    known,
    lines,
)


class TestSqliteLog(LogConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.paths = (tmp_path / f"{number}.db" for number in range(10**6))

    async def open_log(self, *, retained_bytes: int | None = None) -> Log:
        return SqliteLog(next(self.paths), bytes_max=retained_bytes)


class TestSharedSqliteLog(SharedLogConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path / "store.db"

    async def open_pair(self) -> tuple[Log, Log]:
        return SqliteLog(self.path), SqliteLog(self.path)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def work_of(log: SqliteLog) -> WriterContext:
    return log._bridge._work  # pyright: ignore[reportPrivateUsage]


def change(path: Path, *statements: str) -> None:
    """Change the file through another connection."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


# -- commits ---------------------------------------------------------------------------------------------------------
async def test_group_commit_is_one_transaction_with_one_update_per_session(path: Path) -> None:
    log = SqliteLog(path)
    writers = [await Writer.claim(log, name) for name in "abc"]
    said: list[str] = []
    work_of(log).connection.set_trace_callback(said.append)
    # The writer thread blocks at its next BEGIN, so it cannot take one operation before the others are queued.
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writers[0].append(b"first, and waits for the lock")
        for _ in range(5):
            for writer in writers:
                writer.append(b"x")
        other.execute("ROLLBACK")
    for writer in writers:
        assert set(await writer.answers.all()) == {None}
    work_of(log).connection.set_trace_callback(None)
    # The first operation may have been taken alone. All others came together.
    assert 1 <= said.count("COMMIT") <= 2
    assert len([one for one in said if one.startswith("UPDATE sessions")]) <= 4
    assert len([one for one in said if one.startswith("INSERT INTO chunks")]) == 16
    await log.close()


async def test_group_commit_refuses_only_the_append_that_does_not_fit(path: Path) -> None:
    log = SqliteLog(path)
    writers = [await Writer.claim(log, name) for name in "abcde"]
    for writer in writers:
        await writer.commit(b"before")
    failures = log.counters()["failures"]
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for writer in writers:
            writer.append(b"x", seq=7 if writer.session == "c" else None)
        other.execute("ROLLBACK")
    for writer in writers:
        (_, answer) = await writer.answers.all()
        assert (answer is None) is (writer.session != "c"), writer.session
        assert log.head(writer.session).seq == (1 if writer.session == "c" else 2)
    assert log.counters()["failures"] == failures
    await log.close()


async def test_group_commit_keeps_no_snapshot_of_a_refused_append(path: Path) -> None:
    log = SqliteLog(path)
    writers = [await Writer.claim(log, name) for name in "abc"]
    for writer in writers:
        await writer.commit(b"before")
    stale = writers[2]
    again = await Writer.claim(log, "c")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        for writer in writers[:2]:
            writer.append(b"x")
        stale.append(snapshot=b"stale")
        other.execute("ROLLBACK")
    assert (await stale.answers.all())[-1] is not None
    assert await log.snapshot("c") is None
    assert again.epoch == log.head("c").epoch
    await log.close()


async def test_failed_transaction_fails_its_whole_group_until_answered(path: Path) -> None:
    log = SqliteLog(path)
    one, two = await Writer.claim(log, "one"), await Writer.claim(log, "two")
    await one.commit(b"a")
    # SQLite's limit on the file stands for a full disk.
    pages = work_of(log).row("PRAGMA page_count")[0]
    await log._bridge.call(lambda work: work.execute(f"PRAGMA max_page_count = {pages}").fetchall())  # pyright: ignore[reportPrivateUsage]
    one.append(b"x" * 100_000)
    one.append(b"behind")
    one.append(b"would fit", seq=1)
    two.append(b"y" * 100_000)
    assert await one.answers.all() == [None, StoreFull, *[one.answers.kinds[2]] * 2]
    assert one.answers.kinds[2] in {StoreFull, NotOwner}
    assert await two.answers.all() == [StoreFull]
    assert [log.head(name).seq for name in ("one", "two")] == [1, 0]
    await log._bridge.call(lambda work: work.execute("PRAGMA max_page_count = 1000000").fetchall())  # pyright: ignore[reportPrivateUsage]
    one.append(b"b", seq=1)
    two.append(b"c", seq=0)
    assert await one.answers.last() is None
    assert await two.answers.last() is None
    assert data(await everything(log, "one")) == [b"a", b"b"]
    await log.close()


async def test_append_behind_a_failed_transaction_is_refused_though_it_would_fit(path: Path) -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    await writer.commit(b"a")
    performed = threading.Event()

    def make_room(work: WriterContext) -> None:
        work.execute("PRAGMA max_page_count = 1000000").fetchall()
        performed.set()

    pages = work_of(log).row("PRAGMA page_count")[0]
    await log._bridge.call(lambda work: work.execute(f"PRAGMA max_page_count = {pages}").fetchall())  # pyright: ignore[reportPrivateUsage]
    writer.append(b"x" * 100_000)
    room = asyncio.ensure_future(log._bridge.call(make_room, is_alone=True))  # pyright: ignore[reportPrivateUsage]
    # One pass of the loop makes the call, and the next one passes it on.
    for _ in range(2):
        await asyncio.sleep(0)
    # The loop is blocked meanwhile: the failure has happened, and is not reported yet.
    assert performed.wait(30)
    writer.append(b"it would fit", seq=1)
    assert await writer.answers.all() == [None, StoreFull, NotOwner]
    await room
    writer.append(b"b", seq=1)
    assert await writer.answers.last() is None
    await log.close()


async def test_append_raises_store_busy_when_write_lock_is_held(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_file, "BUSY_SECONDS_MAX", 0.05)
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    await writer.commit(b"a")
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writer.append(b"b")
        error = await writer.answers.last()
        assert isinstance(error, StoreBusy)
        assert error.hint
        with pytest.raises(StoreBusy):
            await log.claim("another", agent="claude")
        # Reads do not wait for the write lock.
        assert data((await log.read("s", 0)).events) == [b"a"]
        other.execute("ROLLBACK")
    writer.append(b"b", seq=1)
    assert await writer.answers.last() is None
    await log.close()


async def test_cancelled_claim_leaves_session_unowned(path: Path) -> None:
    log, other = SqliteLog(path), SqliteLog(path)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        claim = asyncio.ensure_future(log.claim("s", agent="claude"))
        await asyncio.sleep(0)
        claim.cancel()
        with pytest.raises(asyncio.CancelledError):
            await claim
        holder.execute("ROLLBACK")
    # These calls are queued behind the claim, and behind its release.
    await log.claim("t", agent="claude")
    await log.claim("t", agent="claude")
    assert known(log).owner is None
    assert await other.claim("s", agent="claude") > 1
    await asyncio.gather(log.close(), other.close())


async def test_idle_threads_keep_nothing_of_the_callers_they_served(path: Path) -> None:
    log = SqliteLog(path, level="full")  # So the thread writes everything.
    writer = await Writer.claim(log)
    answers = writer.answers
    callback = answers.done()
    reference = weakref.ref(callback)
    log.advance(writer.session, writer.epoch, callback)
    del callback
    await answers.all()
    # The thread has passed the group on, and waits for the next one a moment later.
    deadline = time.monotonic() + 10
    while reference() is not None and time.monotonic() < deadline:  # noqa: ASYNC110  No event marks that moment.
        await asyncio.sleep(0)
    assert reference() is None
    await log.close()


async def test_restore_propagates_callers_error_and_leaves_nothing(path: Path) -> None:
    log = SqliteLog(path)

    def chunks() -> Iterator[Chunk]:
        yield chunk(1, b"a")
        raise FileNotFoundError("of the bundle")

    waiting = asyncio.ensure_future(log.claim("before", agent="claude"))
    with pytest.raises(FileNotFoundError, match="of the bundle"):
        await log.restore("s", name=None, agent="", chunks=chunks)
    assert await waiting == 1
    assert log.find("s") is None
    assert await everything_placed(log) == []
    await log.close()


# -- retention -------------------------------------------------------------------------------------------------------
async def test_retention_by_bytes_is_exact_and_stops_at_the_snapshot(path: Path) -> None:
    probe = SqliteLog(path)
    writer = await Writer.claim(probe)
    await writer.commit(b"." * 1000)
    weight = work_of(probe).row("SELECT bytes FROM sessions")[0]
    assert weight == work_of(probe).row("SELECT length(blob) FROM chunks")[0] + CHUNK_BYTES
    await probe.close()
    log = SqliteLog(path, bytes_max=3 * weight)
    writer = await Writer.claim(log)
    for _ in range(4):
        await writer.commit(b"." * 1000)
    assert log.head("s").first == 1  # Without a snapshot no event may be dropped.
    await writer.commit(b"." * 1000, snapshot=b"at 6")
    assert log.head("s") == Head(writer.epoch, 6, 4)
    await writer.commit(b"." * 1000)
    assert log.head("s").first == 5
    for _ in range(4):
        await writer.commit(b"." * 1000)
    # The snapshot covers the events up to 6, so all events from 7 on are kept.
    assert log.head("s") == Head(writer.epoch, 11, 7)
    page = await log.read("s", 2)
    assert page.gap == (3, 6)
    assert [event.seq for event in page.events] == [7, 8, 9, 10, 11]
    assert (await log.read_many(None)).gaps == {"s": 6}
    await log.close()


async def test_retention_by_age_drops_old_chunks_but_never_the_newest(path: Path) -> None:
    log = SqliteLog(path, seconds_max=3600)
    writer = await Writer.claim(log)
    for age in (7300, 3700, 3500, 10):
        writer.append(b"x", at=time.time() - age)
    await writer.commit(b"y", snapshot=b"at 5")  # The time of this event is years ago.
    assert log.head("s").first == 3
    old = await Writer.claim(log, "old")
    await old.commit(b"a", snapshot=b"at 1")
    await old.commit(b"b", snapshot=b"at 2")
    assert data((await log.read("old", 0)).events) == [b"b"]
    await log.close()


async def test_deleted_history_is_erased_from_the_files(path: Path) -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    secret = b"the secret of the deleted one"
    for _ in range(20):
        await writer.commit(secret * 500, snapshot=secret * 300)
    await log.trim("s", 5)
    await (await Writer.claim(log, "other")).commit(b"something else")

    def found() -> list[str]:
        return [file.name for file in path.parent.iterdir() if secret in file.read_bytes()]

    assert found()
    await log.delete("s")
    assert found() == []
    await log.close()
    assert found() == []


async def test_position_is_never_reused_when_newest_session_is_deleted(path: Path) -> None:
    log = SqliteLog(path)
    await (await Writer.claim(log, "a")).commit(b"a")
    await (await Writer.claim(log, "b")).commit(b"b")
    end = (await log.read_many(None)).position
    await log.delete("b")
    assert (await log.read_many(None)).position == end
    await (await Writer.claim(log, "c")).commit(b"c")
    page = await log.read_many(end)
    assert [placed.event.data for placed in page.events] == [b"c"]
    await log.delete("c")
    assert work_of(log).row("SELECT count(*) FROM chunks WHERE session IS NULL")[0] == 1
    await log.close()


async def test_position_is_never_reused_after_machine_restart(path: Path) -> None:
    """The chunks that a power cut lost had positions, and readers may have these positions."""
    log = SqliteLog(path)
    await (await Writer.claim(log)).commit(b"a")
    before = int((await log.read_many(None)).position, 16)
    await log.close()
    change(path, "INSERT INTO hosts (pid, boot, started, address) VALUES (1, 'before the cut', 1, '')")
    log = SqliteLog(path)
    await (await Writer.claim(log, "t")).commit(b"b")
    after = int((await log.read_many(None)).position, 16)
    assert after == before + LOST_CHUNKS_MAX + 1
    assert [placed.event.data for placed in await everything_placed(log)] == [b"a", b"b"]
    # A reader can continue from a lost position.
    assert len((await log.read_many(f"{before + 3:x}")).events) == 1
    assert work_of(log).row("SELECT count(*) FROM hosts")[0] == 1
    await log.close()


# -- damage ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["blob", "type", "null", "epoch", "length"])
async def test_read_raises_damage_with_lost_range_when_a_chunk_byte_changed(path: Path, where: str) -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    for number in range(3):
        await writer.commit(b"%d." % number * 3000, b"x")
    await log.close()
    row = "WHERE first = 3"
    match where:
        case "blob":
            change(path, f"UPDATE chunks SET blob = CAST(replace(blob, x'312e', x'302e') AS BLOB) {row}")
        case "type":
            change(path, f"UPDATE chunks SET blob = CAST(blob AS TEXT) || 'é' {row}")
        case "null":
            change(path, f"UPDATE chunks SET blob = 7 {row}")
        case "epoch":
            change(path, f"UPDATE chunks SET epoch = 9 {row}")
        case _:
            change(path, f"UPDATE chunks SET blob = substr(blob, 1, 2000) {row}")
    log = SqliteLog(path)
    with pytest.raises(StoreDamaged, match=r"events 3 to 4 of session s") as raised:
        await log.read("s", 0)
    assert raised.value.ids == {"session": "s", "first": 3, "last": 4}
    assert raised.value.hint
    # A reader by position continues behind the gap, also if it reads only this session.
    assert await told_of_many(log, sessions=["s"]) == [("s", 1), ("s", 2), ("s up to", 4), ("s", 5), ("s", 6)]
    assert [event.seq for event in (await log.read("s", 4)).events] == [5, 6]
    # The session can continue: only its past is damaged.
    writer = await Writer.claim(log)
    await writer.commit(b"more")
    await log.close()


@pytest.mark.parametrize(
    ("removed", "lost", "readable"),
    [
        (1, (1, 2), ([3, 4], [5, 6])),
        (3, (3, 4), ([1, 2], [5, 6])),
        (5, (5, 6), ([1, 2], [3, 4])),
    ],
    ids=["first", "middle", "last"],
)
async def test_read_raises_damage_when_a_chunk_is_missing(
    path: Path, removed: int, lost: tuple[int, int], readable: tuple[list[int], list[int]]
) -> None:
    log = SqliteLog(path)
    writer, other = await Writer.claim(log), await Writer.claim(log, "other")
    for number in range(3):
        await writer.commit(b"%d" % number, b"x")
        await other.commit(b"beside")
    await log.close()
    change(path, f"DELETE FROM chunks WHERE session = 's' AND first = {removed}")
    log = SqliteLog(path)
    with pytest.raises(StoreDamaged, match=f"events {lost[0]} to {lost[1]} of session s .* missing") as raised:
        await log.read("s", 0)
    assert raised.value.ids == {"session": "s", "first": lost[0], "last": lost[1]}
    # A reader whose page begins right before the hole gets the same error.
    with pytest.raises(StoreDamaged):
        await log.read("s", lost[0] - 1, 1)
    for seqs in readable:
        assert [event.seq for event in (await log.read("s", seqs[0] - 1, 2)).events] == seqs
    expected = sorted([*(("s", seq) for seqs in readable for seq in seqs), ("s up to", lost[1])], key=itemgetter(1))
    for limit in (1, 2, 3, 1000):
        assert await told_of_many(log, limit, sessions=["s"]) == expected
        assert [each for each in await told_of_many(log, limit) if each[0] != "other"] == expected
    await log.close()


async def told_of_many(
    log: SqliteLog, limit: int = 1000, *, after: str | None = None, sessions: Collection[str] | None = None
) -> list[tuple[str, int]]:
    """Return what a reader of many sessions gets until the end: events, and the last seq of each gap."""
    told: list[tuple[str, int]] = []
    while True:
        page = await log.read_many(after, limit, sessions=sessions)
        told += [(f"{session} up to", last) for session, last in page.gaps.items()]
        told += [(event.session, event.seq) for _, event in page.events]
        if not page.events and not page.gaps:
            return told
        assert page.position != after, "a page leads on"
        after = page.position


@pytest.mark.parametrize("limit", [1, 2, 1000])
@pytest.mark.parametrize("how", ["missing", "damaged"])
async def test_read_many_reports_damaged_chunk_as_gap_and_continues(path: Path, how: str, limit: int) -> None:
    log = SqliteLog(path)
    writer, other = await Writer.claim(log), await Writer.claim(log, "other")
    for number in range(3):
        await writer.commit(b"%d" % number, b"x")
        await other.commit(b"beside")
    await log.close()
    row = "WHERE session = 's' AND first = 3"
    change(path, f"DELETE FROM chunks {row}" if how == "missing" else f"UPDATE chunks SET crc = crc + 1 {row}")
    log = SqliteLog(path)
    told = await told_of_many(log, limit)
    assert [each for each in told if each[0] == "other"] == [("other", 1), ("other", 2), ("other", 3)]
    # The gap comes once, and in its place among the events of its session.
    assert [each for each in told if each[0] != "other"] == [("s", 1), ("s", 2), ("s up to", 4), ("s", 5), ("s", 6)]
    await log.close()


async def test_read_many_resumed_before_a_lost_end_reports_its_gap(path: Path) -> None:
    log = SqliteLog(path)
    writer, other = await Writer.claim(log), await Writer.claim(log, "other")
    await writer.commit(b"a", b"b")
    await other.commit(b"beside")
    await writer.commit(b"c")
    await log.close()
    change(path, "DELETE FROM chunks WHERE session = 's' AND last = 3")
    log = SqliteLog(path)
    placed = (await log.read_many(None)).events
    assert [event.data for _, event in placed] == [b"a", b"b"]
    for position, event in placed:
        rest = [("s", 2)] if event.seq == 1 else []
        assert await told_of_many(log, after=position) == [*rest, ("s up to", 3), ("other", 1)]
    # A later chunk turns it into a hole in the middle. The gap is reported before the events behind it.
    writer = await Writer.claim(log)
    await writer.commit(b"d")
    assert await told_of_many(log, after=placed[-1].position) == [("other", 1), ("s up to", 3), ("s", 4)]
    await log.close()


async def test_read_many_reports_damaged_chunk_before_lost_end_as_one_gap(path: Path) -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    for number in range(4):
        await writer.commit(b"%d" % number)
    await log.close()
    change(path, "DELETE FROM chunks WHERE first IN (2, 4)")
    log = SqliteLog(path)
    assert await told_of_many(log) == [("s", 1), ("s up to", 2), ("s", 3), ("s up to", 4)]
    await log.close()
    change(path, "UPDATE chunks SET crc = crc + 1 WHERE first = 3")
    log = SqliteLog(path)
    assert await told_of_many(log) == [("s", 1), ("s up to", 4)]
    await log.close()


@pytest.mark.parametrize("has_other", [True, False])
async def test_read_raises_damage_when_every_chunk_is_missing(path: Path, has_other: bool) -> None:
    log = SqliteLog(path)
    await (await Writer.claim(log)).commit(b"a", b"b")
    # This session has no events, and lost none.
    await Writer.claim(log, "new")
    if has_other:
        await (await Writer.claim(log, "other")).commit(b"beside")
    await log.close()
    change(path, "DELETE FROM chunks WHERE session = 's'")
    log = SqliteLog(path)
    with pytest.raises(StoreDamaged, match="events 1 to 2 of session s"):
        await log.read("s", 0)
    assert not (await log.read("s", 2)).events
    assert await told_of_many(log) == [("s up to", 2), *([("other", 1)] if has_other else [])]
    assert await told_of_many(log, sessions=["s"]) == [("s up to", 2)]
    assert await told_of_many(log, sessions=["new"]) == []
    await log.close()


async def test_read_many_reports_no_false_gap_beside_appends_and_retention(path: Path) -> None:
    log, other = SqliteLog(path, bytes_max=2000), SqliteLog(path)
    writers = [await Writer.claim(log, f"s{number}") for number in range(3)]
    gaps: dict[str, int] = {}

    async def read() -> None:
        position = None
        while set(seen) != {f"s{number}" for number in range(3)} or set(seen.values()) != {100}:
            page = await other.read_many(position, 7)
            for session, last in page.gaps.items():
                assert last < other.head(session).first, "only what retention took"
                gaps[session] = last
            for _, event in page.events:
                before = max(seen.get(event.session, 0), gaps.get(event.session, 0))
                assert event.seq == before + 1
                seen[event.session] = event.seq
            position = page.position

    seen: dict[str, int] = {}
    reading = asyncio.ensure_future(read())
    for number in range(50):
        for writer in writers:
            writer.append(b"%d" % number, b"x" * 100, snapshot=b"s")
        await asyncio.gather(*(writer.answers.all() for writer in writers))
    await reading
    await asyncio.gather(log.close(), other.close())


async def test_read_raises_damage_when_session_row_is_behind_its_chunks(path: Path) -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    await writer.commit(b"a", b"b", snapshot=b"at 2")
    await writer.commit(b"c", b"d", b"e")
    await log.close()
    change(path, "UPDATE sessions SET seq = 4")
    log = SqliteLog(path)
    with pytest.raises(StoreDamaged, match=r"events 5 to 5 of session s .* row ends at 4") as raised:
        await log.read("s", 0)
    assert raised.value.ids == {"session": "s", "first": 5, "last": 5}
    with pytest.raises(StoreDamaged):
        await log.read("s", 2)
    assert await log.snapshot("s") == Snapshot(2, b"at 2")
    await log.close()
    change(path, "UPDATE sessions SET seq = 1")
    log = SqliteLog(path)
    with pytest.raises(StoreDamaged, match=r"snapshot at 2 of session s"):
        await log.snapshot("s")
    await log.close()


async def test_damaged_snapshot_raises_store_damaged(path: Path) -> None:
    log = SqliteLog(path)
    await (await Writer.claim(log)).commit(b"a", snapshot=b"at 1")
    await log.close()
    change(path, "UPDATE snapshots SET data = x'00'")
    log = SqliteLog(path)
    with pytest.raises(StoreDamaged, match="snapshot at 1 of session s"):
        await log.snapshot("s")
    await log.close()


# -- following -------------------------------------------------------------------------------------------------------
async def test_follower_of_local_writes_reads_no_disk_and_does_not_poll(path: Path) -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    reader = asyncio.ensure_future(follow(log, 30))
    asked: list[object] = []
    put = log._bridge._reader.put  # pyright: ignore[reportPrivateUsage]
    log._bridge._reader.put = lambda request: (asked.append(request), put(request))[1]  # pyright: ignore[reportPrivateUsage]
    for number in range(30):
        await writer.commit(b"%d" % number)
        assert log._waiting._timer is None  # pyright: ignore[reportPrivateUsage]
    events = await reader
    assert asked == []
    # The events in memory equal those on the disk.
    log._owned._recent.drop("s")  # pyright: ignore[reportPrivateUsage]
    assert await everything(log) == events
    assert asked
    await log.close()


async def test_recent_chunks_bound_memory_across_all_sessions(path: Path) -> None:
    log = SqliteLog(path)
    recent = log._owned._recent  # pyright: ignore[reportPrivateUsage]
    recent._bytes_max = 50_000  # pyright: ignore[reportPrivateUsage]
    writers = [await Writer.claim(log, name) for name in "abc"]
    for number in range(100):
        for writer in writers:
            writer.append(b"%d" % number * 400)
    for writer in writers:
        await writer.answers.all()
        assert recent._weight <= 50_000  # pyright: ignore[reportPrivateUsage]
        assert recent.read(writer.session, 0, 1, None) is None
        assert recent.read(writer.session, 99, 1, None) is not None
        for after in range(0, 100, 7):
            assert [event.seq for event in (await log.read(writer.session, after, 9)).events] == [
                *range(after + 1, min(101, after + 10))
            ]
    await log.delete("a")
    writers[1].release()
    await log.delete("c")
    assert recent._weight == 0  # pyright: ignore[reportPrivateUsage]
    await log.close()


async def test_wait_on_released_session_ends_with_next_owners_commit(path: Path) -> None:
    """The wait began when only this host could write, so it did not poll for other writers."""
    here, there = SqliteLog(path), SqliteLog(path)
    writer = await Writer.claim(here)
    waits = [asyncio.ensure_future(here.wait_past("s", seq)) for seq in (0, 1)]
    await asyncio.sleep(0)
    writer.release()
    await here.claim("behind the release", agent="claude")
    new = await Writer.claim(there)
    await new.commit(b"a", b"b")
    await asyncio.gather(*waits)
    await asyncio.gather(here.close(), there.close())


async def test_wait_fails_when_another_host_deletes_the_session(path: Path) -> None:
    here, there = SqliteLog(path), SqliteLog(path)
    await (await Writer.claim(there)).commit(b"a")
    waits = [asyncio.ensure_future(here.wait_past(session, 1)) for session in ("s", "never claimed")]
    await asyncio.sleep(0)
    await there.delete("s")
    await (await Writer.claim(there)).commit(b"of another history")
    with pytest.raises(StoreError, match="deleted"):
        await waits[0]
    await (await Writer.claim(there, "never claimed")).commit(b"a", b"b")
    await waits[1]
    await asyncio.gather(here.close(), there.close())


def test_keyboard_interrupt_in_one_answer_does_not_lose_the_others(path: Path) -> None:
    loop = asyncio.new_event_loop()
    answers = Answers()

    async def begin() -> tuple[SqliteLog, int]:
        log = SqliteLog(path)
        return log, await log.claim("s", agent="claude")

    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    try:
        log, epoch = loop.run_until_complete(begin())
        log.append("s", epoch, 0, AT, lines(b"a"), interrupted)
        for seq in (1, 2):
            log.append("s", epoch, seq, AT, lines(b"b"), answers.done())
        with pytest.raises(KeyboardInterrupt):
            loop.run_forever()
        assert loop.run_until_complete(answers.all()) == [None, None]
        loop.run_until_complete(log.close())
    finally:
        loop.close()
