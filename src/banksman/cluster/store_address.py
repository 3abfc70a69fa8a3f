"""What follows `nats://`: servers, a prefix for several clusters in one account, and how one is let in.

    nats://[USER:PASSWORD@]HOST[:PORT][,HOST[:PORT]…][/PREFIX][?SETTING=VALUE&…]

`tls://` is the same by TLS. A password belongs into a file (`creds=`, `nkey=`), or into an environment variable that
the URL is made from: what is on a command line is there for every user of the machine to see.
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
FILES = ("creds", "nkey", "ca", "cert", "key", "journal")

LEASE_SECONDS = 15.0
LEASE_SECONDS_MIN = 1.0


@dataclass(frozen=True, slots=True)
class StoreAddress:
    servers: tuple[str, ...]
    prefix: str = "banksman"
    # For how long a host has its sessions without being heard of.
    lease: float = LEASE_SECONDS
    # None: as many as the cluster has servers, 3 at most.
    replicas: int | None = None
    tls: bool = False
    token: str | None = None
    creds: str | None = None
    nkey: str | None = None
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    # The folder of the journal; None: in the state folder.
    journal: str | None = None

    def __str__(self) -> str:
        """Without what lets one in."""
        servers = ",".join(server.rpartition("@")[2].rpartition("/")[2] for server in self.servers)
        return f"{'tls' if self.tls else 'nats'}://{servers}/{self.prefix}"

    @property
    def without_credentials(self) -> StoreAddress:
        """The same servers, for a client that has nothing to show. `ca` stays: it says whom we trust."""
        servers = tuple(f"nats://{server.rpartition('@')[2].removeprefix('nats://')}" for server in self.servers)
        return replace(self, servers=servers, token=None, creds=None, nkey=None, cert=None, key=None)


def is_address(store: str) -> bool:
    return store.startswith(SCHEMES)


def parse(store: str) -> StoreAddress:
    """`UsageError` for what is none, without repeating a password."""
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
            # What follows the colon may be half of a password that has a slash in it.
            raise UsageError(f"{place.partition(':')[0]!r:.100} is no server", hint=HINT)
        servers.append(server if port else f"{server}:4222")
    prefix = prefix.rstrip("/") or "banksman"
    if not PREFIX.fullmatch(prefix):
        told = "what follows the slash" if "@" in prefix else f"{prefix!r:.60}"
        raise UsageError(f"{told} is no prefix", hint="letters, digits, - and _; 32 at most")
    return StoreAddress(tuple(servers), prefix=prefix, tls=scheme == "tls", **_settings(query))


def _port(server: str) -> int | None:
    """0: it names none. None: it is no server at all."""
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
                told = f"{name}={value!r:.60}" if name.isidentifier() else "what follows the question mark"
                raise UsageError(f"a store on NATS cannot have {told}", hint=HINT)
    return found


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = 0.0
    if not LEASE_SECONDS_MIN <= seconds <= 3600:
        raise UsageError(f"lease cannot be {value!r:.60}", hint=f"seconds, {LEASE_SECONDS_MIN:g} to 3600")
    return seconds
