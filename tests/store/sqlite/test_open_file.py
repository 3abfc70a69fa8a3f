"""Creation, opening, migration and refusal of the SQLite engine's file."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import sqlite3
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from banksman.errors import StoreDamaged, StoreError, StoreReadOnly, StoreTooNew, UsageError
from banksman.store.log_values import Head
from banksman.store.sqlite import SqliteLog, tables

pytest.register_assert_rewrite("tests.store.conformance")

from tests.store.conformance import Writer, chunk, data, everything, known  # noqa: E402

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def written(path: Path) -> Path:
    """Return a store with a session of two events, closed cleanly."""

    async def write() -> None:
        log = SqliteLog(path)
        await (await Writer.claim(log)).commit(b"a", b"b", snapshot=b"at 2")
        await log.close()

    asyncio.run(write())
    return path


def rows(path: Path, statement: str) -> list[tuple[object, ...]]:
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(statement).fetchall()


def change(path: Path, statement: str) -> None:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute(statement)


def files(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.parent.iterdir()}


# -- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("path", ["", ":memory:", "a\0b", b"bytes", None, 3])
async def test_open_refuses_invalid_path(path: object) -> None:
    with pytest.raises(UsageError):
        SqliteLog(path)  # pyright: ignore[reportArgumentType]


async def test_open_refuses_invalid_settings_before_making_a_file(path: Path) -> None:
    for settings in ({"level": "fast"}, {"bytes_max": 0}, {"bytes_max": -1}, {"seconds_max": 0.0}):
        with pytest.raises(UsageError):
            SqliteLog(path, **settings)  # pyright: ignore[reportArgumentType]
    assert not path.exists()


async def test_claim_refuses_undecodable_id_and_log_stays_usable(path: Path) -> None:
    log = SqliteLog(path)
    for wrong in (
        log.claim("\ud800", agent="claude"),
        log.claim("s", name="\ud800", agent="claude"),
        log.rename("s", "\ud800", expected=None),
    ):
        with pytest.raises(UsageError):
            await wrong
    writer = await Writer.claim(log)
    await writer.commit(b"a")
    with pytest.raises(UsageError):
        writer.lease("\ud800")
    # A number that is larger than the store can hold causes no error either.
    assert (await log.read("s", 1 << 80)).events == ()
    assert [await log.trim("s", before) for before in (1 << 80, -(1 << 80))] == [1, 1]
    await log.close()


# -- creation --------------------------------------------------------------------------------------------------------
@pytest.fixture
def open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("open_umask")
async def test_open_makes_private_files_and_folders(tmp_path: Path) -> None:
    path = tmp_path / "not" / "there yet" / "a # store? 100%.db"
    log = SqliteLog(path)
    await (await Writer.claim(log)).commit(b"a")
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    assert modes == {f"{path.name}{end}": 0o600 for end in ("", "-wal", "-shm", "-hosts")}
    for folder in (path.parent, path.parent.parent):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    await log.close()
    assert {file.name for file in path.parent.iterdir()} == {path.name, f"{path.name}-hosts"}


async def test_symlink_opens_the_same_store(written: Path, tmp_path: Path) -> None:
    link = tmp_path / "elsewhere" / "link.db"
    link.parent.mkdir()
    link.symlink_to(written)
    here, there = SqliteLog(written), SqliteLog(link)
    await (await Writer.claim(here)).commit(b"c")
    assert data(await everything(there)) == [b"a", b"b", b"c"]
    owner = known(there).owner
    assert owner is not None
    assert owner.is_alive
    await asyncio.gather(here.close(), there.close())
    assert [file.name for file in link.parent.iterdir()] == ["link.db"]


async def test_reading_log_writes_nothing_to_the_store(written: Path) -> None:
    before = written.read_bytes()
    log = SqliteLog(written)
    assert data(await everything(log)) == [b"a", b"b"]
    assert await log.snapshot("s") == (2, b"at 2")
    assert len(log.sessions()) == 1
    assert (written.parent / "store.db-wal").stat().st_size == 0
    await log.close()
    assert written.read_bytes() == before
    assert rows(written, "SELECT count(*) FROM hosts") == [(0,)]


async def test_open_raises_store_error_with_hint_when_folder_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError) as raised:
        SqliteLog(tmp_path / "file" / "store.db")
    assert raised.value.hint
    assert isinstance(raised.value.__cause__, OSError)


# -- other files -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["text", "other", "unmarked", "folder"])
async def test_open_refuses_foreign_file_and_leaves_it_alone(path: Path, kind: str) -> None:
    match kind:
        case "text":
            path.write_bytes(b"Dear diary, " * 1000)
        case "folder":
            path.mkdir()
        case "other":
            change(path, "CREATE TABLE theirs (x)")
            change(path, "PRAGMA application_id = 77")
        case _:
            change(path, "CREATE TABLE theirs (x)")
    before = files(path) if kind != "folder" else {}
    with pytest.raises(StoreError if kind == "folder" else StoreDamaged) as raised:
        SqliteLog(path)
    assert raised.value.hint
    assert before == (files(path) if kind != "folder" else {})


async def test_open_turns_an_empty_file_into_a_store(path: Path) -> None:
    path.touch()
    log = SqliteLog(path)
    assert await log.claim("s", agent="claude") == 1
    await log.close()


async def test_open_refuses_store_of_newer_banksman_and_leaves_it_alone(written: Path) -> None:
    change(written, f"PRAGMA user_version = {tables.SCHEMA + 1}")
    before = files(written)
    with pytest.raises(StoreTooNew, match="newer") as raised:
        SqliteLog(written)
    assert raised.value.hint
    assert raised.value.ids["schema"] == tables.SCHEMA + 1
    assert files(written) == before


# -- migration -------------------------------------------------------------------------------------------------------
@pytest.fixture
def older(written: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a store with the old schema: the fixture adds a newer one."""

    def migrate(connection: sqlite3.Connection) -> None:
        connection.execute("ALTER TABLE sessions ADD COLUMN mood TEXT")
        connection.execute("UPDATE sessions SET mood = 'fine'")

    monkeypatch.setattr(tables, "MIGRATIONS", {tables.SCHEMA: migrate})
    monkeypatch.setattr(tables, "SCHEMA", tables.SCHEMA + 1)
    return written


