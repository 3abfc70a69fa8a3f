"""Scope of failures in the SQLite engine.

A failure of the store fails a whole group. A call that cannot be written fails alone. Calls that follow a failed call
are refused until its writer has the answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import threading
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from banksman.errors import NotOwner, StoreError, StoreFull
from banksman.store.sqlite import SqliteLog
from banksman.store.sqlite.operations import WriterContext

pytest.register_assert_rewrite("tests.store.conformance")

from tests.store.conformance import AT, Answers, Writer, data, everything, lines  # noqa: E402


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


async def call(log: SqliteLog, function: Any, **how: Any) -> Any:
    """Run the function in the writer thread."""
    return await log._bridge.call(function, **how)  # pyright: ignore[reportPrivateUsage]


async def set_pages_max(log: SqliteLog, pages: int | None) -> None:
    """Limit the pages of the file, which stands for a full disk. None: the present number of pages."""

    def bound(work: WriterContext) -> None:
        count = work.row("PRAGMA page_count")[0] if pages is None else pages
        work.execute(f"PRAGMA max_page_count = {count}").fetchall()

    await call(log, bound)


@contextlib.contextmanager
def gathered(path: Path) -> Generator[None]:
    """Collect the calls of the block into one group. The writer thread blocks at the BEGIN of its present work."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        yield
        other.execute("ROLLBACK")


@pytest.mark.parametrize("culprit", ["seq", "epoch", "time", "id"])
async def test_unwritable_operation_fails_alone(path: Path, culprit: str, caplog: pytest.LogCaptureFixture) -> None:
    log = SqliteLog(path)
    names = ("first", "fine", "refused", "also fine", "bad")
    first, fine, refused, also_fine, bad = [await Writer.claim(log, name) for name in names]
    answers = Answers()
    with gathered(path):
        first.append(b"waits for the lock")
        fine.append(b"a")
        fine.lease("claude:x")
        refused.append(b"x", seq=7)
        refused.append(b"behind it, though it would fit", seq=0)
        match culprit:
            case "seq":
                bad.append(b"x", seq=1 << 70)
            case "epoch":
                bad.append(b"x", epoch=1 << 70)
            case "time":
                bad.append(b"x", at=math.nan)
            case _:
                log.append("\ud800", 1, 0, AT, lines(b"x"), answers.done())
        fine.append(b"b")
        claiming = asyncio.ensure_future(log.claim("new", agent="claude"))
        await asyncio.sleep(0)
        also_fine.append(b"c")
    assert await fine.answers.all() == [None] * 3
    assert await also_fine.answers.all() == [None]
    assert await refused.answers.all() == [NotOwner, NotOwner]
    assert "its last seq is not 7" in str(refused.answers.given[0][1])
    assert await claiming == 1
    failed = answers if culprit == "id" else bad.answers
    assert await failed.all() in ([StoreError], [NotOwner])
    # The cause is logged.
    assert [record.message for record in caplog.records if "the writer failed" in record.message]
    assert data(await everything(log, "fine")) == [b"a", b"b"]
    # Each writer continues from its head: no failure that was reported blocks it.
    for writer in (fine, also_fine, refused, bad):
        seq = log.head(writer.session).seq
        writer.append(b"more", seq=seq)
        assert await writer.answers.last() is None
    await log.close()


async def test_operations_behind_an_unwritable_append_are_refused_until_answered(path: Path) -> None:
    log = SqliteLog(path)
    first, bad = await Writer.claim(log, "first"), await Writer.claim(log, "bad")
    with gathered(path):
        first.append(b"waits for the lock")
        bad.append(b"no time", at=math.nan)
        bad.append(b"behind")
        bad.append(b"it would fit", seq=0)
        bad.lease("claude:x")
    assert await bad.answers.all() == [StoreError, NotOwner, NotOwner, NotOwner]
    assert log.head("bad").seq == 0
    bad.append(b"a", seq=0)
    assert await bad.answers.last() is None
    await log.close()


async def test_operations_behind_a_lease_failed_by_the_store_are_refused_until_answered(path: Path) -> None:
    """The writer restarts from the state before the failure, so no later call may be committed."""
    log = SqliteLog(path)
    writer, other = await Writer.claim(log), await Writer.claim(log, "other")
    await writer.commit(b"a")
    performed = threading.Event()

    def make_room(work: WriterContext) -> None:
        work.execute("PRAGMA max_page_count = 1000000").fetchall()
        performed.set()

    await set_pages_max(log, None)
    writer.lease("claude:" + "x" * 100_000)  # The file has no page for such a name.
    room = asyncio.ensure_future(call(log, make_room, is_alone=True))
    # One pass of the loop makes the call, and the next one passes it on.
    for _ in range(2):
        await asyncio.sleep(0)
    # The loop is blocked meanwhile: the failure has happened, and is not reported yet.
    assert performed.wait(30)
    writer.append(b"b")
    writer.lease("claude:y")
    other.append(b"nothing of this is its own")
    assert await writer.answers.all() == [None, StoreFull, NotOwner, NotOwner]
    assert await other.answers.all() == [None]
    await room
    assert log.head("s").seq == 1
    writer.append(b"b", seq=1)
    writer.lease("claude:y")
    assert (await writer.answers.all())[-2:] == [None, None]
    await log.close()


async def test_append_behind_a_refused_lease_is_committed(path: Path) -> None:
    log = SqliteLog(path)
    first, holder, writer = [await Writer.claim(log, name) for name in ("first", "holder", "writer")]
    assert await holder.take("claude:x") is None
    with gathered(path):
        first.append(b"waits for the lock")
        writer.append(b"a")
        writer.lease("claude:x")
        writer.append(b"b")
    assert await writer.answers.all() == [None, NotOwner, None]
    await log.close()


@pytest.mark.parametrize("compiled", ["OFF", "NORMAL", "FULL"])
@pytest.mark.parametrize(("level", "synced"), [("normal", [2, 1, 2, 1]), ("full", [2, 2, 2, 2])])
async def test_synchronous_level_is_set_regardless_of_sqlite_build_default(
    path: Path, monkeypatch: pytest.MonkeyPatch, level: str, synced: list[int], compiled: str
) -> None:
    connect = sqlite3.connect

    def connect_as_compiled(*arguments: Any, **options: Any) -> sqlite3.Connection:
        """Return a connection with a build-time default of SQLite."""
        connection = connect(*arguments, **options)
        connection.execute(f"PRAGMA synchronous = {compiled}")
        return connection

    monkeypatch.setattr(sqlite3, "connect", connect_as_compiled)
    log = SqliteLog(path, level=level)
    seen: list[int] = []

    def look() -> None:
        """Record the level of the last answered transaction: 1 is NORMAL, 2 is FULL."""
        seen.append(log._bridge._work.row("PRAGMA synchronous")[0])  # pyright: ignore[reportPrivateUsage]

    writer = await Writer.claim(log)
    look()
    await writer.commit(b"a")
    look()
    writer.advance()
    await writer.answers.all()
    look()
    await writer.commit(b"b")
    look()
    assert seen == synced
    await log.close()
