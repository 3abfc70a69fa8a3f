"""Commits that were acknowledged and are gone: seen before the first connection, which would pass over them in silence.

After a crash SQLite reads the write-ahead log (`-wal`) from its start and stops at the first frame whose checksum is
wrong. That is right for a transaction that was cut off in the middle, and wrong for a tail that was torn, zeroed or cut
after its commit was acknowledged: both look the same to it, and it opens the store without a word.

But there is a witness. The log's index (`-shm`) says how many frames were committed, and it is written after them, so
after the death of processes, of whichever and at whatever moment, it never says more than the log holds. SQLite does
not ask it: the first connection empties it. So it is asked here, before that.

What is compared: the number of committed frames, the salts that mark the log's generation, each frame's salts, and the
checksum of the last committed frame, which the index has a copy of. Each frame's checksum goes on from the one before,
so one frame can be verified alone; that is done for the last `VERIFIED_FRAMES_MAX`. In older ones of a longer log only
a frame header of another generation and a page of zeros is noticed, not a changed byte. (The log is folded into the
store about every 1000 frames, so a longer one is rare.)

What cannot be seen here, and passes: other damage in the store's file itself (a session's row and the checksums of its
chunks tell of lost and changed events as they are read, `pages.py`); a loss after which there is no index (it was
removed too, or the last process closed the store in good order); one while other processes have the store open, whose
index lives; and, unless commits are synced, one that came with a restart of the machine. There the kernel may have
written the index to the disk and not the log, which is no damage but what the level promises.

A store's file that is empty or missing beside a log with something in it is damage too (`check_file`). SQLite makes the
file's first page before the log, and never shortens it to nothing. On finding an empty file it deletes the log without
a word, so this is looked at before anything else, and by `stat` alone.

Nothing may be opened here while this process has a connection to the store: to close any fd of a file drops all of the
process's POSIX locks on it, SQLite's included. So logs are counted by path, and all of it happens under one lock:

    damage.check_file(path)     # raises StoreDamaged; before the file is made
    damage.check_tail(path)     # raises StoreDamaged
    damage.opened(path)         # before the first connection; check_tail passes from here on
    ...                         # connections
    damage.closed(path)         # after the last connection was closed
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

# 4 MiB of pages, as many as the log normally has, take 0.1 s.
VERIFIED_FRAMES_MAX = 1024

# Of the index: two copies of a header (version, -, changes, is-initialised, checksums-are-big-endian, page size,
# frames, pages, the last frame's checksum, salts, own checksum), then how much was folded back into the store and how
# much of that was begun. All in the machine's order, but for the salts, which are a copy of the log's bytes.
_INDEX = struct.Struct("=III??HII2I8s2I")
_INDEX_BYTES = 136
_FOLDED = struct.Struct("=I")
_FOLDED_OFFSET = 96
_BEGUN_OFFSET = 128
# Every connection holds this byte of the index locked, shared.
_IN_USE_OFFSET = 128

# Of the log: magic, version, page size, checkpoints, salts, own checksum; then the frames, each with page number, pages
# of the store after this commit (0: no commit), salts, checksum. All big-endian.
_LOG = struct.Struct(">4I8s2I")
_FRAME = struct.Struct(">2I8s2I")
# The last bit says in which order the words are that are summed.
_MAGIC = 0x377F0682

# Protects `_logs`, and is held over a whole check: no connection may come to be between the look at the count and the
# close of the check's fds. A thread that opens a store waits here for another's check, less than a second.
_lock = threading.Lock()
_logs: Counter[str] = Counter()


class _Index(Struct, frozen=True):
    """What the index says. `frames` were committed, `folded` of them are in the store, `begun` may be there in part."""

    frames: int
    folded: int
    begun: int
    page_bytes: int
    salts: bytes
    checksum: tuple[int, int]


class _Found(Struct, frozen=True):
    """What the log holds: so many frames are whole, and the last commit among them is that of frame `commit`."""

    frames: int
    commit: int


def _forget() -> None:
    """In a forked child: no connection is its own, and another thread of the parent may have held the lock."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    _logs.clear()


os.register_at_fork(after_in_child=_forget)


