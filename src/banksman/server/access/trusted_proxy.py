"""Users that a trusted proxy names in `X-Forwarded-User`.

A proxy that logs people in (oauth2-proxy, Caddy) has a named token. The settings name this token
together with the address that the proxy connects from. Only a request with both is from the proxy,
and then its header names the caller. The caller has the role and the limits of the proxy's token.
From any other client the header is ignored, as anyone can send it.

Every request of the proxy must name a user. Otherwise all people whom the proxy has forgotten to
log in would be one caller.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from dataclasses import replace

from starlette.datastructures import Headers

from banksman.server.access.named_tokens import proxy_of
from banksman.server.access.roles import Caller
from banksman.server.problems import Problem

HEADER = "X-Forwarded-User"
# Names of other systems: an address of mail, for example. Not with braces or parentheses: where a
# proxy has no user, some send the name of their variable, and Apache sends "(null)". Not "-": it
# stands for no name.
_USER = re.compile(r"(?!-\Z)[\x21-\x27\x2a-\x7a\x7c\x7e]{1,64}")


class TrustedProxies:
    """The proxies that may name their users."""

    def __init__(self, entries: Iterable[str] = ()) -> None:
        """`entries`: the names of tokens with addresses, each as NAME@ADDRESS."""
        self._proxies = frozenset(map(proxy_of, entries))

    def caller(self, caller: Caller, address: str, headers: Headers) -> Caller:
        """Return the user that the proxy names, or `caller` if the request is from no proxy.

        Raises a Problem if the proxy names no user, or several, or its own token.
        """
        if not self._proxies or (caller.name, _plain(address)) not in self._proxies:
            return caller
        users = headers.getlist(HEADER)
        if len(users) != 1 or _USER.fullmatch(users[0]) is None:
            hint = f"let the proxy log the user in, and set {HEADER} to a name without blanks"
            raise Problem(401, "NotLetIn", "the proxy does not name its user", hint=hint)
        # Such a user would pass for the holder of the token, who may make login links for it.
        if users[0] == caller.name:
            hint = "give the token of the proxy a name that no user has"
            raise Problem(401, "NotLetIn", "the proxy names its own token as a user", hint=hint)
        return replace(caller, name=users[0])


def _plain(address: str) -> str:
    """Return an address as `proxy_of` does. A socket for both families maps IPv4 into IPv6."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)
