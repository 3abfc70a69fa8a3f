"""Detect live hosts on one machine by POSIX locks, which the kernel drops when a process dies.

A host has an id in the store that is never reused. It locks the byte with that number in a file
next to the store, `<path>-hosts`. To find out whether a host is alive, another host asks the kernel
for a lock on that byte. If no lock is held, it looks for the host's process in /proc. No process
ever writes to the file or removes it: hosts that use two different files do not see each other.

**Why a lock, and not only a pid with its start time.** No moment lies between a death and the
release of the locks. Two pid namespaces (a container, and its next start) share the locks but do
not see each other's pids.

**Why a POSIX lock, and not flock() or an open file description lock.** These belong to the open
file, which a fork inherits. A sibling process of the host (multiprocessing) would keep the lock of
a dead host. A POSIX lock belongs to the process alone.

**The price** is the strangest rule of POSIX: when a process closes *any* fd of a file, it loses
*all* its locks on that file. So a process has one fd per lock file, which all its logs share, and
the last log closes it. The rest of the program does not know this rule. A backup of the folder
inside the host's own process opens and closes the lock file too. The host is then alive without its
lock. A cleanup job may also remove the file, which is empty and old, and so hide the live hosts
from later ones. Therefore:

- A held lock is proof of life. Without a lock there is a second check. The host's row names its
  boot id, its pid and its start time. The host is alive if this process exists, is not a zombie,
  and has a lock file open. A reused pid has another start time, and a pid of another pid namespace
  does not match. In both cases only the lock counts. For this process the second check is not
  needed, because it knows its own locks.
- A host counts as dead only if the examined file is still the one at its path.
- A host takes its locks again from time to time (`hold_again`). This has no effect on held locks.

**Remaining case.** A host in another pid namespace, whose program has just dropped its locks,
counts as dead until its next commit. Another host can then claim its session too early. The epoch
fences off the first host, like every former writer.
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

# `is_there` recognises the lock file of a host by this end of its name.
_SUFFIX = "-hosts"
# Linux's struct flock: type, whence, start, length, pid. Native order includes the compiler's
# padding.
_FLOCK = struct.Struct("@hhqqi4x")


class HostProcess(NamedTuple):
    """Identity of a process: boot id, pid, and start time in clock ticks. "" and 0 mean unknown."""

    boot: str
    pid: int
    started: int


@dataclass(slots=True, eq=False)
class _Shared:
    """One lock file in this process: its fd, the number of its users, and the locked bytes.

    `held` is necessary because F_GETLK reports only locks of other processes. `strays` are fds of
    the same file that were opened by accident. To close one of them would drop the locks, so they
    stay open until the end.
    """

    fd: int
    # The path at the time of the open.
    path: str
    users: int = 0
    held: set[int] = field(default_factory=set[int])
    strays: list[int] = field(default_factory=list[int])
    # A forked child has none of its parent's locks, so an inherited object has no valid
    # information.
    is_inherited: bool = False

    def close(self) -> None:
        # The first close drops all locks of this process on the file. So only the last user may
        # call this.
        for fd in (self.fd, *self.strays):
            os.close(fd)


# Protects `_files` and its entries, including every open, lock and close. A close in one thread
# must not fall between another thread's lookup in `_files` and its use of the fd. Code under this
# lock makes only system calls that do not block. This is the innermost lock: no other lock is taken
# under it.
_lock = threading.Lock()
_files: dict[tuple[int, int], _Shared] = {}


def _forget() -> None:
    """Reset the state in a forked child.

    The child owns none of the locks. So it can close its copies of the fds without an effect on the
    parent's locks.
    """
    global _lock  # noqa: PLW0603  A thread of the parent may have held the lock; this copy would never be released.
    _lock = threading.Lock()
    # Mark each entry: an object that the child has inherited must refuse to work.
    for shared in _files.values():
        shared.is_inherited = True
        shared.held.clear()
        with contextlib.suppress(OSError):
            shared.close()
    _files.clear()


os.register_at_fork(after_in_child=_forget)


class HostLocks:
    """Locks of the hosts of the store at `path`, for one log of this process. Thread-safe.

    Every method raises `StoreError` if the file cannot be created, opened or locked. A forked child
    must open the store again: there `close` does nothing, and all other methods raise.
    """

    def __init__(self, path: str) -> None:
        # Resolve symlinks: two names of one store must lead to one lock file.
        self._path = f"{os.path.realpath(path)}{_SUFFIX}"
        self._mine: set[int] = set()
        # Closed until the file is open: `close` after a failed constructor has nothing to undo.
        self._is_closed = True
        with _lock, self._translated("open"):
            self._key, self._shared = _open(self._path)
            self._shared.users += 1
        self._is_closed = False

    def __repr__(self) -> str:
        state = "closed" if self._is_closed else f"holding {sorted(self._mine)}"
        return f"<HostLocks {self._path!r} {state}>"

    def hold(self, host_id: int) -> None:
        """Lock this host id until `let_go`, `close` or death.

        Raises `StoreError` if the id is locked already, which means that it was issued twice.
        """
        assert host_id > 0, f"not an id of a host: {host_id}"
        with _lock, self._translated("lock"):
            shared = self._usable()
            # The kernel would accept it: a second lock by the same process equals the first one.
            is_taken = host_id in shared.held
            if not is_taken:
                try:
                    fcntl.lockf(shared.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, host_id)
                except (BlockingIOError, PermissionError):
                    is_taken = True  # EAGAIN or EACCES: POSIX allows both.
            if is_taken:
                raise StoreError(
                    f"another host holds the id {host_id} in {self._path}",
                    hint="close that host; a copy may have replaced the store that it had open",
                    host=host_id,
                )
            # After the lock. An entry without a lock would make a dead host look alive here for as
            # long as this process runs.
            shared.held.add(host_id)
            self._mine.add(host_id)

    def is_alive(self, host_id: int, process: HostProcess | None = None) -> bool:
        """Whether a process holds this id, this process included, or `process` is alive.

        The module docstring explains the second check.
        """
        assert host_id > 0, f"not an id of a host: {host_id}"
        with _lock, self._translated("query a lock of"):
            shared = self._usable()
            # Cheapest proof first. Each of these three tests may only prove life. Death is what is
            # left after all of them, and only if the file is the right one (`_check_file`).
            if host_id in shared.held or is_locked(shared.fd, host_id):
                return True
            if process is not None and (is_there(process) or self._is_held_here(host_id, process)):
                return True
            self._check_file()
            return False

    def hold_again(self) -> None:
        """Take the held locks again, in case this program has dropped them by accident."""
        with _lock:
            # If another process has locked one of these bytes meanwhile, this raises. That cannot
            # happen by itself, because ids are never issued twice. Every commit calls this, so it
            # saves the context manager of the other methods.
            try:
                shared = self._usable()
                for host_id in self._mine:
                    fcntl.lockf(shared.fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, host_id)
            except OSError as exc:
                raise translate(exc, self._path, "lock") from exc

    def check_file(self) -> None:
        """Raise `StoreError` if another file, or none, is at the path now.

        Hosts that start later use another file and do not see the locks in this one.
        """
        with _lock, self._translated("check"):
            self._usable()
            self._check_file()

    def let_go(self, host_id: int) -> None:
        """Unlock this host id, so that others see the host as dead.

        Ignore an id that is not held here.
        """
        with _lock, self._translated("unlock"):
            # Only an id of this object. Another log of this process may hold others in the same
            # file.
            if host_id in self._mine:
                self._release(host_id)

    def close(self) -> None:
        """Unlock all ids of this object. Safe to call twice, and in a forked child."""
        with _lock, self._translated("close"):
            if self._is_closed:
                return
            self._is_closed = True
            shared = self._shared
            # In a forked child the fd is closed already, and its number may belong to another file.
            if shared.is_inherited:
                self._mine.clear()
                return
            # Unlock each id separately: the fd stays open for the other users, so no close drops
            # the locks of this object.
            for host_id in tuple(self._mine):
                self._release(host_id)
            assert shared.users > 0
            shared.users -= 1
            if shared.users == 0:
                assert not shared.held, f"closed while it holds {shared.held}"
                del _files[self._key]
                shared.close()

    def _usable(self) -> _Shared:
        assert _lock.locked()
        if self._is_closed or self._shared.is_inherited:
            why = "is closed" if self._is_closed else "was opened by the parent, before a fork"
            message = f"cannot use {self._path}: it {why}"
            raise StoreError(message, hint="open the store in this process")
        return self._shared

    def _is_held_here(self, host_id: int, process: HostProcess) -> bool:
        """Whether a log of this process holds the id.

        The log may use an older file of this path.
        """
        assert _lock.locked()
        shared = [one for one in _files.values() if one.path == self._path and host_id in one.held]
        return bool(shared) and process == identity()

    def _check_file(self) -> None:
        """Compare by `stat` only: to open the file and close it again would drop the locks."""
        assert _lock.locked()
        # The inode number of a removed file cannot be reused while this process has it open. So an
        # equal pair of device and inode is the same file.
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            found = None
        if found is None or (found.st_dev, found.st_ino) != self._key:
            what = "removed" if found is None else "replaced"
            raise StoreError(
                f"{self._path} was {what} while it was open", hint=MOVED, path=self._path
            )

    def _release(self, host_id: int) -> None:
        assert _lock.locked()
        self._mine.discard(host_id)
        if not self._shared.is_inherited:
            # Two steps, but one for all other threads: they wait at `_lock`.
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
    # F_GETLK asks and takes nothing. To try the lock instead would make a dead host look alive to a
    # third process for that moment.
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, offset, 1, 0)
    (found, *_) = _FLOCK.unpack(fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    # The pid in the answer may be 0 or meaningless: the holder may live in another pid namespace.
    return found != fcntl.F_UNLCK


def identity() -> HostProcess:
    """Return the identity of this process."""
    stat = _stat(os.getpid())
    return HostProcess(_boot(), os.getpid(), 0 if stat is None else stat[1])


def _boot() -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return file.read().strip()
    except OSError:
        return ""


def _stat(pid: int) -> tuple[str, int] | None:
    """Return state and start time of a pid; None if the process is missing or not visible."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            # The process name, in parentheses, may contain spaces and parentheses.
            fields = file.read().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError, PermissionError, NotADirectoryError):
        return None
    return fields[0], int(fields[19])


