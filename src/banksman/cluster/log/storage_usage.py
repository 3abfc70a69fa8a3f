"""How full JetStream is: a look that changes nothing, for the doctor. Where it is full, nothing is accepted any more.

There are two bounds. The account may have one, and says so to every client. The server has one always, the share of its
disk that it may take (`max_file_store`), and says so on its monitoring port only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

from msgspec import Struct

from banksman.cluster.log.cluster_health import MONITOR_PORT, varz
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import Address
from banksman.errors import Unreachable

LOOK_SECONDS_MAX = 5.0


class Fullness(Struct, frozen=True):
    """`place`: whose it is, the account's or a server's. `limit_bytes` None: there is none, or it is not told."""

    place: str
    used_bytes: int
    limit_bytes: int | None

    @property
    def share(self) -> float | None:
        return None if not self.limit_bytes else self.used_bytes / self.limit_bytes


async def look(address: Address, servers: Collection[str], *, monitors: Sequence[str] = ()) -> tuple[Fullness, ...]:
    """`servers`: the ids of those that are meant; on the port of another cluster somebody else may answer. `monitors`:
    as in `health.look`. `StoreError`: we are not let in, or nobody answers."""
    usual = [f"http://{urlsplit(server).hostname}:{MONITOR_PORT}" for server in address.servers]
    answers = await asyncio.gather(*(asyncio.to_thread(varz, monitor) for monitor in monitors or usual))
    known = {str(answer.get("server_id")): answer for answer in answers if answer is not None}
    told = (each for id, answer in known.items() if id in servers for each in _of_server(answer))
    return (*_of_account(await _account(address)), *told)


async def _account(address: Address) -> dict[str, Any]:
    nats = Nats(address, name="banksman doctor")
    try:
        async with asyncio.timeout(LOOK_SECONDS_MAX):
            await nats.connect()
            return await nats.api("INFO", {}, timeout=LOOK_SECONDS_MAX)
    except TimeoutError as exc:
        raise Unreachable(f"JetStream has not answered for {LOOK_SECONDS_MAX:g} s") from exc
    finally:
        await nats.close()


def _of_account(said: dict[str, Any]) -> Iterator[Fullness]:
    """An account may have a bound for each number of replicas, and is then told by them."""
    if "error" in said:
        return
    for name, tier in _part(said, "tiers").items() or [("", said)]:
        # Without a bound it says -1.
        limit = _number(_part(tier, "limits").get("max_storage"))
        yield Fullness(
            f"this account{', ' * bool(name)}{name}", _number(tier.get("storage")), limit if limit > 0 else None
        )


def _of_server(said: dict[str, Any]) -> Iterator[Fullness]:
    jetstream = _part(said, "jetstream")
    limit = _number(_part(jetstream, "config").get("max_storage"))
    if limit > 0:
        used = _number(_part(jetstream, "stats").get("storage"))
        yield Fullness(f"server {said.get('server_name') or said.get('server_id')}", used, limit)


def _part(said: dict[str, Any], name: str) -> dict[str, Any]:
    """Empty where there is none: a server leaves out what it has not got."""
    return said.get(name) or {}


def _number(said: Any) -> int:
    return said if isinstance(said, int) else 0
