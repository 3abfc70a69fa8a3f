"""A service manager that passes its listening sockets to a server: socket activation.

The sockets are open as long as the manager, whatever happens to the servers.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Sequence
from pathlib import Path

# Becomes the server, with the given fds as 3, 4, …
ACTIVATE = """
import os, sys

fds = [int(fd) for fd in sys.argv[1].split(",") if fd]
# First out of the way of the places where they must be.
for place, fd in enumerate(fds):
    os.dup2(fd, 100 + place)
    os.close(fd)
for place in range(len(fds)):
    os.dup2(100 + place, 3 + place)
    os.close(100 + place)
os.environ.update(LISTEN_FDS=str(len(fds)), LISTEN_PID=str(os.getpid()), LISTEN_FDNAMES=":".join("x" for _ in fds))
os.execv(sys.argv[2], sys.argv[2:])
"""


def tcp() -> socket.socket:
    listener = socket.create_server(("127.0.0.1", 0))
    listener.listen(64)
    return listener


def unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    path.chmod(0o600)
    listener.listen(64)
    return listener


def words(listeners: Sequence[socket.socket], argv: Sequence[str]) -> list[str]:
    """Return the command that starts `argv` with these sockets. Pass their fds to it (`pass_fds`)."""
    fds = ",".join(str(listener.fileno()) for listener in listeners)
    return [sys.executable, "-S", "-c", ACTIVATE, fds, *argv]
