"""Parse `nats://` store addresses: servers, prefix, credentials and settings.

    nats://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…][/PREFIX][?SETTING=VALUE&…]

`tls://` is the same over TLS. The prefix separates several clusters in one NATS account. A password
belongs in a file (`creds=`, `nkey=`), or in an environment variable from which the URL is built.
Every user of the machine can read a command line.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from banksman.errors import UsageError

SCHEMES = ("nats://", "tls://")
HINT = "nats://HOST:4222[,HOST:4222…][/PREFIX][?lease=15&replicas=3&creds=FILE&ca=FILE&cert=FILE&key=FILE]"
PREFIX = re.compile(r"[A-Za-z0-9_-]{1,32}")
# Scheme, user and password of an address. A password may contain any character.
USER = re.compile(r"^([\w+.-]*:/{0,2}).*@")
FILES = ("creds", "nkey", "ca", "cert", "key", "journal")

LEASE_SECONDS = 15.0
LEASE_SECONDS_MIN = 1.0


@dataclass(frozen=True, slots=True)
class StoreAddress:
    """A parsed store address."""

    servers: tuple[str, ...]
    prefix: str = "banksman"
    # Seconds for which a host keeps its sessions without an acknowledged heartbeat.
    lease: float = LEASE_SECONDS
    # None: 3 replicas if the cluster has servers for them, else 1.
    replicas: int | None = None
    tls: bool = False
    token: str | None = None
    creds: str | None = None
    nkey: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    # The folder of the journal; None means the state folder.
    journal: str | None = None

    def __str__(self) -> str:
        """Return the address without its credentials."""
        servers = ",".join(server.rpartition("@")[2].rpartition("/")[2] for server in self.servers)
        return f"{'tls' if self.tls else 'nats'}://{servers}/{self.prefix}"

    @property
    def without_credentials(self) -> StoreAddress:
        """The same servers for a client without credentials.

        `ca` stays: it says which servers this client trusts, and grants the client nothing.
        """
        servers = tuple(
            f"nats://{server.rpartition('@')[2].removeprefix('nats://')}" for server in self.servers
        )
        return replace(
            self, servers=servers, token=None, creds=None, nkey=None, cert=None, key=None
        )


def is_address(store: str) -> bool:
    """Return whether a `--store` value is an address of this kind."""
    return store.startswith(SCHEMES)


def why_unusable(store: object) -> tuple[str, str]:
    """Return the error and the hint for a store whose scheme is missing or unknown.

    The error never repeats a password.
    """
    shown = USER.sub(r"\1…@", store) if isinstance(store, str) else store
    reason, hint = _reason(store)
    return f"cannot use the store {shown!r:.200}: {reason}", hint


def _reason(store: object) -> tuple[str, str]:
    hint = (
        'pass "sqlite:PATH" (a file that hosts may share), '
        '"memory:", or "nats://HOST:4222" (many machines)'
    )
    if not isinstance(store, str):
        return "it is not a string", hint
    scheme, colon, rest = store.partition(":")
    if not store:
        return "it is empty", hint
    # A colon may also be a part of a path.
    if not colon or "/" in scheme:
        return "it has no scheme", f"pass sqlite:{store:.200}"
    if scheme == "sqlite":
        return "it has no path" if not rest else "it is not the path of a file", hint
    if scheme == "memory":
        return "it has text after the colon", hint
    if f"{scheme}://" in SCHEMES:
        return "it has no // after the scheme", hint
    return f"its scheme {scheme!r:.60} is unknown", hint


def parse(store: str) -> StoreAddress:
    """Parse a store address.

    Raises `UsageError` if it is invalid. The error never repeats a password.
    """
    scheme, _, rest = store.partition("://")
    where, _, query = rest.partition("?")
    places, _, prefix = where.partition("/")
    user, at, places = places.rpartition("@")
    if not places:
        raise UsageError("a store on NATS needs a server", hint=HINT)
    servers: list[str] = []
    for place in places.split(","):
        server = f"nats://{user}{at}{place}"
        port = _port(server)
        if port is None:
            # Do not show the text behind the colon: it may be part of a password that contains a
            # slash.
            raise UsageError(f"{place.partition(':')[0]!r:.100} is not a server", hint=HINT)
        servers.append(server if port else f"{server}:4222")
    prefix = prefix.rstrip("/") or "banksman"
    if not PREFIX.fullmatch(prefix):
        told = "the text after the slash" if "@" in prefix else f"{prefix!r:.60}"
        hint = "use at most 32 letters, digits, - and _"
        raise UsageError(f"{told} is not a valid prefix", hint=hint)
    return StoreAddress(tuple(servers), prefix=prefix, tls=scheme == "tls", **_settings(query))


def _port(server: str) -> int | None:
    """Return the port of a server; 0 if it names no port, None if it is not a valid server."""
    try:
        parts = urlsplit(server)
        return (parts.port or 0) if parts.hostname else None
    except ValueError:
        return None


def _settings(query: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in parse_qsl(query, keep_blank_values=True):
        match name:
            case "lease":
                found[name] = _seconds(value)
            case "replicas" if value in ("1", "3", "5"):
                found[name] = int(value)
            case "token" if value:
                found[name] = value
            case _ if name in FILES and value:
                found[name] = os.path.abspath(os.path.expanduser(value))
            case _:
                told = (
                    f"{name}={value!r:.60}"
                    if name.isidentifier()
                    else "the text after the question mark"
                )
                raise UsageError(f"invalid setting of a store on NATS: {told}", hint=HINT)
    return found


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not LEASE_SECONDS_MIN <= seconds <= 3600:
        hint = f"use seconds, {LEASE_SECONDS_MIN:g} to 3600"
        raise UsageError(f"lease cannot be {value!r:.60}", hint=hint)
    return seconds
