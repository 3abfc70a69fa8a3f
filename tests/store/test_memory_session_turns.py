"""Cost of finding a turn: SQLite steps and events read, for two lengths of the history."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from banksman.core.session.event import entry
from banksman.store.log_values import Page
from banksman.store.memory import MemoryLog
from banksman.store.memory_session import TurnIndexes
from banksman.store.sqlite import SqliteLog, pages, turn_table

pytest.register_assert_rewrite("tests.store.conformance")

from tests.store.conformance import Writer, everything  # noqa: E402


async def write_turns(log: SqliteLog | MemoryLog, numbers: range, session: str = "s") -> None:
    writer = await Writer.claim(log, session)
    for number in numbers:
        id = f"t-{number}"
        writer.append(entry(id, "turn.queued"), entry(id, "turn.started"))
        writer.append(*[b"word"] * 8)
        writer.append(entry(id, "turn.ended"), snapshot=b"{}")
    assert set(await writer.answers.all()) == {None}


class Steps:
    """Count the instructions of SQLite's virtual machine, and the chunks that are unpacked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.unpacked = 0
        unpack = pages.unpacked

        def counted(*args: object) -> object:
            self.unpacked += 1
            return unpack(*args)  # pyright: ignore[reportArgumentType]

        monkeypatch.setattr(turn_table, "unpacked", counted)
        find = turn_table.find

        def counting(connection: sqlite3.Connection, session: str, turn: str) -> turn_table.FoundTurn:
            connection.set_progress_handler(self._step, 1)
            try:
                return find(connection, session, turn)
            finally:
                connection.set_progress_handler(None, 0)

        monkeypatch.setattr(turn_table, "find", counting)

    def _step(self) -> int:
        self.count += 1
        return 0


async def test_find_turn_in_sqlite_costs_the_same_in_a_history_ten_times_as_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SqliteLog(tmp_path / "store.db")
    steps = Steps(monkeypatch)
    await log.find_turn("s", "to read the schema")
    cost: list[tuple[int, ...]] = []
    written = 0
    for count in (30, 300):
        await write_turns(log, range(written, count))
        written = count
        each: list[int] = []
        for turn, is_there in (("t-0", True), (f"t-{count - 1}", True), ("unknown", False)):
            steps.count = 0
            assert (await log.find_turn("s", turn) is not None) == is_there
            each.append(steps.count)
        cost.append(tuple(each))
    await log.close()
    assert cost[0] == cost[1]
    assert steps.unpacked == 0


async def test_store_without_turn_index_is_indexed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "store.db"
    log = SqliteLog(path)
    await write_turns(log, range(30))
    before = await everything(log)
    await log.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("DROP TABLE turns")
        connection.execute("ALTER TABLE sessions DROP COLUMN indexed")
    monkeypatch.setattr(turn_table, "PIECE_BYTES_MAX", 500)
    steps = Steps(monkeypatch)
    log = SqliteLog(path)
    await write_turns(log, range(30, 31))
    assert steps.unpacked == 0
    assert await log.find_turn("s", "t-29") == (320, 330, 341)
    once = steps.unpacked
    assert once >= len(before) // 11 * 3
    for turn in ("unknown", "t-0", "t-30"):
        await log.find_turn("s", turn)
    assert steps.unpacked == once
    assert (await everything(log))[: len(before)] == before
    await log.close()


async def test_store_with_turn_index_can_be_written_by_an_older_version(tmp_path: Path) -> None:
    """The older version does not know the column, and leaves it unchanged."""
    path = tmp_path / "store.db"
    log = SqliteLog(path)
    await write_turns(log, range(2))
    await log.close()
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        blob = pages.packed([entry("t-2", "turn.queued"), entry("t-2", "turn.ended")])
        crc = pages.checksum("s", 23, 1, blob)
        connection.execute(
            "INSERT INTO chunks (session, first, last, epoch, at, crc, blob) VALUES ('s', 23, 24, 1, 0, ?, ?)",
            (crc, blob),
        )
        connection.execute("UPDATE sessions SET seq = 24")
    log = SqliteLog(path)
    await write_turns(log, range(3, 4))
    assert await log.find_turn("s", "t-2") == (23, 24, 35)
    assert await log.find_turn("s", "t-3") == (25, 35, 35)
    await log.close()


