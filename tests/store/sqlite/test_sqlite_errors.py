"""Faults of the file, produced for real: full disks, locks, foreign files, folders without write permission.

A test that needs a separate disk runs in a mount namespace. A test that needs a user without permissions runs in a
process that drops its own. For each of them another test reaches the same code on every machine.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from banksman.errors import StoreBusy, StoreDamaged, StoreError, StoreFull, StoreReadOnly
from banksman.store.sqlite import sqlite_errors
from banksman.store.sqlite.sqlite_errors import translate

# The program ends after its attempts, and prints the result of each as JSON.
_PROGRAM = """
import errno, json, os, resource, signal, sqlite3, sys
from banksman.store.sqlite.sqlite_errors import translate
signal.alarm(60)
WORDS = sys.argv[1:]

def store(path):
    connection = sqlite3.connect(path, isolation_level=None, timeout=0)
    connection.execute("PRAGMA journal_mode=wal").fetchall()
    connection.execute("CREATE TABLE IF NOT EXISTS rows (data BLOB)")
    return connection

def fill(connection):
    for _ in range(1000):
        connection.execute("INSERT INTO rows VALUES (randomblob(5000))")

def attempt(path, doing, what):
    try:
        what()
    except (sqlite3.Error, OSError) as exc:
        error = translate(exc, path, doing)
        said = {"class": type(error).__name__, "said": str(error), "hint": error.hint, "code": error.ids["code"]}
    else:
        said = {"class": None}
    print(json.dumps(said))
"""


def run(code: str, *words: object, prefix: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    argv = [*prefix, sys.executable, "-c", _PROGRAM + code, *map(str, words)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def with_own_mounts(code: str, *words: object) -> list[dict[str, Any]]:
    """Run the code in a mount namespace, which ends with the process."""
    flags = ("--mount", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")))
    argv = ["unshare", *flags, "mount", "-t", "tmpfs", "none", "/mnt"]
    probe = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    if probe.returncode != 0:
        pytest.skip(f"NOT TESTED: nothing can be mounted here: {probe.stderr}")
    return run(code, *words, prefix=("unshare", *flags))


def translated(path: Path, doing: str, what: Callable[[], object]) -> StoreError:
    with pytest.raises((sqlite3.Error, OSError)) as caught:
        what()
    error = translate(caught.value, str(path), doing)
    assert doing in str(error)
    assert str(path) in str(error)
    return error


@contextlib.contextmanager
def connected(path: Path, **options: Any) -> Generator[sqlite3.Connection]:
    with contextlib.closing(sqlite3.connect(path, isolation_level=None, timeout=0, **options)) as connection:
        yield connection


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "store"
    with connected(path) as connection:
        connection.execute("PRAGMA journal_mode=wal").fetchall()
        connection.execute("CREATE TABLE rows (data BLOB)")
        connection.executemany("INSERT INTO rows VALUES (?)", [(os.urandom(5000),) for _ in range(20)])
    return path


# -- no space --------------------------------------------------------------------------------------------------------
def test_write_beyond_page_limit_raises_store_full(path: Path) -> None:
    with connected(path) as connection:
        connection.execute("PRAGMA max_page_count=40").fetchall()
        error = translated(path, "append to", lambda: connection.execute("INSERT INTO rows VALUES (zeroblob(1000000))"))
    assert type(error) is StoreFull
    assert error.hint == sqlite_errors.FREE_SPACE
    assert error.ids["code"] == "SQLITE_FULL"


def test_full_disk_raises_store_full_at_every_step(tmp_path: Path) -> None:
    """In the middle of the writes, at the creation of a store, and at the creation of its index."""
    code = """
import subprocess
(folder,) = WORDS
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", folder], check=True)
first, small = f"{folder}/first", f"{folder}/small"
store(small).close()
connection = store(first)
attempt(first, "append to", lambda: fill(connection))
rest = open(f"{folder}/rest", "wb", buffering=0)

def take_all():
    try:
        while rest.write(bytes(4096)): pass
    except OSError: pass

