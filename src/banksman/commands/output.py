"""Captured output of a command: head and tail in memory, the whole in a bounded spill file, the rest counted."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import weakref
from collections import deque
from collections.abc import Generator, Iterator
from dataclasses import dataclass, field

from banksman.process import syscalls

# Spill files: output too large for memory, on disk, and removed with the last object that refers to it.
#
# A process that is killed cannot remove its files, so each process says which files are its own, in a way that outlives
# it. For one folder there is an *owner file*, `banksman-XXXXXXXX.owner`, on which the process holds a lock (`flock`),
# and the spill files of that process have its name in theirs, `banksman-XXXXXXXX-N.out`. The kernel drops the lock when
# the process dies, of SIGKILL too. The next process that spills in this folder, or `banksman doctor --sweep`, then gets
# the lock and removes the files and, last, the owner file. A lock and not a pid: pids are reused, and those of another
# container mean nothing here.
#
# The lock costs one fd per process and folder, as long as a result refers to a spill file, also after the host is
# closed.
#
# A file that its caller keeps (`Output.keep`) is named in the owner file, and is left alone. The owner file exists only
# while there are spill files, so that a process that ends by itself leaves the files that are kept, and nothing else.
#
# A fork of the program has copies of these objects and of the lock's fd. It removes nothing, and what it spills itself
# is under an owner file of its own.

_OWNER = re.compile(r"(banksman-[a-z0-9_]{8})\.owner")
_SPILL = re.compile(r"(banksman-[a-z0-9_]{8})-[0-9]+\.out")

OUTPUT_BYTES_MAX = 1 << 20
SPILL_BYTES_MAX = 64 << 20
# Smaller pieces are gathered: a command that writes single bytes would otherwise cost fifty times its output.
_GATHER_BYTES = 4096
log = logging.getLogger("banksman")


class SpillOwner:
    """This process's claim on its spill files in one folder. Held by each of them, and gone with the last one."""

    def __init__(self, folder: str) -> None:
        import tempfile  # noqa: PLC0415  It brings much along, and few commands write enough to need it.

        self.pid = os.getpid()
        self._numbers = itertools.count()
        while True:
            fd, path = tempfile.mkstemp(prefix="banksman-", suffix=".owner", dir=folder)
            fd = syscalls.above_stdio(fd)
            # Between these two a sweeper may have taken the file for a dead process's: then it is unlinked by now.
            try:
                fcntl.flock(fd, fcntl.LOCK_EX)
            except OSError:
                _remove_owner(fd, path, self.pid)
                raise
            if os.fstat(fd).st_nlink:
                break
            os.close(fd)
        self._fd = fd
        self._stem = path.removesuffix(".owner")
        weakref.finalize(self, _remove_owner, fd, path, self.pid)

    def create(self) -> tuple[int, str]:
        """A new file: its fd, and its path."""
        path = f"{self._stem}-{next(self._numbers)}.out"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o600), path

    def keep(self, path: str) -> None:
        with contextlib.suppress(OSError):  # A full disk: the file is kept unless this process is killed.
            os.write(self._fd, os.fsencode(os.path.basename(path)) + b"\n")


# The one of each folder, as long as it has files. Two threads that come at the same time may make two, which is fine.
_owners: weakref.WeakValueDictionary[tuple[int, str], SpillOwner] = weakref.WeakValueDictionary()


def _owner() -> SpillOwner:
    import tempfile  # noqa: PLC0415

    folder = tempfile.gettempdir()
    owner = _owners.get((os.getpid(), folder))
    if owner is None:
        with contextlib.suppress(OSError):  # A folder that cannot be listed may still be written to.
            for dead in find_dead(folder):
                dead.remove()
        owner = _owners[os.getpid(), folder] = SpillOwner(folder)
    return owner


