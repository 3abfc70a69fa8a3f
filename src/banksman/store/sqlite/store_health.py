"""Read-only health check of a SQLite store: it changes no byte and creates no file.

`look` is the check, for `banksman doctor`. `names` lists the newest sessions and writes nothing
either, for the completion of the shell.

An ordinary open would change the store. The first connection after a crash resets the index of the
write-ahead log, which is the only evidence of the committed frames (`wal_check.py`). The last
connection checkpoints the log. So this module checks the tail of the log first. Then it opens the
store with options that forbid SQLite to write the store or the index. If the index is stale, SQLite
builds one in its own memory. A store without a write-ahead log has no writer, so it is opened as
immutable.

These functions block, for a large store up to `CHECK_SECONDS_MAX` per check.
"""

from __future__ import annotations

import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from urllib.parse import quote

from msgspec import Struct

from banksman.core.dialects.log_dialect import UNKNOWN
from banksman.core.process_facts import Born
from banksman.core.session import history as pasts
from banksman.core.session.history import SessionHistory
from banksman.core.session.session_config import Config
from banksman.errors import StoreDamaged, StoreError
from banksman.store.sqlite import pages, tables, wal_check
from banksman.store.sqlite.host_locks import HostLocks, HostProcess, is_there
from banksman.store.sqlite.open_file import checked_path
from banksman.store.sqlite.sqlite_errors import translate

CHECK_SECONDS_MAX = 10.0
# The first few faults are enough to describe a damaged file.
FAULTS_MAX = 5
# SQLite calls the progress handler after this many of its steps, every few milliseconds.
_STEPS = 100_000
_BUSY_SECONDS_MAX = 2.0


class UnsettledSession(Struct, frozen=True):
    """A session whose host has died and that no host has recovered since.

    `born`: the session's process; None if it had no process. `fault`: why its history cannot be
    read.
    """

    session: str
    name: str | None
    host_pid: int
    born: Born | None = None
    fault: str = ""


class StoreHealth(Struct, frozen=True):
    """Result of a health check.

    `faults`: defects of the file, in SQLite's words. `is_checked`: the check reached the end.
    `hosts`: the pids of the live hosts that own sessions. `left`: the sessions of dead hosts.
    `damaged`: sessions that cannot be read, and why.
    """

    path: str
    schema: int
    sessions: int
    store_bytes: int
    log_bytes: int
    faults: tuple[str, ...]
    is_checked: bool
    hosts: tuple[int, ...]
    left: tuple[UnsettledSession, ...]
    damaged: tuple[str, ...] = ()


def look(path: str | os.PathLike[str], *, reads_sessions: bool = True) -> StoreHealth | None:
    """Check a store. None: the store does not exist.

    `reads_sessions`: also read every session, to find the `damaged` ones. Raises `StoreError` if
    the store is damaged, belongs to another program, has a newer schema, or cannot be read.
    """
    path = checked_path(path)
    wal_check.check_file(path)
    if not os.path.exists(path):
        return None
    wal_check.check_tail(path)
    try:
        with closing(_connected(path)) as connection:
            return _look(connection, path, reads_sessions)
    except (sqlite3.Error, OSError) as exc:
        raise translate(exc, path, "read") from exc


def check_schema(path: Path) -> None:
    """Check that this version can use a store as it is. A store that does not exist is fine.

    A migration would take the store away from the older version that uses it. Raises `StoreError`.
    """
    if not path.exists():
        return
    try:
        with closing(_connected(str(path))) as connection:
            version = tables.version_of(connection, str(path))
    except sqlite3.Error as exc:
        raise StoreError(f"cannot read the store {path}: {exc}") from exc
    if version not in (0, tables.SCHEMA):
        message = f"the store has schema {version}, this version {tables.SCHEMA}"
        raise StoreError(message, hint="stop the server, and start the new version")


def names(path: str | os.PathLike[str], limit: int) -> list[str]:
    """Return the names of the newest sessions, newest first.

    A session without a name gives its id.
    """
    path = checked_path(path)
    wal_check.check_file(path)
    if not os.path.exists(path):
        return []
    try:
        with closing(_connected(path)) as connection:
            if tables.version_of(connection, path) != tables.SCHEMA:
                return []
            rows = connection.execute(
                "SELECT coalesce(name, id) FROM sessions ORDER BY number DESC LIMIT ?", (limit,)
            )
            return [str(row[0]) for row in rows.fetchall()]
    except (sqlite3.Error, OSError) as exc:
        raise translate(exc, path, "read") from exc


def _connected(path: str) -> sqlite3.Connection:
    # Without a write-ahead log no host has the store open, so the file cannot change during the
    # check. SQLite also creates no index for it.
    how = "readonly_shm=1" if os.path.exists(f"{path}-wal") else "immutable=1"
    uri = f"file:{quote(os.fsencode(path))}?mode=ro&{how}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=_BUSY_SECONDS_MAX)


