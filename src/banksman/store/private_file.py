"""A new file for its owner only, which is there whole or not at all: for what is taken out of a store."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import secrets
from collections.abc import AsyncIterator
from typing import BinaryIO

from banksman.errors import StoreError, StoreFull, UsageError

# Lines are gathered to this before a thread writes them.
WRITE_BYTES = 1 << 20


async def write_new(path: str | os.PathLike[str], lines: AsyncIterator[bytes]) -> None:
    """Write a new file for its owner only (0600), which appears under its name when it is whole and on the disk.

    `UsageError` if there is something of that name, or no folder that we may write to; `StoreError` if the disk fails.
    Whatever goes wrong, cancellation included, nothing is left.
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
    """Said now: whoever changes the working folder while we wait must not change what is meant."""
    return os.path.abspath(path)


def _opened(target: str) -> tuple[str, BinaryIO]:
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
        # The file is closed next, and its number may be another's by the time the thread writes to it: so the thread is
        # waited for, however often we are cancelled. It has a bounded piece to write.
        while not writing.done():
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([writing])
        writing.exception()
        raise


def _put(partial: str, target: str) -> None:
    """Give it its name, unless somebody has it by now: a rename would take it away, a link does not."""
    try:
        os.link(partial, target)
    except FileExistsError:
        _check_absent(target)
        raise
    except OSError as exc:
        if exc.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK):
            raise
        # No hard links here (FAT, some network drives). Between these two lines somebody may still come.
        _check_absent(target)
        os.rename(partial, target)
    folder = os.open(os.path.dirname(target), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _check_absent(target: str) -> None:
    if os.path.lexists(target):
        raise UsageError(f"there is a file {target} already", hint="remove it, or take another name", path=target)


def _unwritable(target: str, exc: OSError) -> UsageError | StoreError:
    why = os.strerror(exc.errno) if exc.errno else str(exc)
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"cannot write {target}: {why}", hint="make room, and try again", path=target)
    if isinstance(exc, FileNotFoundError | NotADirectoryError | PermissionError) or exc.errno == errno.EROFS:
        return UsageError(f"cannot write {target}: {why}", hint="a folder that is there and ours to write", path=target)
    return StoreError(f"cannot write {target}: {why}", path=target)
