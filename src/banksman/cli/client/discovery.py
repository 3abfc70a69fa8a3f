"""Find server addresses: of the user's server, with its token, and of the owner of a session.

`find`, `named` and `announced` read the flag, the settings and `server.json`, which the server
writes (`server/ops/discovery_file.py`). `OwnerServers` remembers which server of this machine owns
a session, and which ask to send again if that server dies. Nothing here sends a request:
`client.py` does. `locate.py` chooses between a server and an embedded host.
"""

from __future__ import annotations

import json
import os
import re
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from banksman import config, sockets
from banksman.errors import UsageError
from banksman.folders import state_folder

# The address of the server, and its token.
#
# The address is the first of: `--url`, `BANKSMAN_URL`, `url` in the settings file, and the
# announcement of a running server in the state folder. The announcement has a socket, by which the
# server recognises its user, or a URL.
#
# The token is the first of: `BANKSMAN_TOKEN`, the end of the URL (`/#token=…`), and the file in the
# state folder. It has no flag, because every user of the machine can read flags. It never appears
# in a message, because messages are copied. The token in the file belongs to this user's running
# server. It is sent only to the address and port that this server announced in `server.json`, and
# only while the server lives. Another port of this machine may belong to another user, and so may
# the same port after the server's death. A socket needs no token.

# Prefix of an address that is a Unix socket.
UNIX = "unix:"
_LOCAL = ("127.0.0.1", "::1", "localhost")
# Where to connect to a server that listens at all addresses of its family.
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# A token is one word. This bounds the read of a file that is something else.
_FILE_BYTES_MAX = 64 << 10
# A server on this machine accepts a connection much faster than this.
_LOOK_SECONDS_MAX = 1.0

_SESSION = re.compile(r"/v1/sessions/([^/]+)(/turns)?")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The parsed address of a server.

    `prefix`: the path before `/v1`, for a server behind a proxy. `socket`: the path of the Unix
    socket; None for a connection by host and port.
    """

    url: str
    is_secure: bool
    host: str
    port: int
    prefix: str
    token: str | None = field(repr=False)
    socket: str | None = None
    # CA certificates for https; None trusts those of the machine.
    cafile: str | None = None
    # The place that the token is from, for errors.
    token_from: str = field(default="", compare=False)

    @property
    def is_local(self) -> bool:
        return self.socket is not None or self.host in _LOCAL


def find(url: str | None = None) -> ServerAddress | None:
    """Return the current address of the server, or None if none is known. Does not connect.

    Raises `UsageError` if the given URL is invalid.
    """
    given: str | None = config.load(flags={"url": url or None}).value("url")
    return announced() if given is None else named(given)


def named(url: str, cafile: str | None = None) -> ServerAddress:
    """Return the address for a URL that the user gave. Raises `UsageError` if it is invalid.

    `cafile`: the CA certificates for https; None takes the file of the settings.
    """
    address, token = _without_token(url)
    if address.startswith(UNIX):
        return at_socket(address.removeprefix(UNIX))
    place = _parsed(address)
    if place.is_secure:
        place = replace(place, cafile=config.load(flags={"cafile": cafile}).value("cafile"))
    own = _announced_address(place)
    return _with_token(
        place if own is None else replace(place, host=own), token, is_ours=own is not None
    )


def announced() -> ServerAddress | None:
    """Return the address that this user's server announced. The server may have died since."""
    said = _said_by_server()
    path, url = said.get("socket"), said.get("url")
    if isinstance(path, str) and os.path.isabs(path):
        return at_socket(path)
    if not isinstance(url, str) or not url:
        return None
    address, token = _without_token(url)
    return _with_token(_parsed(address), token, is_ours=_is_living(said))


def announced_at(url: str) -> ServerAddress | None:
    """Return the announced address if the server announced this URL, else None."""
    return announced() if url and url == _said_by_server().get("url") else None


def at_socket(path: str) -> ServerAddress:
    """Return the address of a server at a Unix socket."""
    if not path or "\0" in path:
        raise UsageError(
            "cannot use this path of a socket: it is empty or contains NUL", hint=f"use {UNIX}/PATH"
        )
    path = os.path.abspath(path)
    return ServerAddress(
        f"{UNIX}{path}",
        is_secure=False,
        host="localhost",
        port=0,
        prefix="",
        token=None,
        socket=path,
    )


