"""Find the server of this user: its address, its token, and the server that owns a session."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

from banksman import config, sockets
from banksman.errors import UsageError
from banksman.folders import state_folder

# Where the server is, and the token that it asks for.
#
# The place: `--url`, else `BANKSMAN_URL`, else `url` of the settings file, else what a running server has left in the
# state folder: its socket, by which its own user is let in as such, or its URL. Else there is none.
#
# The token: `BANKSMAN_TOKEN`, else what the URL ends with (`/#token=…`), else the file in the state folder. It has no
# flag, because everybody can read those, and it never gets into a message, because those are copied about. The token in
# the file belongs to the server that this user has running. It is sent only to the address and port that this server
# has announced in `server.json`, and only while that server lives: another port of this machine, and the same port
# after the server's death, may be another user's. A socket needs no token.

# What begins the address of one that is asked by a socket.
UNIX = "unix:"
_LOCAL = ("127.0.0.1", "::1", "localhost")
# Where a server can be asked that listens at all addresses of its family.
_LOOPBACK_OF = {"0.0.0.0": "127.0.0.1", "::": "::1"}
# A token is a word; the file of one holds nothing that would take longer to read.
_FILE_BYTES_MAX = 64 << 10
# On this machine one that is there answers at once.
_LOOK_SECONDS_MAX = 1.0

_SESSION = re.compile(r"/v1/sessions/([^/]+)(/turns)?")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server's address, taken apart. `prefix`: what is before `/v1`, for one behind a proxy. `socket`: the path of
    the socket by which it is asked; None: by host and port."""

    url: str
    is_secure: bool
    host: str
    port: int
    prefix: str
    token: str | None = field(repr=False)
    socket: str | None = None

    @property
    def is_local(self) -> bool:
        return self.socket is not None or self.host in _LOCAL


def find(url: str | None = None) -> ServerAddress | None:
    """The server to talk to, as it is known at this moment; whether it is there is another matter. None: there is none.
    Raises `UsageError` if what was given cannot be one."""
    given: str | None = config.load(flags={"url": url or None}).value("url")
    return announced() if given is None else named(given)


def named(url: str) -> ServerAddress:
    """The server that somebody has named. `UsageError`: this can be none."""
    address, token = _without_token(url)
    if address.startswith(UNIX):
        return at_socket(address.removeprefix(UNIX))
    place = _parsed(address)
    own = _announced_address(place)
    return _with_token(place if own is None else replace(place, host=own), token, is_ours=own is not None)


def announced() -> ServerAddress | None:
    """The one that was started here by this user, and has said so. It may be gone since."""
    said = _said_by_server()
    path, url = said.get("socket"), said.get("url")
    if isinstance(path, str) and os.path.isabs(path):
        return at_socket(path)
    if not isinstance(url, str) or not url:
        return None
    address, token = _without_token(url)
    return _with_token(_parsed(address), token, is_ours=_is_living(said))


def announced_at(url: str) -> ServerAddress | None:
    """The same, if this is where it says that it is."""
    return announced() if url and url == _said_by_server().get("url") else None


def at_socket(path: str) -> ServerAddress:
    if not path or "\0" in path:
        raise UsageError("this is no path of a socket", hint=f"{UNIX}/PATH")
    path = os.path.abspath(path)
    return ServerAddress(f"{UNIX}{path}", is_secure=False, host="localhost", port=0, prefix="", token=None, socket=path)


def is_there(place: ServerAddress) -> bool:
    """Whether somebody takes connections there."""
    try:
        if place.socket is not None:
            sockets.connect(place.socket, _LOOK_SECONDS_MAX).close()
        else:
            socket.create_connection((place.host, place.port), _LOOK_SECONDS_MAX).close()
    except (OSError, UnicodeError):
        return False
    return True


def _said_by_server() -> dict[str, Any]:
    try:
        with (state_folder() / "server.json").open("rb") as file:
            said: Any = json.loads(file.read(_FILE_BYTES_MAX))
    except (OSError, ValueError):
        return {}  # None has been started here, or there is no home; or it is just being written.
    return cast("dict[str, Any]", said) if isinstance(said, dict) else {}


