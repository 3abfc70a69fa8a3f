"""The descendants of a process, and signals that can only reach them.

Who belongs to the tree is read from /proc by parent pid, and from nothing else: process groups, sessions and the
environment are the child's to change, its ancestry is not. Because zygote and keeper are subreapers, an orphan's parent
becomes one of them, so the chain from any descendant up to us never breaks.

A pid read from /proc may name another process by the time it is signalled. So a signal goes through a pidfd that was
opened *before* the start time was read again: if the start time still matches, the pidfd is the process we meant, and
stays it.
"""

from __future__ import annotations

import errno
import os
import time

from banksman.run import system
from banksman.run.keeper.wire import NAME_BYTES_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container

    Member = tuple[int, int]  # pid and start time: an identity that is never reused while the machine runs

SIGKILL, SIGTERM, SIGCONT, SIGSTOP = 9, 15, 18, 19
_GONE = (errno.ENOENT, errno.ESRCH)
# One pass finds what was forked during the pass before; each pass freezes more of the tree, so a tree that can be
# frozen at all is frozen in a few. The bound is for one that cannot: the next round goes on.
FREEZE_PASSES_MAX = 100
# Asking about every pid there can be is dear (0.1 s): only where there are few enough, and not too often. More than
# once, because what a hidden child leaves behind becomes ours only when the child is dead.
ENUMERATE_PIDS_MAX = 65536
ENUMERATE_SECONDS_BETWEEN = 0.5


