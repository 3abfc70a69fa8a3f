"""Write a new private file (0600) atomically, for data that leaves a store."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
from collections.abc import AsyncIterator
from typing import BinaryIO

from banksman.errors import StoreError, StoreFull, UsageError

# The writer buffers lines up to this size before a thread writes them.
WRITE_BYTES = 1 << 20


async def write_new(path: str | os.PathLike[str], lines: AsyncIterator[bytes]) -> None:
    """Write a new file that only its owner can read (0600).

    The file appears under its name only when it is complete and synced to disk. Raises `UsageError`
    if the name exists, or if this user cannot write to the folder. Raises `StoreError` if the disk
    fails. After any failure, cancellation included, no file remains.
    """
    target = absolute(path)
    _check_absent(target)
    partial, file = _opened(target)
    try:
        with file:
            await _write(file, lines)
        _put(partial, target)
    except OSError as exc:
        raise _unwritable(target, exc) from exc
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)


def absolute(path: str | os.PathLike[str]) -> str:
    """Resolve a path immediately, so that a later `chdir` cannot change its meaning."""
    return os.path.abspath(path)


def _opened(target: str) -> tuple[str, BinaryIO]:
    """Create the partial file, with a random name, next to the target."""
    folder, name = os.path.split(target)
    partial = os.path.join(folder, f".{name[:100]}.{secrets.token_hex(8)}.part")
    try:
        fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise _unwritable(target, exc) from exc
    return partial, open(fd, "wb", buffering=0)


async def _write(file: BinaryIO, lines: AsyncIterator[bytes]) -> None:
    waiting = bytearray()
    async for line in lines:
        waiting += line
        if len(waiting) >= WRITE_BYTES:
            await _in_thread(file, waiting)
            waiting = bytearray()
    await _in_thread(file, waiting, is_last=True)


async def _in_thread(file: BinaryIO, data: bytearray, *, is_last: bool = False) -> None:
    """Write the data in a thread. `is_last`: sync the file afterwards."""

    def write() -> None:
        left = memoryview(data)
        while left:
            left = left[file.write(left) :]
        if is_last:
            os.fsync(file.fileno())

    writing = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        await asyncio.shield(writing)
    except asyncio.CancelledError:
        # The caller closes the file next, and another file may reuse its fd number before the
        # thread writes. So this function waits for the thread, however often its task is cancelled.
        # The wait is short, because the thread writes a bounded buffer.
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([writing])
        writing.exception()
        raise


def _put(partial: str, target: str) -> None:
    """Link the partial file to its name, and sync the folder. An existing file stays untouched.

    A rename would replace a file that another process has created in the meantime. A link fails
    instead.
    """
    try:
        os.link(partial, target)
    except FileExistsError:
        _check_absent(target)
        raise
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # The file system has no hard links (FAT, some network drives). Another process may still
        # create the target between these two lines.
        _check_absent(target)
        os.rename(partial, target)
    folder = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check_absent(target: str) -> None:
    if os.path.lexists(target):
        hint = "remove it, or use another name"
        raise UsageError(f"cannot write {target}: it exists already", hint=hint, path=target)


def _unwritable(target: str, exc: OSError) -> UsageError | StoreError:
    why = os.strerror(exc.errno) if exc.errno else str(exc)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        hint = "free space on that disk, then try again"
        return StoreFull(f"cannot write {target}: {why}", hint=hint, path=target)
    if (
        isinstance(exc, FileNotFoundError | NotADirectoryError | PermissionError)
        or exc.errno == errno.EROFS
    ):
        hint = "use an existing folder that this user may write to"
        return UsageError(f"cannot write {target}: {why}", hint=hint, path=target)
    return StoreError(f"cannot write {target}: {why}", path=target)