class SpillFile:
    """A file that holds the first part of a stream, and goes with the last object that refers to it.

    Both the running capture and the result do, so that it is deleted however the command or the program ends.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._owner = _owner()
        fd, self.path = self._owner.create()
        # A copy of this object in a forked child must not delete its parent's file, hence the pid.
        self._unlink = weakref.finalize(self, _unlink, self.path, os.getpid())
        self._fd = syscalls.above_stdio(fd)
        self.size = 0

    def add(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            taken = syscalls.write(self._fd, view)
            self.size += taken
            view = view[taken:]

    def read(self, after: int, size: int) -> bytes:
        # Opened anew: a finished command that is kept for reading must not keep an fd.
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, min(size, self.size - after), after)
        finally:
            os.close(fd)

    def close(self) -> None:
        if self._fd >= 0:
            syscalls.close(self._fd)
            self._fd = -1

    def delete(self) -> None:
        self.close()
        self._unlink()

    def keep(self) -> None:
        if self._unlink.detach() is not None:
            self._owner.keep(self.path)

    def __del__(self) -> None:
        # A command that was abandoned with its loop never came to its end.
        self.close()


@dataclass(frozen=True, slots=True)
class DeadSpill:
    """What a process that was killed has left: its owner file, and its spill files without those that are kept."""

    owner: str
    files: tuple[str, ...]
    size: int

    def remove(self) -> list[str]:
        """Remove them, the owner file last, and return their paths. Nothing is removed if another process is at it."""
        removed: list[str] = []
        with _locked(self.owner) as kept:
            if kept is not None:
                for path in (*self.files, self.owner):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                        removed.append(path)
        return removed


def find_dead(folder: str) -> Iterator[DeadSpill]:
    """Every owner file of this user whose process is gone."""
    files: dict[str, list[os.DirEntry[str]]] = {}
    owners: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if match := _SPILL.fullmatch(entry.name):
                files.setdefault(match[1], []).append(entry)
            elif match := _OWNER.fullmatch(entry.name):
                owners.append(match[1])
    for stem in owners:
        path = os.path.join(folder, f"{stem}.owner")
        with _locked(path) as kept:
            if kept is None:
                continue
        left = [entry for entry in files.get(stem, ()) if entry.name not in kept]
        size = 0
        for entry in left:
            with contextlib.suppress(FileNotFoundError):
                size += entry.stat(follow_symlinks=False).st_size
        yield DeadSpill(path, tuple(entry.path for entry in left), size)


@contextlib.contextmanager
def _locked(path: str) -> Generator[frozenset[str] | None]:
    """With the lock of an owner file held: the names that are kept. None: its process lives, or it is not ours."""
    try:
        fd = syscalls.above_stdio(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK))
    except OSError:
        yield None  # Another user's, or gone.
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        found = os.fstat(fd)
        is_ours = found.st_nlink == 1 and found.st_uid == os.geteuid()
        yield frozenset(os.fsdecode(os.read(fd, 1 << 20)).splitlines()) if is_ours else None
    except BlockingIOError:
        yield None
    finally:
        os.close(fd)


def _unlink(path: str, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _remove_owner(fd: int, path: str, owner: int) -> None:
    _unlink(path, owner)
    # In a fork, too: the lock is the parent's, and is held by the parent's fd.
    os.close(fd)


# What a command wrote: head and tail kept in memory, the whole in a file up to a bound, the rest counted.
#
# A command can write for ever; what is kept of it cannot grow for ever. The beginning says what was done, the end says
# how it ended; the middle goes to a file, and past the file's bound it is counted and dropped.


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a command's output. `next` is where to read on; `missed` bytes before it are gone. `is_end`: the
    stream has ended here, whether or not the command has."""

    data: bytes
    next: int
    missed: int
    is_end: bool

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Output:
    """One stream of a finished command.

    `total` bytes were written; `dropped` of them, between `head` and `tail`, are not in memory. `file` has them from
    the start, up to 64 MiB; it is deleted with this object unless `keep()` was called.
    """

    head: bytes = b""
    tail: bytes = b""
    total: int = 0
    dropped: int = 0
    spill: SpillFile | None = field(default=None, repr=False, compare=False)

    @property
    def file(self) -> str | None:
        return None if self.spill is None else self.spill.path

    @property
    def text(self) -> str:
        """Head and tail as text, with a line in between that says how much is missing, if anything is."""
        if not self.dropped:
            return (self.head + self.tail).decode("utf-8", "replace")
        head, tail = self.head.decode("utf-8", "replace"), self.tail.decode("utf-8", "replace")
        return f"{head}\n[… {self.dropped} bytes left out …]\n{tail}"

    def keep(self) -> str | None:
        """Keep the file; deleting it is the caller's business from now on. None if there is none."""
        if self.spill is not None:
            self.spill.keep()
        return self.file


