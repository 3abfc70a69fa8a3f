"""Temporary file for `Log.restore`: collect, check and encode a history before it is copied.

`HistorySpool` fills the file, attaches it to the writer's connection, and discards it. The
transaction that copies it into the store is `maintenance.restore`. `RunningSpools` runs the fills
of one log, and aborts them when it closes.

The source of a history may be slow, and the store has one write lock for all hosts. A slow
transaction would make the other hosts wait, and fail. So the restore does not touch the store until
it has read, checked and encoded the whole history into this file. Then one transaction inside
SQLite copies it. One transaction is required: chunk ids are the commit order, and no reader may see
half of a session.

The file is next to the store, on the same disk: if the file does not fit there, the history would
not either. It is private and always removed: by the spool, or after a crash by the next process
that creates one. A lock on the file shows that its process is alive. It is a `flock` lock, because
SQLite would drop a POSIX lock. A forked child that inherits the lock only keeps the file for
longer.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from typing import NamedTuple
from urllib.parse import quote

from banksman.errors import StoreError
from banksman.store.log_values import Chunk
from banksman.store.preconditions import checked
from banksman.store.sqlite.operations import WriterContext
from banksman.store.sqlite.pages import CHUNK_BYTES, checksum, packed
from banksman.store.sqlite.sqlite_errors import translate

# Follows the store's file name.
SUFFIX = "-restore-"

# The file never survives a crash, so it needs neither a journal nor syncs.
_CARELESS = ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF")
_TABLE = (
    "CREATE TABLE chunks "
    "(first INTEGER, last INTEGER, epoch INTEGER, at REAL, crc INTEGER, blob BLOB)"
)

log = logging.getLogger("banksman")


class History(NamedTuple):
    """The session's columns that follow from the spooled chunks."""

    first: int
    last: int
    epoch: int
    created: float
    changed: float
    weight: int


class HistorySpool:
    """A history on its way into the store.

    `fill` is called once, in a worker thread. `discard` may be called from any thread at any time;
    a running `fill` then ends with the next chunk.
    """

    def __init__(self, path: str) -> None:
        self._store = path
        # Protects the three fields below. `discard` removes the file under it, and only the
        # creation and the removal of the file hold it.
        self._lock = threading.Lock()
        self._is_discarded = False
        self._path: str | None = None
        self._fd: int | None = None

    def fill(self, session: str, chunks: Callable[[], Iterable[Chunk]]) -> History:
        """Write the chunks to the file and return the summary of the history.

        Raises every exception of `chunks`, `UsageError` for an invalid history, and `StoreError`
        for a disk error.
        """
        with self._translated():
            self._make()
            connection = self._connect()
        try:
            return self._fill(connection, session, chunks)
        finally:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _fill(
        self, connection: sqlite3.Connection, session: str, chunks: Callable[[], Iterable[Chunk]]
    ) -> History:
        begin: tuple[int, float] | None = None
        last, epoch, changed, weight = 0, 0, 0.0, 0
        for chunk in checked(session, chunks()):
            if self._is_discarded:
                raise StoreError("the log is closed", session=session)
            begin = begin or (chunk.first, chunk.at)
            last, epoch, changed = chunk.last, chunk.epoch, chunk.at
            blob = packed(tuple(chunk.entries))
            weight += len(blob) + CHUNK_BYTES
            row = (
                chunk.first,
                last,
                epoch,
                changed,
                checksum(session, chunk.first, epoch, blob),
                blob,
            )
            with self._translated():
                connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)", row)
        assert begin is not None
        with self._translated():
            connection.execute("COMMIT")
        return History(begin[0], last, epoch, begin[1], changed, weight)

    @contextlib.contextmanager
    def attached(self, work: WriterContext) -> Generator[None]:
        """Attach the file to the writer's connection as database `spool`, around the transaction.

        Afterwards the file is discarded, in the writer thread: to free a large file takes time.
        """
        try:
            work.execute("ATTACH ? AS spool", (self._uri("mode=ro&immutable=1"),))
            try:
                yield
            finally:
                try:
                    work.execute("DETACH spool")
                except sqlite3.Error as exc:
                    # The result of the restore does not depend on this. The transaction was
                    # committed or rolled back.
                    message = "detach of a spool file failed: %s (store=%s, spool=%s)"
                    log.warning(message, exc, self._store, self._path)
        finally:
            self.discard()

    def discard(self) -> None:
        """Remove the file. Safe to call twice."""
        with self._lock:
            self._is_discarded = True
            if self._fd is None:
                return
            assert self._path is not None
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self._path)
            os.close(self._fd)
            self._fd = None

    def _make(self) -> None:
        remove_dead(self._store)
        with self._lock:
            while not self._is_discarded and self._fd is None:
                self._path = f"{self._store}{SUFFIX}{secrets.token_hex(8)}"
                fd = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
                fcntl.flock(fd, fcntl.LOCK_EX)
                if os.fstat(fd).st_nlink:
                    self._fd = fd
                else:
                    # Another process removed it as dead before this process had the lock.
                    os.close(fd)
            if self._fd is None:
                raise StoreError("the log is closed")

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._uri("mode=rw&nolock=1"), uri=True, isolation_level=None)
        try:
            for statement in (*_CARELESS, _TABLE, "BEGIN"):
                connection.execute(statement)
        except BaseException:
            connection.close()
            raise
        return connection

    def _uri(self, how: str) -> str:
        assert self._path is not None
        return f"file:{quote(os.fsencode(self._path))}?{how}"

    @contextlib.contextmanager
    def _translated(self) -> Generator[None]:
        """Translate errors of the spool file.

        An OSError of the source of the history stays as it is.
        """
        try:
            yield
        except (sqlite3.Error, OSError) as exc:
            raise translate(exc, self._store, "write to") from exc


class RunningSpools:
    """The spools of the restores that run on one store. Belongs to the event loop."""

    def __init__(self, path: str) -> None:
        self._store = path
        self._running: set[HistorySpool] = set()

    @contextlib.asynccontextmanager
    async def filled(
        self, session: str, chunks: Callable[[], Iterable[Chunk]]
    ) -> AsyncGenerator[tuple[HistorySpool, History]]:
        """Fill a spool in a thread. It is discarded on leaving the context."""
        spool = HistorySpool(self._store)
        self._running.add(spool)
        try:
            yield spool, await asyncio.to_thread(spool.fill, session, chunks)
        finally:
            self._running.discard(spool)
            spool.discard()

    def discard(self) -> None:
        """Abort every restore whose history is not in the store yet."""
        for spool in self._running:
            spool.discard()


def remove_dead(store: str) -> None:
    """Remove the spool files that killed processes have left, which may hold whole histories."""
    folder, name = os.path.split(store)
    for found in os.listdir(folder):
        if found.startswith(f"{name}{SUFFIX}"):
            _remove_if_dead(os.path.join(folder, found))


def _remove_if_dead(path: str) -> None:
    """Remove a spool file unless its process is alive.

    The lock is held during the removal. A process that has just created the file, and has not
    locked it yet, then finds it unlinked and creates another one.
    """
    # The file is gone already, or it belongs to another user.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        except BlockingIOError:
            pass  # Its process is alive.
        finally:
            os.close(fd)
