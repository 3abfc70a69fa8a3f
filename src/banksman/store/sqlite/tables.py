"""SQLite schema: creation, recognition of the file, and migration after a backup copy.

A file of another program, or of a newer schema, stays unchanged: this module checks the file before
it writes. All its writes are one transaction, so a crash or a failed migration leaves the file as
it was. Several processes may run it at the same time, because each checks again under the write
lock.

**chunks** has one row per append (`pages.py`). Its ids are the commit order: writers take turns,
and each takes the next id. No id may be used twice, or a position in that order would mean another
place. AUTOINCREMENT guarantees this, but costs one more page per commit, a third of the time of a
small commit. Without it SQLite takes the highest existing id plus one. So the row with the highest
id is never removed. If its session is deleted, an empty row without a session stays in its place, a
*stone*.

**sessions** has the columns that every append changes first, and no long values, because each
append writes the whole row. The snapshot may be long, so it has a separate table. `number` is the
identity of a session: an id may be deleted and created again, but a number is used once. `trimmed`
is the highest chunk id that retention has removed.

A chunk whose session has no row is left over from a deleted session (`deleted_sessions.py`).

**turns** has the place where each turn begins and ends (`turn_table.py`). The table and the column
`indexed` are additions to the first schema: a file without them gets them when it is opened. The
schema number stays the same, because an older version can use the file as before. A later lookup
indexes the events that the older version writes.

**usage** has the usage of the store (`usage_table.py`). The table and the column `counted` are
additions of the same kind. A row is of one day, session, agent and caller (empty: no caller), and
has no reference to its session: it stays when the session is deleted.

**hosts** lists the hosts that own sessions, or did. An id is used only once: `host_locks.py` holds
a lock for each.

**store** has the global values: the highest deleted epoch, the number of deletions, and the deleted
sessions whose data is not removed yet.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
import time
from collections.abc import Callable

from banksman.errors import StoreDamaged, StoreError, StoreReadOnly, StoreTooNew
from banksman.store.sqlite.sqlite_errors import ALLOW_WRITING

# "bnks" in the file header: `file` and other tools can identify the format.
APPLICATION = 0x626E6B73
SCHEMA = 1
# Each migration leads from its key to the next version. It runs inside the one transaction and must
# not end it.
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
_USAGE = """
CREATE TABLE usage (
    day TEXT NOT NULL,
    session TEXT NOT NULL,
    agent TEXT NOT NULL,
    caller TEXT NOT NULL,
    input INTEGER NOT NULL,
    output INTEGER NOT NULL,
    cache_read INTEGER NOT NULL,
    cache_write INTEGER NOT NULL,
    usd REAL,
    working_seconds REAL NOT NULL,
    turns INTEGER NOT NULL,
    PRIMARY KEY (day, session, agent, caller)
) WITHOUT ROWID;
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
    indexed INTEGER NOT NULL DEFAULT 0,
    counted INTEGER NOT NULL DEFAULT 0
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
{_TURNS}{_USAGE}"""


def prepare(
    connection: sqlite3.Connection, path: str, *, is_writable: bool, busy_seconds: float
) -> None:
    """Create or migrate the tables, or check them if the file is read-only.

    Raises `StoreTooNew`, `StoreDamaged`, `StoreReadOnly` or `StoreError`. Exceptions of SQLite are
    not translated.
    """
    version = version_of(connection, path)
    if not is_writable:
        if version != SCHEMA:
            verb, what = ("migrate", "it") if version else ("create", "the empty file")
            message = f"cannot {verb} the store {path}: {what} is read-only"
            raise StoreReadOnly(message, hint=ALLOW_WRITING, path=path)
        return
    _become_wal(connection, busy_seconds)
    if version == SCHEMA and has_turns(connection) and has_usage(connection):
        return
    connection.execute("BEGIN IMMEDIATE")
    try:
        # Another process may have created or migrated the file before this one got the write lock.
        version = version_of(connection, path)
        if version == 0:
            _execute_all(connection, _TABLES)
        elif version < SCHEMA:
            _back_up(path, version)
            _migrate(connection, path, version)
        if not has_turns(connection):
            connection.execute("ALTER TABLE sessions ADD COLUMN indexed INTEGER NOT NULL DEFAULT 0")
            _execute_all(connection, _TURNS)
        if not has_usage(connection):
            connection.execute("ALTER TABLE sessions ADD COLUMN counted INTEGER NOT NULL DEFAULT 0")
            _execute_all(connection, _USAGE)
        connection.execute(f"PRAGMA application_id = {APPLICATION}")
        connection.execute(f"PRAGMA user_version = {SCHEMA}")
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def has_turns(connection: sqlite3.Connection) -> bool:
    """Whether the file has the index of turns. An old read-only file does not have it."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'turns'").fetchall())