def is_there(place: ServerAddress) -> bool:
    """Return whether a process accepts connections at this address."""
    try:
        if place.socket is not None:
            sockets.connect(place.socket, _LOOK_SECONDS_MAX).close()
        else:
            socket.create_connection((place.host, place.port), _LOOK_SECONDS_MAX).close()
    except (OSError, UnicodeError):
        return False
    return True


def pid_of(place: ServerAddress) -> int | None:
    """Return the pid of the server at this address; None if it is unknown.

    The kernel knows the process behind a socket. An announced pid may be of another container.
    """
    path = place.socket
    if path is None and _announced_address(place) is not None:
        path = _said_by_server().get("socket")
    if path is None or sys.platform != "linux":
        return None
    try:
        with sockets.connect(path, _LOOK_SECONDS_MAX) as peer:
            return sockets.peer_pid(peer) or None
    except OSError:
        return None


def _said_by_server() -> dict[str, Any]:
    try:
        with (state_folder() / "server.json").open("rb") as file:
            said: Any = json.loads(file.read(_FILE_BYTES_MAX))
    except (OSError, ValueError):
        # No server was started here, there is no home folder, or a server is just writing the file.
        return {}
    return cast("dict[str, Any]", said) if isinstance(said, dict) else {}


def _announced_address(place: ServerAddress) -> str | None:
    """Return the host to connect to if this is the user's running server; None for another server.

    `localhost` is replaced by the address that the server listens at. It may resolve to two
    addresses, and at the other address the same port may belong to another user.
    """
    said = _said_by_server()
    try:
        own = _parsed(str(said.get("url")))
    except UsageError:
        return None
    host = _LOOPBACK_OF.get(own.host, own.host)
    is_same_host = place.host in (own.host, host) or (place.host == "localhost" and host in _LOCAL)
    is_same = is_same_host and (place.port, place.is_secure) == (own.port, own.is_secure)
    if not is_same or not _is_living(said):
        return None
    return host if place.host == "localhost" else place.host


def _is_living(said: Mapping[str, Any]) -> bool:
    """Return whether the announced server still has its address.

    Its socket is the proof, because a pid means nothing in another container.
    """
    path, pid = said.get("socket"), said.get("pid")
    if isinstance(path, str) and os.path.isabs(path):
        return sockets.is_alive(Path(path))
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        # The process is gone, or the pid was reused by another user.
        return False
    return True


def _with_token(place: ServerAddress, token: str, *, is_ours: bool) -> ServerAddress:
    found, origin = _token(token, is_ours=is_ours)
    return replace(place, token=found, token_from=origin)


def _without_token(url: str) -> tuple[str, str]:
    """Split the token from the end of a URL. Return the address and the token.

    Secrets are removed before any other code sees the address, so that no message can repeat them.
    A one-time code (`#code=…`) is for a browser and is not used.
    """
    address, _, token = url.partition("#code=")[0].partition("#token=")
    return address, token


def _parsed(url: str) -> ServerAddress:
    hint = "use a URL such as http://127.0.0.1:4380, or unix:PATH for a socket"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UsageError("cannot read the server's URL: it is not valid", hint=hint) from None
    if "@" in parts.netloc:
        # The URL is not repeated in the message, because it holds a secret.
        hint = "put the token in BANKSMAN_TOKEN"
        raise UsageError("cannot use the server's URL: it contains a user or a password", hint=hint)
    if (
        parts.scheme not in ("http", "https")
        or not host
        or not url.isascii()
        or not url.isprintable()
        or " " in url
    ):
        raise UsageError(f"cannot use {url!r}: it is not the URL of a server", hint=hint)
    if parts.fragment or parts.query:
        # The URL is not repeated in the message: the user may have put a secret there.
        hint = "remove the part that begins with ? or #"
        raise UsageError("cannot use the server's URL: it contains ? or #", hint=hint)
    is_secure = parts.scheme == "https"
    return ServerAddress(
        url=f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}",
        is_secure=is_secure,
        host=host,
        port=port or (443 if is_secure else 80),
        prefix=parts.path.rstrip("/"),
        token=None,
    )


