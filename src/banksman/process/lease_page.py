"""Host's end of the lease page: shared memory that tells keepers when to end their processes.

A keeper is the parent process of one command. `keeper/lease_timer.py` is its end of the page.
`kill_by` computes when the host's own ladder must reach KILL.

A host with a remote store owns its sessions only for the time of a lease, and must renew the lease
with heartbeats (`cluster/log/host_leases.py`). The processes of these sessions must not outlive the
lease, even if the host cannot act. Its loop may be blocked, it may be stopped (SIGSTOP), or its
machine may be overloaded. So each keeper of these processes maps this page, and reads there when to
act without an order.

**Why a page and not a message.** A heartbeat is one store of sixteen bytes, for any number of
processes, and wakes none of them. An idle keeper reads the page when the last known time has
passed, and usually finds a later time there. That happens once in several heartbeats. Messages
would wake each keeper at each heartbeat, and messages of a host that was stopped would wait in the
sockets and be read late. An example with a hundred processes and a heartbeat per second: the host
spends about 0.04 ms on each heartbeat (9 ms with messages). Each keeper spends 7 µs per second (77
µs with messages).

**Contents.** Two times of CLOCK_MONOTONIC, which is the same clock in all processes of a machine:
when to begin with TERM, and when to KILL. Each is eight bytes at an address that is a multiple of
eight, so that it is read and written atomically. A reader may see one new and one old value. That
is harmless, because it reads both again before it acts.

**Times.** Both lie in the window between `fence_at` and `dead_by`:

    fence_at ── a tenth ──► TERM by the keeper ── … ──► KILL ── a third ──► dead_by
       └ a living host begins its ladder here, which has one rung more (the end of stdin)

The third is the reserve for KILL. A plain tree is frozen, killed and reaped in about 30 ms, a tree
of hundreds of processes on a busy machine in some hundred ms. The keeper also needs its share of a
core for that. With the usual lease (15 s) the reserve is 2 s. It is a share of the window, because
a lease of one second needs a reserve too. The tenth keeps the host and the keeper from acting at
the same moment.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref

from banksman.errors import NotOwner, no_room
from banksman.process import syscalls

# Shares of the window: the keeper's delay after the host, and the reserve for KILL.
HOST_FIRST_SHARE = 0.1
KILL_SHARE = 1 / 3
_PAGE_BYTES = 16


class LeasePage:
    """Lease of one generation of claims. Belongs to one event loop.

    It is renewed until it is lost, and never after that. Later claims have another page.
    """

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
        # A finaliser, because the page must also be closed if its loop is dropped without a close.
        self.close = weakref.finalize(self, _close, self._times, page, self._fd)
        self.hold(fence_at, dead_by)

    def __repr__(self) -> str:
        return f"<Lease {'held' if self.close.alive else 'lost'}>"

    def hold(self, fence_at: float, dead_by: float) -> None:
        """Renew the lease for every process started under it. Times never go back.

        The answer to an earlier heartbeat may arrive after a later one, and must not shorten the
        lease.
        """
        assert fence_at <= dead_by
        window = dead_by - fence_at
        # Write KILL before TERM. A reader that sees the new TERM must not see the old KILL with it.
        self._times[1] = max(self._times[1], dead_by - KILL_SHARE * window)
        self._times[0] = max(self._times[0], fence_at + HOST_FIRST_SHARE * window)

    def copy_fd(self) -> int:
        """Return a copy of the fd for a keeper.

        Raises `NotOwner` once the lease is lost: nothing may be started under it then.
        """
        if not self.close.alive:
            hint = "use the host that owns the session now"
            raise NotOwner("cannot start a process: the lease of its session is lost", hint=hint)
        return syscalls.dup(self._fd)


def kill_by(now: float, dead_by: float) -> float:
    """Return when the host's ladder must reach KILL so that everything is dead by `dead_by`."""
    return dead_by - KILL_SHARE * max(0.0, dead_by - now)


def _close(times: memoryview[float], page: mmap.mmap, fd: int) -> None:
    times.release()
    page.close()
    syscalls.close(fd)
