"""Open the store's file privately, and detect its removal or replacement while it is open.

`StoreOpening` opens the file and owns all connections to it. `StoreFiles` detects a removal.

Another process can remove, move or replace a file while this process has it open. The kernel then
lets this process write to a file that no process can ever open again. SQLite does not check this.
So the writer checks before it acknowledges each group of commits.

The check includes the write-ahead log (`-wal`) and its index (`-shm`). The last process to close a
store checkpoints the log and removes both files. SQLite determines the last process by locks. A
program that copies its state folder drops the locks of that process (`host_locks.py` explains the
rule). Another host that then opens and closes the store believes to be the last one, and removes
the files of a live host.

The check uses only `stat`. To open one of these files and close it again would also drop the locks.
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
# Timeout for the write lock. Another host holds the lock for milliseconds, or for a second while it
# copies a long history (`spool.py`). A longer holder is not a Banksman host.
BUSY_SECONDS_MAX = 5.0
# Timeout for reads in the loop's thread. Only a recovery after a crash makes them wait, and the
# event loop must not stall.
LOOK_BUSY_SECONDS_MAX = 0.25


class StoreFiles:
    """Identities of the store's files since the call of `note`. `path` is resolved."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._files: dict[str, tuple[int, int]] = {}

    def note(self) -> None:
        """Record the files' identities. Call this after a connection has opened them for writing.

        On a file system with layers (overlayfs), the first open for writing gives the file a new
        inode number.
        """
        for name in (self._path, f"{self._path}-wal", f"{self._path}-shm"):
            key = _key(name)
            if key is not None:
                self._files[name] = key

    @property
    def is_whole(self) -> bool:
        """Whether every recorded file is still at its path."""
        return all(_key(name) == key for name, key in self._files.items())

    def check(self) -> None:
        """Raise `StoreError` if a file was removed or replaced. It takes a few microseconds."""
        for name, key in self._files.items():
            found = _key(name)
            if found != key:
                what = "replaced" if found is not None else "removed"
                raise StoreError(
                    f"{name} was {what} while it was open", hint=MOVED, path=self._path
                )


def _key(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def identity(path: str) -> str:
    """Return the identity of the store's file, which a copy of the file does not have.

    Empty if the file is gone.
    """
    key = _key(path)
    return "" if key is None else f"{key[0]:x}:{key[1]:x}"


# Open the store's file: create it privately if missing, check it, and open it as far as permitted.
#
# This module opens only a file that did not exist by other means than SQLite. To close any fd of a
# file drops all locks of this process on that file. These locks keep two processes from writing at
# the same time.


def checked_path(path: object) -> str:
    """Return the absolute path with symlinks resolved.

    SQLite puts its other files next to that path.
    """
    try:
        name = os.fspath(cast("os.PathLike[Any]", path))
    except TypeError as exc:
        message = "cannot open the store: it needs a path"
        raise UsageError(message, hint="pass a str or a PathLike", path=path) from exc
    # SQLite gives an empty name and ":memory:" a special meaning, so neither is a path.
    if not isinstance(name, str) or name in ("", ":memory:") or "\0" in name:
        message = "cannot open the store: it needs the path of a file"
        raise UsageError(message, hint="use MemoryLog for a store in memory", path=path)
    return os.path.realpath(name)


class StoreOpening:
    """A store during and after its opening: the file, and all connections to it."""

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
        """Create the file if missing, check it, and return the first connection, for the writer.

        Raises OSError, sqlite3.Error or StoreError. The caller must call `close` in that case too.
        """
        # Check before the file is created: SQLite deletes a write-ahead log next to an empty file.
        wal_check.check_file(self.path)
        self._make()
        self._look()
        wal_check.check_tail(self.path, is_synced=self.level == "full")
        wal_check.opened(self.path)
        self._is_counted = True
        connection = self.connect()
        tables.prepare(
            connection, self.path, is_writable=self.is_writable, busy_seconds=BUSY_SECONDS_MAX
        )
        self.presence.note()
        return connection

    def connect(
        self, *, busy_seconds: float | None = None, is_writer: bool = True
    ) -> sqlite3.Connection:
        """Open another connection, to be used by one thread at a time."""
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
        """Close every connection. No thread uses one at this point.

        The last connection of a store checkpoints the log and removes it. SQLite detects by its
        locks which connection is the last, and a live host may have lost its locks (`host_locks.py`
        explains how). `is_last`: False prevents the checkpoint, by closing a read-only connection
        last.
        """
        order = (
            (self._readers, self._connections) if is_last else (self._connections, self._readers)
        )
        for connection in (*order[0], *order[1]):
            with suppress(
                sqlite3.Error
            ):  # The next open repairs a connection that could not be closed cleanly.
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
            # Another process may create the folder at the same moment.
            with suppress(FileExistsError):
                os.mkdir(name, 0o700)
        try:
            # Created before SQLite would do it with the process's umask: the agents' output is
            # private. SQLite gives its other files the same mode.
            fd = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            self._keep_private()
            return
        except OSError:
            if os.path.exists(self.path):
                # A read-only file system raises this before it reports that the file exists.
                return
            raise
        os.close(fd)
        tables.sync_folder(self.path)

    def _keep_private(self) -> None:
        """Check the mode of an existing file.

        The check uses the path: closing an fd of the file would drop SQLite's locks.
        """
        found = os.stat(self.path)
        if not stat.S_ISREG(found.st_mode):
            message = f"cannot open the store {self.path}: it is not a regular file"
            raise StoreError(message, hint="use another path", path=self.path)
        if not found.st_size and found.st_uid == os.geteuid():
            os.chmod(self.path, 0o600)
        elif found.st_mode & 0o077:
            log.warning(
                "store may be read by others: chmod 600 it and the files beside it (store=%s)",
                self.path,
            )

    def _look(self) -> None:
        """Determine the access rights. A store that this user cannot write can still be read."""
        folder = os.path.dirname(self.path)
        is_folder_writable = os.access(folder, os.W_OK, effective_ids=True)
        self.is_writable = is_folder_writable and os.access(self.path, os.W_OK, effective_ids=True)
        # If the index of the log cannot even be created, SQLite reads only a file that is declared
        # immutable. Without a write-ahead log no host has the store open, so the declaration holds
        # now. This log does not see the later writes of a host with more rights.
        self._is_immutable = not is_folder_writable and not os.path.exists(f"{self.path}-wal")