class Capture:
    """Takes one stream as it comes, in bounded memory."""

    def __init__(self, bytes_max: int = OUTPUT_BYTES_MAX, spill_bytes_max: int = SPILL_BYTES_MAX) -> None:
        assert bytes_max >= 0
        self.total = 0
        self._head_max = bytes_max - bytes_max // 2
        self._tail_max = bytes_max // 2
        self._head: bytearray | bytes = bytearray()
        self._tail: deque[bytes | bytearray] = deque()
        self._tail_bytes = 0
        self._spill: SpillFile | None = None
        self._spill_max = spill_bytes_max

    def add(self, data: bytes) -> None:
        self.total += len(data)
        if self.total > self._head_max + self._tail_max and self._spill_max:
            self._add_to_spill(data)
        room = self._head_max - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_max:
            self._add_to_tail(data)

    def read(self, after: int, bytes_max: int) -> tuple[bytes, int]:
        """What was written from byte `after` on, and where that really begins: later, if some of it is gone."""
        if self._spill is not None and after < self._spill.size:
            try:
                return self._spill.read(after, bytes_max), after
            except OSError:
                pass  # Somebody has moved or deleted the file. Head and tail are still there, and the gap is told.
        if after < len(self._head):
            return bytes(self._head[after : after + bytes_max]), after
        begin = self.total - self._tail_bytes
        after = max(after, begin)
        tail = b"".join(self._tail)
        return tail[after - begin :][:bytes_max], after

    def finish(self) -> Output:
        """The result. Nothing is added after this, but `read` still works."""
        head, tail = bytes(self._head), b"".join(self._tail)
        tail = tail[max(0, len(tail) - self._tail_max) :]
        dropped = self.total - len(head) - len(tail)
        assert dropped >= 0
        # One copy for both of us from here on.
        self._head, self._tail_bytes = head, len(tail)
        self._tail.clear()
        self._tail.append(tail)
        if self._spill is not None:
            self._spill.close()
        return Output(head, tail, self.total, dropped, self._spill)

    def discard(self) -> None:
        """There will be no result: delete the file."""
        if self._spill is not None:
            self._spill.delete()
            self._spill = None

    def _add_to_tail(self, data: bytes) -> None:
        last = self._tail[-1] if self._tail else None
        if isinstance(last, bytearray) and len(last) + len(data) <= _GATHER_BYTES:
            last += data
        else:
            self._tail.append(bytearray(data) if len(data) < _GATHER_BYTES else data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= self._tail_max:
            self._tail_bytes -= len(self._tail.popleft())

    def _add_to_spill(self, data: bytes) -> None:
        try:
            if self._spill is None:
                self._spill = SpillFile()
                # Nothing was dropped before this moment, so head and tail are all there has been.
                data = b"".join((self._head, *self._tail, data))
            room = self._spill_max - self._spill.size
            if room > 0:
                self._spill.add(data[:room])
        except OSError as exc:
            # A full disk must not end somebody's command. Head, tail and count are kept; the file is given up.
            log.warning("! output is no longer written to a file: %s", exc)
            self._spill_max = 0
            self.discard()
