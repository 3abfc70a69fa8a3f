"""Listening sockets that a service manager, or the version before an upgrade, passes to the server.

This is the socket activation of systemd. The sockets are the fds from 3 on: `LISTEN_FDS` is their
number, `LISTEN_PID` the process that they are for, and `LISTEN_FDNAMES` their names. They stay open
while one server exits and the next one starts. So the kernel queues the connections of that time
and refuses none.

The variables are removed from the environment, and the fds close at an exec: no agent and no
command gets them.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from banksman.errors import UsageError

FIRST_FD = 3
# A TCP and a Unix socket are useful. A higher number is a mistake.
FDS_MAX = 64
_NAMES = ("LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "LISTEN_PIDFDID")
# The name of each socket in an upgrade.
_UPGRADE = "banksman-upgrade"
_HINT = "pass one TCP socket and one Unix socket (ListenStream=) at most"


@dataclass(frozen=True, slots=True)
class PassedSockets:
    """The sockets that were passed. `port`: a TCP socket. `user`: a Unix socket.

    `is_upgrade`: another version passed them when it became this one.
    """

    port: socket.socket | None = None
    user: socket.socket | None = None
    is_upgrade: bool = False

    @property
    def user_path(self) -> Path | None:
        """Where clients find the Unix socket."""
        return None if self.user is None else Path(self.user.getsockname())

    def close(self) -> None:
        """Close this process's copies. The sockets stay open where they come from."""
        for passed in (self.port, self.user):
            if passed is not None:
                passed.close()


def take(environ: MutableMapping[str, str] | None = None) -> PassedSockets:
    """Take the sockets that the environment announces, and remove its variables.

    Raises `UsageError` for sockets that the server cannot use.
    """
    variables = os.environ if environ is None else environ
    count, pid, names, _ = (variables.pop(name, "") for name in _NAMES)
    # The variables may be left over from a parent process: then the fds are something else.
    if pid != str(os.getpid()) or not count:
        return PassedSockets()
    if not (count.isascii() and count.isdecimal()) or not int(count) <= FDS_MAX:
        raise UsageError(f"cannot use LISTEN_FDS={count!r:.20}: it is not a number", hint=_HINT)
    passed = [_opened(FIRST_FD + number) for number in range(int(count))]
    return replace(_sorted(passed), is_upgrade=_UPGRADE in names.split(":"))


def variables(count: int) -> dict[str, str]:
    """Return the variables that announce so many sockets to the program that this one becomes."""
    if count == 0:
        return {}
    names = ":".join(_UPGRADE for _ in range(count))
    return {"LISTEN_FDS": str(count), "LISTEN_PID": str(os.getpid()), "LISTEN_FDNAMES": names}


def _opened(fd: int) -> socket.socket:
    """Return the socket of a passed fd, which no child process inherits from now on."""
    try:
        os.set_inheritable(fd, False)
        passed = socket.socket(fileno=fd)
        is_listening = passed.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as exc:
        raise UsageError(f"cannot use the passed fd {fd}: {exc.strerror}", hint=_HINT) from exc
    if passed.type != socket.SOCK_STREAM or not is_listening:
        message = f"cannot use the passed fd {fd}: it is no listening stream socket"
        raise UsageError(message, hint="use ListenStream= and Accept=no")
    passed.setblocking(False)
    return passed


def _sorted(passed: Sequence[socket.socket]) -> PassedSockets:
    ports = [each for each in passed if each.family in (socket.AF_INET, socket.AF_INET6)]
    users = [each for each in passed if each.family == socket.AF_UNIX]
    if len(ports) > 1 or len(users) > 1 or len(ports) + len(users) < len(passed):
        raise UsageError(f"cannot use {len(passed)} passed sockets", hint=_HINT)
    for user in users:
        name = user.getsockname()
        # The user's clients look for a file that only this user can open.
        if not isinstance(name, str) or not name.startswith("/"):
            message = f"cannot use the passed Unix socket {name!r:.60}: it has no path"
            raise UsageError(message, hint="use ListenStream=%t/banksman.sock")
    return PassedSockets(ports[0] if ports else None, users[0] if users else None)