def _look(connection: sqlite3.Connection, path: str, reads_sessions: bool) -> StoreHealth:
    version = tables.version_of(connection, path)
    sessions = (
        connection.execute("SELECT count(*) FROM sessions").fetchone()[0]
        if version == tables.SCHEMA
        else 0
    )
    faults = _faults(connection)
    hosts, left = _owners(connection, path) if version == tables.SCHEMA else ((), ())
    # In a damaged file the sessions are damaged too. The faults of the file say enough.
    damaged = (
        _damaged(connection) if reads_sessions and version == tables.SCHEMA and not faults else ()
    )
    return StoreHealth(
        path=path,
        schema=version,
        sessions=sessions,
        store_bytes=os.stat(path).st_size,
        log_bytes=_size(f"{path}-wal"),
        faults=() if faults is None else faults,
        is_checked=faults is not None and damaged is not None,
        hosts=hosts,
        left=left,
        damaged=damaged or (),
    )


def _faults(connection: sqlite3.Connection) -> tuple[str, ...] | None:
    """Run SQLite's quick check. None: the file is too large to check within the time limit."""
    until = time.monotonic() + CHECK_SECONDS_MAX
    connection.set_progress_handler(lambda: time.monotonic() > until, _STEPS)
    try:
        rows = connection.execute(f"PRAGMA quick_check({FAULTS_MAX})").fetchall()
    except sqlite3.OperationalError as exc:
        if exc.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return None
    finally:
        connection.set_progress_handler(None, 0)
    return tuple(str(row[0]) for row in rows if row[0] != "ok")


def _damaged(connection: sqlite3.Connection) -> tuple[str, ...] | None:
    """Read each session as a reader and as its next owner would, and return the damaged ones.

    This reads every chunk, then folds the log. None: the time limit passed before damage was found.
    The result has at most `FAULTS_MAX` sessions.
    """
    until = time.monotonic() + CHECK_SECONDS_MAX
    found: list[str] = []
    for (session,) in connection.execute("SELECT id FROM sessions ORDER BY number").fetchall():
        try:
            with closing(pages.chunks_after(connection, session, 0)) as chunks:
                for _ in chunks:
                    if time.monotonic() > until:
                        return tuple(found) or None
            _past(connection, session)
        except (StoreError, AssertionError, LookupError, TypeError, ValueError) as exc:
            found.append(
                exc.args[0]
                if isinstance(exc, StoreError)
                else f"session {session} cannot be read: {exc!r:.200}"
            )
            if len(found) == FAULTS_MAX:
                break
    return tuple(found)


def _owners(
    connection: sqlite3.Connection, path: str
) -> tuple[tuple[int, ...], tuple[UnsettledSession, ...]]:
    rows = connection.execute(
        "SELECT s.id, s.name, h.id, h.boot, h.pid, h.started "
        "FROM sessions s JOIN hosts h ON h.id = s.owner ORDER BY s.number"
    ).fetchall()
    processes = {host: HostProcess(boot, pid, started) for _, _, host, boot, pid, started in rows}
    alive = _alive(path, processes)
    left = tuple(
        _left(connection, session, name, processes[host].pid)
        for session, name, host, *_ in rows
        if host not in alive
    )
    return tuple(sorted({processes[host].pid for host in alive})), left


def _alive(path: str, processes: dict[int, HostProcess]) -> set[int]:
    """Return the hosts that are alive.

    Without the lock file no lock can be queried, and a health check must not create it. Then the
    process table decides.
    """
    if not os.path.exists(f"{path}-hosts"):
        return {host for host, process in processes.items() if is_there(process)}
    with closing(HostLocks(path)) as hosts:
        return {host for host, process in processes.items() if hosts.is_alive(host, process)}


def _left(
    connection: sqlite3.Connection, session: str, name: str | None, host_pid: int
) -> UnsettledSession:
    try:
        process = _past(connection, session).process
    except (StoreError, AssertionError, LookupError, TypeError, ValueError) as exc:
        return UnsettledSession(session, name, host_pid, fault=str(exc))
    return UnsettledSession(
        session, name, host_pid, born=None if process is None else process.parts
    )


def _past(connection: sqlite3.Connection, session: str) -> SessionHistory:
    """Fold the session's log from its last snapshot on.

    All dialects record the process in the same way.
    """
    past = pasts.beginning(Config(dialect=UNKNOWN))
    snapshot = pages.snapshot(connection, session)
    if snapshot is not None:
        past = pasts.decode(snapshot.data, past.session.config)
    while (page := pages.read(connection, session, past.session.head, 1000, None)).events:
        if page.gap is not None:
            raise StoreDamaged(
                f"the events {page.gap[0]} to {page.gap[1]} of session {session} are missing"
            )
        past = pasts.fold_events(past, page.events)
    return past


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0
