"""Serve the HTTP application of a host: its routes, its place in the cluster, its connections.

uvicorn implements the HTTP protocol. Its own server class is not used: it installs signal handlers,
and it polls ten times a second for its end. In `HttpServer` the end is a future that every stream
waits on. Each stream sends its closing mark. A client that does not read even that is aborted.

This module imports everything of HTTP. `served_host.py` imports it after the take-over.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import cast

from starlette.types import ASGIApp
from uvicorn.server import ServerState

from banksman import Host
from banksman.cluster.http import membership
from banksman.server import app
from banksman.server.context import Context
from banksman.server.graceful_shutdown import StartDrain
from banksman.server.http.accept_loop import Acceptor
from banksman.server.http.connection import Connection, config_for
from banksman.server.http.start_policy import StartPolicy
from banksman.server.http.tls import ServerCertificate
from banksman.server.ops import webhooks
from banksman.server.server_settings import ServerSettings
from banksman.server.streams.follower import EventStreams, StreamCounts
from banksman.server.streams.shared_pages import SharedPages

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


@asynccontextmanager
async def serving(
    context: Context,
    listeners: Sequence[socket.socket],
    *,
    token: str,
    port: int,
    certificate: ServerCertificate | None = None,
    webhook_secret: str | None = None,
) -> AsyncGenerator[None]:
    """Serve on these sockets until the context exits. `port`: 0 without one.

    `certificate`: of the port; None for plain HTTP. `webhook_secret`: None sends no webhooks.
    """
    settings = context.settings
    application = app.make(context, token=token, port=port)
    # A host with a port is a front end: clients of the cluster can connect to it.
    async with (
        membership.of(context, is_front=port != 0),
        _telemetry(context.host, settings),
        webhooks.sending(context.host, settings, webhook_secret) as context.webhooks,
    ):
        server = HttpServer(application, listeners, settings, context.streams, certificate)
        server.start()
        try:
            yield
        finally:
            # First end the streams, while the log can still be read. Then the host closes the log.
            await server.close()


@asynccontextmanager
async def _telemetry(host: Host, settings: ServerSettings) -> AsyncGenerator[None]:
    """Export spans, if the settings say so. Otherwise nothing is imported."""
    if settings.otel_endpoint is None:
        yield
        return
    from banksman.server.ops import telemetry  # noqa: PLC0415

    async with telemetry.reporting(host, settings):
        yield


def context_of(
    host: Host, settings: ServerSettings, drain: StartDrain, policy: StartPolicy | None = None
) -> Context:
    streams = EventStreams(
        closing=asyncio.get_running_loop().create_future(),
        counts=StreamCounts(),
        pages=SharedPages(),
        heartbeat_seconds=settings.heartbeat_seconds,
        streams_max=settings.streams_max,
    )
    return Context(
        host,
        settings,
        policy or StartPolicy(settings),
        streams,
        drain=drain,
        store=settings.store_shown,
    )
