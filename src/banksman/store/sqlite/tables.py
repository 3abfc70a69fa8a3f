"""The tables, and how a file comes to have them: made anew, or migrated from an older schema after a copy was taken.

A file that is not ours, or of a newer schema, is left as it is: nothing is written before that is known. All that is
written here is one transaction, so a crash, or a migration that fails, leaves the file as it was; and several processes
may do this at once, since each looks again once it may write.

`chunks` has one row per append (`pages.py`). Its ids are the order of the commits: writers come one after the other,
and each takes the next number. No number is ever taken twice, or a position in that order would mean another place; but
AUTOINCREMENT, which promises that, costs another page per commit (a third of the time of a small one). Without it
SQLite gives one more than the highest there is, and so the row with the highest id is never removed: where its session
is deleted, an empty row stays in its place, a *stone*, with no session.

`sessions` has what changes with each append in its first columns and nothing long, because its row is written anew each
time; the snapshot, which may be long, is therefore in a table of its own. `number` is a session's identity: an id may
be deleted and made again, a number is given once. `trimmed` is the highest chunk that retention has taken.

A chunk whose session has no row is a rest of one that was deleted, and nobody's: see `deleted_sessions.py`.

`turns` has where each turn begins and ends (`turn_table.py`). It is an addition to the first schema, and so is the
column `indexed`: a file without them gets them when it is opened. The schema keeps its number, because a version that
does not know them can use the file as before, and what it writes is indexed later.

`hosts` are those that own something, or did. Its ids are given once, ever: `host_locks.py` holds a lock for each.

`store` has what is one for all: the highest epoch that was deleted, how many deletions there were; and of which
sessions there is a rest.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable

from banksman.errors import StoreDamaged, StoreError, StoreReadOnly, StoreTooNew
from banksman.store.sqlite.sqlite_errors import ALLOW_WRITING

# "bnks", in the file's header: `file` and others can tell whose it is.
APPLICATION = 0x626E6B73
SCHEMA = 1
# From the version that is the key to the next. Each runs inside the one transaction, and must not end it.
MIGRATIONS: dict[int, Callable[[sqlite3.Connection], None]] = {}

_TURNS = """
CREATE TABLE turns (
    session INTEGER NOT NULL,
    turn TEXT NOT NULL,
    first INTEGER NOT NULL,
    last INTEGER,
    PRIMARY KEY (session, turn)
) WITHOUT ROWID;
CREATE INDEX turns_by_last ON turns (session, last);
"""
_TABLES = f"""
CREATE TABLE sessions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    seq INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    changed REAL NOT NULL,
    epoch INTEGER NOT NULL,
    owner INTEGER,
    first INTEGER NOT NULL,
    trimmed INTEGER NOT NULL,
    created REAL NOT NULL,
    id TEXT NOT NULL UNIQUE,
    name TEXT UNIQUE,
    agent TEXT NOT NULL,
    lease TEXT UNIQUE,
    indexed INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX sessions_by_trimmed ON sessions (trimmed);