def _announced_address(place: ServerAddress) -> str | None:
    """The host to connect to, if this place is the server that this user has running; None: it is another.

    `localhost` is replaced by the address that the server listens at. It may resolve to two addresses, and at the other
    one the same port may be another user's.
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
    """Whether the server that announced itself still has its address. Its socket answers for it: a pid means nothing in
    another container."""
    path, pid = said.get("socket"), said.get("pid")
    if isinstance(path, str) and os.path.isabs(path):
        return sockets.is_alive(Path(path))
    if not isinstance(pid, int) or pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False  # Gone; or another user's, with a number that was ours.
    return True


def _with_token(place: ServerAddress, token: str, *, is_ours: bool) -> ServerAddress:
    return replace(place, token=_token(token, is_ours=is_ours))


def _without_token(url: str) -> tuple[str, str]:
    """The address, and the token that it ends with. Secrets are cut off before anything else looks at the address, so
    that nothing repeats them. A one-time code (`#code=…`) is for a browser, and stays unused."""
    address, _, token = url.partition("#code=")[0].partition("#token=")
    return address, token


def _parsed(url: str) -> ServerAddress:
    hint = "it looks like http://127.0.0.1:4380, or unix:PATH for a socket"
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        raise UsageError("the server's URL cannot be read", hint=hint) from None
    if "@" in parts.netloc:
        # Not repeated: what stands there is a secret.
        raise UsageError("a URL with a user or a password in it is not taken", hint="put the token in BANKSMAN_TOKEN")
    if parts.scheme not in ("http", "https") or not host or not url.isascii() or not url.isprintable() or " " in url:
        raise UsageError(f"{url!r} is not the URL of a server", hint=hint)
    if parts.fragment or parts.query:
        # Not repeated: whoever wrote it may have put a secret there.
        raise UsageError("the server's URL has a ? or a # in it", hint="leave away what comes after the port")
    is_secure = parts.scheme == "https"
    return ServerAddress(
        url=f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}",
        is_secure=is_secure,
        host=host,
        port=port or (443 if is_secure else 80),
        prefix=parts.path.rstrip("/"),
        token=None,
    )


def _token(in_url: str, *, is_ours: bool) -> str | None:
    token, place = os.environ.get("BANKSMAN_TOKEN", "").strip(), "BANKSMAN_TOKEN"
    if not token:
        token, place = in_url.strip(), "the server's URL"
    if not token and is_ours:
        try:
            path = state_folder() / "token"
        except UsageError:
            return None
        try:
            with path.open("rb") as file:
                token, place = file.read(_FILE_BYTES_MAX).decode("ascii", "replace").strip(), str(path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise UsageError(f"the token in {path} cannot be read: {exc.strerror}") from exc
    if not token:
        return None
    # Checked here, because whoever makes a header of it would repeat it when he complains.
    if not all("!" <= character <= "~" for character in token):
        raise UsageError(f"what is in {place} is no token", hint="a token is one word of visible ASCII")
    return token


# Sessions that another process of this machine has: who is asked about them instead, and what if it dies.
#
# Whoever is refused because another has the session (`NotOwner`) is told where that one is. From there on it is asked
# about this session, and followed, too: so its death is heard of, as any other loss of a connection. What it had
# accepted from us is then in the log, and in nobody's hands. It is asked for once more, with the same key: that makes
# it the same turn, and whoever is asked now takes the session over.


class OwnerRequest(NamedTuple):
    """`key`: it may be repeated."""

    method: str
    path: str
    query: Mapping[str, str | int | float | None] | None = None
    body: Mapping[str, Any] | None = None
    key: str | None = None

    @property
    def session(self) -> str | None:
        """The one that it is about, as its path has it."""
        found = _SESSION.match(self.path)
        return None if found is None else found[1]

    @property
    def is_ask(self) -> bool:
        found = _SESSION.fullmatch(self.path)
        return found is not None and found[2] is not None and self.method == "POST" and self.key is not None


class OwnerServers:
    """Any thread may use it: each step is one of a dictionary's, and a request that finds out too late is repeated."""

    def __init__(self) -> None:
        self._places: dict[str, ServerAddress] = {}
        # The last thing that each was asked to do, as long as it is there; then it is nobody's.
        self._asks: dict[str, OwnerRequest] = {}
        self._orphans: dict[str, OwnerRequest] = {}

    def place(self, session: str | None) -> ServerAddress | None:
        return None if session is None else self._places.get(session)

    def remember(self, request: OwnerRequest, owner: ServerAddress) -> ServerAddress | None:
        """None: from here on. Else there is no session to remember it by, and this request alone goes there."""
        if request.session is None:
            return owner
        self._places[request.session] = owner
        return None

    def note_asked(self, request: OwnerRequest, place: ServerAddress) -> None:
        """It was accepted there."""
        session = request.session
        if session is not None and request.is_ask and self._places.get(session) == place:
            self._asks[session] = request

    def note_gone(self, place: ServerAddress) -> None:
        """Nobody answers there."""
        for session in [session for session, owner in list(self._places.items()) if owner == place]:
            self.forget(session)

    def forget(self, session: str | None) -> None:
        if session is None:
            return
        self._places.pop(session, None)
        ask = self._asks.pop(session, None)
        if ask is not None:
            self._orphans[session] = ask

    def take_orphan(self, session: str | None) -> OwnerRequest | None:
        """What is to be asked for once more. Whoever could not puts it back."""
        return None if session is None else self._orphans.pop(session, None)

    def put_back(self, orphan: OwnerRequest) -> None:
        assert orphan.session is not None
        self._orphans[orphan.session] = orphan


def owner_of(title: str, ids: Mapping[str, Any], asked: ServerAddress) -> ServerAddress | None:
    """Where the one is that has the session; None: this is no such refusal, or nothing says where.

    The address is what some host has written into the store, and may be anybody's. So nobody is sent our token there: a
    socket is asked whose it is, and of servers only the one that this user has started and that has said so is ours,
    whatever else calls itself localhost."""
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
