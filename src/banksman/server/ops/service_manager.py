"""Service manager duties: systemd notifications, and reaping orphans as container init."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Mapping, MutableMapping
from contextlib import suppress

from banksman.process.zygote_client import spawner

# systemd notifications: a datagram of `NAME=value` lines to the socket in `NOTIFY_SOCKET`.
#
# Without that socket nothing is sent, and nothing ever raises: a server must not fail because a
# notification has no receiver. The variables are removed from the environment, so that no child
# process sends notifications in the name of the server.

# A busy manager reads late. The ready notification is worth the wait, because the manager kills a
# service that does not send it. A heartbeat is not: the next one follows.
SEND_SECONDS_MAX = 1.0
STATUS_CHARACTERS_MAX = 500
_NAMES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")

log = logging.getLogger("banksman")

# How long a parent in this process may take to reap its own child.
TAKE_SECONDS_MAX = 1.0


class Notifier:
    """Sender of systemd notifications.

    `address`: the manager's socket; None sends nothing. For one thread at a time.
    """

    def __init__(
        self,
        address: str | None,
        watchdog_seconds: float | None = None,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self._address = address
        self._watchdog_seconds = watchdog_seconds
        # The environment that this notifier was made of, for a program that this one becomes.
        self.variables = dict(variables or {})

    def __repr__(self) -> str:
        return f"<Notifier {self._address!r} watchdog={self._watchdog_seconds}>"

    @property
    def is_managed(self) -> bool:
        """Whether a service manager waits for notifications."""
        return self._address is not None

    def ready(self, status: str = "") -> None:
        """Report that the server accepts requests."""
        self._send("READY=1", _status(status))

    def status(self, text: str) -> None:
        """Report the current activity, for people."""
        self._send(_status(text))

    def stopping(self) -> None:
        """Report that the server refuses new work and will exit."""
        self._send("STOPPING=1")

    def watchdog_seconds(self) -> float | None:
        """Return after how many silent seconds the manager kills the server; None if it never does.

        Send a heartbeat twice in that time.
        """
        return self._watchdog_seconds

    def beat(self) -> None:
        """Send a heartbeat. Call it in the event loop: a stuck loop then misses its beats."""
        if self._watchdog_seconds is not None:
            self._send("WATCHDOG=1", waits=False)

    def _send(self, *lines: str, waits: bool = True) -> None:
        if self._address is None:
            return
        # A leading `@` stands for an abstract socket: its name begins with a zero byte.
        where = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        message = "\n".join(line for line in lines if line).encode("utf-8", "replace")
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.settimeout(SEND_SECONDS_MAX if waits else 0.0)
                sender.sendto(message, where)
        except (OSError, ValueError) as exc:
            log.debug("cannot notify the service manager of %s: %s", lines[0], exc)


def take(environ: MutableMapping[str, str] | None = None) -> Notifier:
    """Return the notifier that the environment names, and remove its variables."""
    variables = os.environ if environ is None else environ
    given = {name: variables.pop(name) for name in _NAMES if name in variables}
    address, microseconds, pid = (given.get(name, "") for name in _NAMES)
    if not address.startswith(("/", "@")) or len(address) < 2:
        if address:
            log.warning("NOTIFY_SOCKET is not a supported address: readiness is not reported")
        return Notifier(None)
    return Notifier(address, _watchdog(microseconds, pid), given)


def _watchdog(microseconds: str, pid: str) -> float | None:
    if pid and pid != str(os.getpid()):
        return None  # The watchdog is for another process: the one that started this server.
    if not (microseconds.isascii() and microseconds.isdecimal()) or len(microseconds) > 19:
        return None
    return int(microseconds) / 1e6 or None


def _status(text: str) -> str:
    # A line end would begin another variable.
    return f"STATUS={' '.join(text.split())[:STATUS_CHARACTERS_MAX]}" if text else ""


# Orphans. Process 1 of a container becomes the parent of every process whose own parent has died.
# It must reap them, or they stay in the process table forever.
#
# Some children have a waiter in this process that needs their exit status: the zygotes, which are
# known, and children of some library, which are not. A waiter reaps its child as soon as the child
# is dead. So a zombie that is not a zygote, and still exists a moment after it was first seen, has
# no waiter and is reaped.
#
# The zombies are found in /proc. `waitid` would always return the same one, such as a zygote, and
# never the ones behind it.


# The kernel reuses a pid, but not the pair of a pid and its start time.
_Zombie = tuple[int, int]


class OrphanReaper:
    """Reap orphaned zombies, starting with the first SIGCHLD. Belongs to its event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.reaped = 0
        self._loop = loop
        self._seen: set[_Zombie] = set()
        self._next: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._loop.add_signal_handler(signal.SIGCHLD, self._look_soon)
        self._look()  # A shell that became this program by `exec` may have left children.

    def close(self) -> None:
        self._loop.remove_signal_handler(signal.SIGCHLD)
        if self._next is not None:
            self._next.cancel()
            self._next = None

    def _look_soon(self) -> None:
        """Scan later: a scan walks through /proc, and signals arrive in bursts."""
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
        # A late waiter may have reaped it first.
        with suppress(ChildProcessError):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                self.reaped += 1
                log.debug("orphan reaped (pid=%s, status=%s)", pid, status)


def install(loop: asyncio.AbstractEventLoop, *, has_children: bool = False) -> OrphanReaper | None:
    """Start an orphan reaper if this is process 1; elsewhere init adopts the orphans.

    `has_children`: the program that became this one in an upgrade has left children, which need it
    too. Call it in the main thread.
    """
    if os.getpid() != 1 and not has_children:
        return None
    adopted = OrphanReaper(loop)
    adopted.start()
    return adopted


def _zombies() -> set[_Zombie]:
    """Return the dead children of this process, without those that have a known waiter."""
    try:
        # One cheap system call answers the usual case: no dead children.
        if os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return set()
    except ChildProcessError:
        return set()
    known = spawner.pids()
    found = {
        _read(int(entry))
        for entry in os.listdir("/proc")
        if entry.isdecimal() and int(entry) not in known
    }
    return {zombie for zombie in found if zombie is not None}


def _read(pid: int) -> _Zombie | None:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # A program's name may contain blanks and parentheses. The other fields follow the last
            # one.
            fields = file.read().rpartition(b") ")[2].split()
    except OSError:
        return None  # The process has ended.
    is_ours = fields[0] == b"Z" and int(fields[1]) == os.getpid()
    return (pid, int(fields[19])) if is_ours else None