def opened(path: str) -> None:
    """Another log of this process is about to connect to this store."""
    with _lock:
        _logs[os.path.realpath(path)] += 1


def closed(path: str) -> None:
    """A log of this process has closed its last connection to this store."""
    with _lock:
        path = os.path.realpath(path)
        assert _logs[path] > 0, f"closed more often than opened: {path}"
        _logs[path] -= 1
        if not _logs[path]:
            del _logs[path]


def check_file(path: str) -> None:
    """Raise `StoreDamaged` if the store's file is empty or missing, and its write-ahead log is not.

    Opens nothing, so it may be called at any time. A process that makes the store meanwhile writes the file first and
    the log second: the log is looked at first here, so the file that belongs to it is found.
    """
    path = os.path.realpath(path)
    try:
        if _size(f"{path}-wal") and not (size := _size(path)):
            raise StoreDamaged(
                f"the store {path} is {'missing' if size is None else 'empty'}, and its write-ahead log {path}-wal is "
                "not: the commits in the log belong to a file that is gone",
                hint=f"restore {path}, keeping {path}-wal beside it; or move {path}-wal and {path}-shm aside to begin "
                "with an empty store",
                path=path,
            )
    except OSError as exc:
        raise translate(exc, path, "look at") from exc


def check_tail(path: str, *, is_synced: bool = False) -> None:
    """`StoreDamaged` if commits were acknowledged that the store no longer has. See the module for when it can tell.

    `is_synced`: each commit was on the disk before it was acknowledged (the level `full`), so that a restart of the
    machine is no excuse. Blocks for up to a quarter of a second after a crash, and for no time worth a word otherwise.
    """
    # SQLite puts these files beside what a symlink points to, not beside the link.
    path = os.path.realpath(path)
    with _lock:
        if _logs[path] > 0:
            return
        try:
            _check(path, is_synced)
        except OSError as exc:
            raise translate(exc, path, "look at the write-ahead log of") from exc


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
    # A process that came by meanwhile, and closed the store in good order, has removed both files one after the other.
    # What it left, if anything, is for another look.
    if _read_index(path, is_synced) != index:
        return
    raise _damaged(path, index, found)


def _is_lost(index: _Index, found: _Found | Literal["missing", "another"]) -> bool:
    match found:
        case "another":
            # A log of another generation. A newer one began after all of ours was folded; the index is then one that
            # the kernel had written to the disk some time before a power cut.
            return False
        case "missing":
            return index.folded < index.frames
        case _Found():
            # Also when all was folded back into the store: from what is left of the log, SQLite would take older
            # versions of pages that are newer in the store.
            return found.frames < index.frames


def _damaged(path: str, index: _Index, found: _Found | Literal["missing", "another"]) -> StoreDamaged:
    whole, commit = (found.frames, found.commit) if isinstance(found, _Found) else (0, 0)
    before = f"with no program using the store, copy {path}, {path}-wal and {path}-shm to a safe place; then "
    # SQLite folds a page back in its newest version, so a store into which not all was folded has pages of several
    # times. It is sound only together with every frame up to `begun`, and then at any commit from there on.
    if index.folded == index.frames:
        hint = f"{before}remove {path}-wal and {path}-shm: the store itself has every commit"
    elif index.begun <= commit or index.begun == 0:
        hint = f"restore a backup; or, {before}remove {path}-shm to go on without the lost commits"
    else:
        hint = "restore a backup: the store's file fits together only with the frames that are gone"
    return StoreDamaged(
        f"the write-ahead log {path}-wal has lost its end: {index.frames} frames were committed, {whole} are whole",
        hint=hint,
        path=path,
        frames=index.frames,
        whole=whole,
        folded=index.folded,
    )