def is_there(process: HostProcess) -> bool:
    """Whether this other process is alive and may be a host.

    It must have a lock file open, as far as this user can see. Pid and start time alone are not
    enough, because they survive an `exec`. They also match a host that has closed its store but
    could not delete its row.
    """
    if (
        not process.boot
        or not process.started
        or process.pid == os.getpid()
        or process.boot != _boot()
    ):
        return False
    # A zombie has closed its files, so its locks are gone: it is dead, whatever its pid says.
    stat = _stat(process.pid)
    if stat is None or stat[0] in "ZX" or stat[1] != process.started:
        return False
    folder = f"/proc/{process.pid}/fd"
    try:
        fds = os.listdir(folder)
    except PermissionError:
        return True  # The process of another user: its start time has to suffice.
    except OSError:
        return False  # The process has just ended.
    return any(_is_of_hosts(f"{folder}/{fd}") for fd in fds)


def _is_of_hosts(link: str) -> bool:
    """Whether an fd is a lock file, by name.

    Its inode is no criterion, as the file may be replaced.
    """
    try:
        return os.readlink(link).removesuffix(" (deleted)").endswith(_SUFFIX)
    except OSError:
        return False  # The fd has just been closed.


def _open(path: str) -> tuple[tuple[int, int], _Shared]:
    """Return the entry of a lock file, and create it if missing.

    A file that is open already is not opened again: see the module docstring.
    """
    assert _lock.locked()
    # Look by `stat` first. An fd of a known file that is opened by accident cannot be closed again
    # without dropping the locks.
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
        # A user with read access only cannot hold a lock, but can query locks.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    found = os.fstat(fd)
    key = (found.st_dev, found.st_ino)
    if key in _files:
        # A rename or a link put the file at this path between the `stat` and the `open`.
        _files[key].strays.append(fd)
        return key, _files[key]
    shared = _files[key] = _Shared(fd, path)
    return key, shared
