"""The descendants of a process, and pidfds that are certainly theirs.

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

from banksman.process import syscalls
from banksman.process.keeper.messages import NAME_BYTES_MAX

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

    Row = tuple[int, int, str, int]  # pid, parent, state, start time
    Member = tuple[int, int]  # pid and start time: an identity that is never reused while the machine runs

_GONE = (errno.ENOENT, errno.ESRCH)
# Asking about every pid there can be is dear (0.1 s): only where there are few enough.
ENUMERATE_PIDS_MAX = 65536
PID_MAX_DEFAULT = 32768
# A report is one message. Whoever has more survivors than this does not need all their names.
SURVIVORS_MAX = 50


def read_stat(pid: int) -> tuple[int, str, int] | None:
    """Parent, state and start time of a process, or None if there is no such process."""
    try:
        data = syscalls.read_proc(f"{pid}/stat", 1024)
    except OSError as exc:
        if exc.errno in _GONE:
            return None
        raise
    if not data:
        return None  # It went while it was read.
    # The name stands in parentheses and may itself hold any byte, ")" too: the last one ends it.
    fields = data[data.rindex(b")") + 2 :].split()
    state = fields[0].decode()
    if state == "Z" and int(fields[17]) > 1:
        # Its first thread has ended and others go on: the kernel shows a zombie, but it lives, and can be killed.
        state = "R"
    return int(fields[1]), state, int(fields[19])


def is_ignoring(pid: int, number: int) -> bool:
    """Whether a process ignores this signal. False if that cannot be read."""
    try:
        data = syscalls.read_proc(f"{pid}/status", 4096)
        mask = int(data.partition(b"\nSigIgn:")[2].split(None, 1)[0], 16)
    except (OSError, ValueError, IndexError):
        return False
    return bool(mask >> (number - 1) & 1)


def name_of(pid: int) -> str:
    """The command line of a process, for people; cut. Empty if it is gone, or ending: it has no memory any more."""
    try:
        data = syscalls.read_proc(f"{pid}/cmdline", NAME_BYTES_MAX)
        if not data and syscalls.has_memory(pid):
            # It has made its argv empty. It still has a name.
            return f"[{syscalls.read_proc(f'{pid}/comm', 64).decode('utf-8', 'replace').strip()}]"
    except OSError:
        return ""
    return data.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")


def census(root: int, *, near: bool, known: Container[int] = ()) -> Iterator[Row]:
    """Everybody in /proc but `known`, newest first: a process that lives for a moment only is met while it lives.

    `near` looks only at pids above the root's own, which is where nearly all its descendants are: on a machine with
    thousands of older processes that is most of the cost. It can miss some (pids wrap around), so it is for finding,
    never for proving that there is nobody left. Neither is a full look: /proc may hide processes from us.
    """
    pids = [int(entry) for entry in syscalls.list_proc(".") if entry.isdigit()]
    for pid in sorted(pids, reverse=True):
        if near and pid <= root:
            return
        if pid not in known:
            stat = read_stat(pid)
            if stat is not None:
                yield pid, *stat


def family(roots: Iterable[int], rows: Iterable[Row], *, but: Container[int] = ()) -> list[Row]:
    """Those of `rows` that descend from one of `roots`, leaving out the subtrees of `but`."""
    children: dict[int, list[Row]] = {}
    for row in rows:
        children.setdefault(row[1], []).append(row)
    members: list[Row] = []
    waiting = list(roots)
    while waiting:
        for row in children.get(waiting.pop(), ()):
            if row[0] not in but:
                waiting.append(row[0])
                members.append(row)
    return members


def is_alive(row: Row) -> bool:
    return row[2] not in "ZX"


def descendants(root: int, *, near: bool, but: Container[int] = ()) -> list[Member]:
    """The living descendants of `root`, leaving out the subtrees of `but`."""
    return [(row[0], row[3]) for row in family([root], census(root, near=near), but=but) if is_alive(row)]


def open_member(member: Member) -> int | None:
    """A pidfd that is certainly this process, or None if it is gone."""
    pid, start = member
    try:
        fd = syscalls.pidfd_open(pid)
    except OSError as exc:
        if exc.errno in _GONE:
            return None
        raise
    try:
        stat = read_stat(pid)
    except OSError:
        syscalls.close(fd)
        raise
    if stat is None or stat[2] != start:
        syscalls.close(fd)
        return None
    return fd


def enumerate_children() -> list[int]:
    """Our living direct children, found without /proc: the kernel says ECHILD for every pid that is not one.

    A mount with `hidepid` hides a child that changed its user or is not dumpable. This asks about every pid there can
    be: 0.1 s at the usual 32,768 pids, ten seconds at four million. Beyond the bound it is not tried.
    """
    try:
        pid_max = int(syscalls.read_proc("sys/kernel/pid_max", 32))
    except OSError:
        pid_max = PID_MAX_DEFAULT
    if pid_max > ENUMERATE_PIDS_MAX:
        return []
    children: list[int] = []
    for pid in range(2, pid_max):
        try:
            if syscalls.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT | syscalls.WALL) is None:
                children.append(pid)
        except ChildProcessError:
            continue
    return children


UNSEEN = (0, "", "not to be seen in /proc")
_WHY = {"D": "in uninterruptible sleep", "Z": "dead, but its tracer has not let it go"}


def survey(root: int, denied: dict[Member, str], *, but: Container[int] = ()) -> list[tuple[int, str, str]]:
    """Who is left, and why: pid, command, reason. Never empty: whoever calls this has no proof that the tree is."""
    try:
        rows = family([root], census(root, near=False), but=but)
    except OSError:
        rows = []  # No room to look: somebody is there, and that is all we know.
    return explain(rows, denied) or [UNSEEN]


def explain(rows: list[Row], denied: Container[Member]) -> list[tuple[int, str, str]]:
    """Why each of the first of these is still there."""
    left: list[tuple[int, str, str]] = []
    for pid, _parent, state, start in rows[:SURVIVORS_MAX]:
        if (pid, start) in denied:
            why = "not ours to signal"
        else:
            why = _WHY.get(state, "still dying")
        left.append((pid, name_of(pid), why))
    return left