def read_stat(pid: int) -> tuple[int, str, int] | None:
    """Parent, state and start time of a process, or None if there is no such process."""
    try:
        fd = system.open_fd(f"/proc/{pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError as exc:
        if exc.errno in _GONE:
            return None
        raise
    try:
        data = system.read(fd, 1024)
    except OSError as exc:
        if exc.errno in _GONE:
            return None
        raise
    finally:
        system.close(fd)
    # The name stands in parentheses and may itself hold any byte, ")" too: the last one ends it.
    fields = data[data.rindex(b")") + 2 :].split()
    return int(fields[1]), fields[0].decode(), int(fields[19])


def name_of(pid: int) -> str:
    """The command line of a process, for people; cut, and empty if it is gone."""
    try:
        fd = system.open_fd(f"/proc/{pid}/cmdline", os.O_RDONLY | os.O_CLOEXEC)
        try:
            data = system.read(fd, NAME_BYTES_MAX)
        finally:
            system.close(fd)
    except OSError:
        return ""
    return data.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")


def descendants(root: int, *, spare: Container[int] = (), near: bool) -> list[Member]:
    """The living descendants of `root`, leaving out the subtrees of `spare`.

    `near` looks only at pids above the root's own, which is where nearly all of them are: on a machine with thousands
    of older processes that is most of the cost. It can miss some (pids wrap around), so it is for finding, never for
    proving that there is nothing left. Neither is a full look: /proc may hide processes from us.
    """
    return [(pid, start) for pid, state, start in family(root, spare=spare, near=near) if state not in "ZX"]


def family(root: int, *, spare: Container[int] = (), near: bool) -> list[tuple[int, str, int]]:
    """The descendants of `root` with their states, zombies too: pid, state, start time."""
    children: dict[int, list[int]] = {}
    found: dict[int, tuple[str, int]] = {}
    for entry in system.listdir("/proc"):
        if not entry.isdigit():
            continue
        pid = int(entry)
        if near and pid <= root:
            continue
        stat = read_stat(pid)
        if stat is not None:
            parent, state, start = stat
            children.setdefault(parent, []).append(pid)
            found[pid] = (state, start)
    members: list[tuple[int, str, int]] = []
    waiting = [root]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            if pid in spare:
                continue
            waiting.append(pid)
            members.append((pid, *found[pid]))
    return members


def open_member(member: Member) -> int | None:
    """A pidfd that is certainly this process, or None if it is gone."""
    pid, start = member
    try:
        fd = system.pidfd_open(pid)
    except OSError as exc:
        if exc.errno in _GONE:
            return None
        raise
    try:
        stat = read_stat(pid)
    except OSError:
        system.close(fd)
        raise
    if stat is None or stat[2] != start:
        system.close(fd)
        return None
    return fd


class Sweep:
    """Ends a tree, round by round: freeze what is there, look again until nothing is new, then kill it all.

    Frozen first, because a tree that forks faster than it is killed outruns a sweep that only kills, and one that
    restarts its dead children never ends. The caller repeats rounds until it has *proof* that nothing is left.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._near = True
        self._ask_all_at = 0.0
        self.names: dict[Member, str] = {}
        self.denied: dict[Member, str] = {}

    def term(self) -> None:
        """TERM to each member that is alive now, and CONT, without which a stopped one would not even notice."""
        members = descendants(self._root, near=True) or descendants(self._root, near=False)
        for member in members:
            fd = open_member(member)
            if fd is None:
                continue
            self.names.setdefault(member, name_of(member[0]))
            try:
                system.pidfd_send_signal(fd, SIGTERM)
                system.pidfd_send_signal(fd, SIGCONT)
            except OSError:
                pass  # Gone, or not ours to signal. The sweep that follows tells the two apart and reports the second.
            finally:
                system.close(fd)

    def kill(self, spare: Container[int] = ()) -> bool:
        """One round. True if there was something to kill."""
        held: dict[Member, int] = {}
        self.denied = {}
        try:
            self._freeze(held, spare)
        except OSError as exc:
            # Out of fds, most likely. Those that are held get killed below and give their fds back; the next round
            # finds the others.
            if not held and exc.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
                raise
        finally:
            for fd in held.values():
                try:
                    system.pidfd_send_signal(fd, SIGKILL)
                except OSError:
                    pass  # Gone between the two signals.
                system.close(fd)
        if not held:
            if not self._near and not self.denied and not spare and time.monotonic() >= self._ask_all_at:
                self._ask_all_at = time.monotonic() + ENUMERATE_SECONDS_BETWEEN
                return self._kill_unseen()
            # Nothing near: whatever is left has a pid below ours, so from now on look everywhere.
            self._near = False
        return bool(held)

    def _kill_unseen(self) -> bool:
        """Kill direct children that /proc does not show: by number, which is safe for an unreaped child of our own."""
        # A child that /proc shows as a zombie is dead; its tracer has it. One that it does not show at all is meant.
        children = [pid for pid in enumerate_children() if read_stat(pid) is None]
        for pid in children:
            self.names.setdefault((pid, 0), "(hidden)")
            try:
                system.kill(pid, SIGKILL)
            except OSError:
                self.denied[pid, 0] = "(hidden)"
        return bool(children)

    def _freeze(self, held: dict[Member, int], spare: Container[int]) -> None:
        for _ in range(FREEZE_PASSES_MAX):
            fresh = [
                member
                for member in descendants(self._root, spare=spare, near=self._near)
                if member not in held and member not in self.denied
            ]
            if not fresh:
                return
            for member in fresh:
                fd = open_member(member)
                if fd is None:
                    continue
                try:
                    system.pidfd_send_signal(fd, SIGSTOP)
                except OSError as exc:
                    system.close(fd)
                    if exc.errno == errno.EPERM:
                        self.denied[member] = name_of(member[0])
                    continue
                held[member] = fd
                if member not in self.names:
                    self.names[member] = name_of(member[0])


def enumerate_children() -> list[int]:
    """Our living direct children, found without /proc: the kernel says ECHILD for every pid that is not one.

    A mount with `hidepid` hides a child that changed its user or is not dumpable. This asks about every pid there can
    be: 0.1 s at the usual 32,768 pids, ten seconds at four million. Beyond the bound it is not tried.
    """
    fd = system.open_fd("/proc/sys/kernel/pid_max", os.O_RDONLY | os.O_CLOEXEC)
    try:
        pid_max = int(system.read(fd, 32))
    finally:
        system.close(fd)
    if pid_max > ENUMERATE_PIDS_MAX:
        return []
    children: list[int] = []
    for pid in range(2, pid_max):
        try:
            if system.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT | system.WALL) is None:
                children.append(pid)
        except ChildProcessError:
            continue
    return children


_WHY = {"D": "in uninterruptible sleep", "Z": "dead, but its tracer has not let it go"}


def survey(root: int, denied: dict[Member, str]) -> list[tuple[int, str, str]]:
    """Who is left, and why: pid, command, reason. Never empty: whoever calls this has no proof that the tree is."""
    left: list[tuple[int, str, str]] = []
    for pid, state, start in family(root, near=False):
        if (pid, start) in denied:
            why = "not ours to signal"
        else:
            why = _WHY.get(state, "still dying")
        left.append((pid, name_of(pid), why))
    return left or [(0, "", "hidden from /proc")]
