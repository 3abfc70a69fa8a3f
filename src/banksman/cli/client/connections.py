"""Connections of the CLI to a server: by port, by port with TLS, or by Unix socket."""

from __future__ import annotations

import http.client
import ssl

from banksman import sockets
from banksman.cli.client.discovery import ServerAddress
from banksman.errors import UsageError

CONNECT_SECONDS_MAX = 10.0


class _BySocket(http.client.HTTPConnection):
    """HTTP connection over a Unix socket. The `Host` header is localhost."""

    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=CONNECT_SECONDS_MAX)
        self._path = path

    def connect(self) -> None:
        self.sock = sockets.connect(self._path, CONNECT_SECONDS_MAX)


def connection_to(place: ServerAddress) -> http.client.HTTPConnection:
    """Return an unconnected connection. Raises `UsageError` for an unusable CA file."""
    if place.socket is not None:
        return _BySocket(place.socket)
    if not place.is_secure:
        return http.client.HTTPConnection(place.host, place.port, timeout=CONNECT_SECONDS_MAX)
    try:
        context = ssl.create_default_context(cafile=place.cafile)
    except OSError as exc:  # ssl.SSLError is one: a file without a certificate.
        reason = "it has no PEM certificate" if isinstance(exc, ssl.SSLError) else exc.strerror
        hint = "pass the PEM file of the CA with --cafile or BANKSMAN_CAFILE"
        message = f"cannot read the CA certificates in {place.cafile}: {reason}"
        raise UsageError(message, hint=hint) from exc
    return http.client.HTTPSConnection(
        place.host, place.port, timeout=CONNECT_SECONDS_MAX, context=context
    )
