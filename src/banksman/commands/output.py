"""Captured output of a command: head and tail in memory, a bounded spill file for long output.

A command can write forever, but the kept output must stay bounded. The beginning shows the task,
and the end shows its result, so both stay in memory. A longer stream is also written to a file,
from its first byte. Beyond the file's limit, bytes are counted and dropped. Half of this module is
about the files: their owner, and their removal after its death. output_streams.py has the readers.

**Spill files** hold output that is too large for memory. A spill file is removed with the last
object that refers to it.

A killed process cannot remove its files. Therefore each process marks its files in a way that
outlives it. For each folder it has an *owner file*, `banksman-XXXXXXXX.owner`, and holds a lock
(`flock`) on it. Its spill files have the same stem, `banksman-XXXXXXXX-N.out`. The kernel drops the
lock when the process dies, even of SIGKILL. The next process that spills into this folder, or
`banksman doctor --sweep`, then gets the lock and removes the files, the owner file last. A pid
would not work in place of the lock: pids are reused, and pids of another container have no meaning
here.

The lock costs one fd per process and folder while a result refers to a spill file, even after the
host is closed.

A file that the caller keeps (`Output.keep`) is listed in the owner file and is not removed. The
owner file exists only while there are spill files. A process that exits normally therefore leaves
the kept files and nothing else.

A fork of the program has copies of these objects and of the lock's fd. It removes nothing. Its own
spill files belong to a new owner file.
"""

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
from dataclasses import dataclass, field, replace

from banksman.process import syscalls

_OWNER = re.compile(r"(banksman-[a-z0-9_]{8})\.owner")
_SPILL = re.compile(r"(banksman-[a-z0-9_]{8})-[0-9]+\.out")

OUTPUT_BYTES_MAX = 1 << 20
SPILL_BYTES_MAX = 64 << 20
# Smaller pieces are merged. Otherwise a command that writes single bytes would cost fifty times the
# memory of its output.
_GATHER_BYTES = 4096
log = logging.getLogger("banksman")


class SpillOwner:
    """Claim of this process on its spill files in one folder.

    Each spill file holds a reference to it. It is removed with the last one.
    """

    def __init__(self, folder: str) -> None:
        import tempfile  # noqa: PLC0415  Slow import; few commands write enough to need it.

        self.pid = os.getpid()
        self._numbers = itertools.count()
        while True:
            fd, path = tempfile.mkstemp(prefix="banksman-", suffix=".owner", dir=folder)
            fd = syscalls.above_stdio(fd)
            # Before the lock is held, a sweeper may have taken this file for a dead process's file
            # and unlinked it. The link count below detects that.
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
        """Create a spill file; return its fd and its path."""
        path = f"{self._stem}-{next(self._numbers)}.out"
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o600), path

    def keep(self, path: str) -> None:
        """List a file as kept, so that no sweep removes it."""
        # On a full disk the file is still kept, unless this process is killed.
        with contextlib.suppress(OSError):
            os.write(self._fd, os.fsencode(os.path.basename(path)) + b"\n")


# The owner of each folder, while it has files. Two threads at the same time may create two owners,
# which is harmless.
_owners: weakref.WeakValueDictionary[tuple[int, str], SpillOwner] = weakref.WeakValueDictionary()


def _owner() -> SpillOwner:
    import tempfile  # noqa: PLC0415

    folder = tempfile.gettempdir()
    owner = _owners.get((os.getpid(), folder))
    if owner is None:
        with contextlib.suppress(OSError):  # A folder that cannot be listed may still be writable.
            for dead in find_dead(folder):
                dead.remove()
        owner = _owners[os.getpid(), folder] = SpillOwner(folder)
    return owner


