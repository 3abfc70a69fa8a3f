"""Whether the files of a store are still those that were opened.

A file can be removed, moved or replaced under a process that has it open, and the kernel lets that process write on,
into what nobody can ever open again. SQLite does not look. So each group of commits looks before it is acknowledged.

The log (`-wal`) and its index (`-shm`) are looked at too. Whoever is the last to close a store folds the log into it
and removes both; but who is the last is told by locks, and a program that copies its own state folder drops those of
its own process (`host_locks.py` has the rule). Another host that then opens and closes the store takes itself for the
last.

By `stat` only: to open one of these files, and close it again, would drop the locks as well.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import stat
from contextlib import suppress
from typing import Any, cast
from urllib.parse import quote

from banksman.errors import StoreError, UsageError
from banksman.store.sqlite import tables, wal_check
from banksman.store.sqlite.sqlite_errors import MOVED

log = logging.getLogger("banksman")
# For the write lock, which another process of ours holds for milliseconds, or for a second where it takes over a long
# history (`spool.py`). Who holds it longer is no host of ours.
BUSY_SECONDS_MAX = 5.0
# For reads in the loop's thread: nothing makes them wait but a recovery after a crash, and the loop must go on.
LOOK_BUSY_SECONDS_MAX = 0.25


class StoreFiles:
    """The files of the store at `path`, which is resolved, from the moment on at which they are noted."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files: dict[str, tuple[int, int]] = {}

    def note(self) -> None:
        """Now that a connection has opened them for writing, and not before: where a file system has layers, a file
        gets another number by that."""
        for name in (self._path, f"{self._path}-wal", f"{self._path}-shm"):
            key = _key(name)
            if key is not None:
                self._files[name] = key

    @property
    def is_whole(self) -> bool:
        return all(_key(name) == key for name, key in self._files.items())

    def check(self) -> None:
        """`StoreError` if one of them is not at its path any more, or another one is. A few microseconds."""
        for name, key in self._files.items():
            found = _key(name)
            if found != key:
                what = "replaced" if found is not None else "removed"
                raise StoreError(f"{name} was {what} while it was open", hint=MOVED, path=self._path)


def _key(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


# The way to a store's file: made private where it is missing, looked at before it is opened, opened as far as it may.
#
# Only a file that did not exist is ever opened here by other means than SQLite's: to close any fd of a file drops all
# locks that this process has on it, and those are what keeps two processes from writing at once.


def checked_path(path: object) -> str:
    """Absolute, and what a symlink points to: the files beside it are beside that."""
    try:
        name = os.fspath(cast("os.PathLike[Any]", path))
    except TypeError as exc:
        raise UsageError("the store needs a path", hint="a str or a PathLike", path=path) from exc
    # A name that SQLite takes for one of its own kinds of stores is as little a path as an empty one.
    if not isinstance(name, str) or name in ("", ":memory:") or "\0" in name:
        raise UsageError("the store needs the path of a file", hint="for one in memory use MemoryLog", path=path)
    return os.path.realpath(name)


class StoreOpening:
    """A store that is being opened, and then is open: how many connections it gets, and as what."""

    def __init__(self, path: str, *, level: str) -> None:
        self.path = path
        self.level = level
        self.is_writable = True
        self.presence = StoreFiles(path)
        self._is_immutable = False
        self._is_counted = False
        self._connections: list[sqlite3.Connection] = []
        self._readers: list[sqlite3.Connection] = []

    def open(self) -> sqlite3.Connection:
        """Make the file if there is none, and see that it is one of ours: the first connection, for the writer. Raises
        OSError, sqlite3.Error, StoreError; `close` is due then too."""
        # Before anything is made: an empty file is what makes SQLite delete a log.
        wal_check.check_file(self.path)
        self._make()
        self._look()
        wal_check.check_tail(self.path, is_synced=self.level == "full")
        wal_check.opened(self.path)
        self._is_counted = True
        connection = self.connect()
        tables.prepare(connection, self.path, is_writable=self.is_writable, busy_seconds=BUSY_SECONDS_MAX)
        self.presence.note()
        return connection

    def connect(self, *, busy_seconds: float | None = None, is_writer: bool = True) -> sqlite3.Connection:
        """Another connection; whoever gets it uses it in one thread at a time."""
        mode = "rw" if self.is_writable and is_writer else "ro"
        extra = "&immutable=1" if self._is_immutable else ""
        connection = sqlite3.connect(
            f"file:{quote(os.fsencode(self.path))}?mode={mode}{extra}",
            uri=True,
            isolation_level=None,
            timeout=BUSY_SECONDS_MAX if busy_seconds is None else busy_seconds,
            check_same_thread=False,
        )
        (self._connections if mode == "rw" else self._readers).append(connection)
        return connection

    def close(self, *, is_last: bool = True) -> None:
        """Every connection, wherever it was used: by now nobody does.

        The last to close a store folds the log into it and removes it. SQLite tells by its locks who that is, and a
        live host may have lost those (`host_locks.py` says how). With `is_last` False it is not done: the last to be
        closed
        is then a connection that may not write."""
        order = (self._readers, self._connections) if is_last else (self._connections, self._readers)
        for connection in (*order[0], *order[1]):
            with suppress(sqlite3.Error):  # What could not be closed in good order is closed at the next opening.
                connection.close()
        self._connections.clear()
        self._readers.clear()
        if self._is_counted:
            self._is_counted = False
            wal_check.closed(self.path)

    def _make(self) -> None:
        folder = os.path.dirname(self.path)
        missing: list[str] = []
        while not os.path.isdir(folder):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for name in reversed(missing):
            # Another process may make it at the same moment.
            with suppress(FileExistsError):
                os.mkdir(name, 0o700)
        try:
            # Before SQLite would, with the process's umask: what agents say is private. The files that it puts beside
            # this one get the same mode.
            fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            self._keep_private()
            return
        except OSError:
            if os.path.exists(self.path):
                return  # A file system that may not be written says so first.
            raise
        os.close(fd)
        tables.sync_folder(self.path)

    def _keep_private(self) -> None:
        """One that was there before us. By its path: an fd of ours would drop SQLite's locks as it is closed."""
        found = os.stat(self.path)
        if not stat.S_ISREG(found.st_mode):
            raise StoreError(f"the store {self.path} is no regular file", hint="take another path", path=self.path)
        if not found.st_size and found.st_uid == os.geteuid():
            os.chmod(self.path, 0o600)
        elif found.st_mode & 0o077:
            log.warning("! the store %s may be read by others: chmod 600, also those beside it", self.path)

    def _look(self) -> None:
        """A store that may not be written can still be read."""
        folder = os.path.dirname(self.path)
        is_folder_writable = os.access(folder, os.W_OK, effective_ids=True)
        self.is_writable = is_folder_writable and os.access(self.path, os.W_OK, effective_ids=True)
        # Where the log's index cannot even be made, SQLite reads only what it is told will not change. Without a
        # write-ahead log nobody has the store open, so that holds now; what a host with more rights writes later is
        # not seen by this log.
        self._is_immutable = not is_folder_writable and not os.path.exists(f"{self.path}-wal")
