"""Authentication of HTTP requests: Host, Origin and token checks, and the logins of browsers.

`AuthMiddleware` checks each request. `PageTokens` makes one-time codes and page tokens for
browsers, verifies them, and keeps the revoked ones in a file. The routes for login and logout are
in `api/admin_routes.py`. `token_file.py` loads the server's token, and `peer_identity.py`
recognises agents on the Unix socket.
"""

from __future__ import annotations

import base64
import fcntl
import functools
import hashlib
import hmac
import ipaddress
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from banksman import sockets
from banksman.errors import UsageError
from banksman.folders import state_folder
from banksman.server.access.named_tokens import NamedTokens
from banksman.server.access.roles import ADMIN, STRANGER, Caller
from banksman.server.access.trusted_proxy import TrustedProxies
from banksman.server.http import token_file as tokens
from banksman.server.http.connection import Connection
from banksman.server.http.peer_identity import PeerIdentity
from banksman.server.http.rate_limit import RateLimit
from banksman.server.problems import Problem

# One-time login codes, and the page tokens that browsers get for them.
#
# The page must not use a cookie. Browsers send a cookie to every port of a host, so a development
# server at another port of 127.0.0.1 would receive it and could use it here. The page keeps its
# token in `localStorage` instead, which belongs to one origin (scheme, host and port), and sends it
# as an `Authorization` header.
#
# A link carries a *code* and never the token: browsers write links to their history. A code is used
# once, within `CODE_SECONDS_MAX`, and is worthless afterwards. The browser gets a page token for
# it. For the code of a named caller it gets the named token instead: the page then acts in the name
# of that caller, within its limits, until that token is revoked.
#
# A *page token* is `bmp_ID.EXPIRES.MAC`. The MAC is keyed by the server's token and covers the
# port. So the server keeps no table, a page stays logged in when the server restarts, and a new
# server token invalidates every page token. Logging out revokes one page token: the server writes
# its id to a file beside its token, where the id stays until the page token would have expired.

CODE_SECONDS_MAX = 600.0
# Limit of unused codes. Only authenticated clients can request one.
CODES_MAX = 16
PAGE_TOKEN_SECONDS_MAX = 30 * 24 * 3600
# Limit of revoked page tokens that have not expired. Beyond it the oldest are forgotten first.
REVOKED_MAX = 2_000

_PAGE_TOKEN = re.compile(r"bmp_([A-Za-z0-9_-]{16})\.([0-9]{1,12})\.([A-Za-z0-9_-]{43})")

log = logging.getLogger("banksman.serve")

LOOPBACK_NAMES = frozenset(("127.0.0.1", "localhost", "::1"))
# A host name or an address, with an optional port.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
# Headers that only browsers and proxies send.
_NOT_LOCAL = (
    "origin",
    "cookie",
    "sec-fetch-site",
    "sec-fetch-mode",
    "forwarded",
    "x-forwarded-for",
    "via",
)
# Prefix of the client name of an unauthenticated client.
_STRANGER = "nobody "
_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="banksman"'}


def revoked_path() -> Path | None:
    """Return the file of revoked page tokens; None if the user has no home folder."""
    try:
        return state_folder() / "logged-out"
    except UsageError:
        return None


class LoginOfCode(NamedTuple):
    """Login by a valid code. `named`: the token of its maker; None: it needs a new page token."""

    named: str | None


