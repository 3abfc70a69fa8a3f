"""Limits of a whole process tree: its memory and its number of processes, looked at every second.

`guard` and `exec` use this. The kernel's limits do not do it without a control group, which needs
rights that a user may not have: RLIMIT_AS counts the address space of one process, and RLIMIT_NPROC
all processes of a user. A tree over its limit is ended, up to a second later.
"""

from __future__ import annotations

import time

from banksman.process import syscalls
from banksman.process.keeper.proc_tree import descendants

LOOK_SECONDS = 1.0
# Private memory, and memory that is shared between processes but not with a file.
_COUNTED = (b"RssAnon:", b"RssShmem:")


class TreeLimits:
    """Limits of the descendants of one process.

    `memory_bytes_max`: None is no limit. Counts the resident memory that is not shared with a file,
    as the sum over all processes. Memory that processes share counts in each of them.
    `processes_max`: None is no limit.
    """

    def __init__(self, root: int, memory_bytes_max: int | None, processes_max: int | None) -> None:
        assert root > 1
        self._root = root
        self._memory_bytes_max = memory_bytes_max
        self._processes_max = processes_max
        self.next_look: float | None = None
        if memory_bytes_max is not None or processes_max is not None:
            self.next_look = time.monotonic()

    def exceeded(self) -> str | None:
        """Look if it is time to. Return the name of a limit that is exceeded: memory or pids."""
        now = time.monotonic()
        if self.next_look is None or now < self.next_look:
            return None
        self.next_look = now + LOOK_SECONDS
        try:
            pids = [pid for pid, _start in descendants(self._root, near=False)]
        except OSError:
            return None  # No memory or fds for a scan. The next look may succeed.
        if self._processes_max is not None and len(pids) > self._processes_max:
            return "pids"
        if self._memory_bytes_max is None:
            return None
        return "memory" if sum(map(_memory_bytes, pids)) > self._memory_bytes_max else None


def _memory_bytes(pid: int) -> int:
    try:
        lines = syscalls.read_proc(f"{pid}/status", 4096).splitlines()
        # A line is `RssAnon:      1234 kB`. A process that has exited and waits has none.
        sizes = [int(line.split()[1]) for line in lines if line.startswith(_COUNTED)]
    except (OSError, ValueError, IndexError):
        return 0  # The process has exited.
    return sum(sizes) * 1024
