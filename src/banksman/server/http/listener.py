"""Bind the address of the server, or use a listening socket that was passed to it.

This module imports nothing of HTTP: the address must be free before anything else happens.
"""

from __future__ import annotations

import errno
import socket

from banksman import sockets
from banksman.errors import MachineError, UsageError
from banksman.server.server_settings import ServerSettings, is_loopback


def bind(settings: ServerSettings) -> socket.socket:
    """Bind and listen first, so that an address in use is an error without cost."""
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.bind, settings.port))
        # Listen now: of two servers that start at the same time, the second one gets its error only
        # from `listen`.
        listener.listen(sockets.BACKLOG)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        where = f"{settings.bind}:{settings.port}"
        if exc.errno == errno.EADDRINUSE:
            hint = "stop the server that uses it, or pass another --port (0: any free port)"
            raise MachineError(
                f"cannot listen at {where}: the address is in use", number=exc.errno, hint=hint
            ) from exc
        if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS):
            raise MachineError(
                f"cannot listen at {where}: {exc.strerror}", number=exc.errno
            ) from exc
        raise UsageError(
            f"cannot listen at {where}: {exc.strerror or exc}", hint="pass another --bind or --port"
        ) from exc
    return listener


def use(passed: socket.socket, settings: ServerSettings) -> socket.socket:
    """Return a listener that was passed to the server, in place of one that it binds.

    Raises `UsageError` if other machines can reach its address and the settings forbid that.
    """
    address = str(passed.getsockname()[0])
    if not settings.allow_remote and not is_loopback(address):
        message = f"cannot listen at {address}: other machines can reach the passed socket"
        hint = (
            "pass a socket at 127.0.0.1, "
            "or set allow_remote = true, with tls_cert and tls_key or with TLS in front of it"
        )
        raise UsageError(message, hint=hint)
    return passed


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def url_of(listener: socket.socket, *, is_secure: bool = False) -> str:
    host, port, *_ = listener.getsockname()
    scheme = "https" if is_secure else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"
