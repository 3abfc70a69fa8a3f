"""TLS of the listening port: load the certificate, and load it again when its files change.

`ServerCertificate.context` is called for each new connection. It looks at the two files and loads
them again if one of them has changed, so a renewed certificate needs no restart, no signal and no
timer. Connections that are open keep the certificate of their handshake.

A tool that renews a certificate writes two files, one after the other. In between, the key does not
belong to the certificate. A pair that cannot be loaded therefore changes nothing: new connections
get the certificate that was loaded last, and the log says why, once for each reason. Files that
cannot be read are tried again with each connection: the cause may be elsewhere, for example no free
file descriptor.
"""

from __future__ import annotations

import logging
import os
import ssl
from pathlib import Path

from banksman.errors import UsageError
from banksman.server.server_settings import ServerSettings

log = logging.getLogger("banksman.serve")

_HINT = "pass the certificate chain and its unencrypted key as PEM files"
# Times of modification and change, inode and size of a file; None if it does not exist. A new owner
# or mode moves the time of change only.
_Stamp = tuple[int, int, int, int] | None


class ServerCertificate:
    """The certificate of a server and its key. Belongs to the event loop."""

    def __init__(self, cert: str, key: str) -> None:
        """Load the files. Raises `UsageError` if they cannot be used."""
        self._cert, self._key = (Path(os.path.expanduser(path)) for path in (cert, key))
        # The stamps first: a change during the load then counts as a later change.
        self._stamps: tuple[_Stamp, _Stamp] = self._look()
        self._context = self._load()
        # The last failure that was logged; None since the last load.
        self._failure: str | None = None

    def __repr__(self) -> str:
        return f"<ServerCertificate {self._cert}>"

    def context(self) -> ssl.SSLContext:
        """Return the context for a new connection, with the newest certificate that can be used."""
        stamps = self._look()
        if stamps == self._stamps:
            return self._context
        try:
            self._context = self._load()
        except UsageError as exc:
            if isinstance(exc.__cause__, ssl.SSLError):
                self._stamps = stamps
            if exc.args[0] != self._failure:
                self._failure = exc.args[0]
                log.warning("certificate not reloaded, the previous one stays: %s", self._failure)
        else:
            self._stamps = stamps
            self._failure = None
            log.info("certificate reloaded (path=%s)", self._cert)
        return self._context

    def _look(self) -> tuple[_Stamp, _Stamp]:
        return _stamp(self._cert), _stamp(self._key)

    def _load(self) -> ssl.SSLContext:
        # A new context for each load: a failed load would leave half of the pair in an old one.
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.set_alpn_protocols(["http/1.1"])
        for path in (self._cert, self._key):
            try:
                path.open("rb").close()
            except OSError as exc:
                raise UsageError(f"cannot read {path}: {exc.strerror}", hint=_HINT) from exc
        is_encrypted = False

        def no_password() -> str:
            nonlocal is_encrypted
            is_encrypted = True
            return ""

        try:
            # Without a password OpenSSL would ask for one at the terminal.
            context.load_cert_chain(self._cert, self._key, password=no_password)
        except ssl.SSLError as exc:
            reason = "the key is encrypted" if is_encrypted else _reason(exc)
            message = f"cannot use {self._cert} with the key {self._key}: {reason}"
            raise UsageError(message, hint=_HINT) from exc
        except OSError as exc:
            # A file that was removed since it was opened above.
            message = f"cannot read {self._cert} and {self._key}: {exc.strerror}"
            raise UsageError(message, hint=_HINT) from exc
        return context


def of(settings: ServerSettings) -> ServerCertificate | None:
    """Load the certificate of the settings; None if the server speaks plain HTTP.

    Raises `UsageError` if the files cannot be used.
    """
    if settings.tls_cert is None or settings.tls_key is None:
        return None
    return ServerCertificate(settings.tls_cert, settings.tls_key)


def _stamp(path: Path) -> _Stamp:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_ctime_ns, found.st_ino, found.st_size


def _reason(error: ssl.SSLError) -> str:
    # typeshed calls it a string; OpenSSL gives none for a file that is no PEM file.
    reason: str | None = error.reason
    if reason == "KEY_VALUES_MISMATCH":
        return "the key does not belong to the certificate"
    if not reason or reason in ("NO_START_LINE", "BAD_BASE64_DECODE"):
        return "they are no PEM files of a certificate and a key"
    return reason.replace("_", " ").lower()