@pytest.mark.usefixtures("open_umask")
async def test_open_backs_up_then_migrates_an_older_store(older: Path) -> None:
    log = SqliteLog(older)
    assert data(await everything(log)) == [b"a", b"b"]
    await (await Writer.claim(log)).commit(b"c")
    await log.close()
    assert rows(older, "SELECT mood FROM sessions") == [("fine",)]
    assert rows(older, "PRAGMA user_version") == [(2,)]
    backup = Path(tables.backup_path(str(older), 1))
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert rows(backup, "PRAGMA user_version") == [(1,)]
    assert rows(backup, "PRAGMA integrity_check") == [("ok",)]
    assert rows(backup, "SELECT seq FROM sessions") == [(2,)]
    # The backup is one file, which can replace the store directly.
    assert not list(older.parent.glob("*.bak?*"))


async def test_migration_backup_opens_with_the_older_version(older: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await SqliteLog(older).close()
    monkeypatch.setattr(tables, "SCHEMA", 1)
    with pytest.raises(StoreTooNew):
        SqliteLog(older)
    shutil.copy(tables.backup_path(str(older), 1), older)
    log = SqliteLog(older)
    await (await Writer.claim(log)).commit(b"c")
    assert data(await everything(log)) == [b"a", b"b", b"c"]
    await log.close()


@pytest.mark.parametrize("why", ["sql", "bug"])
async def test_failed_migration_leaves_the_store_and_the_backup(older: Path, why: str) -> None:
    works = tables.MIGRATIONS[1]

    def fails(connection: sqlite3.Connection) -> None:
        works(connection)
        if why == "bug":
            raise ZeroDivisionError
        connection.execute("SELECT nothing")

    tables.MIGRATIONS[1] = fails
    with pytest.raises(StoreError, match="from schema 1 to 2") as raised:
        SqliteLog(older)
    assert tables.backup_path(str(older), 1) in raised.value.hint
    assert rows(older, "PRAGMA user_version") == [(1,)]
    assert "mood" not in str(rows(older, "SELECT sql FROM sqlite_master"))
    assert rows(Path(tables.backup_path(str(older), 1)), "SELECT seq FROM sessions") == [(2,)]
    # The second attempt succeeds.
    tables.MIGRATIONS[1] = works
    log = SqliteLog(older)
    assert data(await everything(log)) == [b"a", b"b"]
    await log.close()


# -- read-only stores ------------------------------------------------------------------------------------------------
READ_ONLY = """
import asyncio, os, sys
from banksman.errors import StoreReadOnly
from banksman.store.sqlite import SqliteLog

async def main(path):
    log = SqliteLog(path)
    print(*[event.data.decode() for event in (await log.read("s", 0)).events], (await log.snapshot("s")).seq)
    print(*log.head("s"), log.find("s").id, len((await log.read_many(None)).events))
    calls = [log.claim("s"), log.claim("t", agent="claude"), log.delete("s"), log.rename("s", "n", expected=None)]
    for call in calls:
        try:
            await call
        except StoreReadOnly as exc:
            assert exc.hint
        else:
            raise AssertionError("it was written")
    answer = asyncio.get_running_loop().create_future()
    log.append("s", 1, 2, 1.0, [(None, "update", b"x")], answer.set_result)
    print(type(await answer).__name__)
    await log.close()

if os.getuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
asyncio.run(main(sys.argv[1]))
"""


@pytest.fixture
def public() -> Iterator[Path]:
    """Return a folder that every user may read, unlike pytest's folders."""
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@pytest.mark.parametrize("what", ["file", "folder", "live"])
async def test_read_only_store_can_be_read(written: Path, public: Path, what: str) -> None:
    """The reader has no write permission. Root has every permission, so the test changes to the user `nobody`."""
    folder = public / "theirs"
    folder.mkdir()
    copy = folder / "store.db"
    shutil.copy(written, copy)
    live: SqliteLog | None = None
    if what == "live":
        live = SqliteLog(copy)
        await live.claim("u", agent="claude")
    for file in folder.iterdir():
        file.chmod(0o444)
    folder.chmod(0o777 if what == "file" else 0o555)
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(copy)],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    folder.chmod(0o700)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["a b 2", "1 2 1 s 2", StoreReadOnly.__name__]
    if live is not None:
        await live.close()


