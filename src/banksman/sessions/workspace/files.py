"""Text files of a workspace, read and written by their fd. Everything here blocks: it is called in a thread
(`BlockingCalls` in request_handler.py).

**Reading.** Regular files only: a fifo would wait for somebody who writes, a device may do anything. A file that is not
UTF-8 is refused, and not read with something else in place of what cannot be: an agent that writes back what it has
read would destroy the rest of the file.

**Writing.** The new text is written to a file beside the old one, which then takes its name and its mode: who reads
meanwhile has the old text or the new, and a write that fails leaves the old. Where that cannot be (a folder that takes
no new file, or a file of another user that would become ours) the old file itself is written to. Not if it has another
name, by a hard link: whoever has it by that name, perhaps outside the root, has not asked for it. It is not forced to
the disk: what an agent edits is not worth more than what it builds.
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

# Of a file that is read or written: an answer is one frame, and an agent takes no larger ones than we do.
FILE_BYTES_MAX = 32 << 20
_READ_BYTES = 1 << 20

# Not to wait for whoever is at the other end, not to follow, and not to be given a terminal by it.
_CAREFULLY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

IsWanted = Callable[[], bool]


def read(root: Root, path: str, *, line: int = 1, limit: int | None = None) -> str:
    """The text of a file, or `limit` lines of it from `line` on, counted from 1. After its last line there is none."""
    data = safe_paths.at(root, path, lambda folder, name: _read(folder, name, path))
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        raise UsageError(f"{shown(path)} is not UTF-8 text", hint="a command can read other files") from exc
    return text if line <= 1 and limit is None else _lines(text, line, limit)


def write(root: Root, path: str, data: bytes, is_wanted: IsWanted = lambda: True) -> None:
    """Make this the content of a file, which may be new, and its folders too. `is_wanted`: asked last of all."""
    new = _New(path, data, is_wanted)
    safe_paths.at(root, path, lambda folder, name: _write(folder, name, new), creates=True)


def _lines(text: str, line: int, limit: int | None) -> str:
    # Only a newline ends a line here: what else Unicode knows as one is part of it, as in every editor.
    lines = text.split("\n")
    first = max(line, 1) - 1
    end = len(lines) if limit is None else min(first + limit, len(lines))
    chosen = "\n".join(lines[first:end])
    return f"{chosen}\n" if first < end < len(lines) else chosen


# -- reading ---------------------------------------------------------------------------------------------------------
def _read(folder: int, name: str, path: str) -> bytes:
    fd = _open_regular(folder, name, os.O_RDONLY, path, "read")
    try:
        # Not by its size: it may grow while we read, and some files of the kernel's have none.
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
        raise UsageError(f"{shown(path)} is larger than {FILE_BYTES_MAX} bytes", hint="a command can read parts of it")
    return b"".join(pieces)


def _open_regular(folder: int, name: str, flags: int, path: str, verb: str) -> int:
    """Opened only if it is a regular file, and looked at again once it is: to open a fifo or a device is to act on it
    already."""
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
        raise UsageError(f"{shown(path)} is a folder", hint="the path of a file")
    if not stat.S_ISREG(found.st_mode):
        raise UsageError(f"{shown(path)} is not a regular file", hint="no device, no fifo, no socket")


# -- writing ---------------------------------------------------------------------------------------------------------
class _New(Struct, frozen=True):
    """What is to be written."""

    path: str
    data: bytes
    is_wanted: IsWanted

    def check_wanted(self) -> None:
        if not self.is_wanted():
            raise Closed("nobody waits for this write any more; nothing was written")


def _write(folder: int, name: str, new: _New) -> None:
    # Opened for writing though another one will take its place: who may not write to a file may not replace it either,
    # whatever the rights on its folder say.
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
    """Write another file and give it the name. False: not here, and nothing was done."""
    partial = f".banksman-{secrets.token_hex(8)}.part"
    # A new one is as open as every new file of ours; one that replaces another is nobody else's until it is like it.
    mode = 0o666 if old is None else 0o600
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _CAREFULLY, mode, dir_fd=folder)
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
        # Of whatever is there by now the name is taken away, and nothing is followed: a link that was put here a moment
        # ago is replaced, and not what it leads to.
        os.rename(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        partial = ""
    except OSError as exc:
        raise refusal("write", new.path, exc) from exc
    finally:
        if partial:
            with contextlib.suppress(OSError):  # What went wrong first is what is told.
                os.unlink(partial, dir_fd=folder)
    return True


def _make_like(fd: int, old: os.stat_result) -> bool:
    """The same owner, group and mode. Without the bits that let it run as another: the kernel takes those from a file
    that is written to."""
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
        hint = "its folder takes no new file"
        raise Refused(f"{shown(new.path)} has another name, and cannot be replaced", hint=hint)
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
