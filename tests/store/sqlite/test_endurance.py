"""SQLite engine in a hostile environment.

Other programs drop its locks, files vanish, readers stay for long, disks fill for a while, and the work lasts for
weeks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.thorough import thorough

from banksman.errors import NotOwner, StoreError
from banksman.store.sqlite import SqliteLog, maintenance, open_file, tail_wait, wal_check
from banksman.store.sqlite.append import CHUNKS_MAX, ENTRY_BYTES, AppendOperation, RecentChunks
from banksman.store.sqlite.host_locks import HostLocks, HostProcess, identity
from banksman.store.sqlite.operations import WriterContext
from banksman.store.sqlite.pages import CHUNK_BYTES
from banksman.store.sqlite.writer_thread import AGAIN_SECONDS

pytest.register_assert_rewrite("tests.store.conformance")

from tests.store.conformance import AT, Writer, data, everything, known, lines, until  # noqa: E402

pytestmark = thorough

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


# Host in a separate process. It executes commands or lines of Python from its stdin, and reports the end of each. It
# owns the session "s", with the lease "claude:x".
HOST = """
import asyncio, os, shutil, signal, sys
from banksman.store.sqlite import SqliteLog

signal.alarm(60)

async def main(path):
    log = SqliteLog(path, address="there")
    epoch = await log.claim("s", agent="claude")
    loop = asyncio.get_running_loop()
    seq = 0

    async def answered(call, *arguments):
        future = loop.create_future()
        call("s", epoch, *arguments, future.set_result)
        return await future

    async def append():
        nonlocal seq
        error = await answered(log.append, seq, 0.0, [("t-1", "update", b"%d" % seq)])
        seq += error is None
        return error

    assert await answered(log.lease, "claude:x") is None
    print("ready", flush=True)
    while line := await loop.run_in_executor(None, sys.stdin.readline):
        if line.startswith("append"):
            print(repr(await append()), flush=True)
        elif line.startswith("close"):
            await log.close()
            print("closed", flush=True)
        else:
            exec(line, {**globals(), "path": path})
            print("done", flush=True)

