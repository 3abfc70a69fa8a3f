"""Which thread commits: the event loop if nothing can make it wait, and the writer thread in all other cases."""

from __future__ import annotations

import asyncio
import contextlib
import math
import sqlite3
import threading
import time
from pathlib import Path

import pytest

from banksman.core.session.event import QUEUE_CHANGED, Entry
from banksman.errors import NotOwner, StoreError
from banksman.store.sqlite import SqliteLog, group_writer

pytest.register_assert_rewrite("tests.store.conformance")

from tests.store.conformance import Writer, data, everything, until  # noqa: E402

HERE, THERE = "loop", "writer thread"
URGENT: Entry = (None, QUEUE_CHANGED, b"{}")


class Commits:
    """The thread of each commit of a log, in order. `seconds`: how long a commit in the loop waits for the disk."""

    def __init__(self, log: SqliteLog) -> None:
        self.threads: list[str] = []
        self.seconds = 0.0
        connection = log._bridge._work.connection  # pyright: ignore[reportPrivateUsage]
        connection.set_trace_callback(self._on_statement)

    def _on_statement(self, statement: str) -> None:
        if statement == "COMMIT":
            is_here = threading.current_thread() is threading.main_thread()
            self.threads.append(HERE if is_here else THERE)
            if is_here and self.seconds:
                time.sleep(self.seconds)

    def take(self) -> set[str]:
        threads, self.threads = set(self.threads), []
        return threads


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture(autouse=True)
def disk_is_never_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a commit can be slow by chance."""
    monkeypatch.setattr(group_writer, "SLOW_SECONDS", math.inf)


@pytest.mark.parametrize(
    ("settings", "thread"),
    [({}, HERE), ({"level": "full"}, THERE), ({"bytes_max": 1 << 30}, THERE)],
    ids=["normal", "full", "retention"],
)
async def test_loop_commits_only_what_cannot_wait_for_the_disk(
    path: Path, settings: dict[str, object], thread: str
) -> None:
    log = SqliteLog(path, **settings)  # pyright: ignore[reportArgumentType]
    writer = await Writer.claim(log)
    commits = Commits(log)
    for number in range(10):
        await writer.commit(b"%d" % number)
    assert commits.take() == {thread}
    # An epoch is synced at each level.
    writer.advance()
    await writer.answers.all()
    assert commits.take() == {THERE}
    await log.close()


async def test_loop_never_calls_back_the_caller_of_append(path: Path) -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    commits = Commits(log)
    for _ in range(3):
        writer.append(b"x")
        assert writer.answers.given == []
    assert await writer.answers.all() == [None] * 3
    # What one pass of the loop appends is one commit.
    assert commits.threads == [HERE]
    await log.close()


async def test_writer_thread_waits_for_the_lock_of_another_process(path: Path) -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    commits = Commits(log)
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writer.append(b"a")
        # The loop is not blocked: the lock is held until it gets here, and the connection would wait for seconds.
        for _ in range(100):
            await asyncio.sleep(0)
        assert writer.answers.given == []
        # The loop leaves the thread also what comes behind it. This event does not wait for others.
        writer.append(URGENT)
        for _ in range(2):
            await asyncio.sleep(0)
        other.execute("ROLLBACK")
    assert await writer.answers.all() == [None, None]
    assert commits.take() == {THERE}
    await writer.commit(b"c")
    assert commits.take() == {HERE}
    assert data(await everything(log, "s")) == [b"a", URGENT[2], b"c"]
    await log.close()


async def test_slow_disk_moves_the_commits_to_the_writer_thread_for_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    commits = Commits(log)
    monkeypatch.setattr(group_writer, "SLOW_SECONDS", 0.01)
    commits.seconds = 0.02
    await writer.commit(b"slow")
    for _ in range(10):
        await writer.commit(b"x")
    assert commits.threads == [HERE, *[THERE] * 10]
    # Afterwards the loop tries again.
    monkeypatch.setattr(group_writer, "SLOW_SHARE", 0.5)
    log._bridge._group_writer._slow_until = 0.0  # pyright: ignore[reportPrivateUsage]
    commits.take()
    await writer.commit(b"slow again")
    assert commits.take() == {HERE}
    commits.seconds = 0.0
    while commits.take() != {HERE}:
        await writer.commit(b"x")
    await log.close()


async def test_writer_thread_runs_the_checkpoints_of_a_log_that_the_loop_writes(path: Path) -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    commits = Commits(log)
    for _ in range(100):
        await writer.commit((None, QUEUE_CHANGED, b"x" * 100_000))
    assert commits.threads.count(HERE) > 75
    assert commits.threads.count(THERE) > 1
    # Without a checkpoint, the write-ahead log would have all bytes.
    size = Path(f"{path}-wal").stat().st_size
    assert size < 3 * group_writer.CHECKPOINT_PAGES * group_writer.PAGE_BYTES
    await log.close()


async def test_append_refused_in_the_loop_is_refused_alone(path: Path) -> None:
    """Several sessions share a statement. The writer thread finds the one that must be refused."""
    log = SqliteLog(path)
    one, two, three = [await Writer.claim(log, name) for name in ("one", "two", "three")]
    one.append(b"a")
    two.append(b"x", seq=7)
    two.append(b"behind", seq=0)
    three.append(b"c")
    assert await one.answers.all() == [None]
    assert await three.answers.all() == [None]
    assert await two.answers.all() == [NotOwner, NotOwner]
    commits = Commits(log)
    two.append(b"b", seq=0)
    assert await two.answers.last() is None
    assert commits.take() == {HERE}
    assert [data(await everything(log, name)) for name in ("one", "two", "three")] == [[b"a"], [b"b"], [b"c"]]
    await log.close()


async def test_deleted_data_is_removed_while_another_session_writes(path: Path) -> None:
    """A piece goes after each group of the writer thread, so the loop leaves the groups to it meanwhile."""
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    commits = Commits(log)
    bridge = log._bridge  # pyright: ignore[reportPrivateUsage]
    # The writer thread has finished the upkeep after the claim.
    await until(lambda: bridge._writer._has_looked_for_rests)  # pyright: ignore[reportPrivateUsage]
    rests = bridge._work.rests  # pyright: ignore[reportPrivateUsage]
    with bridge._group_writer._lock:  # pyright: ignore[reportPrivateUsage]
        rests["a session that a dead host was deleting"] = None
    await writer.commit(b"x")
    assert commits.take() == {THERE}
    await until(lambda: not rests)
    while HERE not in commits.take():
        await writer.commit(b"y")
    await log.close()


async def test_failed_commit_in_the_loop_is_not_acknowledged(path: Path) -> None:
    log = SqliteLog(path)
    writer = await Writer.claim(log)
    connection = log._bridge._work.connection  # pyright: ignore[reportPrivateUsage]

    def authorize(action: int, what: str | None, *_: object) -> int:
        is_commit = action == sqlite3.SQLITE_TRANSACTION and what == "COMMIT"
        return sqlite3.SQLITE_DENY if is_commit else sqlite3.SQLITE_OK

    connection.set_authorizer(authorize)
    writer.append(b"a")
    assert isinstance(await writer.answers.last(), StoreError)
    connection.set_authorizer(None)
    assert log.head("s").seq == 0
    writer.append(b"b", seq=0)
    assert await writer.answers.last() is None
    assert data(await everything(log, "s")) == [b"b"]
    await log.close()


@pytest.mark.parametrize("moment", ["before the commit", "after the commit"])
def test_keyboard_interrupt_during_a_commit_in_the_loop_loses_no_answer(
    path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    loop = asyncio.new_event_loop()

    async def begin() -> Writer:
        return await Writer.claim(SqliteLog(path))

    try:
        writer = loop.run_until_complete(begin())
        log = writer.log
        assert isinstance(log, SqliteLog)
        group_writer = log._bridge._group_writer  # pyright: ignore[reportPrivateUsage]
        place = (group_writer._presence, "check") if moment == "before the commit" else (group_writer, "stay_seen")  # pyright: ignore[reportPrivateUsage]
        usual = getattr(*place)
        interrupts = [KeyboardInterrupt()]

        def interrupted() -> None:
            if interrupts:
                raise interrupts.pop()
            usual()

        monkeypatch.setattr(*place, interrupted)
        writer.append(b"a")
        with pytest.raises(KeyboardInterrupt):
            loop.run_forever()
        assert loop.run_until_complete(writer.answers.all()) == [None]
        loop.run_until_complete(writer.commit(b"b"))
        assert data(loop.run_until_complete(everything(log, "s"))) == [b"a", b"b"]
        loop.run_until_complete(log.close())
    finally:
        loop.close()
