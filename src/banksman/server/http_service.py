"""Serve the HTTP application of a host: its routes, its place in the cluster, its connections.

This module imports everything of HTTP. `served_host.py` imports it after the take-over.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

from banksman import Host
from banksman.cluster.http import membership
from banksman.server import app
from banksman.server.context import Context
from banksman.server.graceful_shutdown import StartDrain
from banksman.server.http.start_policy import StartPolicy
from banksman.server.http.tls import ServerCertificate
from banksman.server.http_server import HttpServer
from banksman.server.ops import webhooks
from banksman.server.server_settings import ServerSettings
from banksman.server.streams.follower import EventStreams, StreamCounts
from banksman.server.streams.shared_pages import SharedPages


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