def has_usage(connection: sqlite3.Connection) -> bool:
    """Whether the file has the table of usage. An old read-only file does not have it."""
    return bool(connection.execute("SELECT 1 FROM sqlite_master WHERE name = 'usage'").fetchall())


def version_of(connection: sqlite3.Connection, path: str) -> int:
    """Return the file's schema version; 0 for an empty file.

    Raises `StoreDamaged` for a file of another program, `StoreTooNew` for a newer schema.
    """
    # One transaction gives one consistent view. Without it, a file that another process is creating
    # could look like a database of another program.
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
            f"{path} is a database of another program",
            hint="take another path for the store",
            path=path,
        )
    if version > SCHEMA:
        raise StoreTooNew(
            f"the store {path} was written by a newer Banksman "
            f"(schema {version}, this one knows {SCHEMA})",
            hint="use that Banksman, or another store; nothing was changed",
            path=path,
            schema=version,
        )
    return version


def _become_wal(connection: sqlite3.Connection, busy_seconds: float) -> None:
    """Switch the file to WAL mode, in which readers and the writer do not wait for each other.

    The mode is a property of the file, so it is usually set already. The switch needs exclusive
    access, and SQLite does not wait for that. So this function retries. Contention occurs only if
    several processes create one store at the same moment.
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
                f"cannot use a write-ahead log for the store: its journal mode stays {mode}",
                hint="move the store off any network file system",
            )
        time.sleep(0.005)


def _migrate(connection: sqlite3.Connection, path: str, version: int) -> None:
    for step in range(version, SCHEMA):
        try:
            MIGRATIONS[step](connection)
        except Exception as exc:
            raise StoreError(
                f"cannot migrate the store {path} from schema {step} to {step + 1}: {exc}",
                hint=f"nothing was changed; a copy of the store is at {backup_path(path, version)}",
                path=path,
                schema=step,
            ) from exc
        assert connection.in_transaction, f"the migration from {step} ended the transaction"


def backup_path(path: str, version: int) -> str:
    return f"{path}.v{version}.bak"


def _back_up(path: str, version: int) -> None:
    """Copy the committed data. The copy gets its name only when it is complete and synced.

    The caller holds the write lock, so no host can commit data that would be missing in the copy.
    """
    target = backup_path(path, version)
    partial = f"{target}.partial"
    # A process that was killed here has left these files. The write lock excludes a second live
    # one.
    for name in (partial, f"{partial}-journal", f"{partial}-wal", f"{partial}-shm"):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
    try:
        # A second connection, because a backup cannot read from the connection with the open
        # transaction.
        with (
            contextlib.closing(sqlite3.connect(path)) as source,
            contextlib.closing(sqlite3.connect(partial)) as copy,
        ):
            source.backup(copy)
            # The copy inherits WAL mode from its source. This makes it a single file.
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
    """Sync the folder of a file, so that the file's name is on disk like its contents."""
    fd = os.open(os.path.dirname(path), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _execute_all(connection: sqlite3.Connection, script: str) -> None:
    """Execute each statement of a script. `executescript` would commit the transaction first."""
    for statement in script.split(";"):
        if statement.strip():
            connection.execute(statement)
