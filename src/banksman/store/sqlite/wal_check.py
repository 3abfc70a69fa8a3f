"""Detect acknowledged commits that a store has lost, before SQLite opens it.

`check_tail` compares the write-ahead log with its index. `check_file` finds an empty or missing
store file beside a log. `opened` and `closed` count the logs of this process: while one is open, no
check runs that would drop SQLite's locks.

After a crash SQLite reads the write-ahead log (`-wal`) from its start and stops at the first frame
with a wrong checksum. This is right for a transaction that was interrupted. It is wrong for a tail
that was torn, zeroed or truncated after the commit was acknowledged. SQLite cannot distinguish the
two cases, and opens the store without an error.

**The evidence.** The index of the log (`-shm`) holds the number of committed frames. It is written
after the frames. So after the death of any process at any moment, it never counts more frames than
the log holds. SQLite does not use this evidence: the first connection resets the index. So this
module reads the index before that.

**The comparison** covers:

- the number of committed frames,
- the salts that mark the generation of the log,
- the salts of each frame,
- the checksum of the last committed frame, of which the index has a copy.

The checksum of a frame continues from the one before, so one frame can be verified alone. The check
verifies the last `VERIFIED_FRAMES_MAX` frames. In older frames of a longer log it detects only a
frame header of another generation and a page of zeros, not a changed byte. SQLite checkpoints the
log about every 1000 frames, so a longer log is rare.

**Undetected damage:**

- Other damage in the store's file. The session's row and the checksums of its chunks reveal lost
  and changed events when they are read (`pages.py`).
- A loss after which no index exists: it was removed too, or the last process closed the store
  cleanly.
- A loss while other processes have the store open, because their index is in use.
- A loss in a reboot of the machine, unless commits are synced. The kernel may have written the
  index to disk and not the log. This is not damage but the promise of the level `normal`.

**An empty or missing store file** next to a non-empty log is damage too (`check_file`). SQLite
creates the first page of the file before the log, and never truncates the file to nothing. If
SQLite finds an empty file, it deletes the log without an error. So this check comes before
everything else, and it uses only `stat`.

**Locks.** While this process has a connection to the store, this module must not open its files. To
close any fd of a file drops all POSIX locks of the process on it, including SQLite's. So the module
counts the logs by path, and every check runs under one lock:

    wal_check.check_file(path)     # raises StoreDamaged; before the file is created
    wal_check.check_tail(path)     # raises StoreDamaged
    wal_check.opened(path)         # before the first connection; check_tail passes from here on
    ...                            # connections
    wal_check.closed(path)         # after the last connection was closed
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from collections import Counter
from typing import Literal

from msgspec import Struct

from banksman.errors import StoreDamaged
from banksman.store.sqlite.host_locks import is_locked
from banksman.store.sqlite.sqlite_errors import translate

# 4 MiB of pages, the usual size of the log, take 0.1 s.
VERIFIED_FRAMES_MAX = 1024

# The index starts with two copies of a header: version, unused, change counter, is-initialised,
# checksums-are-big-endian, page size, frames, pages, checksum of the last frame, salts, checksum of
# the header. Then come the number of checkpointed frames and the number of frames whose checkpoint
# has begun. All numbers are in machine order, except the salts, which are a copy of the log's
# bytes.
_INDEX = struct.Struct("=III??HII2I8s2I")
_INDEX_BYTES = 136
_FOLDED = struct.Struct("=I")
_FOLDED_OFFSET = 96
_BEGUN_OFFSET = 128
# Every connection holds a shared lock on this byte of the index.
_IN_USE_OFFSET = 128

# The log starts with a header: magic, version, page size, checkpoints, salts, checksum of the
# header. Then come the frames, each with page number, pages of the store after this commit (0: no
# commit), salts, checksum, page. All numbers are big-endian.
_LOG = struct.Struct(">4I8s2I")
_FRAME = struct.Struct(">2I8s2I")
# The last bit gives the byte order of the words in the checksum.
_MAGIC = 0x377F0682

# Protects `_logs` and is held during a whole check: no connection may be opened between the look at
# the count and the close of the check's fds. A thread that opens a store waits here for another
# thread's check, less than a second.
_lock = threading.Lock()
_logs: Counter[str] = Counter()


class _Index(Struct, frozen=True):
    """Contents of the log's index.

    `frames`: committed frames. `folded`: frames that were checkpointed into the store. `begun`:
    frames that may be in the store in part.
    """

    frames: int
    folded: int
    begun: int
    page_bytes: int
    salts: bytes
    checksum: tuple[int, int]


class _Found(Struct, frozen=True):
    """Contents of the log: the number of intact frames, and the last commit frame among them."""

    frames: int
    commit: int


def _forget() -> None:
    """Reset the state in a forked child.

    The child owns no connection, and a thread of the parent may have held the lock.
    """
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _logs.clear()


os.register_at_fork(after_in_child=_forget)


def opened(path: str) -> None:
    """Count a log of this process that is about to connect to the store."""
    with _lock:
        _logs[os.path.realpath(path)] += 1


def closed(path: str) -> None:
    """Uncount a log of this process after it has closed its last connection to the store."""
    with _lock:
        path = os.path.realpath(path)
        assert _logs[path] > 0, f"closed more often than opened: {path}"
        _logs[path] -= 1
        if not _logs[path]:
            del _logs[path]


def check_file(path: str) -> None:
    """Raise `StoreDamaged` if the store's file is empty or missing and its write-ahead log is not.

    It opens nothing, so it may be called at any time. A process that creates the store at the same
    time writes the file first and the log second. This function looks at the log first, so it then
    also finds the file.
    """
    path = os.path.realpath(path)
    try:
        if _size(f"{path}-wal") and not (size := _size(path)):
            raise StoreDamaged(
                f"the store {path} is {'missing' if size is None else 'empty'}, "
                f"and its write-ahead log {path}-wal is not: "
                "the commits in the log belong to a file that is gone",
                hint=f"restore {path}, keeping {path}-wal beside it; "
                f"or move {path}-wal and {path}-shm aside to begin "
                "with an empty store",
                path=path,
            )
    except OSError as exc:
        raise translate(exc, path, "check") from exc


def check_tail(path: str, *, is_synced: bool = False) -> None:
    """Raise `StoreDamaged` if the store has lost acknowledged commits.

    See the module for the limits.

    `is_synced`: each commit was on disk before its acknowledgement (level `full`), so a reboot does
    not explain a loss. Blocks for up to a quarter of a second after a crash, and for a negligible
    time otherwise.
    """
    # SQLite puts these files next to the target of a symlink, not next to the link.
    path = os.path.realpath(path)
    with _lock:
        if _logs[path] > 0:
            return
        try:
            _check(path, is_synced)
        except OSError as exc:
            raise translate(exc, path, "check the write-ahead log of") from exc


def _check(path: str, is_synced: bool) -> None:
    assert _lock.locked()
    if _is_open_here(f"{path}-shm", f"{path}-wal"):
        return
    index = _read_index(path, is_synced)
    if index is None or index.frames == 0:
        return
    found = _read_log(path, index)
    if not _is_lost(index, found):
        return
    # Another process that closed the store cleanly has removed both files one after the other. If
    # the index has changed, this result is not reliable, and the next check decides.
    if _read_index(path, is_synced) != index:
        return
    raise _damaged(path, index, found)


def _is_lost(index: _Index, found: _Found | Literal["missing", "another"]) -> bool:
    match found:
        case "another":
            # A log of another generation. It began after all frames of this index were
            # checkpointed. The index is then an old copy that the kernel wrote to disk some time
            # before a power cut.
            return False
        case "missing":
            return index.folded < index.frames
        case _Found():
            # This holds even if all frames were checkpointed. From the rest of the log, SQLite
            # would take older versions of pages that are newer in the store.
            return found.frames < index.frames


def _damaged(
    path: str, index: _Index, found: _Found | Literal["missing", "another"]
) -> StoreDamaged:
    whole, commit = (found.frames, found.commit) if isinstance(found, _Found) else (0, 0)
    before = (
        "with no program using the store, "
        f"copy {path}, {path}-wal and {path}-shm to a safe place; then "
    )
    # A checkpoint copies the newest version of each page. So a partly checkpointed store has pages
    # from several moments. It is consistent only together with every frame up to `begun`, and then
    # at any commit from there on.
    if index.folded == index.frames:
        hint = f"{before}remove {path}-wal and {path}-shm: the store itself has every commit"
    elif index.begun <= commit or index.begun == 0:
        after = f"remove {path}-shm to continue without the lost commits"
        hint = f"restore a backup; or, {before}{after}"
    else:
        hint = "restore a backup: the store's file is consistent only with the lost frames"
    return StoreDamaged(
        f"the write-ahead log {path}-wal has lost its end: "
        f"{index.frames} frames were committed, {whole} are whole",
        hint=hint,
        path=path,
        frames=index.frames,
        whole=whole,
        folded=index.folded,
    )


# -- the index -----------------------------------------------------------------------------------
def _read_index(path: str, is_synced: bool) -> _Index | None:
    """Read the index. None: the index is missing, in use, or no evidence."""
    try:
        fd = os.open(f"{path}-shm", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if is_locked(fd, _IN_USE_OFFSET):
            return None
        if not is_synced and os.fstat(fd).st_mtime < time.time() - time.clock_gettime(
            time.CLOCK_BOOTTIME
        ):
            return None  # Written before the last boot.
        data = os.pread(fd, _INDEX_BYTES, 0)
    finally:
        os.close(fd)
    if len(data) < _INDEX_BYTES:
        return None
    # SQLite writes the second copy before the first. A process that died in between leaves two
    # different copies, or a torn one. Every intact copy is true. The first one is the state that
    # readers knew.
    return _parse_index(data, 0) or _parse_index(data, _INDEX.size)


def _parse_index(data: bytes, offset: int) -> _Index | None:
    unpacked = _INDEX.unpack_from(data, offset)
    (_, _, _, is_initialised, _, page_bytes, frames, _, first, second, salts, *own) = unpacked
    words = memoryview(data)[offset : offset + _INDEX.size - 8].cast("I")
    if not is_initialised or tuple(own) != _summed(words, (0, 0)):
        return None
    (folded,) = _FOLDED.unpack_from(data, _FOLDED_OFFSET)
    (begun,) = _FOLDED.unpack_from(data, _BEGUN_OFFSET)
    # The checksum does not cover these two numbers. SQLite resets them to 0 after it has written a
    # new header. Until then they belong to the earlier generation, so they are capped here.
    folded, begun = min(folded, frames), min(max(begun, folded), frames)
    return _Index(frames, folded, begun, _page_bytes(page_bytes), salts, (first, second))


def _page_bytes(stored: int) -> int:
    """Decode a page size. 65536 does not fit into two bytes and is stored as 1."""
    return 65536 if stored == 1 else stored


# -- the log -------------------------------------------------------------------------------------
def _read_log(path: str, index: _Index) -> _Found | Literal["missing", "another"]:
    try:
        fd = os.open(f"{path}-wal", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return "missing"
    try:
        header = os.pread(fd, _LOG.size, 0)
        if len(header) < _LOG.size:
            return "missing"
        (magic, _, page_bytes, _, salts, *own) = _LOG.unpack(header)
        order = "big" if magic & 1 else "little"
        is_sound = magic & ~1 == _MAGIC and tuple(own) == _summed(
            _words(header[:-8], order), (0, 0)
        )
        if not is_sound:
            return "missing"  # SQLite ignores a log with an invalid header.
        if salts != index.salts or page_bytes != index.page_bytes:
            return "another"
        return _count_frames(fd, index, order, (own[0], own[1]))
    finally:
        os.close(fd)


def _count_frames(fd: int, index: _Index, order: str, before: tuple[int, int]) -> _Found:
    """Count the intact frames from the start, at most as many as were committed.

    `before`: the checksum from which the first frame continues.
    """
    commit = 0
    zeros = bytes(index.page_bytes)
    for number in range(1, index.frames + 1):
        # One frame at a time: a log that could not be checkpointed may be larger than the memory.
        frame = os.pread(
            fd,
            _FRAME.size + index.page_bytes,
            _LOG.size + (number - 1) * (_FRAME.size + index.page_bytes),
        )
        if len(frame) < _FRAME.size + index.page_bytes:
            return _Found(number - 1, commit)
        (page, pages, salts, *stored) = _FRAME.unpack_from(frame)
        checksum = (stored[0], stored[1])
        if page == 0 or salts != index.salts:
            return _Found(number - 1, commit)
        # A page of zeros can be valid (the rest of a long value), so its checksum decides.
        is_recent = number > index.frames - VERIFIED_FRAMES_MAX
        if is_recent or frame[_FRAME.size :] == zeros:
            words = _words(frame[:8] + frame[_FRAME.size :], order)
            if _summed(words, before) != checksum:
                return _Found(number - 1, commit)
        if number == index.frames and checksum != index.checksum:
            return _Found(number - 1, commit)
        before = checksum
        commit = number if pages else commit
    return _Found(index.frames, commit)


def _words(data: bytes, order: str) -> memoryview[int]:
    """Return the words of a checksum. The log may be in the byte order of another machine."""
    if order != sys.byteorder:
        data = struct.pack(
            f"{len(data) // 4}I",
            *struct.unpack(f"{'>' if order == 'big' else '<'}{len(data) // 4}I", data),
        )
    return memoryview(data).cast("I")


def _summed(words: memoryview[int], before: tuple[int, int]) -> tuple[int, int]:
    """Continue SQLite's checksum over an even number of words.

    The checksum has two sums of 32 bits, and each one adds the other.
    """
    first, second = before
    # This loop is the whole cost of the check. Each pass takes six words, and cuts the sums to 32
    # bits once. The words that do not fill a pass come first. A frame with a page of 4096 bytes
    # takes 171 passes.
    place = 0
    while (len(words) - place) % 6:
        first = (first + words[place] + second) & 0xFFFFFFFF
        second = (second + words[place + 1] + first) & 0xFFFFFFFF
        place += 2
    rest = iter(words[place:])
    for one, two, three, four, five, six in zip(rest, rest, rest, rest, rest, rest, strict=True):
        first += one + second
        second += two + first
        first += three + second
        second += four + first
        first = (first + five + second) & 0xFFFFFFFF
        second = (second + six + first) & 0xFFFFFFFF
    return first, second


def _size(path: str) -> int | None:
    """Return the size in bytes; None if the file does not exist."""
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_open_here(*paths: str) -> bool:
    """Whether this process has one of these files open outside of a log.

    The program may have its own SQLite connection, whose locks must not be dropped. This function
    opens none of these files.
    """
    wanted: set[tuple[int, int]] = set()
    for path in paths:
        try:
            found = os.stat(path)
        except FileNotFoundError:
            continue
        wanted.add((found.st_dev, found.st_ino))
    if not wanted:
        return False
    try:
        fds = [int(name) for name in os.listdir("/proc/self/fd")]
    except FileNotFoundError:
        return False  # Without /proc this is unknown, and a foreign connection is very rare.
    for fd in fds:
        try:
            found = os.fstat(fd)
        except OSError:
            continue  # Closed in the meantime: by another thread, or the fd of the listing.
        if (found.st_dev, found.st_ino) in wanted:
            return True
    return False
