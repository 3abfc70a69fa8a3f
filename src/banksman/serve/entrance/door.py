"""Who may come in. Every request passes here before anything of it is looked at.

The server listens on the loopback, and that is no protection by itself: every page that a browser shows can send
requests there. So there are three questions, in this order.

Is the request meant for us? `Host` must be a name of ours. A page of evil.example whose name was made to point to
127.0.0.1 (rebinding) sends `Host: evil.example`.

Is it sent by us, if a page sent it? `Origin`, where a browser sends one, must be the very address that the request went
to: not another port of this machine, and not `null`. Whatever else it carries, cookie or token.

Who is it? A token in `Authorization`, compared in constant time, or the cookie that `/v1/login` gives for it. A
browser adds a cookie by itself, so with a cookie more is asked: what changes something must say its origin, and
what only reads must not say that another site began it.

Who comes by the socket of our own user (sockets.py) is asked none of these: the kernel says who it is, and no page can
come by there. A proxy could, if somebody put one before it, and would bring in whoever stands before the proxy. So
whatever a browser or a proxy adds to a request is refused there.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.datastructures import Headers
from starlette.requests import cookie_parser
from starlette.types import ASGIApp, Receive, Scope, Send

from banksman import sockets
from banksman.serve.entrance import token as tokens
from banksman.serve.entrance.wire import Connection
from banksman.serve.problems import Problem

LOOPBACK_NAMES = frozenset(("127.0.0.1", "localhost", "::1"))
# A name or an address, and perhaps a port.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
# Only browsers and proxies say these.
_NOT_LOCAL = ("origin", "cookie", "sec-fetch-site", "sec-fetch-mode", "forwarded", "x-forwarded-for", "via")
COOKIE_SECONDS = 30 * 24 * 3600


class Door:
    """In front of everything. `is_open`: which paths are shown to everybody who asks for them by our name."""

    def __init__(
        self, app: ASGIApp, *, token: str, port: int, names: Collection[str], is_open: Callable[[str], bool]
    ) -> None:
        self._app = app
        self._token = token
        self._names = LOOPBACK_NAMES | {plain(name) for name in names}
        self._is_open = is_open
        # Cookies do not know ports: two servers of one machine must not take each other's away.
        self.cookie_name = f"banksman-{port}"
        self._cookie = tokens.cookie_of(token, port)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            scope["state"]["client"] = self._admit(scope["method"], scope["path"], Headers(scope=scope), scope)
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admit(self, method: str, path: str, headers: Headers, scope: Scope) -> str:
        """Who it is, for counting; a Problem if it is not let in."""
        connection: Connection = scope["state"]["connection"]
        if connection.is_local:
            return self._admit_local(connection, headers)
        host = self._check_host(headers)
        origins = headers.getlist("origin")
        # A proxy may have taken the TLS off: the page is then at https, and the request is not.
        is_ours = origins in ([f"{scope['scheme']}://{host}"], [f"https://{host}"])
        if origins and not is_ours:
            raise Problem(
                403, "ForeignOrigin", "a page of another site has sent this", hint="use a program, or our page"
            )
        address = (scope.get("client") or ("",))[0]
        if self._has_token(headers):
            return f"token {address}"
        if self._has_cookie(headers):
            self._check_page(method, headers, is_ours=is_ours)
            return f"cookie {address}"
        if self._is_open(path):
            return f"nobody {address}"
        hint = "send `Authorization: Bearer TOKEN`; it is in the file banksman/token of the state folder of its user"
        raise Problem(401, "NotLetIn", "there is no token, or not the right one", hint=hint, headers=_CHALLENGE)

    @staticmethod
    def _admit_local(connection: Connection, headers: Headers) -> str:
        if not sockets.is_ours(connection.uid):
            hint = "ask by its URL, with the token"
            raise Problem(403, "NotLetIn", "this socket is for the user of the server alone", hint=hint)
        if any(name in headers for name in _NOT_LOCAL):
            hint = "a proxy is put before the server's URL, with the token"
            raise Problem(403, "ForeignOrigin", "neither browsers nor proxies come in by this socket", hint=hint)
        return f"user {connection.uid}"

    def _check_host(self, headers: Headers) -> str:
        hosts = headers.getlist("host")
        host = hosts[0].lower() if len(hosts) == 1 else ""
        match = _HOST.fullmatch(host)
        if match is None or plain(match[1]) not in self._names:
            hint = "use 127.0.0.1 or localhost, or name the proxy's host in the settings (hosts = […])"
            raise Problem(403, "ForeignHost", "this server is not known by that name", hint=hint)
        return host

    def _has_token(self, headers: Headers) -> bool:
        scheme, _, given = headers.get("authorization", "").partition(" ")
        return scheme.lower() == "bearer" and tokens.is_same(given.strip(), self._token)

    def knows(self, token: str) -> bool:
        return tokens.is_same(token, self._token)

    def _has_cookie(self, headers: Headers) -> bool:
        # A browser sends what every port of this machine has set, however odd: theirs must not hide ours.
        cookie = cookie_parser("; ".join(headers.getlist("cookie"))).get(self.cookie_name)
        return cookie is not None and tokens.is_same(cookie, self._cookie)

    @staticmethod
    def _check_page(method: str, headers: Headers, *, is_ours: bool) -> None:
        # A HEAD changes as little as a GET, and comes from a browser in the same way.
        if method in ("GET", "HEAD"):
            # A browser sends no origin with a GET of our own page, but says who began it.
            if headers.get("sec-fetch-site", "same-origin") in ("cross-site", "same-site"):
                raise Problem(
                    403, "ForeignOrigin", "a page of another site has begun this", hint="open our page itself"
                )
        elif not is_ours:
            hint = "with a cookie, what changes something must carry our own Origin; programs use the token"
            raise Problem(403, "NoOrigin", "there is no Origin", hint=hint)

    # -- logging in --------------------------------------------------------------------------------------------------
    def cookie(self) -> Mapping[str, Any]:
        """What a browser gets for the token: for `Response.set_cookie`."""
        return {
            "key": self.cookie_name,
            "value": self._cookie,
            "max_age": COOKIE_SECONDS,
            "path": "/",
            "httponly": True,
            "samesite": "strict",
        }


def plain(name: str) -> str:
    """A host's name or address, written in the one way in which it is compared."""
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return name.lower()


_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="banksman"'}
