"""What systemd is told, in its own protocol: a datagram of `NAME=value` lines to the socket that it names to us.

Without that socket nothing is told, and nothing ever raises: a server must not fail because nobody listens. The
variables are taken out of the environment, so that no child speaks in our name.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

# A manager that is behind takes what we say by and by. That we are ready is worth waiting for, since it kills those of
# whom it does not hear; a heartbeat is not, for the next one comes.
SEND_SECONDS_MAX = 1.0
STATUS_CHARACTERS_MAX = 500

log = logging.getLogger("banksman")


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
