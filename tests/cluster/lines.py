"""Connections to real nodes with the streams that owner requests and placement need, without a log."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from banksman.cluster import store_address
from banksman.cluster.log.owner_requests import ClusterOwnerRequests
from banksman.cluster.log.placement import ClusterPlacement
from banksman.cluster.nats import Nats
from banksman.testing.nats_servers import Servers

SECONDS_MAX = 40.0


@dataclass
class Line:
    nats: Nats
    bus: ClusterOwnerRequests
    placement: ClusterPlacement


async def make_streams(nats: Nats, prefix: str) -> None:
    common: dict[str, Any] = {"storage": "file", "allow_direct": True, "num_replicas": 1}
    blobs = f"{prefix}-blobs"
    streams: dict[str, dict[str, Any]] = {
        f"{prefix}-work": {"subjects": [f"{prefix}.place.>"], "retention": "workqueue", "allow_msg_ttl": True},
        f"{prefix}-records": {
            "subjects": [f"{prefix}.rec.>"],
            "max_msgs_per_subject": 1,
            "allow_msg_ttl": True,
            "republish": {"src": f"{prefix}.rec.>", "dest": f"{prefix}.live.rec.>"},
        },
        f"OBJ_{blobs}": {
            "subjects": [f"$O.{blobs}.C.>", f"$O.{blobs}.M.>"],
            "discard": "new",
            "allow_rollup_hdrs": True,
        },
    }
    for name, own in streams.items():
        made = await nats.api(f"STREAM.CREATE.{name}", {"name": name, **common, **own})
        assert "error" not in made, made


@asynccontextmanager
async def lines(servers: Servers, prefix: str, count: int, *, lease: float = 2.0) -> AsyncGenerator[list[Line]]:
    """Connect `count` hosts, each with a separate connection, a bus and a placement."""
    async with AsyncExitStack() as stack:
        found: list[Line] = []
        for number in range(count):
            nats = Nats(
                store_address.parse(servers.store(prefix)), name=f"line-{number}", on_up=partial(on_up, found, number)
            )
            await nats.connect()
            stack.push_async_callback(nats.close)
            if not number:
                await make_streams(nats, prefix)
            bus = ClusterOwnerRequests(nats, prefix)
            stack.push_async_callback(bus.close)
            placement = ClusterPlacement(nats, prefix, lease)
            stack.push_async_callback(placement.close)
            found.append(Line(nats, bus, placement))
        yield found


def on_up(found: list[Line], number: int) -> None:
    """Report that the connection of this line is back."""
    if number < len(found):
        found[number].placement.on_up()


async def stored(nats: Nats, stream: str) -> int:
    """Return the number of messages in a stream."""
    found = await nats.api(f"STREAM.INFO.{stream}", {})
    return int(found["state"]["messages"])


async def until(look: Callable[[], Any], what: str = "") -> Any:
    """Poll with one deadline, because a server sends no event for the actions of others."""
    end = time.monotonic() + SECONDS_MAX
    while True:
        found = look()
        if asyncio.iscoroutine(found):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, f"not in time: {what}"
        await asyncio.sleep(0.01)