class SpillFile:
    """A file with the first part of a stream, deleted with the last object that refers to it.

    Both the running capture and the result refer to it. It is therefore deleted however the command
    or the program ends.
    """

    def __init__(self) -> None:
        self._fd = -1
        self._owner = _owner()
        fd, self.path = self._owner.create()
        # A copy of this object in a forked child must not delete the parent's file, hence the pid.
        self._unlink = weakref.finalize(self, _unlink, self.path, os.getpid())
        self._fd = syscalls.above_stdio(fd)
        self.size = 0

    def add(self, data: bytes) -> None:
        """Append data."""
        view = memoryview(data)
        while view:
            taken = syscalls.write(self._fd, view)
            self.size += taken
            view = view[taken:]

    def read(self, after: int, size: int) -> bytes:
        """Read up to `size` bytes from byte `after` on."""
        # Opened for each read: a finished command that is kept for reading must not hold an fd.
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, min(size, self.size - after), after)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close the file. It stays readable."""
        if self._fd >= 0:
            syscalls.close(self._fd)
            self._fd = -1

    def delete(self) -> None:
        """Close and delete the file."""
        self.close()
        self._unlink()

    def keep(self) -> None:
        """Keep the file beyond the life of this object and this process."""
        if self._unlink.detach() is not None:
            self._owner.keep(self.path)

    def __del__(self) -> None:
        # A command that was abandoned with its event loop never reached its end.
        self.close()


@dataclass(frozen=True, slots=True)
class DeadSpill:
    """Leftovers of a killed process: its owner file, and its spill files except the kept ones."""

    owner: str
    files: tuple[str, ...]
    size: int

    def remove(self) -> list[str]:
        """Remove the files, the owner file last, and return their paths.

        Nothing is removed if another process holds the lock.
        """
        removed: list[str] = []
        with _locked(self.owner) as kept:
            if kept is not None:
                for path in (*self.files, self.owner):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(path)
                        removed.append(path)
        return removed


def find_dead(folder: str) -> Iterator[DeadSpill]:
    """Yield the leftovers of each owner file of this user whose process is dead."""
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
        # The lock is released here, before the files are removed. `DeadSpill.remove` takes it
        # again.
        left = [entry for entry in files.get(stem, ()) if entry.name not in kept]
        size = 0
        for entry in left:
            with contextlib.suppress(FileNotFoundError):
                size += entry.stat(follow_symlinks=False).st_size
        yield DeadSpill(path, tuple(entry.path for entry in left), size)


@contextlib.contextmanager
def _locked(path: str) -> Generator[frozenset[str] | None]:
    """Hold the lock of an owner file and yield the kept names.

    Yields None if its process is alive, or if the file belongs to another user.
    """
    try:
        fd = syscalls.above_stdio(
            os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        )
    except OSError:
        yield None  # The file belongs to another user, or does not exist.
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
    # Also in a fork: the parent's fd still holds the lock.
    os.close(fd)


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a command's output.

    `next`: the position of the next read. `missed`: bytes before this piece that are lost.
    `is_end`: the stream has ended here, whether or not the command has.
    """

    data: bytes
    next: int
    missed: int
    is_end: bool

    @property
    def text(self) -> str:
        """The data as text. Invalid UTF-8 is replaced."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Output:
    """One stream of a finished command.

    `total`: bytes written. `dropped`: bytes between `head` and `tail` that are not in memory.
    `file`: a file with the stream from its start, up to 64 MiB. It is deleted with this object
    unless `keep()` was called.
    """

    head: bytes = b""
    tail: bytes = b""
    total: int = 0
    dropped: int = 0
    spill: SpillFile | None = field(default=None, repr=False, compare=False)

    @property
    def file(self) -> str | None:
        """Path of the spill file, or None."""
        return None if self.spill is None else self.spill.path

    @property
    def text(self) -> str:
        """Head and tail as text. A line between them states the number of omitted bytes."""
        if not self.dropped:
            return (self.head + self.tail).decode("utf-8", "replace")
        head, tail = self.head.decode("utf-8", "replace"), self.tail.decode("utf-8", "replace")
        return f"{head}\n[… {self.dropped} bytes left out …]\n{tail}"

    def keep(self) -> str | None:
        """Keep the file and return its path, or None without a file. The caller must delete it."""
        if self.spill is not None:
            self.spill.keep()
        return self.file


@dataclass(frozen=True, slots=True)
class CaptureState:
    """The kept output of a stream, for another host: see `Capture`.

    `spilled`: the content of the spill file; None without one.
    """

    total: int = 0
    head: bytes = b""
    tail: bytes = b""
    spilled: bytes | None = None


class Capture:
    """Collector of one stream, in bounded memory."""

    def __init__(
        self, bytes_max: int = OUTPUT_BYTES_MAX, spill_bytes_max: int = SPILL_BYTES_MAX
    ) -> None:
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
        """Add the next bytes of the stream."""
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
        """Return output from byte `after` on, and its true start.

        The true start is later than `after` if bytes in between were dropped.
        """
        if self._spill is not None and after < self._spill.size:
            try:
                return self._spill.read(after, bytes_max), after
            except OSError:
                # The file was moved or deleted. Head and tail still exist, and the caller sees the
                # gap.
                pass
        if after < len(self._head):
            return bytes(self._head[after : after + bytes_max]), after
        begin = self.total - self._tail_bytes
        after = max(after, begin)
        tail = b"".join(self._tail)
        return tail[after - begin :][:bytes_max], after

    def state(self) -> CaptureState:
        """Return what another host needs to continue."""
        spilled: bytes | None = None
        if self._spill is not None:
            # If the file was moved or deleted, readers see the gap, as on this host.
            with contextlib.suppress(OSError):
                spilled = self._spill.read(0, self._spill.size)
        return CaptureState(self.total, bytes(self._head), b"".join(self._tail), spilled)

    def restore(self, state: CaptureState) -> None:
        """Continue where another host has stopped. Nothing was added yet."""
        assert self.total == 0
        self.total = state.total
        self._head = bytearray(state.head)
        self._tail = deque([state.tail] if state.tail else [])
        self._tail_bytes = len(state.tail)
        if state.spilled is None:
            if self.total > self._head_max + self._tail_max:
                self._spill_max = 0  # The beginning of the stream is lost. A file needs it.
            return
        try:
            self._spill = SpillFile()
            self._spill.add(state.spilled)
        except OSError as exc:
            self._give_up_spill(exc)

    def kept(self) -> Output:
        """Return the present output, without the spill file."""
        head, tail = bytes(self._head), b"".join(self._tail)
        tail = tail[max(0, len(tail) - self._tail_max) :]
        dropped = self.total - len(head) - len(tail)
        assert dropped >= 0
        return Output(head, tail, self.total, dropped)

    def finish(self) -> Output:
        """Return the result. Nothing is added after this call, but `read` still works."""
        kept = self.kept()
        # From here on, the capture and the result share one copy.
        self._head, self._tail_bytes = kept.head, len(kept.tail)
        self._tail.clear()
        self._tail.append(kept.tail)
        if self._spill is not None:
            self._spill.close()
        return replace(kept, spill=self._spill)

    def discard(self) -> None:
        """Delete the file, because there will be no result."""
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
                # Nothing was dropped before this moment, so head and tail are the whole stream.
                data = b"".join((self._head, *self._tail, data))
            room = self._spill_max - self._spill.size
            if room > 0:
                self._spill.add(data[:room])
        except OSError as exc:
            self._give_up_spill(exc)

    def _give_up_spill(self, exc: OSError) -> None:
        # A full disk must not end the command. Head, tail and count are kept, and the file is given
        # up.
        log.warning("output file failed: %s, keeping only the output's start and end", exc)
        self._spill_max = 0
        self.discard()