take_all()
attempt(f"{folder}/second", "open", lambda: store(f"{folder}/second"))
attempt(f"{folder}/file", "write", lambda: open(f"{folder}/file", "wb", buffering=0).write(b"x"))
# This store is whole, and for its index there is no room.
attempt(small, "read", lambda: sqlite3.connect(small).execute("SELECT count(*) FROM rows").fetchall())
"""
    said = with_own_mounts(code, tmp_path)
    assert [answer["class"] for answer in said] == ["StoreFull"] * 4
    assert [answer["hint"] for answer in said] == [sqlite_errors.FREE_SPACE] * 4
    assert [answer["code"] for answer in said] == ["SQLITE_FULL", "SQLITE_FULL", "ENOSPC", "SQLITE_IOERR_SHMSIZE"]


def test_disk_without_inodes_raises_store_full(tmp_path: Path) -> None:
    code = """
import subprocess
(folder,) = WORDS
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=2", "none", folder], check=True)
attempt(f"{folder}/store", "open", lambda: store(f"{folder}/store"))
"""
    (said,) = with_own_mounts(code, tmp_path)
    assert (said["class"], said["code"]) == ("StoreFull", "SQLITE_CANTOPEN")


def test_file_size_limit_of_sqlite_write_is_not_reported_as_full_disk(tmp_path: Path) -> None:
    """The kernel refuses a file that is larger than the limit of the process."""
    code = """
path = f"{WORDS[0]}/store"
connection = store(path)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
attempt(path, "append to", lambda: fill(connection))
with open(f"{WORDS[0]}/file", "wb") as file:
    attempt(path, "back up", lambda: os.posix_fallocate(file.fileno(), 0, 300_000))
"""
    by_sqlite, by_kernel = run(code, tmp_path)
    assert (by_sqlite["class"], by_sqlite["code"]) == ("StoreError", "SQLITE_IOERR_WRITE")
    assert by_sqlite["hint"] == sqlite_errors.LOOK_AT_DISK
    assert (by_kernel["class"], by_kernel["code"]) == ("StoreFull", "EFBIG")


def test_enospc_from_kernel_raises_store_full(path: Path) -> None:
    """/dev/full is always a full disk."""

    def write() -> None:
        with open("/dev/full", "wb", buffering=0) as file:
            file.write(b"x")

    assert type(translated(path, "back up", write)) is StoreFull


# -- no permission ---------------------------------------------------------------------------------------------------
def test_write_to_store_opened_read_only_raises_store_read_only(path: Path) -> None:
    with connected(Path(f"file:{path}?mode=ro"), uri=True) as connection:
        error = translated(path, "append to", lambda: connection.execute("DELETE FROM rows"))
    assert type(error) is StoreReadOnly
    assert error.hint == sqlite_errors.ALLOW_WRITING


def test_missing_permission_raises_store_read_only() -> None:
    """Another user than the owner meets a file and a folder without write permission, and an unreadable folder."""
    folder = tempfile.mkdtemp()
    code = """
(folder,) = WORDS
os.chmod(folder, 0o755)
store(f"{folder}/store").close()
os.mkdir(f"{folder}/secret", 0o700)
if os.geteuid() == 0:
    os.setgroups([])
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
else:
    os.chmod(f"{folder}/store", 0o444); os.chmod(f"{folder}/secret", 0); os.chmod(folder, 0o555)
attempt(f"{folder}/store", "append to", lambda: fill(store(f"{folder}/store")))
attempt(f"{folder}/new", "make", lambda: store(f"{folder}/new"))
attempt(f"{folder}/secret/store", "open", lambda: open(f"{folder}/secret/store"))
attempt(f"{folder}/new", "lock", lambda: open(f"{folder}/new", "w"))
"""
    try:
        said = run(code, folder)
    finally:
        os.chmod(folder, 0o700)
        shutil.rmtree(folder)
    assert [answer["class"] for answer in said] == ["StoreReadOnly"] * 4
    assert said[1]["code"] == "SQLITE_CANTOPEN"
    assert said[2]["code"] == "EACCES"


def test_read_only_mount_raises_store_read_only(tmp_path: Path) -> None:
    code = """