CREATE TABLE snapshots (
    session TEXT NOT NULL PRIMARY KEY,
    seq INTEGER NOT NULL,
    crc INTEGER NOT NULL,
    data BLOB NOT NULL
);
CREATE TABLE chunks (
    id INTEGER PRIMARY KEY,
    session TEXT,
    first INTEGER NOT NULL,
    last INTEGER NOT NULL,
    epoch INTEGER NOT NULL,
    at REAL NOT NULL,
    crc INTEGER NOT NULL,
    blob BLOB NOT NULL
);
CREATE INDEX chunks_by_session ON chunks (session, last);
CREATE TABLE hosts (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    pid INTEGER NOT NULL,
    boot TEXT NOT NULL,
    started INTEGER NOT NULL,
    address TEXT NOT NULL
);
CREATE TABLE store (key TEXT NOT NULL PRIMARY KEY, value INTEGER NOT NULL);
INSERT INTO store VALUES ('deleted_epoch', 0), ('deletions', 0);
{_TURNS}"""


def prepare(connection: sqlite3.Connection, path: str, *, is_writable: bool, busy_seconds: float) -> None:
    """See that the file has our tables. `StoreTooNew`, `StoreDamaged`; errors of SQLite's own are not translated."""
    version = version_of(connection, path)
    if not is_writable:
        if version != SCHEMA:
            raise StoreReadOnly(
                f"the store {path} must be migrated, and cannot be written" if version else f"{path} is empty",
                hint=ALLOW_WRITING,
                path=path,
            )
        return
    _become_wal(connection, busy_seconds)
    if version == SCHEMA and has_turns(connection):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have been here in the meantime.
        version = version_of(connection, path)
        if version == 0:
            _execute_all(connection, _TABLES)
        elif version < SCHEMA:
            _back_up(path, version)
            _migrate(connection, path, version)
        if not has_turns(connection):
            connection.execute("ALTER TABLE sessions ADD COLUMN indexed INTEGER NOT NULL DEFAULT 0")
            _execute_all(connection, _TURNS)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def has_turns(connection: sqlite3.Connection) -> bool:
    """Whether the file has the index of turns: one that may not be written, and was made before it, has none."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'turns'").fetchall())


def version_of(connection: sqlite3.Connection, path: str) -> int:
    """The file's schema; 0 if there is nothing in it yet."""
    # At one moment: somebody may be making it, and half of it would look like another program's.
    is_alone = not connection.in_transaction
    if is_alone:
        connection.execute("BEGIN")
    try:
        ((application,),) = connection.execute("PRAGMA application_id").fetchall()
        ((version,),) = connection.execute("PRAGMA user_version").fetchall()
        ((tables,),) = connection.execute("SELECT count(*) FROM sqlite_master").fetchall()
    finally:
        if is_alone and connection.in_transaction:
            connection.execute("ROLLBACK")
    if application == 0 and version == 0 and tables == 0:
        return 0
    if application != APPLICATION or version < 1:
        raise StoreDamaged(
            f"{path} is a database of another program", hint="take another path for the store", path=path
        )
    if version > SCHEMA:
        raise StoreTooNew(
            f"the store {path} was written by a newer Banksman (schema {version}, this one knows {SCHEMA})",
            hint="use that one, or another store; nothing was changed",
            path=path,
            schema=version,
        )
    return version


def _become_wal(connection: sqlite3.Connection, busy_seconds: float) -> None:
    """Readers and the writer do not wait for each other. It is a property of the file, so mostly it is there already.

    To change it needs the file alone, and for that SQLite does not wait by itself: so it is tried again, which happens
    only where several processes make one store at the same moment.
    """
    deadline = time.monotonic() + busy_seconds
    while True:
        try:
            ((mode,),) = connection.execute("PRAGMA journal_mode").fetchall()
            if mode != "wal":
                ((mode,),) = connection.execute("PRAGMA journal_mode = WAL").fetchall()
        except sqlite3.OperationalError as exc:
            if exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > deadline:
                raise
        else:
            if mode == "wal":
                return
            raise StoreError(
                f"the store cannot be kept with a write-ahead log, only in the mode {mode}",
                hint="is it on a network file system? Put it on a local one",
            )
        time.sleep(0.005)


def _migrate(connection: sqlite3.Connection, path: str, version: int) -> None:
    for step in range(version, SCHEMA):
        try:
            MIGRATIONS[step](connection)
        except Exception as exc:
            raise StoreError(
                f"the store {path} could not be migrated from schema {step} to {step + 1}: {exc}",
                hint=f"nothing was changed; there is a copy at {backup_path(path, version)} too",
                path=path,
                schema=step,
            ) from exc
        assert connection.in_transaction, f"the migration from {step} ended the transaction"


def backup_path(path: str, version: int) -> str:
    return f"{path}.v{version}.bak"


def _back_up(path: str, version: int) -> None:
    """A copy of what is committed, whole on the disk before it has its name. We hold the write lock meanwhile, so that
    nobody commits what would be in neither."""
    target = backup_path(path, version)
    partial = f"{target}.partial"
    # One that was killed here has left these, and nobody else is here now: we hold the lock.
    for name in (partial, f"{partial}-journal", f"{partial}-wal", f"{partial}-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        # Another connection: the one with the transaction may not be read from by a copy.
        with (
            contextlib.closing(sqlite3.connect(path)) as source,
            contextlib.closing(sqlite3.connect(partial)) as copy,
        ):
            source.backup(copy)
            # The copy says that it has a write-ahead log, as its source does. It shall be one file.
            copy.execute("PRAGMA journal_mode = DELETE")
        fd = os.open(partial, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        os.replace(partial, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
        raise
    sync_folder(path)


def sync_folder(path: str) -> None:
    """So that a file's name is on the disk, as its contents are."""
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _execute_all(connection: sqlite3.Connection, script: str) -> None:
    """Not `executescript`, which would commit first."""
    for statement in script.split(";"):
        if statement.strip():
            connection.execute(statement)
