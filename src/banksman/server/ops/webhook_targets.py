"""Webhook targets: which URLs and which addresses the server may send events to.

An event may contain text of an agent, and a URL may point anywhere. So a target is either on this
machine or on the allow-list of the settings (`webhook_hosts`: names and networks). The check has
two parts:

- At the start, by the URL. A target that no address could permit is an error of the settings.
- Before each connection, by the resolved address. A name may resolve to another address tomorrow,
  so the connection goes to the address that was checked.

A listed name must resolve to a public address. Otherwise whoever controls the name's DNS records
could make the server send requests to this machine or to its network.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from banksman.errors import UsageError

# The events that receivers can get, by the name that they have there.
EVENTS = ("turn.ended", "question.asked", "session.lost", "budget.warning")
TARGETS_MAX = 16
URL_CHARACTERS_MAX = 2048
_PORTS = {"http": 80, "https": 443}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class AllowList(NamedTuple):
    """Names and networks that webhooks may be sent to, beside this machine."""

    names: frozenset[str]
    networks: tuple[Network, ...]


class WebhookTarget(NamedTuple):
    """A configured URL.

    `label`: names the target in log lines and metrics. It leaves the path and the query out, which
    may contain a key.
    """

    url: str
    label: str
    scheme: str
    host: str
    port: int
    path: str
    allowed: AllowList

    @property
    def is_tls(self) -> bool:
        return self.scheme == "https"

    def permits(self, address: str) -> bool:
        """Whether a request may go to this address, to which the host has resolved."""
        # An IPv6 address may have a zone, and an IPv4 address may be written as IPv6.
        found = _plain(ipaddress.ip_address(address.partition("%")[0]))
        if found.is_loopback:
            return _is_here(self.host)
        if any(found in network for network in self.allowed.networks):
            return True
        return self.is_tls and self.host in self.allowed.names and found.is_global


def targets_of(urls: Sequence[str], hosts: Sequence[str]) -> list[WebhookTarget]:
    """Parse the URLs and the allow-list of the settings. Raises `UsageError`."""
    allowed = _allow_list(hosts)
    if len(urls) > TARGETS_MAX:
        hint = f"use at most {TARGETS_MAX}"
        raise UsageError(f"too many webhooks: {len(urls)}", hint=hint, setting="webhooks")
    if len(set(urls)) != len(urls):
        raise UsageError("webhooks contains a URL twice", setting="webhooks")
    found: list[WebhookTarget] = []
    for url in urls:
        target = _target(url, allowed)
        same = sum(one.label.partition("#")[0] == target.label for one in found)
        found.append(target._replace(label=f"{target.label}#{same + 1}") if same else target)
    return found


def origin_of(url: str) -> str:
    """Return scheme, host and port of a URL, without a user, a path and a query."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an invalid URL"
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


def _target(url: str, allowed: AllowList) -> WebhookTarget:
    parts, port = _split(url)
    host = (parts.hostname or "").rstrip(".")
    path = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
    shown = f"[{host}]" if ":" in host else host
    label = f"{parts.scheme}://{shown}:{port}"
    target = WebhookTarget(url, label, parts.scheme, host, port, path, allowed)
    try:
        is_possible = target.permits(host)
    except ValueError:
        # A name. If networks are listed, only its addresses can tell.
        is_listed = target.is_tls and host in allowed.names
        is_possible = _is_here(host) or is_listed or bool(allowed.networks)
    if not is_possible:
        if host in allowed.names:
            hint = "use https, or list the receiver's network"
            message = f"cannot send webhooks to {label}: the connection is not encrypted"
        else:
            hint = "use a receiver on this machine, or add the host to webhook_hosts"
            message = f"cannot send webhooks to {label}: webhook_hosts does not list it"
        raise UsageError(message, hint=hint, setting="webhooks")
    return target


def _split(url: str) -> tuple[SplitResult, int]:
    hint = "use https://HOST/PATH, or http:// to this machine"
    # The URL may contain a key, so no message quotes it.
    error = UsageError("webhooks contains an invalid URL", hint=hint, setting="webhooks")
    if len(url) > URL_CHARACTERS_MAX or not url.isascii() or any(c <= " " for c in url):
        raise error
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
    except (ValueError, KeyError):
        raise error from None
    if not parts.hostname or parts.username is not None or parts.fragment:
        raise error
    return parts, port


def _allow_list(hosts: Sequence[str]) -> AllowList:
    names: set[str] = set()
    networks: list[Network] = []
    for entry in hosts:
        try:
            networks.append(ipaddress.ip_network(entry))
        except ValueError:
            if not entry or "/" in entry or ":" in entry or not entry.isascii():
                hint = "use a name without a port, an address or a network such as 10.1.0.0/16"
                message = f"invalid entry {entry!r:.60} in webhook_hosts"
                raise UsageError(message, hint=hint, setting="webhook_hosts") from None
            names.add(entry.lower().rstrip("."))
    return AllowList(frozenset(names), tuple(networks))


def _is_here(host: str) -> bool:
    """Whether the URL itself names this machine."""
    if host == "localhost":
        return True
    try:
        return _plain(ipaddress.ip_address(host)).is_loopback
    except ValueError:
        return False


def _plain(address: Address) -> Address:
    mapped = getattr(address, "ipv4_mapped", None)
    return address if mapped is None else mapped