import subprocess
(folder,) = WORDS
subprocess.run(["mount", "-t", "tmpfs", "none", folder], check=True)
store(f"{folder}/store").close()
subprocess.run(["mount", "-o", "remount,ro", folder], check=True)
attempt(f"{folder}/store", "append to", lambda: fill(store(f"{folder}/store")))
attempt(f"{folder}/new", "make", lambda: store(f"{folder}/new"))
attempt(f"{folder}/file", "write", lambda: open(f"{folder}/file", "w"))
"""
    said = with_own_mounts(code, tmp_path)
    assert [answer["class"] for answer in said] == ["StoreReadOnly"] * 3
    assert said[2]["code"] == "EROFS"


def test_moved_store_file_raises_store_read_only_with_moved_hint(path: Path) -> None:
    with connected(path) as connection:
        connection.execute("PRAGMA journal_mode=delete").fetchall()
        path.rename(path.with_name("elsewhere"))
        error = translated(path, "append to", lambda: connection.execute("DELETE FROM rows"))
    assert (type(error), error.hint) == (StoreReadOnly, sqlite_errors.MOVED)
    assert error.ids["code"] == "SQLITE_READONLY_DBMOVED"


# -- other connections -----------------------------------------------------------------------------------------------
def test_store_locked_by_another_writer_raises_store_busy(path: Path) -> None:
    with connected(path) as one, connected(path) as other:
        one.execute("BEGIN IMMEDIATE")
        error = translated(path, "append to", lambda: other.execute("BEGIN IMMEDIATE"))
        assert (type(error), error.hint) == (StoreBusy, sqlite_errors.LET_GO)
        one.execute("ROLLBACK")
        # A reader with a snapshot older than the last write must not write. This error is also worth a retry.
        one.execute("BEGIN")
        one.execute("SELECT * FROM rows").fetchall()
        other.execute("DELETE FROM rows WHERE rowid = 1")
        error = translated(path, "append to", lambda: one.execute("DELETE FROM rows"))
    assert (type(error), error.ids["code"]) == (StoreBusy, "SQLITE_BUSY_SNAPSHOT")


def test_table_being_read_raises_store_busy(path: Path) -> None:
    with connected(path) as connection:
        rows = connection.execute("SELECT * FROM rows")
        rows.fetchone()
        error = translated(path, "migrate", lambda: connection.execute("DROP TABLE rows"))
        rows.close()
    assert (type(error), error.ids["code"]) == (StoreBusy, "SQLITE_LOCKED")


def test_locked_file_raises_store_busy(path: Path) -> None:
    error = translate(BlockingIOError(errno.EAGAIN, "locked"), str(path), "lock")
    assert type(error) is StoreBusy


# -- contents of the file --------------------------------------------------------------------------------------------
def test_foreign_file_raises_store_damaged(path: Path) -> None:
    path.write_bytes(b"not a store " * 1000)
    with connected(path) as connection:
        error = translated(path, "open", lambda: connection.execute("SELECT * FROM sqlite_schema").fetchall())
    assert (type(error), error.hint, error.ids["code"]) == (StoreDamaged, sqlite_errors.RESTORE, "SQLITE_NOTADB")


def test_overwritten_page_raises_store_damaged(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[4096 : 2 * 4096] = b"\xff" * 4096
    path.write_bytes(data)
    with connected(path) as connection:
        error = translated(path, "read", lambda: connection.execute("SELECT * FROM rows").fetchall())
    assert (type(error), error.hint, error.ids["code"]) == (StoreDamaged, sqlite_errors.RESTORE, "SQLITE_CORRUPT")


# -- other errors ----------------------------------------------------------------------------------------------------
def test_missing_folder_raises_store_error_with_make_folder_hint(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "store"
    for what in (lambda: sqlite3.connect(path), lambda: os.stat(path)):
        error = translated(path, "open", what)
        assert (type(error), error.hint) == (StoreError, sqlite_errors.MAKE_FOLDER)
    error = translated(tmp_path, "open", lambda: sqlite3.connect(tmp_path))
    assert (type(error), error.hint) == (StoreError, sqlite_errors.MAKE_FOLDER)


def test_too_many_open_files_raises_store_error_with_ulimit_hint(path: Path) -> None:
    error = translate(OSError(errno.EMFILE, "too many"), str(path), "open")
    assert type(error) is StoreError
    assert "ulimit -n" in error.hint


def test_error_without_code_raises_store_error(path: Path) -> None:
    """Python's module raises some errors without a code, and a bare OSError has no errno."""
    connection = sqlite3.connect(path)
    connection.close()
    error = translated(path, "read", lambda: connection.execute("SELECT 1"))
    assert (type(error), error.ids["code"]) == (StoreError, "ProgrammingError")
    assert type(translate(OSError("odd"), str(path), "read")) is StoreError
    with connected(path) as open_one:
        error = translated(path, "read", lambda: open_one.execute("SELECT * FROM nowhere"))
    assert (type(error), error.ids["code"]) == (StoreError, "SQLITE_ERROR")
