"""Who lives: the hosts that share a store, each known by a lock that the kernel drops at the instant of its death.

A host has an id in the store, given once and never again, and holds the byte of that number in a file beside the store,
`<path>-hosts`. Who wants to know whether a host lives asks the kernel who holds its byte. Nothing is ever written into
that file, and it is never removed: hosts that look at two files do not see each other.

Why a lock, and not only a pid with its start time: there is no moment between a death and the release of its locks, and
two pid namespaces (a container, and the same one started anew) see the same locks but not each other's pids.

Why a POSIX lock, and not flock() or an open file description's: those belong to the open file, which a fork inherits,
so a sibling of the host (multiprocessing) would keep a dead host alive. A POSIX lock belongs to the process alone.

The price is the strangest rule of POSIX: when a process closes *any* fd of a file, it loses *all* its locks on that
file. So there is one fd for each such file in a process, whichever logs share it, and it is closed with the last of
them. But the rest of the program does not know that: a backup of the folder, made inside the host's own process, opens
and closes this file too, and the host is alive without its lock. And whoever removes the file (a cleaner, for it is
empty and old) hides the living from those that come later. Therefore:

- A lock that is held is believed. Where none is, there is a second opinion: the host's row names its boot, its pid and
  the time of its start, and if this process is there, is no zombie and has such a file open, the host lives. A pid that
  was given again has another start, and one of another pid namespace matches nobody: both leave it to the lock. Of
  this process itself no second opinion is needed: what it holds it knows.
- That a host is dead is believed only if the file that was asked is still the one at that path.
- A host takes its locks again now and then (`hold_again`), which costs nothing where they are held.

What is left: a host in another pid namespace whose own program has just let go of its locks is taken for dead until its
next commit. Its session is then claimable too early, and it is refused by its epoch, as any other former writer.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import NamedTuple

from banksman.errors import StoreError
from banksman.store.sqlite.sqlite_errors import MOVED, translate

_SUFFIX = "-hosts"
# struct flock as Linux has it: type, whence, start, length, pid; the compiler's padding comes with the native order.
_FLOCK = struct.Struct("@hhqqi4x")


class HostProcess(NamedTuple):
    """By what a process can be known: the boot's id, the pid, and the start in clock ticks. "" and 0: unknown."""

    boot: str
    pid: int
    started: int


@dataclass(slots=True, eq=False)
class _Shared:
    """One file of locks in this process: its fd, who uses it, and which bytes are ours (F_GETLK shows others' only).

    `strays` are fds of the same file that were opened by accident: to close one would drop the locks, so they stay
    until the end.
    """

    fd: int
    # Where it was when it was opened.
    path: str
    users: int = 0
    held: set[int] = field(default_factory=set[int])
    strays: list[int] = field(default_factory=list[int])
    # A fork has no locks of its parent's, so what it inherited can tell it nothing.
    is_inherited: bool = False

    def close(self) -> None:
        for fd in (self.fd, *self.strays):
            os.close(fd)


# Protects `_files` and all that is in it, of which every opening, locking and closing is a part: a close in one thread
# must not fall between another's look into `_files` and its use of the fd. Only system calls that do not wait are made
# while it is held. It is the innermost lock: nothing else is taken under it.
_lock = threading.Lock()
_files: dict[tuple[int, int], _Shared] = {}


def _forget() -> None:
    """In a forked child: it owns none of the locks, and to close its copies of the fds costs the parent nothing."""
    global _lock  # noqa: PLW0603  Another thread of the parent may have held it, and will never release this copy.
    _lock = threading.Lock()
    for shared in _files.values():
        shared.is_inherited = True
        shared.held.clear()
        with contextlib.suppress(OSError):
            shared.close()
    _files.clear()


os.register_at_fork(after_in_child=_forget)


