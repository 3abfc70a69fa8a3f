"""Long histories in the SQLite engine: a restore or a delete does not block other writers.

A crash in the middle leaves nothing that a reader sees, and nothing that stays.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from banksman.errors import StoreError, StoreFull, StoreReadOnly, UsageError
from banksman.store.log_values import Chunk, Head, Snapshot
from banksman.store.sqlite import SqliteLog, deleted_sessions, spool
from banksman.store.sqlite.operations import WriterContext

pytest.register_assert_rewrite("tests.store.conformance")

from tests.store.conformance import Writer, chunk, data, everything, everything_placed, follow, known, until  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[3]
SECRET = b"the secret of the deleted one"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deleted_sessions, "PIECE_CHUNKS_MAX", 3)


@pytest.fixture
def go_on(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Removal stops after a few small pieces until this event is set, as if there were many more."""
    monkeypatch.setattr(deleted_sessions, "PIECE_CHUNKS_MAX", 3)
    remove_some, pieces = deleted_sessions.remove_some, 0
    go_on = threading.Event()

    def remove_slowly(work: WriterContext, session: str) -> bool:
        nonlocal pieces
        pieces += 1
        return remove_some(work, session) if pieces < 5 or go_on.is_set() else True

    monkeypatch.setattr(deleted_sessions, "remove_some", remove_slowly)
    return go_on


def spools(path: Path) -> list[Path]:
    return [file for file in path.parent.iterdir() if spool.SUFFIX in file.name]


def found(path: Path, secret: bytes = SECRET) -> list[str]:
    """Return the files of the store that contain the secret."""
    return [file.name for file in path.parent.iterdir() if secret in file.read_bytes()]


