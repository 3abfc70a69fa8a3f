"""Control for the server benchmarks: an asyncio server that writes timestamps to all clients.

    python bare_server.py SHAPE RATE BYTES CLIENTS

The server waits for CLIENTS connections. Then it writes BYTES bytes with the current time in them,
RATE times a second. SHAPE `one`: all clients get each write at the same time, like followers of one
session. SHAPE `each`: each client gets its writes at other times, like followers of many sessions.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import cast

HEAD = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
    b"event: stream.live\n\n"
)


class Client(asyncio.Protocol):
    """Connection of a client. Any request is answered, and `come` gets the transport."""

    def __init__(self, come: Callable[[asyncio.Transport], None]) -> None:
        self._come = come
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(HEAD)
        self._come(self._transport)


async def tick(transports: list[asyncio.Transport], rate: float, size: int, phase: float) -> None:
    loop = asyncio.get_running_loop()
    at = loop.time() + phase
    while True:
        at += 1 / rate
        await asyncio.sleep(at - loop.time())
        event = b"\nid: 1\ndata: tick=%020d " % time.monotonic_ns()
        body = event.ljust(size - 2, b"x") + b"\n\n"
        chunk = b"%x\r\n%b\r\n" % (len(body), body)
        for transport in transports:
            transport.write(chunk)


async def main() -> None:
    shape, rate, size, count = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    loop = asyncio.get_running_loop()
    clients: list[asyncio.Transport] = []
    all_here: asyncio.Future[None] = loop.create_future()

    def come(transport: asyncio.Transport) -> None:
        clients.append(transport)
        if len(clients) == count:
            all_here.set_result(None)

    server = await loop.create_server(lambda: Client(come), "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await all_here
    groups = [clients] if shape == "one" else [[client] for client in clients]
    await asyncio.gather(
        *(tick(each, rate, size, n / len(groups) / rate) for n, each in enumerate(groups))
    )


asyncio.run(main())
