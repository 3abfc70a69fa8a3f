"""Signals to processes that are not ours to signal, by a helper with more rights: `sudo -n /usr/bin/kill …`.

It may be slow, refuse, or hang, and a tree is waiting to be ended. So each run has a time, all runs together a number,
and one that did not come back in time is not asked again. Whatever it did is not believed either: that the tree is gone
is proven by the kernel, as ever, and who is left is named.
"""

from __future__ import annotations

import select
import time

from banksman.process import syscalls
from banksman.process.keeper.spawn import DEFAULT_SIGNALS

# `kill` is over in a moment, and what comes before it (rules, a log) in a few. The keeper hears nobody meanwhile.
RUN_SECONDS_MAX = 2.0
# A refusal is in somebody's log each time. Who could not be ended by so many runs will not be by more.
RUNS_MAX = 32
# So that the words of one run fit in a command line.
PIDS_PER_RUN = 1000
SIGKILL = 9
_NAMES = {1: "HUP", 2: "INT", 3: "QUIT", 9: "KILL", 10: "USR1", 12: "USR2", 15: "TERM", 18: "CONT", 19: "STOP"}
_ENVIRONMENT = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}


class Helper:
    """`ender` are its words up to and with the absolute path of `kill`."""

    def __init__(self, ender: tuple[bytes, ...]) -> None:
        self._ender = ender
        self._runs = 0
        # No run goes on beyond this moment.
        self.until: float | None = None

    def kill(self, number: int, pids: list[int]) -> bool:
        """True if all of them were signalled. A negative one is a group, as ever."""
        if number not in _NAMES:
            return False
        done = True
        for first in range(0, len(pids), PIDS_PER_RUN):
            words = ["-s", _NAMES[number], "--", *map(str, pids[first : first + PIDS_PER_RUN])]
            done = self._run([*self._ender, *(word.encode() for word in words)]) and done
        return done

    def _run(self, argv: list[bytes]) -> bool:
        now = time.monotonic()
        due = now + RUN_SECONDS_MAX if self.until is None else min(now + RUN_SECONDS_MAX, self.until)
        if self._runs >= RUNS_MAX or due <= now:
            return False
        self._runs += 1
        try:
            # Our own stdio is /dev/null, and every other fd of ours is closed on exec.
            pid = syscalls.posix_spawn(argv[0], argv, _ENVIRONMENT, setsigmask=(), setsigdef=DEFAULT_SIGNALS)
        except OSError:
            return False
        try:
            pidfd = syscalls.pidfd_open(pid)
        except OSError:
            # Then it is not waited for. Whoever reaps the tree reaps it too.
            return False
        try:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            if not syscalls.poll(poller, max(0.0, due - time.monotonic()) * 1000):
                self._runs = RUNS_MAX
                # Perhaps in vain, for it may have become another user. Then it is one of those who are left.
                syscalls.pidfd_send_signal(pidfd, SIGKILL)
                return False
            return syscalls.waitpid(pid, 0)[1] == 0
        except OSError:
            return False
        finally:
            syscalls.close(pidfd)