class PageTokens:
    """Make one-time codes, exchange each for a page token, verify and revoke page tokens."""

    def __init__(self, token: str, port: int, revoked: Path | None = None) -> None:
        """Issue and verify codes and page tokens for the server at this port.

        `revoked`: the file of revoked ids. All servers of one user share it, and each reads the
        entries of the others.
        """
        self._key = token.encode("utf-8", "surrogatepass")
        self._port = port
        self._path = revoked
        self._revoked: set[str] = set()
        # Modification time and size of the file when it was read.
        self._stamp: tuple[int, int] | None = None
        # Maps the hash of a code to its deadline, and to the named token of its maker. The time of
        # a hash lookup reveals nothing about the codes.
        self._codes: dict[bytes, tuple[float, str | None]] = {}

    # -- codes ------------------------------------------------------------------------------------
    def make_code(self, named: str | None = None) -> str:
        """Make a new code. The oldest unused code is dropped if there are too many.

        `named`: the token of a named caller that asks for it.
        """
        code = secrets.token_urlsafe(16)
        while len(self._codes) >= CODES_MAX:
            del self._codes[next(iter(self._codes))]
        self._codes[_hash(code)] = time.monotonic() + CODE_SECONDS_MAX, named
        return code

    def take_code(self, code: str) -> LoginOfCode | None:
        """Return whose login this code is, and invalidate it; None if it is not valid."""
        deadline, named = self._codes.pop(_hash(code), (0.0, None))
        return LoginOfCode(named) if time.monotonic() <= deadline else None

    # -- page tokens ------------------------------------------------------------------------------
    def make(self) -> tuple[str, int]:
        """Make a new page token. Returns it with its expiry time (seconds since 1970)."""
        expires = int(time.time()) + PAGE_TOKEN_SECONDS_MAX
        id = secrets.token_urlsafe(12)
        return f"bmp_{id}.{expires}.{self._mac(id, expires)}", expires

    def is_valid(self, given: str) -> bool:
        """Whether this is a page token of this server that is neither expired nor revoked."""
        match = _PAGE_TOKEN.fullmatch(given)
        if match is None:
            return False
        id, expires, mac = match[1], int(match[2]), match[3]
        if not hmac.compare_digest(mac, self._mac(id, expires)):
            return False
        return time.time() <= expires and not self.is_revoked(given)

    def is_revoked(self, given: str) -> bool:
        match = _PAGE_TOKEN.fullmatch(given)
        return match is not None and match[1] in self._known_revoked()

    def revoke(self, given: str) -> None:
        """Refuse this page token from now on, and also after a restart."""
        assert self.is_valid(given), "only a valid page token can be revoked"
        id, expires, _mac = given.removeprefix("bmp_").split(".")
        self._known_revoked().add(id)
        if self._path is None:
            return
        try:
            _record(self._path, f"{id} {expires}")
        except OSError as exc:
            log.warning(
                "logout not recorded: the page token is valid again after a restart: %s",
                exc.strerror,
            )

    def _mac(self, id: str, expires: int) -> str:
        digest = hmac.digest(
            self._key, f"banksman page {self._port} {id} {expires}".encode(), "sha256"
        )
        return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()

    def _known_revoked(self) -> set[str]:
        if self._path is None:
            return self._revoked
        try:
            found = self._path.stat()
            stamp = found.st_mtime_ns, found.st_size
            if stamp != self._stamp:
                lines = self._path.read_text(encoding="ascii", errors="replace").splitlines()
                self._revoked |= {line.split(" ")[0] for line in lines}
                self._stamp = stamp
        except FileNotFoundError:
            pass
        except OSError as exc:
            log.warning(
                "cannot read the revoked page tokens: %s (path=%s)",
                exc.strerror,
                self._path,
            )
        return self._revoked


def _hash(code: str) -> bytes:
    return hashlib.sha256(code.encode("utf-8", "surrogatepass")).digest()


