"""Read and write text files of a workspace by file descriptor.

Everything here blocks and is called in a thread (`BlockingCalls` in request_handler.py).

**Reading.** Regular files only: a FIFO would wait for a writer, and opening a device may have side
effects. A file that is not UTF-8 is rejected instead of being read with replacement characters. An
agent that writes back a text with replacement characters would destroy the rest of the file.

**Writing.** The new text is written to a temporary file in the same folder. That file then gets the
mode and the name of the old file. A concurrent reader sees the old text or the new text, and a
failed write leaves the old text. In two cases the old file itself is overwritten: the folder does
not permit a new file, or the file would get another owner. A file with a second hard link is never
overwritten, because a user of the other name, perhaps outside the root, has not agreed to the
change. The write is not synced to disk: an agent's edits are not worth more than its build results.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable

from msgspec import Struct

from banksman.errors import Closed, NotFound, Refused, UsageError
from banksman.sessions.workspace import safe_paths
from banksman.sessions.workspace.safe_paths import PathChanged, Root, refusal, shown

# Limit for reads and writes. The answer is a single frame, and agents accept frames up to the same
# size as Banksman.
FILE_BYTES_MAX = 32 << 20
_READ_BYTES = 1 << 20

# O_NONBLOCK: do not wait for a process at the other end of a FIFO. O_NOFOLLOW: do not follow links.
# O_NOCTTY: do not get a controlling terminal from a device.
_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

IsWanted = Callable[[], bool]


def read(root: Root, path: str, *, line: int = 1, limit: int | None = None) -> str:
    """Return the text of a file, or `limit` lines of it from `line` on.

    Lines are counted from 1. Beyond the last line the result is empty.
    """
    data = safe_paths.at(root, path, lambda folder, name: _read(folder, name, path))
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        message = f"cannot read {shown(path)}: not UTF-8 text"
        raise UsageError(message, hint="read it with a command") from exc
    return text if line <= 1 and limit is None else _lines(text, line, limit)


def write(root: Root, path: str, data: bytes, is_wanted: IsWanted = lambda: True) -> None:
    """Set the content of a file, and create the file and its folders if needed.

    `is_wanted`: checked directly before the change becomes visible.
    """
    new = _New(path, data, is_wanted)
    safe_paths.at(root, path, lambda folder, name: _write(folder, name, new), creates=True)


def _lines(text: str, line: int, limit: int | None) -> str:
    # Only a newline ends a line. Other line separators of Unicode are part of the line, as in most
    # editors.
    lines = text.split("\n")
    first = max(line, 1) - 1
    end = len(lines) if limit is None else min(first + limit, len(lines))
    chosen = "\n".join(lines[first:end])
    return f"{chosen}\n" if first < end < len(lines) else chosen


# -- reading -------------------------------------------------------------------------------------
def _read(folder: int, name: str, path: str) -> bytes:
    fd = _open_regular(folder, name, os.O_RDONLY, path, "read")
    try:
        # Not by the size: the file may grow during the read, and some kernel files report the size
        # 0.
        pieces: list[bytes] = []
        left = FILE_BYTES_MAX + 1
        while left and (piece := os.read(fd, min(left, _READ_BYTES))):
            pieces.append(piece)
            left -= len(piece)
    except OSError as exc:
        raise refusal("read", path, exc) from exc
    finally:
        os.close(fd)
    if not left:
        message = f"cannot read {shown(path)}: larger than {FILE_BYTES_MAX} bytes"
        raise UsageError(message, hint="read parts of it with a command")
    return b"".join(pieces)


def _open_regular(folder: int, name: str, flags: int, path: str, verb: str) -> int:
    """Open a file only if it is a regular file, and check it again after the open.

    The first check is needed because opening a FIFO or a device already has side effects. The
    second check is needed because the file may have been replaced in between.
    """
    try:
        _check_regular(os.stat(name, dir_fd=folder, follow_symlinks=False), path)
        fd = os.open(name, flags | _CAREFULLY, dir_fd=folder)
    except OSError as exc:
        if exc.errno == errno.ELOOP:
            raise PathChanged from exc
        raise refusal(verb, path, exc) from exc
    try:
        _check_regular(os.fstat(fd), path)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _check_regular(found: os.stat_result, path: str) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise PathChanged
    if stat.S_ISDIR(found.st_mode):
        raise UsageError(f"{shown(path)} is a folder", hint="use the path of a file")
    if not stat.S_ISREG(found.st_mode):
        hint = "use a regular file, not a device, FIFO or socket"
        raise UsageError(f"{shown(path)} is not a regular file", hint=hint)


# -- writing -------------------------------------------------------------------------------------
class _New(Struct, frozen=True):
    """New content of a file."""

    path: str
    data: bytes
    is_wanted: IsWanted

    def check_wanted(self) -> None:
        if not self.is_wanted():
            raise Closed("the write was cancelled: nothing was written")


def _write(folder: int, name: str, new: _New) -> None:
    # Opened for writing even if another file replaces it. A process that may not write to a file
    # must not replace it either, even if the permissions of the folder allow that.
    try:
        old = _open_regular(folder, name, os.O_WRONLY, new.path, "write")
    except NotFound:
        _replace(folder, name, new, None)
        return
    try:
        if not _replace(folder, name, new, os.fstat(old)):
            _overwrite(old, new)
    finally:
        os.close(old)


def _replace(folder: int, name: str, new: _New, old: os.stat_result | None) -> bool:
    """Write a temporary file and rename it to `name`.

    Returns False if that is not possible here. Nothing was changed in this case.
    """
    partial = f".banksman-{secrets.token_hex(8)}.part"
    # A new file gets the default permissions. A replacement stays private until it has the owner
    # and mode of the old file.
    mode = 0o666 if old is None else 0o600
    try:
        fd = os.open(
            partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY, mode, dir_fd=folder
        )
    except OSError as exc:
        if old is not None and exc.errno in (errno.EACCES, errno.EPERM):
            return False
        raise refusal("write", new.path, exc) from exc
    try:
        try:
            if old is not None and not _make_like(fd, old):
                return False
            _write_all(fd, new.data)
        finally:
            os.close(fd)
        new.check_wanted()
        # `rename` replaces the directory entry and follows no link. A link that was just created
        # here is replaced, and its target is not touched.
        os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        partial = ""
    except OSError as exc:
        raise refusal("write", new.path, exc) from exc
    finally:
        if partial:
            with contextlib.suppress(OSError):  # The first error is the one to report.
                os.unlink(partial, dir_fd=folder)
    return True


def _make_like(fd: int, old: os.stat_result) -> bool:
    """Give the file the owner, group and mode of the old file.

    The setuid, setgid and sticky bits are omitted, because the kernel also clears set-id bits on a
    write. Returns False if the owner cannot be set.
    """
    new = os.fstat(fd)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(fd, old.st_uid, old.st_gid)
        except PermissionError:
            return False
    os.fchmod(fd, stat.S_IMODE(old.st_mode) & 0o777)
    return True


def _overwrite(fd: int, new: _New) -> None:
    if os.fstat(fd).st_nlink > 1:
        hint = "write to another path: a new file cannot replace it in its folder"
        raise Refused(f"cannot write {shown(new.path)}: it has another hard link", hint=hint)
    new.check_wanted()
    try:
        os.ftruncate(fd, 0)
        _write_all(fd, new.data)
    except OSError as exc:
        raise refusal("write", new.path, exc) from exc


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]
