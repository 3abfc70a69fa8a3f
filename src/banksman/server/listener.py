"""The listening sockets and their connections, in our own loop.

uvicorn speaks the HTTP; its own server is not used, because it takes the signals, and looks ten times a second whether
it is to end. To end here is a future that every stream waits on: each is told to come back, and who does not take even
that is cut off.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Sequence
from typing import cast

from starlette.types import ASGIApp
from uvicorn.server import ServerState

from banksman.errors import MachineError, UsageError
from banksman.server.http.accept_loop import BACKLOG, Acceptor
from banksman.server.http.connection import Connection, config_for
from banksman.server.server_settings import ServerSettings
from banksman.server.streams.follower import EventStreams

# From the word that it ends to the last byte of those who take it.
CLOSE_SECONDS_MAX = 2.0


def bind(settings: ServerSettings) -> socket.socket:
    """The socket, before anything else is begun: an address that is taken is an error that costs nothing."""
    family = socket.AF_INET6 if ":" in settings.bind else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((settings.bind, settings.port))
        # Now, because of two that start at once the second is told only here.
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as exc:
        listener.close()
        where = f"{settings.bind}:{settings.port}"
        if exc.errno == errno.EADDRINUSE:
            hint = "end the server that is there, or take another --port (0: any that is free)"
            raise MachineError(f"{where} is taken", number=exc.errno, hint=hint) from exc
        if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS):
            raise MachineError(f"cannot listen at {where}: {exc.strerror}", number=exc.errno) from exc
        raise UsageError(f"cannot listen at {where}: {exc.strerror or exc}", hint="another --bind or --port") from exc
    return listener


def port_of(listener: socket.socket) -> int:
    return int(listener.getsockname()[1])


def url_of(listener: socket.socket) -> str:
    host, port, *_ = listener.getsockname()
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class HttpServer:
    """Serves an application on these sockets, until it is closed; and closes them."""

    def __init__(
        self, app: ASGIApp, listeners: Sequence[socket.socket], settings: ServerSettings, streams: EventStreams
    ) -> None:
        self._config = config_for(app)
        self._state = ServerState()
        self._settings = settings
        self._streams = streams
        self._listeners = listeners
        self._acceptor = Acceptor(listeners, self._connection)

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
        """Take nobody new, tell those who follow to come back, answer what was asked, and cut off who is left."""
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
            await asyncio.wait(lost)  # In the next pass of the loop: whatever was to be sent is dropped.
        # What waited for something on behalf of a client that is gone.
        tasks = list(self._state.tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        assert not self._state.connections, "what is left of a connection is left for ever"
        await self._streams.pages.close()
