"""Serve HTTP connections on listening sockets, and close them in order.

uvicorn implements the HTTP protocol. Its own server class is not used: it installs signal handlers,
and it polls ten times a second for its end. Here the end is a future that every stream waits on.
Each stream sends its closing mark. A client that does not read even that is aborted.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from typing import cast

from starlette.types import ASGIApp
from uvicorn.server import ServerState

from banksman.server.http.accept_loop import Acceptor
from banksman.server.http.connection import Connection, config_for
from banksman.server.http.tls import ServerCertificate
from banksman.server.server_settings import ServerSettings
from banksman.server.streams.follower import EventStreams

# From the start of the shutdown to the last byte for clients that still read.
CLOSE_SECONDS_MAX = 2.0


class HttpServer:
    """Serve an application on these sockets, and close them at the end."""

    def __init__(
        self,
        app: ASGIApp,
        listeners: Sequence[socket.socket],
        settings: ServerSettings,
        streams: EventStreams,
        certificate: ServerCertificate | None = None,
    ) -> None:
        """Create a server. `certificate`: of the TCP sockets; None for plain HTTP."""
        self._config = config_for(app)
        self._state = ServerState()
        self._settings = settings
        self._streams = streams
        self._listeners = listeners
        self._acceptor = Acceptor(listeners, self._connection, certificate)

    def start(self) -> None:
        self._acceptor.start()

    def _connection(self) -> Connection:
        return Connection(
            config=self._config,
            server_state=self._state,
            app_state={},
            stall_seconds=self._settings.stall_seconds,
            on_stall=self._on_stall,
        )

    def _on_stall(self, is_stream: bool) -> None:
        self._streams.counts.cut += is_stream

    async def close(self) -> None:
        """Stop accepting, end the streams, finish running requests, then abort what is left."""
        await self._acceptor.close()
        for listener in self._listeners:
            listener.close()
        if not self._streams.closing.done():
            self._streams.closing.set_result(None)
        connections = [cast("Connection", connection) for connection in self._state.connections]
        lost = [connection.lost for connection in connections]
        for connection in connections:
            connection.shutdown()
        if lost:
            await asyncio.wait(lost, timeout=CLOSE_SECONDS_MAX)
        for connection in connections:
            connection.abort()
        if lost:
            # The abort takes effect in the next iteration of the loop; unsent data is dropped.
            await asyncio.wait(lost)
        # Requests that still wait for something on behalf of a client that has disconnected.
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        assert not self._state.connections, "a connection outlived the shutdown"
        await self._streams.pages.close()