def rows(path: Path, statement: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def history(chunks: int, *, first: int = 1) -> Iterator[Chunk]:
    for seq in range(first, first + chunks):
        yield chunk(seq, b"%d " % seq + SECRET)


class Halted:
    """Chunks that stop in the middle until `go_on` is set. `began` is set in the loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.began = asyncio.Event()
        self.go_on = threading.Event()

    def chunks(self) -> Iterator[Chunk]:
        yield from history(5)
        self._loop.call_soon_threadsafe(self.began.set)
        assert self.go_on.wait(30)
        yield from history(5, first=6)


# -- restoring -------------------------------------------------------------------------------------------------------
async def test_restore_lets_other_writers_commit_while_it_reads_history(path: Path) -> None:
    log, other = SqliteLog(path), SqliteLog(path)
    mine, theirs = await Writer.claim(log, "mine"), await Writer.claim(other, "theirs")
    halted = Halted()
    restoring = asyncio.ensure_future(log.restore("s", name=None, agent="", chunks=halted.chunks))
    await halted.began.wait()
    (file,) = spools(path)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    await mine.commit(b"a")
    await theirs.commit(b"b")
    assert log.find("s") is None
    assert not restoring.done()
    halted.go_on.set()
    await restoring
    assert len(await everything(other)) == 10
    # In commit order the restored session comes after the commits that were made meanwhile.
    assert [placed.event.session for placed in await everything_placed(log)] == ["mine", "theirs", *["s"] * 10]
    assert spools(path) == []
    await asyncio.gather(log.close(), other.close())


@pytest.mark.parametrize("how", ["cancelled", "closed", "abandoned"])
async def test_restore_given_up_halfway_leaves_nothing(path: Path, how: str) -> None:
    log = SqliteLog(path)
    halted = Halted()
    restoring = asyncio.ensure_future(log.restore("s", name=None, agent="", chunks=halted.chunks))
    await halted.began.wait()
    match how:
        case "cancelled":
            restoring.cancel()
            with pytest.raises(asyncio.CancelledError):
                await restoring
        case "closed":
            await log.close()
        case _:
            log.abandon()
    assert spools(path) == []
    halted.go_on.set()
    if how != "cancelled":
        with pytest.raises(StoreError, match="closed"):
            await restoring
    await log.close() if how != "abandoned" else None
    # The thread of the restore has ended too, and has created no file.
    await asyncio.get_running_loop().shutdown_default_executor()
    assert spools(path) == []
    assert rows(path, "SELECT count(*) FROM chunks") == [(0,)]


@pytest.mark.parametrize("why", ["no history", "its own error", "taken", "snapshot", "full"])
async def test_refused_restore_leaves_no_spool_file(path: Path, why: str) -> None:
    log = SqliteLog(path)
    await log.claim("taken", agent="claude")

    def broken() -> Iterator[Chunk]:
        yield from history(3)
        raise ZeroDivisionError

    def torn() -> Iterator[Chunk]:
        yield from history(3)
        yield from history(1, first=5)

    def long() -> Iterator[Chunk]:
        yield chunk(1, b"x" * 100_000)

    match why:
        case "no history":
            with pytest.raises(UsageError, match="dense"):
                await log.restore("s", name=None, agent="", chunks=torn)
        case "its own error":
            with pytest.raises(ZeroDivisionError):
                await log.restore("s", name=None, agent="", chunks=broken)
        case "taken":
            with pytest.raises(UsageError, match="already"):
                await log.restore("taken", name=None, agent="", chunks=lambda: history(3))
        case "snapshot":
            with pytest.raises(UsageError, match="snapshot"):
                await log.restore("s", name=None, agent="", chunks=lambda: history(3), snapshot=Snapshot(4, b"x"))
        case _:
            pages = "PRAGMA max_page_count = 1"  # As many pages as there are: SQLite does not accept fewer.
            await log._bridge.call(lambda work: work.execute(pages).fetchall())  # pyright: ignore[reportPrivateUsage]
            with pytest.raises(StoreFull):
                await log.restore("s", name=None, agent="", chunks=long)
    assert spools(path) == []
    assert [one.id for one in log.sessions()] == ["taken"]
    # The connection has closed the failed restore, and accepts the next.
    room = "PRAGMA max_page_count = 1000000"
    await log._bridge.call(lambda work: work.execute(room).fetchall())  # pyright: ignore[reportPrivateUsage]
    await log.restore("s", name=None, agent="", chunks=lambda: history(3))
    assert len(await everything(log)) == 3
    await log.close()


async def test_restore_into_read_only_store_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await SqliteLog(path).close()

    def no_access(*_: object, **__: object) -> bool:
        return False

    monkeypatch.setattr(os, "access", no_access)
    log = SqliteLog(path)
    with pytest.raises(StoreReadOnly):
        await log.restore("s", name=None, agent="", chunks=lambda: history(3))
    assert spools(path) == []
    await log.close()


DIES = """
import asyncio, os, signal, sys
from banksman.store.log import Chunk
from banksman.store.sqlite import SqliteLog

def chunks():
    yield Chunk(1, 1, 0.0, [(None, "update", b"x")])
    print("half way", flush=True)
    sys.stdin.readline()
    yield Chunk(2, 1, 0.0, [(None, "update", b"y")])

async def main(path):
    log = SqliteLog(path)
    await log.restore("theirs", name=None, agent="", chunks=chunks)
    await log.close()

asyncio.run(main(sys.argv[1]))
"""


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
    )


async def test_spool_of_dead_process_is_removed_and_of_live_one_kept(path: Path) -> None:
    lives, dies = start(DIES, str(path)), start(DIES, str(path))
    for process in (lives, dies):
        assert process.stdout is not None
        assert process.stdout.readline() == "half way\n"
    assert len(spools(path)) == 2
    dies.send_signal(signal.SIGKILL)
    dies.communicate(timeout=30)
    log = SqliteLog(path)
    await log.restore("s", name=None, agent="", chunks=lambda: history(3))
    assert len(spools(path)) == 1
    lives.communicate("go on\n", timeout=30)
    assert lives.returncode == 0
    assert spools(path) == []
    assert known(log, "theirs").seq == 2
    await log.close()


# -- deleting --------------------------------------------------------------------------------------------------------
async def test_delete_of_long_history_lets_other_writers_commit(path: Path, go_on: threading.Event) -> None:
    log, other = SqliteLog(path), SqliteLog(path)
    await log.restore("s", name="fix-ci", agent="", chunks=lambda: history(60), snapshot=Snapshot(1, SECRET))
    mine, theirs = await Writer.claim(log, "mine"), await Writer.claim(other, "theirs")
    deleting = asyncio.ensure_future(log.delete("s"))
    await asyncio.sleep(0)
    for number in range(5):
        await mine.commit(b"%d" % number)
        await theirs.commit(b"%d" % number)
    assert not deleting.done()
    # The session is invisible to all readers, though most of its chunks are still there.
    ((left,),) = rows(path, "SELECT count(*) FROM chunks WHERE session = 's'")
    assert left == 60 - 1 - 4 * 3  # The last chunk became a tombstone.
    for one in (log, other):
        assert one.find("s") is None
        assert one.head("s") == Head(0, 0, 1)
        assert await one.read("s", 0) == ((), None)
        assert await one.snapshot("s") is None
        assert {placed.event.session for placed in await everything_placed(one)} == {"mine", "theirs"}
        assert await one.read_many(None, sessions=["s"]) == ((), (await one.read_many(None)).position, {})
        heads = one._look.heads_after(0)  # pyright: ignore[reportPrivateUsage]
        assert {session for session, _ in heads} == {"mine", "theirs"}
    go_on.set()
    await deleting
    assert found(path) == []
    assert rows(path, "SELECT count(*) FROM chunks WHERE session = 's'") == [(0,)]
    assert len(rows(path, "SELECT * FROM store")) == 2
    await asyncio.gather(log.close(), other.close())


@pytest.mark.parametrize("how", ["claimed", "restored"])
async def test_new_session_sees_nothing_of_the_deleted_one_with_its_id(
    path: Path, how: str, go_on: threading.Event
) -> None:
    log = SqliteLog(path)
    await log.restore("s", name=None, agent="", chunks=lambda: history(60))
    deleting = asyncio.ensure_future(log.delete("s"))
    await (await Writer.claim(log, "behind it")).commit(b"x")
    assert not deleting.done()
    reader = asyncio.ensure_future(follow(log, 1))
    await asyncio.sleep(0)
    if how == "claimed":
        await (await Writer.claim(log)).commit(b"new")
    else:
        await log.restore("s", name=None, agent="", chunks=lambda: [chunk(1, b"new")])
    go_on.set()
    await deleting
    assert data(await everything(log)) == data(await reader) == [b"new"]
    assert await log.trim("s", 500) == 1
    assert rows(path, "SELECT count(*) FROM chunks WHERE session = 's'") == [(1,)]
    assert found(path) == []
    # The new session can be deleted like the first one.
    await log.delete("s")
    assert found(path, b"new") == []
    await log.close()


@pytest.mark.parametrize("how", ["cancelled", "closed", "abandoned"])
async def test_delete_completes_when_its_caller_does_not_wait(path: Path, how: str, go_on: threading.Event) -> None:
    log = SqliteLog(path)
    await log.restore("s", name=None, agent="", chunks=lambda: history(300))
    deleting = asyncio.ensure_future(log.delete("s"))
    await (await Writer.claim(log, "other")).commit(b"x")
    assert not deleting.done()
    go_on.set()
    match how:
        case "cancelled":
            deleting.cancel()
            await asyncio.wait([deleting])
            await until(lambda: not rows(path, "SELECT * FROM chunks WHERE session = 's'"))
        case "closed":
            await log.close()
            await deleting
        case _:
            log.abandon()
            deleting.cancel()
            await asyncio.wait([deleting])
    await log.close() if how == "cancelled" else None
    assert rows(path, "SELECT DISTINCT session FROM chunks WHERE session IS NOT NULL") == [("other",)]
    assert found(path) == []


DIES_DELETING = """
import asyncio, os, signal, sys
from banksman.store.log import Chunk
from banksman.store.sqlite import SqliteLog; from banksman.store.sqlite import deleted_sessions as rests

rests.PIECE_CHUNKS_MAX = 3
remove_some, pieces = rests.remove_some, []

def dying(work, session):
    pieces.append(session)
    if len(pieces) == int(sys.argv[2]):
        os.kill(os.getpid(), signal.SIGKILL)
    return remove_some(work, session)

async def main(path):
    rests.remove_some = dying
    log = SqliteLog(path)
    await log.delete("s")

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("piece", [2, 3, 20])
async def test_delete_interrupted_by_death_is_invisible_and_finished_by_next_host(path: Path, piece: int) -> None:
    log = SqliteLog(path)
    await (await Writer.claim(log, "other")).commit(b"x")
    await log.restore("s", name=None, agent="", chunks=lambda: history(100))
    await log.close()
    process = start(DIES_DELETING, str(path), str(piece))
    process.communicate(timeout=30)
    assert process.returncode == -signal.SIGKILL
    assert found(path)
    log = SqliteLog(path)
    assert [one.id for one in log.sessions()] == ["other"]
    assert {placed.event.session for placed in await everything_placed(log)} == {"other"}
    # A reader writes nothing.
    await log.close()
    assert rows(path, "SELECT * FROM chunks WHERE session = 's'")
    log = SqliteLog(path)
    await (await Writer.claim(log, "other")).commit(b"y")
    await log.close()
    assert rows(path, "SELECT DISTINCT session FROM chunks WHERE session IS NOT NULL") == [("other",)]
    assert found(path) == []


async def test_delete_pieces_are_bounded_in_bytes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deleted_sessions, "PIECE_BYTES_MAX", 250_000)
    log = SqliteLog(path)
    await log.restore("s", name=None, agent="", chunks=lambda: (chunk(seq, b"x" * 100_000) for seq in range(1, 31)))
    work = log._bridge._work  # pyright: ignore[reportPrivateUsage]
    pieces: list[int] = []

    def note(statement: str) -> None:
        if statement == "COMMIT":
            pieces.append(work.connection.total_changes)

    work.connection.set_trace_callback(note)
    await log.delete("s")
    work.connection.set_trace_callback(None)
    assert len(pieces) > 9
    assert max(after - before for before, after in itertools.pairwise(pieces)) <= 4
    await log.close()