asyncio.run(main(sys.argv[1]))
"""


class Host:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    def do(self, line: str) -> str:
        """Send a line, and return the report of its end."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return self.said()

    def said(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        """Kill the process and wait for its death, without reaping it."""
        self.process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


@contextlib.contextmanager
def host(path: Path) -> Generator[Host]:
    with subprocess.Popen(
        [sys.executable, "-c", HOST, str(path)],
        cwd=REPOSITORY,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
    ) as process:
        found = Host(process)
        try:
            assert found.said() == "ready"
            yield found
        finally:
            process.kill()


# A copy, a tar or a search of the folder does the same for each of its files.
DROP_LOCKS = "open(path + '-hosts').close()"
DROP_ALL_LOCKS = "[open(path + end).close() for end in ('', '-wal', '-shm', '-hosts')]"


# -- live and dead hosts ---------------------------------------------------------------------------------------------
async def test_live_host_keeps_its_sessions_when_its_program_drops_its_locks(path: Path) -> None:
    with host(path) as there, contextlib.closing(HostLocks(str(path))) as locks:
        log = SqliteLog(path)
        mine = await Writer.claim(log, "mine")
        ((number,),) = rows(path, "SELECT owner FROM sessions WHERE id = 's'")
        assert locks.is_alive(number)
        assert there.do(DROP_LOCKS) == "done"
        assert not locks.is_alive(number), "the locks are still there: this test would show nothing"
        owner = known(log).owner
        assert owner is not None
        assert (owner.pid, owner.is_alive) == (there.pid, True)
        with pytest.raises(NotOwner) as raised:
            await log.claim("s")
        assert raised.value.ids["pid"] == there.pid
        with pytest.raises(NotOwner):
            await log.delete("s")
        assert isinstance(await mine.take("claude:x"), NotOwner)
        assert there.do("append") == "None"
        # A zombie counts as dead, also in the check of the process.
        there.kill()
        owner = known(log).owner
        assert owner is not None
        assert not owner.is_alive
        assert await mine.take("claude:x") is None
        assert await log.claim("s") > 1
        await log.close()


async def test_host_retakes_its_lock_with_its_next_commit(path: Path) -> None:
    """Hosts in other containers cannot see its pid, so they need the lock."""
    with host(path) as there, contextlib.closing(HostLocks(str(path))) as locks:
        ((number,),) = rows(path, "SELECT owner FROM sessions WHERE id = 's'")
        assert there.do(DROP_LOCKS) == "done"
        assert not locks.is_alive(number)
        assert there.do("append") == "None"
        assert locks.is_alive(number)


async def test_host_that_called_exec_is_dead_despite_same_pid_and_start(path: Path) -> None:
    with host(path) as there:
        code = "import os; os.write(1, b'another\\n'); os.read(0, 1)"
        assert there.do(f"os.execv(sys.executable, [sys.executable, '-c', {code!r}])") == "another"
        log = SqliteLog(path)
        owner = known(log).owner
        assert owner is not None
        assert not owner.is_alive
        await log.claim("s")
        await log.close()


async def test_host_closed_on_full_disk_is_dead_though_its_process_lives(path: Path) -> None:
    """The row still names it as the owner, and its process lives."""
    with host(path) as there:
        log = SqliteLog(path)
        # The same happens at a close on a full disk: the row stays, the lock is gone.
        code = "from banksman.store.sqlite import host_locks; [os.close(one.fd) for one in host_locks._files.values()]"
        assert there.do(code) == "done"
        assert there.process.poll() is None
        await log.claim("s")
        await log.close()


def test_host_process_is_identified_by_boot_and_start(path: Path) -> None:
    with host(path) as there, contextlib.closing(HostLocks(str(path))) as locks:
        ((number, *process),) = rows(path, "SELECT id, boot, pid, started FROM hosts")
        process = HostProcess(*process)
        assert process.pid == there.pid
        assert there.do(DROP_LOCKS) == "done"
        assert locks.is_alive(number, process)
        assert not locks.is_alive(number)
        assert not locks.is_alive(number, process._replace(boot="another"))
        assert not locks.is_alive(number, process._replace(boot=""))
        assert not locks.is_alive(number, process._replace(started=process.started + 1))
        assert not locks.is_alive(number, process._replace(started=0))
        # For its own ids the process needs no other check: "pid 1 lives, and that is this process".
        assert not locks.is_alive(number, identity())
        locks.hold(number + 1)
        assert locks.is_alive(number + 1, identity())


async def test_host_of_another_boot_is_dead_despite_same_pid_and_start(path: Path) -> None:
    """A machine can start the same services in the same order after a boot, so a pid and a start time can repeat."""
    with host(path) as there:
        assert there.do(DROP_LOCKS) == "done"
        change(path, "UPDATE hosts SET boot = 'before'")
        log = SqliteLog(path)
        # Twice, because the first look records the new boot.
        for _ in range(2):
            owner = known(log).owner
            assert owner is not None
            assert not owner.is_alive
            await log.claim("other", agent="claude")
        await log.claim("s")
        await log.close()


# -- files that vanish -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("how", ["folder", "moved", "db", "replaced", "-wal", "-shm"])
async def test_store_acknowledges_nothing_when_its_file_is_gone(path: Path, tmp_path: Path, how: str) -> None:
    """A cleaner of old files, a `git clean` or a restored backup removes the file.

    Later writes would go to a file that no process could open again.
    """
    folder = tmp_path / "state"
    log = SqliteLog(folder / "store.db")
    writer = await Writer.claim(log)
    await writer.commit(b"a")
    match how:
        case "folder":
            shutil.rmtree(folder)
        case "moved":
            folder.rename(tmp_path / "elsewhere")
        case "replaced":
            await SqliteLog(path).close()
            path.replace(folder / "store.db")
        case "db":
            (folder / "store.db").unlink()
        case _:
            (folder / f"store.db{how}").unlink()
    seq = writer.seq
    writer.append(b"b")
    error = await writer.answers.last()
    assert isinstance(error, StoreError)
    assert not isinstance(error, NotOwner)
    assert "while it was open" in str(error)
    assert error.hint
    with pytest.raises(StoreError, match="while it was open"):
        await log.claim("another", agent="claude")
    if how == "moved":
        # Nothing was written, so the session can continue after the file is put back.
        (tmp_path / "elsewhere").rename(folder)
        writer.append(b"b", seq=seq)
        assert await writer.answers.last() is None
        assert data(await everything(log)) == [b"a", b"b"]
    await log.close()


@pytest.mark.parametrize("how", ["reads", "claims"])
async def test_close_keeps_the_wal_when_a_live_hosts_locks_are_invisible(path: Path, how: str) -> None:
    """For SQLite this is the last connection: it would checkpoint the WAL into the store, and remove it."""
    with host(path) as there:
        assert there.do("append") == "None"
        assert there.do(DROP_ALL_LOCKS) == "done"
        for number in range(3):
            log = SqliteLog(path)
            if how == "claims":
                await (await Writer.claim(log, "mine")).commit(b"x")
            assert len(await everything(log)) == 1 + number
            await log.close()
            assert there.do("append") == "None"
        assert there.do("close") == "closed"
        assert not Path(f"{path}-wal").exists()
        log = SqliteLog(path)
        assert len(await everything(log)) == 4
        assert len(await everything(log, "mine")) == (3 if how == "claims" else 0)
        await log.close()
    # Without other hosts it is the last connection, and cleans up.
    assert not Path(f"{path}-wal").exists()


async def test_append_fails_when_another_program_removed_the_wal(path: Path) -> None:
    """A host's program dropped SQLite's locks.

    The next connection to close counted as the last, checkpointed the WAL into the store, and removed it.
    """
    with host(path) as there:
        assert there.do("append") == "None"
        assert there.do(DROP_ALL_LOCKS) == "done"
        assert rows(path, "SELECT count(*) FROM chunks") == [(1,)]
        assert not Path(f"{path}-wal").exists(), "it was not the last: this test would show nothing"
        assert "while it was open" in there.do("append")


async def test_orphaned_wal_is_never_checkpointed_into_a_newer_store(path: Path) -> None:
    """Its pages are older than those of the store, which other hosts have written since."""
    with host(path) as there:
        for _ in range(20):
            assert there.do("append") == "None"
        assert there.do(DROP_ALL_LOCKS) == "done"
        for number in range(3):
            assert rows(path, "SELECT count(*) FROM hosts") == [(1,)]
            assert not Path(f"{path}-wal").exists(), "it was not the last: this test would show nothing"
            log = SqliteLog(path)
            writer = await Writer.claim(log, f"s{number}")
            for _ in range(50):
                await writer.commit(b"x" * 5000)
            await log.close()
        assert "while it was open" in there.do("append")
        assert there.do("close") == "closed"
        assert rows(path, "PRAGMA integrity_check") == [("ok",)]
        log = SqliteLog(path)
        for number in range(3):
            assert len(await everything(log, f"s{number}")) == 50
        assert len(await everything(log)) == 20
        await log.close()


async def test_new_lock_file_hides_no_live_host(path: Path) -> None:
    """The lock file is empty, and looks like a file that can be removed."""
    with host(path) as there:
        Path(f"{path}-hosts").unlink()
        log = SqliteLog(path)
        with pytest.raises(NotOwner):
            await log.claim("s")
        assert there.do("append") == "None"
        there.kill()
        await log.claim("s")
        await log.close()


async def test_new_lock_file_hides_no_live_host_of_the_same_process(path: Path) -> None:
    here = SqliteLog(path)
    writer = await Writer.claim(here)
    Path(f"{path}-hosts").unlink()
    there = SqliteLog(path)
    with pytest.raises(NotOwner):
        await there.claim("s")
    await writer.commit(b"a")
    await here.close()
    await there.claim("s")
    await there.close()


async def test_host_with_removed_lock_file_declares_no_host_dead(path: Path) -> None:
    log = SqliteLog(path)
    await log.claim("mine", agent="claude")
    Path(f"{path}-hosts").unlink()
    with host(path) as there:
        # The check can be sure about a live host.
        with pytest.raises(NotOwner):
            await log.delete("s")
        there.kill()
        with pytest.raises(StoreError, match="was replaced while it was open"):
            await log.claim("s")
        with pytest.raises(StoreError, match="was replaced while it was open"):
            await log.delete("s")
        # Other hosts could not see that this host owns the session.
        with pytest.raises(StoreError, match="was replaced while it was open"):
            await log.claim("new", agent="claude")
    await log.close()


# -- no caller waits forever -----------------------------------------------------------------------------------------
class Odd(Exception):
    """Unexpected error."""


async def test_commit_succeeds_when_maintenance_raises(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def excess(*_: object) -> None:
        raise Odd

    monkeypatch.setattr(maintenance, "excess", excess)
    log = SqliteLog(path, bytes_max=1)
    writer = await Writer.claim(log)
    async with asyncio.timeout(10):
        await writer.commit(b"a")
        await writer.commit(b"b")
        await log.close()
    words = f"store maintenance failed, trying again after a later write (store={path} error=Odd())"
    assert words in caplog.messages


async def test_close_completes_when_a_bug_raises(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop_being_host(_: WriterContext) -> None:
        raise Odd

    log = SqliteLog(path)
    await (await Writer.claim(log)).commit(b"a")
    with monkeypatch.context() as patched:
        patched.setattr(WriterContext, "stop_being_host", stop_being_host)
        async with asyncio.timeout(10):
            await log.close()
    # Its locks are released too, otherwise no log in this process could claim the session.
    log = SqliteLog(path)
    assert data(await everything(log)) == [b"a"]
    await log.claim("s")
    await log.close()


async def test_store_refuses_without_hanging_when_secure_delete_is_denied(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread first sets `secure_delete`, so that SQLite overwrites deleted data."""
    real = open_file.StoreOpening.open

    def deny(action: int, first: str | None, *_: str | None) -> int:
        is_it = action == sqlite3.SQLITE_PRAGMA and first == "secure_delete"
        return sqlite3.SQLITE_DENY if is_it else sqlite3.SQLITE_OK

    def opened(self: open_file.StoreOpening) -> sqlite3.Connection:
        connection = real(self)
        connection.set_authorizer(deny)
        return connection

    monkeypatch.setattr(open_file.StoreOpening, "open", opened)
    log = SqliteLog(path)
    async with asyncio.timeout(10):
        with pytest.raises(StoreError, match="not authorized"):
            await log.claim("s", agent="claude")
        await log.close()


def test_log_can_be_abandoned_when_loop_ends_during_close(path: Path) -> None:
    async def begin() -> SqliteLog:
        log = SqliteLog(path)
        await log.claim("s", agent="claude")
        # The same happens when the loop is stopped: the threads end, and no callback runs.
        closing = log.close()
        assert asyncio.isfuture(closing.send(None))
        closing.close()
        return log

    loop = asyncio.new_event_loop()
    try:
        log = loop.run_until_complete(begin())
    finally:
        loop.close()
    log.abandon()
    log.abandon()
    assert not +wal_check._logs  # pyright: ignore[reportPrivateUsage]
    assert [one.name for one in threading.enumerate() if one.name.startswith("banksman-store")] == []


# -- waits that end --------------------------------------------------------------------------------------------------
async def test_wait_ends_when_ownership_was_lost_and_new_owner_wrote(path: Path) -> None:
    """Another host took the session and wrote. The waiter got no event, because only this host could write before."""
    here, there = SqliteLog(path), SqliteLog(path)
    mine = await Writer.claim(here)
    wait = asyncio.ensure_future(here.wait_past("s", 0))
    await asyncio.sleep(0)
    change(path, "UPDATE sessions SET owner = NULL")
    theirs = await Writer.claim(there)
    await theirs.commit(b"a")
    mine.append(b"late")
    assert await mine.answers.all() == [NotOwner]
    async with asyncio.timeout(10):
        await wait
    await here.close()
    await there.close()


async def test_wait_ends_when_session_was_claimed_here_between_two_polls(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail_wait, "WATCH_SECONDS", 3600.0)
    here, there = SqliteLog(path), SqliteLog(path)
    theirs = await Writer.claim(there)
    waits = [asyncio.ensure_future(here.wait_past("s", seq)) for seq in (0, 1)]
    await asyncio.sleep(0)
    await theirs.commit(b"a")
    theirs.release()
    await until(lambda: known(here).owner is None)
    epoch = await here.claim("s")
    async with asyncio.timeout(10):
        await waits[0]
    assert not waits[1].done()
    # A wait on an earlier session with this id gets an error, and the events of the new session do not end it.
    here.release("s", epoch)
    await until(lambda: known(there).owner is None)
    await there.delete("s")
    theirs = await Writer.claim(there)
    await theirs.commit(b"b", b"c")
    theirs.release()
    await until(lambda: known(here).owner is None)
    await here.claim("s")
    async with asyncio.timeout(10):
        with pytest.raises(StoreError, match="deleted"):
            await waits[1]
    await here.close()
    await there.close()


async def test_wait_for_missing_session_continues_when_our_session_is_deleted(path: Path) -> None:
    here, there = SqliteLog(path), SqliteLog(path)
    wait = asyncio.ensure_future(here.wait_past("s", 0))
    await asyncio.sleep(0)
    await here.claim("s", agent="claude")
    # While this host owns the session, it does not poll for other writers.
    await until(lambda: here._waiting._timer is None)  # pyright: ignore[reportPrivateUsage]
    await here.delete("s")
    await (await Writer.claim(there)).commit(b"a")
    async with asyncio.timeout(10):
        await wait
    await here.close()
    await there.close()


# -- work that is retried --------------------------------------------------------------------------------------------
@contextlib.contextmanager
def other(path: Path, *statements: str) -> Generator[sqlite3.Connection]:
    """Another connection, in the middle of a transaction."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement).fetchall()
        yield connection


def is_in_log(path: Path, text: bytes) -> bool:
    return text in Path(f"{path}-wal").read_bytes()


@pytest.mark.parametrize("how", ["idle", "at work", "closed"])
async def test_deleted_data_leaves_the_wal_once_no_reader_blocks_it(path: Path, how: str) -> None:
    log = SqliteLog(path)
    writer, lasting = await Writer.claim(log), await Writer.claim(log, "lasting")
    await writer.commit(b"a secret of theirs")
    with other(path, "BEGIN", "SELECT * FROM sessions"):
        await log.delete("s")
        assert is_in_log(path, b"a secret of theirs"), "nobody was in the way: this test would show nothing"
    if how == "at work":
        while is_in_log(path, b"a secret of theirs"):
            await lasting.commit(b"x")
    elif how == "idle":
        await until(lambda: not is_in_log(path, b"a secret of theirs"))
    # The log's connections are not the last ones: otherwise SQLite would remove the WAL.
    with other(path, "SELECT * FROM sessions"):
        await log.close()
        assert not is_in_log(path, b"a secret of theirs")


async def test_long_reader_limits_the_rate_of_wal_truncation_attempts(path: Path) -> None:
    """An attempt waits for readers for a moment, and holds the write lock.

    So there must not be one after each group.
    """
    log = SqliteLog(path)
    writer, lasting = await Writer.claim(log), await Writer.claim(log, "lasting")
    await writer.commit(b"a secret of theirs")
    said: list[str] = []
    with other(path, "BEGIN", "SELECT * FROM sessions"):
        await log.delete("s")
        log._bridge._work.connection.set_trace_callback(said.append)  # pyright: ignore[reportPrivateUsage]
        begun = time.monotonic()
        for _ in range(50):
            await lasting.commit(b"x")
        seconds = time.monotonic() - begun
    attempts = sum("wal_checkpoint(TRUNCATE)" in one for one in said)
    assert attempts <= 1 + seconds / AGAIN_SECONDS
    await log.close()


@pytest.mark.parametrize("how", ["idle", "at work"])
async def test_failed_release_is_retried(path: Path, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """No caller in this process has the session, and no other host could get it while this process lives."""
    monkeypatch.setattr(open_file, "BUSY_SECONDS_MAX", 0.05)
    log, there = SqliteLog(path), SqliteLog(path)
    writer, lasting = await Writer.claim(log), await Writer.claim(log, "lasting")
    assert await writer.take("claude:x") is None
    with other(path, "BEGIN IMMEDIATE"):
        writer.release()
        # This append is queued behind the release, so the release has failed when the append is answered.
        lasting.append(b"x")
        assert await lasting.answers.last() is not None
        assert known(there).owner is not None
    if how == "at work":
        lasting.append(b"x", seq=0)
        assert await lasting.answers.last() is None
        assert known(there).owner is None
    else:
        await until(lambda: known(there).owner is None)
    theirs = await Writer.claim(there)
    assert await theirs.take("claude:x") is None
    # Nothing is left to retry, so no timer runs.
    await lasting.log.rename("lasting", "after it", expected=None)
    assert not log._bridge._work.unreleased  # pyright: ignore[reportPrivateUsage]
    await log.close()
    await there.close()


async def test_retried_release_does_not_end_a_newer_claim(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_file, "BUSY_SECONDS_MAX", 0.05)
    log = SqliteLog(path)
    writer, lasting = await Writer.claim(log), await Writer.claim(log, "lasting")
    with other(path, "BEGIN IMMEDIATE"):
        writer.release()
        lasting.append(b"x")
        assert await lasting.answers.last() is not None
    again = await Writer.claim(log)
    assert again.epoch > writer.epoch
    for _ in range(3):
        await again.commit(b"a")
    owner = known(log).owner
    assert owner is not None
    assert owner.is_here
    await log.close()


# -- weeks of work ---------------------------------------------------------------------------------------------------
def test_recent_chunks_free_memory_of_dropped_sessions() -> None:
    bytes_max = 40 * (ENTRY_BYTES + CHUNK_BYTES + 64)
    recent = RecentChunks(bytes_max)
    seqs: Counter[str] = Counter()

    def add(session: str) -> None:
        recent.add(AppendOperation(print, session, 1, 0, print, seqs[session], AT, lines(b"x"), None), 0.0)
        seqs[session] += 1

    for number in range(5000):
        add("lasting")
        for session in (f"s{number}", f"s{number}", f"t{number % 20}"):
            add(session)
        recent.drop(f"s{number}")
        if number % 3 == 0:
            recent.drop(f"t{number % 20}")
        assert all(recent._tails.values())  # pyright: ignore[reportPrivateUsage]
        assert 0 < recent._weight <= bytes_max  # pyright: ignore[reportPrivateUsage]
        # The last chunk is there. The oldest chunks went first.
        assert recent.read("lasting", number, 10, None)
    assert recent.read("lasting", 0, 10, None) is None
    for session in seqs:
        recent.drop(session)
    assert not recent._tails  # pyright: ignore[reportPrivateUsage]
    assert recent._weight == 0  # pyright: ignore[reportPrivateUsage]


def test_recent_chunks_keep_only_the_last_chunks_of_a_session() -> None:
    recent = RecentChunks()
    for seq in range(3 * CHUNKS_MAX):
        recent.add(AppendOperation(print, "s", 1, 0, print, seq, AT, lines(b"x"), None), 0.0)
    assert len(recent._tails["s"]) == CHUNKS_MAX  # pyright: ignore[reportPrivateUsage]
    first = 2 * CHUNKS_MAX
    assert recent.read("s", first - 1, 1, None) is None
    assert [event.seq for event in recent.read("s", first, 1000, None) or ()] == [*range(first + 1, 3 * CHUNKS_MAX + 1)]


def rows(path: Path, statement: str) -> list[tuple[Any, ...]]:
    """Query through another connection."""
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def change(path: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


async def test_retention_drops_old_events_behind_one_with_a_future_time(path: Path) -> None:
    log = SqliteLog(path, seconds_max=2)
    epoch = await log.claim("s", agent="a")
    now = time.time()
    for seq, at in enumerate([now + 1e7, *[now - 1000.0] * 5, now]):
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        log.append("s", epoch, seq, at, [("t", "update", b"x")], answered.set_result, b"all")
        assert await answered is None
    assert log.head("s").first == 7
    await log.close()
