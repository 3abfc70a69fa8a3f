"""Translate SQLite and kernel errors to `StoreError` classes with a hint for the operator.

SQLite reports what failed, by a code of two parts (the low byte is the kind), but rarely why: it
drops the errno. A full disk may appear as SQLITE_FULL, as an I/O error (the index of the
write-ahead log could not grow), or as "unable to open". So this module asks the file system where
the code is ambiguous. The answer is slightly later than the failure. It only selects the words and
the class, never whether an operation has failed.
"""

from __future__ import annotations

import errno
import os
import sqlite3

from banksman.errors import StoreBusy, StoreDamaged, StoreError, StoreFull, StoreReadOnly

# A file system with less free space counts as full. A page of the store and a page of its index
# must fit, and some file systems reserve a few blocks.
FREE_BYTES_MIN = 64 << 10

FREE_SPACE = "free space on that disk, or raise the quota; then retry unacknowledged writes"
ALLOW_WRITING = "allow this user to write the file, its folder, and the files beside it"
LET_GO = "close the program that locks the file (a backup tool, a database browser), then try again"
RESTORE = "restore a backup, or move the file, -wal and -shm away to begin with an empty store"
LOOK_AT_DISK = "check the disk and the kernel's log; move the store off any network file system"
MOVED = "put the file back, or close all hosts that use it; it was moved while it was open"
MAKE_FOLDER = "check that the folder exists and that the path is a file"

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_READ_ONLY = frozenset({errno.EROFS, errno.EACCES, errno.EPERM})
_LOCKED = frozenset({errno.EAGAIN, errno.EDEADLK})


# Errors about the values and statements that the caller passed, not about the store.
_OF_CALLER = (
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
    sqlite3.ProgrammingError,
)


def is_of_store(exc: Exception) -> bool:
    """Whether the store has failed, and not a caller that passed an invalid value or statement."""
    return isinstance(exc, (StoreError, sqlite3.Error, OSError)) and not isinstance(exc, _OF_CALLER)


def translate(exc: sqlite3.Error | OSError, path: str, doing: str) -> StoreError:
    """Return the error to raise `from exc`.

    `doing`: the verb of the failed action on the store at `path`, for example "open" or "append
    to".
    """
    if isinstance(exc, OSError):
        return _of_system(exc, path, doing)
    code = _code(exc)
    what = f"cannot {doing} the store {path}: {exc}"
    ids = {"path": path, "code": getattr(exc, "sqlite_errorname", "") or type(exc).__name__}
    match code & 0xFF:
        case sqlite3.SQLITE_FULL:
            return StoreFull(what, hint=FREE_SPACE, **ids)
        case sqlite3.SQLITE_READONLY | sqlite3.SQLITE_PERM:
            hint = MOVED if code == sqlite3.SQLITE_READONLY_DBMOVED else ALLOW_WRITING
            return StoreReadOnly(what, hint=hint, **ids)
        case sqlite3.SQLITE_BUSY | sqlite3.SQLITE_LOCKED | sqlite3.SQLITE_PROTOCOL:
            return StoreBusy(what, hint=LET_GO, **ids)
        case sqlite3.SQLITE_CORRUPT | sqlite3.SQLITE_NOTADB | sqlite3.SQLITE_FORMAT:
            return StoreDamaged(what, hint=RESTORE, **ids)
        case sqlite3.SQLITE_CANTOPEN:
            # SQLite opens or creates three files and a folder's fd, and does not report which one
            # failed.
            if not _is_writable(path):
                return StoreReadOnly(what, hint=ALLOW_WRITING, **ids)
            if _is_full(path):
                return StoreFull(what, hint=FREE_SPACE, **ids)
            return StoreError(what, hint=MAKE_FOLDER, **ids)
        case sqlite3.SQLITE_IOERR:
            if _is_full(path):
                return StoreFull(what, hint=FREE_SPACE, **ids)
            return StoreError(what, hint=LOOK_AT_DISK, **ids)
        case sqlite3.SQLITE_NOLFS:
            hint = "move the store to a file system that allows larger files"
            return StoreFull(what, hint=hint, **ids)
        case _:
            return StoreError(what, **ids)


def _of_system(exc: OSError, path: str, doing: str) -> StoreError:
    number = exc.errno or 0
    what = f"cannot {doing} {path}: {os.strerror(number) if number else exc}"
    ids = {"path": path, "code": errno.errorcode.get(number, type(exc).__name__)}
    if number in _FULL:
        return StoreFull(what, hint=FREE_SPACE, **ids)
    if number in _READ_ONLY:
        return StoreReadOnly(what, hint=ALLOW_WRITING, **ids)
    if number in _LOCKED:
        return StoreBusy(what, hint=LET_GO, **ids)
    if number in {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG}:
        return StoreError(what, hint=MAKE_FOLDER, **ids)
    if number in {errno.EMFILE, errno.ENFILE}:
        return StoreError(what, hint="close some open files, or raise the limit (ulimit -n)", **ids)
    return StoreError(what, hint=LOOK_AT_DISK, **ids)


def _code(exc: sqlite3.Error) -> int:
    """Return SQLite's extended code; SQLITE_MISUSE if the error has none.

    Python's module raises such errors for a misuse of its interface.
    """
    code = getattr(exc, "sqlite_errorcode", None)
    return code if isinstance(code, int) else sqlite3.SQLITE_MISUSE


def _is_full(path: str) -> bool:
    """Whether an unprivileged writer has no blocks or inodes left on the store's file system."""
    try:
        found = os.statvfs(os.path.dirname(os.path.abspath(path)))
    except OSError:
        return False  # Then a full disk is not the explanation.
    # Some file systems have no fixed number of inodes, and report 0 of 0.
    return found.f_bavail * found.f_frsize < FREE_BYTES_MIN or (
        found.f_files > 0 and found.f_favail == 0
    )


def _is_writable(path: str) -> bool:
    """Whether this user may write the existing files of the store and its folder.

    A missing file counts as writable, because its absence is another fault.
    """
    folder = os.path.dirname(os.path.abspath(path))
    there = [name for name in (folder, path, f"{path}-wal", f"{path}-shm") if os.path.exists(name)]
    return all(os.access(name, os.W_OK, effective_ids=True) for name in there)
