"""How long what a host has claimed stays its own, where its keepers can see it: a page of memory for all of them.

A host whose store is far away has its sessions for a time only, and must say again and again that it lives. Their
processes must not outlive that time, also if the host does not act: because its loop is blocked, because it was stopped
(SIGSTOP), because its machine is out of breath. So each keeper of such a process has the page, and reads there when to
act if it is told nothing.

**Why a page, and no message.** A heartbeat is one store of sixteen bytes, whatever number of processes there are;
nobody is woken by it. A keeper that has nothing else to do looks at the page when the last time that it knows has come,
and mostly finds a later one there: that is once in several heartbeats. A message for each would wake each keeper at
each heartbeat, and those of a host that was stopped would lie in the sockets and be heard late. With a hundred
processes and a heartbeat a second the host spends some 0.04 ms on each (9 ms by messages), and each keeper 7 µs of a
second (77).

**What is on it.** Two times of CLOCK_MONOTONIC, which is one clock for all processes of a machine: when to begin with
TERM, and when to KILL. Each is eight bytes at an address that eight divides, so that it is read and written whole; that
a reader may see one of them new and the other old does no harm, for both are read again before anything is done.

**When that is**, between `fence_at` and `dead_by`, the window:

    fence_at ── a tenth ──► TERM by the keeper ── … ──► KILL ── a third ──► dead_by
       └ the host, if it lives, begins with its own ladder, which has a rung more (the end of stdin)

The third is the reserve for KILL: a plain tree is frozen, killed and reaped in some 30 ms, one of hundreds of processes
on a busy machine in some hundred, and then the keeper needs its share of a core to do so at all. Of the usual lease (15
s) it is 2 s. It is a share, because a lease of one second must have one too. The tenth keeps two who both mean well
from acting at the same moment.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref

from banksman.errors import NotOwner, no_room
from banksman.process import syscalls

# Of the window: by how much the keeper waits longer than the host, and what is left for KILL.
HOST_FIRST_SHARE = 0.1
KILL_SHARE = 1 / 3
_PAGE_BYTES = 16


class LeasePage:
    """Of one generation of claims. It is renewed until it is lost, and never again after that: what is claimed then has
    another one. For one loop."""

    def __init__(self, fence_at: float, dead_by: float) -> None:
        try:
            self._fd = syscalls.above_stdio(syscalls.memfd_create("banksman-lease"))
        except OSError as exc:
            raise no_room("fds", exc) from exc
        with contextlib.ExitStack() as stack:
            stack.callback(syscalls.close, self._fd)
            try:
                os.ftruncate(self._fd, _PAGE_BYTES)
                page = mmap.mmap(self._fd, _PAGE_BYTES)
            except OSError as exc:
                raise no_room("memory", exc) from exc
            stack.pop_all()
        self._times = memoryview(page).cast("d")
        # Also if nobody closes it: with a loop that is dropped.
        self.close = weakref.finalize(self, _close, self._times, page, self._fd)
        self.hold(fence_at, dead_by)

    def __repr__(self) -> str:
        return f"<Lease {'held' if self.close.alive else 'lost'}>"

    def hold(self, fence_at: float, dead_by: float) -> None:
        """Renewed, for every process that was started under it. An answer that was overtaken shortens nothing."""
        assert fence_at <= dead_by
        window = dead_by - fence_at
        # KILL first: whoever sees the later TERM is not to see the earlier KILL beside it.
        self._times[1] = max(self._times[1], dead_by - KILL_SHARE * window)
        self._times[0] = max(self._times[0], fence_at + HOST_FIRST_SHARE * window)

    def copy_fd(self) -> int:
        """For a keeper. `NotOwner` once it is lost: nothing may be started under it any more."""
        if not self.close.alive:
            raise NotOwner("what this was to be started for is not ours any more", hint="another host goes on with it")
        return syscalls.dup(self._fd)


def kill_by(now: float, dead_by: float) -> float:
    """When the host's own ladder comes to its KILL, if everything is to be dead by then."""
    return dead_by - KILL_SHARE * max(0.0, dead_by - now)


def _close(times: memoryview[float], page: mmap.mmap, fd: int) -> None:
    times.release()
    page.close()
    syscalls.close(fd)