async def test_restored_history_beginning_late_is_read_with_its_gap(path: Path) -> None:
    log = SqliteLog(path)
    await log.restore("s", name="n", agent="a", chunks=lambda: [chunk(5, b"a", b"b", epoch=3), chunk(7, b"c", epoch=4)])
    assert log.head("s") == Head(4, 7, 5)
    page = await log.read("s", 0)
    assert page.gap == (1, 4)
    assert data(page.events) == [b"a", b"b", b"c"]
    await log.close()


async def test_open_makes_an_existing_empty_file_private(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.touch(0o666)
    path.chmod(0o666)
    log = SqliteLog(path)
    await log.claim("s", agent="a")
    modes = {name.name: name.stat().st_mode & 0o777 for name in tmp_path.iterdir()}
    assert set(modes.values()) == {0o600}, modes
    await log.close()


async def test_open_warns_of_store_readable_by_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "store.db"
    await SqliteLog(path).close()
    path.chmod(0o644)
    await SqliteLog(path).close()
    assert "may be read by others" in caplog.text


@pytest.mark.parametrize("kind", ["fifo", "folder", "/dev/null"])
async def test_open_refuses_path_that_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    path = Path(kind) if kind.startswith("/") else tmp_path / "store.db"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    with pytest.raises(StoreError, match="not a regular file"):
        SqliteLog(path)
