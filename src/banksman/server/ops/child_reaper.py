"""Orphans. Process 1 of a container is the parent of every process whose own parent has died, and must reap them, or
they stay in the table of processes for ever.

They must be told from children that somebody here waits for, and whose status is theirs: the zygotes, which are known,
and what some library may have started, which is not. But whoever waits for a child takes it as soon as it is dead. So a
zombie that is still there a moment after it was first seen, and is no zygote, is nobody's, and is reaped.

The zombies are found in /proc. `waitid` would always show the same one, a known one for instance, and those behind it
never.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from contextlib import suppress

from banksman.process.zygote_client import spawner

# How long somebody who waits for a child may take to do so.
TAKE_SECONDS_MAX = 1.0

log = logging.getLogger("banksman")

# A pid can be given again, a pid and the time of its start cannot.
_Zombie = tuple[int, int]


class Adopted:
    """Reaps, from the first SIGCHLD on. For its loop only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reaped = 0
        self._loop = loop
        self._seen: set[_Zombie] = set()
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop.add_signal_handler(signal.SIGCHLD, self._look_soon)
        self._look()  # Some may have been ours from before: a shell that became this program by exec had children.

    def close(self) -> None:
        self._loop.remove_signal_handler(signal.SIGCHLD)
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _look_soon(self) -> None:
        """Not at once: a look costs a walk through /proc, and signals come in swarms."""
        if self._next is None:
            self._next = self._loop.call_later(TAKE_SECONDS_MAX, self._look)

    def _look(self) -> None:
        self._next = None
        zombies = _zombies()
        for zombie in zombies & self._seen:
            self._reap(zombie[0])
        self._seen = zombies - self._seen
        if self._seen:
            self._look_soon()

    def _reap(self, pid: int) -> None:
        # Whoever waits for it after all may have been faster.
        with suppress(ChildProcessError):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.reaped += 1
                log.debug("x an orphan was reaped: pid %s, status %s", pid, status)


def install(loop: asyncio.AbstractEventLoop) -> Adopted | None:
    """As process 1 only: elsewhere orphans are somebody else's. In the main thread."""
    if os.getpid() != 1:
        return None
    adopted = Adopted(loop)
    adopted.start()
    return adopted


def _zombies() -> set[_Zombie]:
    """Our dead children, but for those that are known to be waited for."""
    try:
        # One look at whether there are any, which is nearly always the answer, and costs nothing.
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:
        return set()
    known = spawner.pids()
    found = {_read(int(entry)) for entry in os.listdir("/proc") if entry.isdecimal() and int(entry) not in known}
    return {zombie for zombie in found if zombie is not None}


def _read(pid: int) -> _Zombie | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The name of a program may hold anything, also blanks and brackets: what counts is behind the last one.
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None  # It is gone.
    is_ours = fields[0] == b"Z" and int(fields[1]) == os.getpid()
    return (pid, int(fields[19])) if is_ours else None
