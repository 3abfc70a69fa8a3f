"""Duties towards the service manager: systemd notifications, and reaping orphans as process 1 of a container."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import MutableMapping
from contextlib import suppress

from banksman.process.zygote_client import spawner

# What systemd is told, in its own protocol: a datagram of `NAME=value` lines to the socket that it names to us.
#
# Without that socket nothing is told, and nothing ever raises: a server must not fail because nobody listens. The
# variables are taken out of the environment, so that no child speaks in our name.

# A manager that is behind takes what we say by and by. That we are ready is worth waiting for, since it kills those of
# whom it does not hear; a heartbeat is not, for the next one comes.
SEND_SECONDS_MAX = 1.0
STATUS_CHARACTERS_MAX = 500

log = logging.getLogger("banksman")

# How long somebody who waits for a child may take to do so.
TAKE_SECONDS_MAX = 1.0


class Notifier:
    """`address`: where to; None: nowhere. For one thread at a time."""

    def __init__(self, address: str | None, watchdog_seconds: float | None = None) -> None:
        self._address = address
        self._watchdog_seconds = watchdog_seconds

    def __repr__(self) -> str:
        return f"<Notifier {self._address!r} watchdog={self._watchdog_seconds}>"

    def ready(self, status: str = "") -> None:
        """It serves from here on."""
        self._send("READY=1", _status(status))

    def status(self, text: str) -> None:
        """What it is doing, in words for people."""
        self._send(_status(text))

    def stopping(self) -> None:
        """It takes nothing new, and will end."""
        self._send("STOPPING=1")

    def watchdog_seconds(self) -> float | None:
        """How long we may be silent before we are taken for dead; None: as long as we like. Beat twice as often."""
        return self._watchdog_seconds

    def beat(self) -> None:
        """We live. Call it in the loop, so that a loop that is stuck falls silent."""
        if self._watchdog_seconds is not None:
            self._send("WATCHDOG=1", waits=False)

    def _send(self, *lines: str, waits: bool = True) -> None:
        if self._address is None:
            return
        # A name that begins with `@` has no file: its first byte is a zero.
        where = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        message = "\n".join(line for line in lines if line).encode("utf-8", "replace")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(SEND_SECONDS_MAX if waits else 0.0)
                sender.sendto(message, where)
        except (OSError, ValueError) as exc:
            log.debug("! the service manager was not told %s: %s", lines[0], exc)


def take(environ: MutableMapping[str, str] | None = None) -> Notifier:
    """Who is to be told, from the environment, which says so to nobody after this."""
    variables = os.environ if environ is None else environ
    address, microseconds, pid = (
        variables.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
    )
    if not address.startswith(("/", "@")) or len(address) < 2:
        if address:
            log.warning("! NOTIFY_SOCKET is no socket that we know how to reach; nobody is told that we are ready")
        return Notifier(None)
    return Notifier(address, _watchdog(microseconds, pid))


def _watchdog(microseconds: str, pid: str) -> float | None:
    if pid and pid != str(os.getpid()):
        return None  # It is meant for another process, which has started us.
    if not (microseconds.isascii() and microseconds.isdecimal()) or len(microseconds) > 19:
        return None
    return int(microseconds) / 1e6 or None


def _status(text: str) -> str:
    # A line break would begin another variable.
    return f"STATUS={' '.join(text.split())[:STATUS_CHARACTERS_MAX]}" if text else ""


# Orphans. Process 1 of a container is the parent of every process whose own parent has died, and must reap them, or
# they stay in the table of processes for ever.
#
# They must be told from children that somebody here waits for, and whose status is theirs: the zygotes, which are
# known, and what some library may have started, which is not. But whoever waits for a child takes it as soon as it is
# dead. So a zombie that is still there a moment after it was first seen, and is no zygote, is nobody's, and is reaped.
#
# The zombies are found in /proc. `waitid` would always show the same one, a known one for instance, and those behind it
# never.


# A pid can be given again, a pid and the time of its start cannot.
_Zombie = tuple[int, int]


class OrphanReaper:
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


def install(loop: asyncio.AbstractEventLoop) -> OrphanReaper | None:
    """As process 1 only: elsewhere orphans are somebody else's. In the main thread."""
    if os.getpid() != 1:
        return None
    adopted = OrphanReaper(loop)
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
