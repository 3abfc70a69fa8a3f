"""Control group (v2) of one process tree: its keeper makes it, kills by it, and removes it.

The command enters the group before exec(), so every process of the tree is in it. The kernel then
limits the tree as a whole, and `cgroup.kill` ends all of it in one step, also processes that the
keeper may not signal. `process/cgroups.py` decides where the group is and what it limits.

**Groups of dead keepers.** A keeper holds a lock (`flock`) on the folder of its group for as long
as it lives, and the kernel drops the lock with the keeper. So a group without a lock has lost its
keeper: `prune` kills what is in it and removes it. A name is never used twice, and only groups with
the prefix of this module are looked at.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time

from banksman.process import syscalls

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    # File, value, and whether the start fails where the kernel does not have the file.
    Setting = tuple[str, str, bool]

PREFIX = "banksman-tree-"
# A pruning host may take a new group for a lost one, between its creation and its lock. It cannot
# do so with every new group.
ATTEMPTS_MAX = 8
# Killed processes leave their group within moments, except in uninterruptible sleep.
EMPTY_SECONDS_MAX = 0.5
EMPTY_SECONDS_BETWEEN = 0.01
# A tree of groups that a command made inside of its own is removed to this depth.
DEPTH_MAX = 16
_FILE_BYTES_MAX = 65536
_KILL = 9


class Cgroup:
    """The group of the tree of this keeper. `fd`: its folder, with the lock."""

    __slots__ = ("_path", "fd")

    def __init__(self, base: str, settings: Iterable[Setting]) -> None:
        """Make the group and set its limits. Raises `OSError`, with nothing left."""
        self._path, self.fd = _make(base)
        try:
            for name, value, is_needed in settings:
                self._set(name, value, is_needed=is_needed)
        except OSError:
            self.remove()
            raise

    def _set(self, name: str, value: str, *, is_needed: bool) -> None:
        try:
            self._write(name, value.encode())
        except FileNotFoundError:
            if is_needed:
                raise

    def enter(self) -> None:
        """Move this process into the group. The children that it forks later are in it too."""
        self._write("cgroup.procs", b"0")

    def kill(self, note: Callable[[list[int]], None]) -> bool:
        """Kill every process in the group. False if there was none, or before Linux 5.14.

        `note`: gets the pids before they are killed.
        """
        try:
            if b"populated 0" in self._read("cgroup.events"):
                return False
            note([int(line) for line in self._read("cgroup.procs").split()])
            self._write("cgroup.kill", b"1")
        except OSError:
            return False
        return True

    def is_out_of_memory(self, number: int | None) -> bool:
        """Whether the kernel has sent this signal to the leader because memory ran out."""
        if number != _KILL:
            return False
        try:
            # The kernel counts the kill before it sends the signal.
            lines = self._read("memory.events").splitlines()
        except OSError:
            return False  # The group has no memory controller.
        return any(line.startswith(b"oom_kill ") and int(line.split()[1]) > 0 for line in lines)

    def remove(self) -> None:
        """Remove the group, once its tree is gone. What cannot be removed is left to `prune`."""
        _remove(self._path, self)
        syscalls.close(self.fd)

    def _read(self, name: str) -> bytes:
        fd = syscalls.open_fd(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            return syscalls.read(fd, _FILE_BYTES_MAX)
        finally:
            syscalls.close(fd)

    def _write(self, name: str, value: bytes) -> None:
        fd = syscalls.open_fd(name, os.O_WRONLY | os.O_CLOEXEC, dir_fd=self.fd)
        try:
            syscalls.write(fd, value)
        finally:
            syscalls.close(fd)


class LostCgroup(Cgroup):
    """A group whose keeper is dead. Raises `OSError` if its keeper lives, or if it is gone."""

    __slots__ = ()

    def __init__(self, path: str) -> None:
        self._path, self.fd = path, _lock(path)


def prune(base: str) -> None:
    """Kill and remove the groups of dead keepers. Never waits for a living keeper."""
    try:
        names = [name for name in syscalls.listdir(base) if name.startswith(PREFIX)]
    except OSError:
        return
    for name in names:
        try:
            LostCgroup(f"{base}/{name}").remove()
        except OSError:
            pass  # Its keeper lives, or another host has removed it.


def _make(base: str) -> tuple[str, int]:
    attempt = 0
    while True:
        attempt += 1
        # A random part, because pid namespaces can share the folder, and so have equal pids.
        path = f"{base}/{PREFIX}{os.getpid()}-{os.urandom(4).hex()}"
        syscalls.mkdir(path)
        try:
            return path, _lock(path)
        except OSError:
            # Only a host that prunes holds the lock or removes the folder now.
            _rmdir(path)
            if attempt == ATTEMPTS_MAX:
                raise


def _lock(path: str) -> int:
    fd = syscalls.open_fd(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The folder may have been removed between the two calls.
        os.stat("cgroup.procs", dir_fd=fd)
    except OSError:
        syscalls.close(fd)
        raise
    return fd


def _remove(path: str, cgroup: Cgroup) -> None:
    until = time.monotonic() + EMPTY_SECONDS_MAX
    while not _rmdir(path):
        # Processes are left in it, or groups that the command has made. The tree of a living
        # keeper is proven gone here. So these are processes that left the tree, but not the group.
        cgroup.kill(_nothing)
        _remove_inner(path, DEPTH_MAX)
        if time.monotonic() >= until:
            return
        time.sleep(EMPTY_SECONDS_BETWEEN)


def _nothing(_pids: list[int]) -> None:
    pass


def _remove_inner(path: str, depth: int) -> None:
    try:
        names = syscalls.listdir(path)
    except OSError:
        return  # Removed meanwhile, or one of the kernel's files.
    for each in (f"{path}/{name}" for name in names):
        if depth:
            _remove_inner(each, depth - 1)
        _rmdir(each)


def _rmdir(path: str) -> bool:
    """Remove a folder. False if it is not empty; the kernel refuses that."""
    try:
        syscalls.rmdir(path)
    except OSError as exc:
        return exc.errno == errno.ENOENT
    return True