class HostLocks:
    """The hosts of the store at `path`, as one log of this process sees them. Safe to use from any thread.

    `StoreError` from every method if the file cannot be made, opened or locked. Not for a forked child: it must open
    the store anew (`close` does nothing there, all else raises).
    """

    def __init__(self, path: str) -> None:
        # Of what a symlink points to: two names of one store must lead to one file.
        self._path = f"{os.path.realpath(path)}{_SUFFIX}"
        self._mine: set[int] = set()
        self._is_closed = True
        with _lock, self._translated("open"):
            self._key, self._shared = _open(self._path)
            self._shared.users += 1
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Hosts {self._path!r} {'closed' if self._is_closed else f'holding {sorted(self._mine)}'}>"

    def hold(self, host_id: int) -> None:
        """Be this host until `let_go`, `close` or death. `StoreError` if somebody is it already, which means that its
        id was given twice."""
        assert host_id > 0, f"not an id of a host: {host_id}"
        with _lock, self._translated("lock"):
            shared = self._usable()
            # The kernel would not object: to it a second lock by the same process is the first one.
            is_taken = host_id in shared.held
            if not is_taken:
                try:
                    fcntl.lockf(shared.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, host_id)
                except (BlockingIOError, PermissionError):
                    is_taken = True  # EAGAIN or EACCES, as POSIX allows both.
            if is_taken:
                raise StoreError(
                    f"another host holds the id {host_id} in {self._path}",
                    hint="was a copy of the store put in its place while a host had it open? Close that host",
                    host=host_id,
                )
            shared.held.add(host_id)
            self._mine.add(host_id)

    def is_alive(self, host_id: int, process: HostProcess | None = None) -> bool:
        """Whether a process holds this id right now, this one included, or is the one that `process` names: see the
        module."""
        assert host_id > 0, f"not an id of a host: {host_id}"
        with _lock, self._translated("ask for a lock of"):
            shared = self._usable()
            if host_id in shared.held or is_locked(shared.fd, host_id):
                return True
            if process is not None and (is_there(process) or self._is_held_here(host_id, process)):
                return True
            self._check_file()
            return False

    def hold_again(self) -> None:
        """Take the locks of what is held once more, in case that this program has dropped them."""
        with _lock, self._translated("lock"):
            shared = self._usable()
            for host_id in self._mine:
                fcntl.lockf(shared.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, host_id)

    def check_file(self) -> None:
        """`StoreError` if the file is not the one at its path any more: whoever comes now looks at another, and sees
        nobody of those who hold something here."""
        with _lock, self._translated("look at"):
            self._usable()
            self._check_file()

    def let_go(self, host_id: int) -> None:
        """No longer be this host: whoever asks sees it dead. Of one that is not held by this object nothing happens."""
        with _lock, self._translated("unlock"):
            if host_id in self._mine:
                self._release(host_id)

    def close(self) -> None:
        """Let go of all that is held by this object. Safe to call twice, and in a forked child."""
        with _lock, self._translated("close"):
            if self._is_closed:
                return
            self._is_closed = True
            shared = self._shared
            if shared.is_inherited:
                self._mine.clear()
                return
            for host_id in tuple(self._mine):
                self._release(host_id)
            shared.users -= 1
            if shared.users == 0:
                assert not shared.held, f"nobody is left to hold {shared.held}"
                del _files[self._key]
                shared.close()

    def _usable(self) -> _Shared:
        assert _lock.locked()
        if self._is_closed or self._shared.is_inherited:
            why = "is closed" if self._is_closed else "was opened before a fork, and is its parent's"
            raise StoreError(f"{self._path} {why}", hint="open the store in this process")
        return self._shared

    def _is_held_here(self, host_id: int, process: HostProcess) -> bool:
        """Whether a log of this very process holds it, maybe in a file that was at this path before."""
        assert _lock.locked()
        shared = [one for one in _files.values() if one.path == self._path and host_id in one.held]
        return bool(shared) and process == identity()

    def _check_file(self) -> None:
        """By a look only: to open the file, and close it again, would drop what is held."""
        assert _lock.locked()
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._key:
            what = "removed" if found is None else "replaced"
            raise StoreError(f"{self._path} was {what} while it was open", hint=MOVED, path=self._path)

    def _release(self, host_id: int) -> None:
        assert _lock.locked()
        self._mine.discard(host_id)
        if not self._shared.is_inherited:
            fcntl.lockf(self._shared.fd, fcntl.LOCK_UN, 1, host_id)
            self._shared.held.discard(host_id)

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Generator[None]:
        try:
            yield
        except OSError as exc:
            raise translate(exc, self._path, doing) from exc


def is_locked(fd: int, offset: int) -> bool:
    """Whether *another* process holds an exclusive or shared lock on this byte of the file."""
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    (found, *_) = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    # Its pid may be 0, or a number that means nothing: the holder can live in another pid namespace.
    return found != fcntl.F_UNLCK


def identity() -> HostProcess:
    """This process."""
    stat = _stat(os.getpid())
    return HostProcess(_boot(), os.getpid(), 0 if stat is None else stat[1])


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """The state and the start of the process that has this pid here; None if there is none, or it may not be seen."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The name, in parentheses, may hold spaces and parentheses of its own.
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError, NotADirectoryError):
        return None
    return fields[0], int(fields[19])


def is_there(process: HostProcess) -> bool:
    """Whether this other process lives, and may be a host: it has locks' files open, as far as that can be seen.

    The last is asked because a pid and a start outlive what they stood for: an `exec`, and a host that has closed its
    store where nothing could be written, so that its row is still there.
    """
    if not process.boot or not process.started or process.pid == os.getpid() or process.boot != _boot():
        return False
    stat = _stat(process.pid)
    if stat is None or stat[0] in "ZX" or stat[1] != process.started:
        return False
    folder = f"/proc/{process.pid}/fd"
    try:
        fds = os.listdir(folder)
    except PermissionError:
        return True  # Another user's. So its start has to do.
    except OSError:
        return False  # It ended just now.
    return any(_is_of_hosts(f"{folder}/{fd}") for fd in fds)


def _is_of_hosts(link: str) -> bool:
    """By its name, not by its number: the file may have been removed, and another one be in its place."""
    try:
        return os.readlink(link).removesuffix(" (deleted)").endswith(_SUFFIX)
    except OSError:
        return False  # Closed just now.


def _open(path: str) -> tuple[tuple[int, int], _Shared]:
    """The one entry of this file, made if there is none. Nothing is opened that is open already: see the module."""
    assert _lock.locked()
    with contextlib.suppress(FileNotFoundError):
        found = os.stat(path)
        key = (found.st_dev, found.st_ino)
        if key in _files:
            return key, _files[key]
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        if exc.errno not in (errno.EACCES, errno.EPERM, errno.EROFS) or not os.path.exists(path):
            raise
        # Whoever may only read can hold nothing, but can ask who does.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    found = os.fstat(fd)
    key = (found.st_dev, found.st_ino)
    if key in _files:
        # It was put at this path (a rename, a link) between the look and the opening.
        _files[key].strays.append(fd)
        return key, _files[key]
    shared = _files[key] = _Shared(fd, path)
    return key, shared