async def test_retention_removes_turns_from_the_index_with_their_events(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    log = SqliteLog(path, bytes_max=20_000)
    await write_turns(log, range(200))
    assert await log.find_turn("s", "t-0") is None
    first = log.head("s").first
    await log.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        kept = [last for (last,) in connection.execute("SELECT last FROM turns ORDER BY last")]
    assert kept == list(range(kept[0], 200 * 11 + 1, 11))
    assert first <= kept[0] < first + 11


async def test_delete_removes_turns_of_its_session(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    log = SqliteLog(path)
    await write_turns(log, range(20))
    await write_turns(log, range(1), "other")
    await log.delete("s")
    await log.close()
    with contextlib.closing(sqlite3.connect(path)) as connection:
        assert connection.execute("SELECT count(*) FROM turns").fetchall() == [(1,)]
        assert connection.execute("SELECT count(*) FROM store WHERE key LIKE 'rest%'").fetchall() == [(0,)]


async def test_memory_turn_index_reads_every_event_once() -> None:
    """A log on NATS, or a file that must not be written, uses this index."""
    log = MemoryLog()
    await write_turns(log, range(20))
    read: list[int] = []

    async def counted(session: str, after: int) -> Page:
        page = await log.read(session, after)
        read.extend(event.seq for event in page.events)
        return page

    indexes = TurnIndexes(counted)
    assert await indexes.find("s", "t-3", identity=1, first=1) == (34, 44, 220)
    assert await indexes.find("s", "unknown", identity=1, first=1) is None
    await write_turns(log, range(20, 21))
    assert await indexes.find("s", "t-20", identity=1, first=1) == (221, 231, 231)
    assert read == list(range(1, 232))
    assert await indexes.find("s", "t-3", identity=2, first=1) == (34, 44, 231)
    await log.close()


async def test_memory_turn_indexes_evict_the_least_recently_used_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("banksman.store.memory_session.TURNS_MAX", 25)
    log = MemoryLog()
    reads: list[str] = []

    async def counted(session: str, after: int) -> Page:
        reads.append(session)
        return await log.read(session, after)

    indexes = TurnIndexes(counted)
    for session in ("a", "b", "c"):
        await write_turns(log, range(10), session)
        assert await indexes.find(session, "t-9", identity=1, first=1) is not None
    reads.clear()
    for session in ("b", "c", "a"):
        assert await indexes.find(session, "t-9", identity=1, first=1) is not None
    assert reads == ["b", "c", "a", "a"]
    await log.close()


async def test_memory_turn_index_evicted_while_filling_counts_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banksman.store.memory_session.TURNS_MAX", 25)
    log = MemoryLog()
    for session in ("slow", "a", "b"):
        await write_turns(log, range(20 if session == "slow" else 10), session)
    is_held, reads = asyncio.Event(), list[str]()

    async def counted(session: str, after: int) -> Page:
        reads.append(session)
        if session == "slow":
            await is_held.wait()
        return await log.read(session, after)

    indexes = TurnIndexes(counted)
    slow = asyncio.create_task(indexes.find("slow", "t-9", identity=1, first=1))
    await asyncio.sleep(0)
    monkeypatch.setattr("banksman.store.memory_session.SESSIONS_MAX", 1)
    assert await indexes.find("a", "t-9", identity=1, first=1) is not None
    monkeypatch.setattr("banksman.store.memory_session.SESSIONS_MAX", 10)
    is_held.set()
    assert await slow is not None
    for session in ("a", "b"):
        assert await indexes.find(session, "t-9", identity=1, first=1) is not None
    reads.clear()
    for session in ("a", "b", "a", "b"):
        assert await indexes.find(session, "t-9", identity=1, first=1) is not None
    assert reads == ["a", "b", "a", "b"], "both are kept, and only looked at for what is new"
    await log.close()


async def test_memory_turn_indexes_hold_a_bounded_number_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("banksman.store.memory_session.SESSIONS_MAX", 3)
    log = MemoryLog()
    indexes = TurnIndexes(log.read)
    for number in range(10):
        assert await indexes.find(f"without turns {number}", "t-9", identity=1, first=1) is None
    assert len(indexes._indexes) == 3  # pyright: ignore[reportPrivateUsage]
    await log.close()
