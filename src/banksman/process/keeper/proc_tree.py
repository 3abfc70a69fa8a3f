"""Read process trees from /proc: find descendants, open exact pidfds, and describe survivors.

This file signals no process: `sweep.py` does. `enumerate_children` finds children that /proc hides.

Membership of a tree is read from /proc by parent pid. A child can change its process group, its
session and its environment, but not its ancestry. The zygote and the keeper are subreapers, so the
parent of an orphan becomes one of them. So the chain from any descendant up to this process never
breaks.

A pid from /proc may refer to another process when the signal is sent. So each signal goes through a
pidfd that was opened *before* the start time was read again. If the start time still matches, the
pidfd refers to the intended process, and continues to do so.
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
    # Pid and start time: an identity that is never reused while the machine runs.
    Member = tuple[int, int]

# /proc gives ENOENT for a process that is gone when its file is opened, and ESRCH when it is read.
_GONE = (errno.ENOENT, errno.ESRCH)
# Asking the kernel about every possible pid is expensive (0.1 s). It is done only where the number
# of pids is small.
ENUMERATE_PIDS_MAX = 65536
PID_MAX_DEFAULT = 32768
# A report is one message. For more survivors than this, the first names are enough.
SURVIVORS_MAX = 50


def read_stat(pid: int) -> tuple[int, str, int] | None:
    """Return parent, state and start time of a process, or None if there is no such process."""
    try:
        data = syscalls.read_proc(f"{pid}/stat", 1024)
    except OSError as exc:
        # Any other error (no fds, no memory) must reach the caller. Returning None would declare a
        # living process gone.
        if exc.errno in _GONE:
            return None
        raise
    if not data:
        return None  # The process exited during the read.
    # The name stands in parentheses and may contain any byte, even ")". So the last parenthesis
    # ends it.
    fields = data[data.rindex(b")") + 2 :].split()
    # Indices after the name, see proc(5): 0 is the state, 1 the parent, 17 the number of threads,
    # 19 the start time in ticks since the boot.
    state = fields[0].decode()
    if state == "Z" and int(fields[17]) > 1:
        # The first thread has exited and others still run. The kernel shows a zombie, but the
        # process lives and can be killed.
        state = "R"
    return int(fields[1]), state, int(fields[19])


def is_ignoring(pid: int, number: int) -> bool:
    """Whether a process ignores this signal. False if that cannot be read."""
    try:
        data = syscalls.read_proc(f"{pid}/status", 4096)
        mask = int(data.partition(b"\nSigIgn:")[2].split(None, 1)[0], 16)
    except (OSError, ValueError, IndexError):
        return False
    # Bit 0 of the mask is signal 1.
    return bool(mask >> (number - 1) & 1)


def name_of(pid: int) -> str:
    """Return the command line of a process for people, shortened.

    Empty if the process is gone, or is exiting and has freed its memory.
    """
    try:
        # A process chooses the bytes and the length of its argv. So the read is bounded, and
        # decoding replaces invalid bytes.
        data = syscalls.read_proc(f"{pid}/cmdline", NAME_BYTES_MAX)
        if not data and syscalls.has_memory(pid):
            # The process has emptied its argv. It still has a name.
            return f"[{syscalls.read_proc(f'{pid}/comm', 64).decode('utf-8', 'replace').strip()}]"
    except OSError:
        return ""
    return data.rstrip(b"\0").replace(b"\0", b" ").decode("utf-8", "replace")


def census(root: int, *, near: bool, known: Container[int] = ()) -> Iterator[Row]:
    """Read all processes of /proc except `known`, newest first.

    Newest first, so that a short-lived process is more likely to be found alive.

    `near`: look only at pids above the root's. Nearly all descendants are there, and on a machine
    with thousands of older processes this saves most of the cost. It can miss some, because pids
    wrap around. So it serves to find processes, never to prove that none is left. A full scan is no
    proof either: /proc may hide processes.
    """
    # The listing is a snapshot. Processes that are born during the scan are missing, which is why
    # no single scan proves anything.
    pids = [int(entry) for entry in syscalls.list_proc(".") if entry.isdigit()]
    for pid in sorted(pids, reverse=True):
        # The order is descending, so all remaining pids are below the root's.
        if near and pid <= root:
            return
        if pid not in known:
            # Lazy on purpose: the caller can stop a process before the scan reads the next one.
            stat = read_stat(pid)
            if stat is not None:
                yield pid, *stat


def family(roots: Iterable[int], rows: Iterable[Row], *, but: Container[int] = ()) -> list[Row]:
    """Return the rows that descend from one of `roots`, without the subtrees of `but`."""
    # The rows were read one after the other, so a parent may have died during the scan. Then its
    # child shows the old parent or the subreaper. In the first case the child is missing here, and
    # the next scan finds it.
    children: dict[int, list[Row]] = {}
    for row in rows:
        children.setdefault(row[1], []).append(row)
    members: list[Row] = []
    waiting = list(roots)
    while waiting:
        for row in children.get(waiting.pop(), ()):
            # The subtree is not entered either: another keeper ends it.
            if row[0] not in but:
                waiting.append(row[0])
                members.append(row)
    return members


def is_alive(row: Row) -> bool:
    """Whether the process of this row can still run. Zombies (Z) and dead processes (X) cannot."""
    return row[2] not in "ZX"


def descendants(root: int, *, near: bool, but: Container[int] = ()) -> list[Member]:
    """Return the living descendants of `root`, without the subtrees of `but`."""
    return [
        (row[0], row[3])
        for row in family([root], census(root, near=near), but=but)
        if is_alive(row)
    ]


def open_member(member: Member) -> int | None:
    """Open a pidfd that certainly refers to this process; None if the process is gone."""
    pid, start = member
    try:
        fd = syscalls.pidfd_open(pid)
    except OSError as exc:
        if exc.errno in _GONE:
            return None
        raise
    # Read the start time after the pidfd was opened, never before. If it matches now, the intended
    # process has had this pid all the time, also when the pidfd was opened.
    try:
        stat = read_stat(pid)
    except OSError:
        syscalls.close(fd)
        raise
    # The pid is free, or a later process has it. Signalling that process would kill a stranger.
    if stat is None or stat[2] != start:
        syscalls.close(fd)
        return None
    return fd


def enumerate_children() -> list[int]:
    """Return the living direct children of this process, found without /proc.

    For every pid that is not a child, waitid fails with ECHILD. A mount with `hidepid` hides a
    child that has changed its user or is not dumpable. This function asks about every possible pid:
    0.1 s at the usual 32,768 pids, ten seconds at four million. Beyond ENUMERATE_PIDS_MAX it does
    not try.
    """
    try:
        pid_max = int(syscalls.read_proc("sys/kernel/pid_max", 32))
    except OSError:
        pid_max = PID_MAX_DEFAULT
    # Hidden children are then not found. `survey` reports them as UNSEEN.
    if pid_max > ENUMERATE_PIDS_MAX:
        return []
    children: list[int] = []
    for pid in range(2, pid_max):
        try:
            # WNOWAIT reaps nothing: the callers have to see each exit. None means a child that has
            # not exited.
            if (
                syscalls.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT | syscalls.WALL)
                is None
            ):
                children.append(pid)
        except ChildProcessError:
            continue
    return children


# Stands for processes that must exist but cannot be named.
UNSEEN = (0, "", "not visible in /proc")
_WHY = {"D": "in uninterruptible sleep", "Z": "dead, but not reaped by its tracer"}


def survey(
    root: int, denied: dict[Member, str], *, but: Container[int] = ()
) -> list[tuple[int, str, str]]:
    """List the survivors with reasons: pid, command, reason.

    Never empty: the callers have no proof that the tree is empty.
    """
    try:
        rows = family([root], census(root, near=False), but=but)
    except OSError:
        # No memory or fds for a scan. Processes are left, but nothing is known about them.
        rows = []
    return explain(rows, denied) or [UNSEEN]


def explain(rows: list[Row], denied: Container[Member]) -> list[tuple[int, str, str]]:
    """Return pid, command and reason for the first SURVIVORS_MAX of these processes."""
    left: list[tuple[int, str, str]] = []
    for pid, _parent, state, start in rows[:SURVIVORS_MAX]:
        # Checked first: the process may be in another state too, but permission is the reason that
        # an operator can fix.
        if (pid, start) in denied:
            why = "no permission to signal it"
        else:
            why = _WHY.get(state, "still dying")
        left.append((pid, name_of(pid), why))
    return left
