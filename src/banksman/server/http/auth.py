"""Who may come in. Every request passes here before anything of it is looked at.

The server listens on the loopback, and that is no protection by itself: every page that a browser shows can send
requests there. So there are three questions, in this order.

Is the request meant for us? `Host` must be a name of ours. A page of evil.example whose name was made to point to
127.0.0.1 (rebinding) sends `Host: evil.example`.

Is it sent by us, if a page sent it? `Origin`, where a browser sends one, must be the very address that the request went
to: not another port of this machine, and not `null`. Whatever else it carries, cookie or token.

Who is it? A token in `Authorization`, compared in constant time: the server's own, or a page token, which a browser got
for a one-time code (page_tokens.py). A browser adds neither by itself, so no other site and no other port can make it
send one. Cookies are never looked at: browsers send them to every port of this machine.

Who comes by the socket of our own user (banksman/sockets.py) is asked none of these: the kernel says who it is, and no
page can come by there. Processes of agents are refused (peer_identity.py).

A proxy could come by there, if somebody put one before it, and would bring in whoever stands before the proxy. So
whatever a browser or a proxy adds to a request is refused there.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from banksman import sockets
from banksman.server.http import token_file as tokens
from banksman.server.http.connection import Connection
from banksman.server.http.page_tokens import PageTokens
from banksman.server.http.peer_identity import Standing
from banksman.server.problems import Problem

LOOPBACK_NAMES = frozenset(("127.0.0.1", "localhost", "::1"))
# A name or an address, and perhaps a port.
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
# Only browsers and proxies say these.
_NOT_LOCAL = ("origin", "cookie", "sec-fetch-site", "sec-fetch-mode", "forwarded", "x-forwarded-for", "via")

# How clients are counted that have shown no token.
_STRANGER = "nobody "


class Door:
    """In front of everything. `is_open`: which paths are shown to everybody who asks for them by our name."""

    def __init__(
        self, app: ASGIApp, *, token: str, pages: PageTokens, names: Collection[str], is_open: Callable[[str], bool]
    ) -> None:
        self._app = app
        self._token = token
        self._names = LOOPBACK_NAMES | {plain(name) for name in names}
        self._is_open = is_open
        self.pages = pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            state = scope["state"]
            state["client"] = client = self._admit(scope["path"], Headers(scope=scope), scope)
            # What is open to everybody is little, and so is what may be sent to it.
            state["is_admitted"] = not client.startswith(_STRANGER)
            state["connection"].is_admitted |= state["is_admitted"]
        except Problem as problem:
            await problem.response()(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _admit(self, path: str, headers: Headers, scope: Scope) -> str:
        """Who it is, for counting; a Problem if it is not let in."""
        connection: Connection = scope["state"]["connection"]
        if connection.is_local:
            return self._admit_local(connection, headers)
        host = self._check_host(headers)
        origins = headers.getlist("origin")
        # A proxy may have taken the TLS off: the page is then at https, and the request is not.
        if origins and origins not in ([f"{scope['scheme']}://{host}"], [f"https://{host}"]):
            raise Problem(
                403, "ForeignOrigin", "a page of another site has sent this", hint="use a program, or our page"
            )
        address = (scope.get("client") or ("",))[0]
        given = bearer(headers)
        if tokens.is_same(given, self._token):
            return f"token {address}"
        if self.pages.is_valid(given):
            return f"page {address}"
        if self._is_open(path):
            return f"{_STRANGER}{address}"
        hint = "send `Authorization: Bearer TOKEN`; it is in the file banksman/token of the state folder of its user"
        raise Problem(401, "NotLetIn", "there is no token, or not the right one", hint=hint, headers=_CHALLENGE)

    @staticmethod
    def _admit_local(connection: Connection, headers: Headers) -> str:
        if not sockets.is_ours(connection.uid):
            hint = "ask by its URL, with the token"
            raise Problem(403, "NotLetIn", "this socket is for the user of the server alone", hint=hint)
        if connection.standing is Standing.AGENTS:
            hint = "run it yourself, in a terminal of your own: an agent must not answer its own questions"
            raise Problem(
                403, "AgentNotLetIn", "this process belongs to an agent, or to a command of this server", hint=hint
            )
        if connection.standing is Standing.UNCLEAR:
            hint = "ask by its URL, with the token"
            raise Problem(
                403, "NotLetIn", "cannot tell which process this is: it is gone, or in another container", hint=hint
            )
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

    def knows(self, token: str) -> bool:
        return tokens.is_same(token, self._token)


def bearer(headers: Headers) -> str:
    """The token that a request carries; empty: none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def plain(name: str) -> str:
    """A host's name or address, written in the one way in which it is compared."""
    try:
        return str(ipaddress.ip_address(name.strip("[]")))
    except ValueError:
        return name.lower()


_CHALLENGE = {"WWW-Authenticate": 'Bearer realm="banksman"'}
