"""A history on its way into the store: read, checked and packed into a file of its own, and then taken over at once.

Whoever gives the history may take its time, and the store's write lock is one for all hosts: they would wait for it,
and fail. So nothing of the store is touched until all of the history is here; then one transaction copies it, inside
SQLite. It must be one: the numbers of chunks are the order of the commits, and no reader may see half of a session.

The file is beside the store, where there is room for it or there is none for the history either. It is private, and
gone in every case: with the spool, or, when its process died, with the next one that is made. Who holds its lock lives.
It is a lock of flock(), since SQLite would drop POSIX's; a fork that inherits it only keeps the file for longer.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Generator, Iterable
from typing import NamedTuple
from urllib.parse import quote

from banksman.errors import StoreError
from banksman.store.log import Chunk, checked
from banksman.store.sqlite.operations import WriterContext
from banksman.store.sqlite.pages import CHUNK_BYTES, checksum, packed
from banksman.store.sqlite.sqlite_errors import translate

# What it is called after the store's own name.
SUFFIX = "-restore-"

# Nobody will ever ask what became of this file.
_CARELESS = ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF")
_TABLE = "CREATE TABLE chunks (first INTEGER, last INTEGER, epoch INTEGER, at REAL, crc INTEGER, blob BLOB)"

log = logging.getLogger("banksman")


class History(NamedTuple):
    """What is in the spool, as the session's row will have it."""

    first: int
    last: int
    epoch: int
    created: float
    changed: float
    weight: int


class Spool:
    """`fill` is called once, in a thread of its own; `discard` from any, at any time: a spool that is being filled
    comes to its end with the next chunk."""

    def __init__(self, path: str) -> None:
        self._store = path
        # Protects the three below, of which `discard` takes the file away. Only the file is made and removed under it.
        self._lock = threading.Lock()
        self._is_discarded = False
        self._path: str | None = None
        self._fd: int | None = None

    def fill(self, session: str, chunks: Callable[[], Iterable[Chunk]]) -> History:
        """What `chunks` raises is raised, and a `UsageError` if it is no history; what is wrong with the disk is a
        `StoreError`."""
        with self._translated():
            self._make()
            connection = self._connect()
        try:
            return self._fill(connection, session, chunks)
        finally:
            with contextlib.suppress(sqlite3.Error):
                connection.close()

    def _fill(self, connection: sqlite3.Connection, session: str, chunks: Callable[[], Iterable[Chunk]]) -> History:
        begin: tuple[int, float] | None = None
        last, epoch, changed, weight = 0, 0, 0.0, 0
        for chunk in checked(session, chunks()):
            if self._is_discarded:
                raise StoreError("the log is closed", session=session)
            begin = begin or (chunk.first, chunk.at)
            last, epoch, changed = chunk.last, chunk.epoch, chunk.at
            blob = packed(tuple(chunk.entries))
            weight += len(blob) + CHUNK_BYTES
            row = (chunk.first, last, epoch, changed, checksum(session, chunk.first, epoch, blob), blob)
            with self._translated():
                connection.execute("INSERT INTO chunks VALUES (?, ?, ?, ?, ?, ?)", row)
        assert begin is not None
        with self._translated():
            connection.execute("COMMIT")
        return History(begin[0], last, epoch, begin[1], changed, weight)

    @contextlib.contextmanager
    def attached(self, work: WriterContext) -> Generator[None]:
        """As the database `spool` of the writer's connection, around its transaction. Afterwards it is discarded, and
        in this thread: to free a large file takes its time."""
        try:
            work.execute("ATTACH ? AS spool", (self._uri("mode=ro&immutable=1"),))
            try:
                yield
            finally:
                try:
                    work.execute("DETACH spool")
                except sqlite3.Error as exc:
                    # It is no affair of who restores: that was committed, or was not.
                    log.warning("! store=%s could not let go of %s: %s", self._store, self._path, exc)
        finally:
            self.discard()

    def discard(self) -> None:
        """The file is gone from here on. Safe to call twice."""
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
                    os.close(fd)  # Somebody took it for a dead one's before we had the lock.
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
        """For what is ours alone: an OSError of the file that a history is read from is none of the store's."""
        try:
            yield
        except (sqlite3.Error, OSError) as exc:
            raise translate(exc, self._store, "write to") from exc


def remove_dead(store: str) -> None:
    """What processes that were killed have left beside it: whole histories, perhaps."""
    folder, name = os.path.split(store)
    for found in os.listdir(folder):
        if found.startswith(f"{name}{SUFFIX}"):
            _remove_if_dead(os.path.join(folder, found))


def _remove_if_dead(path: str) -> None:
    """The lock is held while it is removed: whoever made it just now and has not locked it yet finds it gone, and makes
    another."""
    # Gone by now, or another user's: then it is not ours to remove.
    with contextlib.suppress(FileNotFoundError, PermissionError):
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.unlink(path)
        except BlockingIOError:
            pass  # Its maker lives.
        finally:
            os.close(fd)