# -- the index -------------------------------------------------------------------------------------------------------
def _read_index(path: str, is_synced: bool) -> _Index | None:
    """What the index says; None if there is none, if it is in use, or if it is no witness."""
    try:
        fd = os.open(f"{path}-shm", os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        if is_locked(fd, _IN_USE_OFFSET):
            return None
        if not is_synced and os.fstat(fd).st_mtime < time.time() - time.clock_gettime(time.CLOCK_BOOTTIME):
            return None  # It was written before the machine was started.
        data = os.pread(fd, _INDEX_BYTES, 0)
    finally:
        os.close(fd)
    if len(data) < _INDEX_BYTES:
        return None
    # The second copy is written before the first. A process that died in between leaves two that differ, or one that is
    # torn; each that is whole is true, the first being what was known to readers.
    return _parse_index(data, 0) or _parse_index(data, _INDEX.size)


def _parse_index(data: bytes, offset: int) -> _Index | None:
    unpacked = _INDEX.unpack_from(data, offset)
    (_, _, _, is_initialised, _, page_bytes, frames, _, first, second, salts, *own) = unpacked
    words = memoryview(data)[offset : offset + _INDEX.size - 8].cast("I")
    if not is_initialised or tuple(own) != _summed(words, (0, 0)):
        return None
    (folded,) = _FOLDED.unpack_from(data, _FOLDED_OFFSET)
    (begun,) = _FOLDED.unpack_from(data, _BEGUN_OFFSET)
    # The two numbers are outside the checksum, and are set to 0 after a new header was written: until then they belong
    # to the generation before.
    folded, begun = min(folded, frames), min(max(begun, folded), frames)
    return _Index(frames, folded, begun, _page_bytes(page_bytes), salts, (first, second))


def _page_bytes(stored: int) -> int:
    """65536 does not fit into two bytes, and is stored as 1."""
    return 65536 if stored == 1 else stored


# -- the log ---------------------------------------------------------------------------------------------------------
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
        is_sound = magic & ~1 == _MAGIC and tuple(own) == _summed(_words(header[:-8], order), (0, 0))
        if not is_sound:
            return "missing"  # SQLite ignores a log with such a header, whatever follows.
        if salts != index.salts or page_bytes != index.page_bytes:
            return "another"
        return _count_frames(fd, index, order, (own[0], own[1]))
    finally:
        os.close(fd)


def _count_frames(fd: int, index: _Index, order: str, before: tuple[int, int]) -> _Found:
    """How many frames, from the first on and at most as many as were committed, are what they were. `before`
    is the checksum that the first one goes on from."""
    commit = 0
    zeros = bytes(index.page_bytes)
    for number in range(1, index.frames + 1):
        # One frame at a time: a log that nobody could fold back may be larger than the memory.
        frame = os.pread(
            fd, _FRAME.size + index.page_bytes, _LOG.size + (number - 1) * (_FRAME.size + index.page_bytes)
        )
        if len(frame) < _FRAME.size + index.page_bytes:
            return _Found(number - 1, commit)
        (page, pages, salts, *stored) = _FRAME.unpack_from(frame)
        checksum = (stored[0], stored[1])
        if page == 0 or salts != index.salts:
            return _Found(number - 1, commit)
        # A page of zeros may be real (the rest of a long value), so its checksum decides.
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
    """The words that a checksum sums. SQLite writes a log in its machine's own order; another machine may have."""
    if order != sys.byteorder:
        data = struct.pack(
            f"{len(data) // 4}I", *struct.unpack(f"{'>' if order == 'big' else '<'}{len(data) // 4}I", data)
        )
    return memoryview(data).cast("I")


def _summed(words: memoryview[int], before: tuple[int, int]) -> tuple[int, int]:
    """SQLite's checksum of an even number of words, going on from another: two sums of 32 bits, each taken up by the
    other."""
    first, second = before
    # This loop is all that the check costs: three steps a turn, with what exceeds 32 bits cut off once. What does not
    # fill a turn comes first; a frame with a page of 4096 bytes fills 171.
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
    """In bytes; None: there is no such file."""
    try:
        return os.stat(path).st_size
    except (FileNotFoundError, NotADirectoryError):
        return None


def _is_open_here(*paths: str) -> bool:
    """Whether this process has one of these files open by other means than a log of ours: a connection of the program's
    own, whose locks we must not drop. Looked at without opening anything of theirs."""
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
        return False  # Without /proc nobody can tell, and nearly always there is none.
    for fd in fds:
        try:
            found = os.fstat(fd)
        except OSError:
            continue  # Closed by now: another thread's, or the one that listed the folder.
        if (found.st_dev, found.st_ino) in wanted:
            return True
    return False