def _record(path: Path, line: str) -> None:
    """Append a line and drop the expired lines.

    A lock keeps other servers from writing at the same time.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "r+", encoding="ascii", errors="replace") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        lines = [kept for kept in file.read().splitlines() if not _is_expired(kept)][
            1 - REVOKED_MAX :
        ]
        file.seek(0)
        file.write("".join(f"{kept}\n" for kept in (*lines, line)))
        file.truncate()


def _is_expired(line: str) -> bool:
    expires = line.partition(" ")[2]
    return not expires.isdecimal() or int(expires) < time.time()


# Authentication. Every request passes these checks before anything else looks at it.
#
# The server listens on the loopback interface, which alone is no protection: every page in a
# browser can send requests to it. So three checks run in this order:
#
# 1. `Host` must be a name of this server. A page of evil.example whose name was pointed at
#    127.0.0.1 (DNS rebinding) sends `Host: evil.example`.
# 2. `Origin`, where a browser sends it, must be the address that the request went to. Another port
#    of this machine and `null` are refused, whatever token or cookie the request carries.
# 3. `Authorization` must carry a token, which is compared in constant time. It is the server's
#    token, or a page token that a browser got for a one-time code. A browser adds neither
#    automatically, so no other site and no other port can make it send one. Cookies are ignored,
#    because browsers send them to every port of this machine.
#
# A connection by the user's Unix socket (banksman/sockets.py) skips these checks: the kernel
# identifies its user, and no page can connect to it. Processes of agents are refused there
# (peer_identity.py).
#
# A proxy in front of that socket would give its own clients access. So requests with a header that
# only browsers and proxies add are refused on that socket.


class AuthMiddleware:
    """ASGI middleware that authenticates each request.

    `is_open`: whether a path needs no token. The Host and Origin checks apply to it all the same.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        token: str,
        pages: PageTokens,
        names: Collection[str],
        is_open: Callable[[str], bool],
        named: NamedTokens | None = None,
        rate_limit: RateLimit | None = None,
        proxies: TrustedProxies | None = None,
    ) -> None:
        self._app = app
        self._token = token
        self._names = LOOPBACK_NAMES | {plain(name) for name in names}
        self._is_open = is_open
        self._named = named or NamedTokens(None)
        self._proxies = proxies or TrustedProxies()
        self.pages = pages
        self.rate_limit = rate_limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            state = scope["state"]
            headers = Headers(scope=scope)
            client, caller = self._admit(scope["path"], headers, scope)
            state["client"], state["caller"] = client, caller
            # Open paths need small bodies only, so unauthenticated clients get stricter limits.
            state["is_admitted"] = not client.startswith(_STRANGER)
            state["connection"].is_admitted |= state["is_admitted"]
            self._limit(scope["path"], headers, scope)
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _limit(self, path: str, headers: Headers, scope: Scope) -> None:
        """Count a request against the limit of its token. Raises a Problem beyond it.

        Open paths do not count: a probe of the health must not fail because of other requests. The
        user of the server, at the Unix socket, has no token.
        """
        is_counted = not self._is_open(path) and not scope["state"]["connection"].is_local
        if self.rate_limit is not None and is_counted:
            self.rate_limit.take(_hash(bearer(headers)))

    def _admit(self, path: str, headers: Headers, scope: Scope) -> tuple[str, Caller]:
        """Return the client's name for counting, and its caller.

        Raises a Problem if the request is refused.
        """
        connection: Connection = scope["state"]["connection"]
        if connection.is_local:
            return self._admit_local(connection, headers), ADMIN
        host = self._check_host(headers)
        origins = headers.getlist("origin")
        # A proxy may terminate TLS: the page then has an https origin, and the request has not.
        if origins and origins not in ([f"{scope['scheme']}://{host}"], [f"https://{host}"]):
            raise Problem(
                403,
                "ForeignOrigin",
                "a page of another site sent this request",
                hint="use the page of this server, or a client program",
            )
        address = (scope.get("client") or ("",))[0]
        given = bearer(headers)
        if tokens.is_same(given, self._token):
            return f"token {address}", ADMIN
        if self.pages.is_valid(given):
            return f"page {address}", ADMIN
        if (caller := self._named.caller_of(given)) is not None:
            caller = self._proxies.caller(caller, address, headers)
            return f"named {caller.name}", caller
        if self._is_open(path):
            return f"{_STRANGER}{address}", STRANGER
        hint = (
            "send `Authorization: Bearer TOKEN`; "
            "the token is in the file banksman/token of the state folder of the server's user"
        )
        raise Problem(
            401, "NotLetIn", "the token is missing or wrong", hint=hint, headers=_CHALLENGE
        )

    @staticmethod
    def _admit_local(connection: Connection, headers: Headers) -> str:
        if not sockets.is_ours(connection.uid):
            hint = "use the URL of the server, with the token"
            raise Problem(
                403, "NotLetIn", "only the user of the server may use this socket", hint=hint
            )
        if connection.standing is PeerIdentity.AGENTS:
            hint = (
                "run it in a terminal that no agent has started: "
                "an agent must not answer its own questions"
            )
            raise Problem(
                403,
                "AgentNotLetIn",
                "this process belongs to an agent, or to a command of this server",
                hint=hint,
            )
        if connection.standing is PeerIdentity.NO_FDS:
            hint = "raise ulimit -n of the server"
            raise Problem(
                403,
                "NotLetIn",
                "cannot identify the client process: Too many open files",
                hint=hint,
            )
        if connection.standing is PeerIdentity.UNCLEAR:
            hint = "use the URL of the server, with the token"
            raise Problem(
                403,
                "NotLetIn",
                "cannot identify the client process: it is gone, or in another container",
                hint=hint,
            )
        if any(name in headers for name in _NOT_LOCAL):
            hint = "put the proxy in front of the server's URL, with the token"
            raise Problem(
                403, "ForeignOrigin", "this socket accepts neither browsers nor proxies", hint=hint
            )
        return f"user {connection.uid}"

    def _check_host(self, headers: Headers) -> str:
        hosts = headers.getlist("host")
        host = hosts[0].lower() if len(hosts) == 1 else ""
        match = _HOST.fullmatch(host)
        if match is None or plain(match[1]) not in self._names:
            hint = (
                "use 127.0.0.1 or localhost, or name the proxy's host in the settings (hosts = […])"
            )
            raise Problem(
                403, "ForeignHost", "the Host header does not name this server", hint=hint
            )
        return host

    def caller_of(self, token: str) -> Caller | None:
        """Return the holder of a named token; None if it is not valid."""
        return self._named.caller_of(token)

    def knows(self, token: str) -> bool:
        """Whether this is the server's token."""
        return tokens.is_same(token, self._token)


def bearer(headers: Headers) -> str:
    """Return the bearer token of a request; empty if it has none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


# Nearly all requests name the same host.
@functools.lru_cache(maxsize=64)
def plain(name: str) -> str:
    """Normalize a host name or an address for comparison."""
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return name.lower()