def _token(in_url: str, *, is_ours: bool) -> tuple[str | None, str]:
    """Return the token and the place that it is from; None and an empty text without a token."""
    token, place = os.environ.get("BANKSMAN_TOKEN", "").strip(), "BANKSMAN_TOKEN"
    if not token:
        token, place = in_url.strip(), "the server's URL"
    if not token and is_ours:
        try:
            path = state_folder() / "token"
        except UsageError:
            return None, ""
        try:
            with path.open("rb") as file:
                token, place = (
                    file.read(_FILE_BYTES_MAX).decode("ascii", "replace").strip(),
                    str(path),
                )
        except FileNotFoundError:
            return None, ""
        except OSError as exc:
            raise UsageError(f"cannot read the token in {path}: {exc.strerror}") from exc
    if not token:
        return None, ""
    # Checked here, because the HTTP library would repeat an invalid token in its error.
    if not all("!" <= character <= "~" for character in token):
        hint = "use a token that is one word of visible ASCII"
        raise UsageError(
            f"cannot use the token in {place}: it contains other characters", hint=hint
        )
    return token, place


# Sessions that another process of this machine owns: where to send their requests instead.
#
# A server that does not own a session refuses with `NotOwner` and the owner's address. From then on
# the client sends all requests about this session to the owner, and follows its events there. The
# client therefore notices the owner's death as a lost connection. An ask that the owner had
# accepted is then in the log, but no host works on it. The client sends it again with the same key.
# The key makes it the same turn, and the server that receives it takes the session over.


class OwnerRequest(NamedTuple):
    """One HTTP request. `key`: the idempotency key; with it the request may be repeated."""

    method: str
    path: str
    query: Mapping[str, str | int | float | None] | None = None
    body: Mapping[str, Any] | None = None
    key: str | None = None

    @property
    def session(self) -> str | None:
        """The session in the path, or None."""
        found = _SESSION.match(self.path)
        return None if found is None else found[1]

    @property
    def is_ask(self) -> bool:
        """Whether this is an ask that may be repeated."""
        found = _SESSION.fullmatch(self.path)
        return (
            found is not None
            and found[2] is not None
            and self.method == "POST"
            and self.key is not None
        )


class OwnerServers:
    """Remember which server owns each session.

    Thread-safe: each step is one operation on a dictionary. A request that sees an outdated owner
    fails and is repeated.
    """

    def __init__(self) -> None:
        self._places: dict[str, ServerAddress] = {}
        # The last accepted ask of each session while its owner lives. When the owner dies, the ask
        # moves to `_orphans`.
        self._asks: dict[str, OwnerRequest] = {}
        self._orphans: dict[str, OwnerRequest] = {}

    def place(self, session: str | None) -> ServerAddress | None:
        """Return the owner of a session, or None if it is unknown."""
        return None if session is None else self._places.get(session)

    def remember(self, request: OwnerRequest, owner: ServerAddress) -> ServerAddress | None:
        """Remember the owner for later requests about the session, and return None.

        A request without a session in its path returns `owner`: only this request goes there.
        """
        if request.session is None:
            return owner
        self._places[request.session] = owner
        return None

    def note_asked(self, request: OwnerRequest, place: ServerAddress) -> None:
        """Record that the server at `place` accepted the request."""
        session = request.session
        if session is not None and request.is_ask and self._places.get(session) == place:
            self._asks[session] = request

    def note_gone(self, place: ServerAddress) -> None:
        """Forget every session whose owner was at this address, because it does not answer."""
        for session in [session for session, owner in list(self._places.items()) if owner == place]:
            self.forget(session)

    def forget(self, session: str | None) -> None:
        """Forget the owner of a session. Its last ask becomes an orphan."""
        if session is None:
            return
        self._places.pop(session, None)
        ask = self._asks.pop(session, None)
        if ask is not None:
            self._orphans[session] = ask

    def take_orphan(self, session: str | None) -> OwnerRequest | None:
        """Return the ask to send again, or None. A caller that fails to send it puts it back."""
        return None if session is None else self._orphans.pop(session, None)

    def put_back(self, orphan: OwnerRequest) -> None:
        """Keep an orphaned ask for the next attempt."""
        assert orphan.session is not None
        self._orphans[orphan.session] = orphan


def owner_of(title: str, ids: Mapping[str, Any], asked: ServerAddress) -> ServerAddress | None:
    """Return the address of the session's owner; None for another refusal or an unknown address.

    A host wrote the address into the store, so it may be forged, and the token must not be sent
    there. Therefore a socket is used without a token, and its peer must be this user or root. A URL
    is used only if it is the one that this user's server announced, whatever else calls itself
    localhost.
    """
    address = ids.get("address")
    if title != "NotOwner" or not isinstance(address, str) or not asked.is_local:
        return None
    if address.startswith(UNIX):
        try:
            owner = at_socket(address.removeprefix(UNIX))
        except UsageError:
            return None
    else:
        owner = announced_at(address)
    return owner if owner is not None and owner.url != asked.url else None
