"""One connection: what it may send before it is let go, and how long it may take to send and to be sent to.

The HTTP itself is uvicorn's. What it leaves open is closed here, for every request alike: a head that never ends
(slowloris), a head that is too large, a client that does not take what it is sent. The last is told by the socket: as
long as its buffer shrinks somebody reads, however slowly; if it stands still for `stall_seconds` the connection is cut
off. What the kernel has taken and nobody acknowledges (a laptop that was closed, a cable that was pulled) is cut off by
the kernel, after the same time.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from typing import Any, cast

from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from banksman.serve.problems import MEDIA_TYPE, Problem

HEAD_BYTES_MAX = 64 << 10
URL_BYTES_MAX = 8 << 10
# From the first byte of a request to the end of its head.
HEAD_SECONDS_MAX = 10.0
# A connection that is kept for the next request.
IDLE_SECONDS_MAX = 75
# What the kernel is given beyond what is on its way: the rest waits here, where it is seen that nobody takes it.
UNSENT_BYTES_MAX = 128 << 10


class Connection(HttpToolsProtocol):
    """A client's connection. `lost` is done when it is gone, by whichever side."""

    def __init__(self, *, stall_seconds: float, on_stall: Callable[[], None], **rest: Any) -> None:
        super().__init__(**rest)
        self.lost: asyncio.Future[None] = self.loop.create_future()
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._is_in_head = True
        self._refusal: Problem | None = None

    # -- beginning and end -------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        peer = cast("socket.socket | None", transport.get_extra_info("socket"))
        if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6) and sys.platform == "linux":
            milliseconds = max(1, int(self._stall_seconds * 1000))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for timer in (self._head_timer, self._stall_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def abort(self) -> None:
        """Cut it off, whatever is still to be sent."""
        self.transport.abort()

    # -- the head of a request ---------------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # Refused already. What it still sends is nothing to us.
        if self._is_in_head and self._head_timer is None:
            self._start_head_timer()
        super().data_received(data)
        # Of a head that has not ended nothing was handed to us yet that could have been counted.
        if self._is_in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(_too_large())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = 0
        self.scope["state"]["connection"] = self  # pyright: ignore[reportTypedDictNotRequiredAccess]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_BYTES_MAX:
            raise self._remember(Problem(414, "UrlTooLong", f"a URL has at most {URL_BYTES_MAX} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._head_bytes += len(name) + len(value)
        if self._head_bytes > HEAD_BYTES_MAX:
            raise self._remember(_too_large())

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._head_bytes = 0
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True

    def send_400_response(self, msg: str) -> None:
        """What the parser could not go on with: it is not HTTP, or we have stopped it."""
        hint = "send HTTP/1.1"
        self._refuse(self._refusal or Problem(400, "BadRequest", "this is not an HTTP request", hint=hint))

    def _remember(self, problem: Problem) -> Problem:
        self._refusal = problem
        return problem

    def _refuse(self, problem: Problem) -> None:
        """No request is there yet that could be answered, so the connection is."""
        cycle: Any = self.cycle  # None before the first request, whatever its type says.
        if cycle is not None and cycle.response_started and not cycle.response_complete:
            self.abort()  # Into the middle of another answer nothing may be written.
            return
        body = problem.body()
        head = STATUS_LINE[problem.status] + b"content-type: %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"
        self.transport.write(head % (MEDIA_TYPE.encode(), len(body)) + body)
        self.transport.close()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_SECONDS_MAX, self._on_head_late)

    def _on_head_late(self) -> None:
        self._head_timer = None
        if self._is_in_head and not self.transport.is_closing():
            self._refuse(Problem(408, "TooSlow", f"the head of a request takes at most {HEAD_SECONDS_MAX:g} s"))

    # -- a client that does not read ---------------------------------------------------------------------------------
    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _watch_stall(self) -> None:
        self._unsent = self.transport.get_write_buffer_size()
        self._stall_timer = self.loop.call_later(self._stall_seconds, self._on_stall_timer)

    def _on_stall_timer(self) -> None:
        if self.transport.get_write_buffer_size() < self._unsent:
            self._watch_stall()  # Slow, but it takes what it is sent.
            return
        self._stall_timer = None
        self._on_stall()
        self.abort()


def _too_large() -> Problem:
    return Problem(431, "HeadersTooLarge", f"the head of a request has at most {HEAD_BYTES_MAX} bytes")


def config_for(app: Any) -> Config:
    """uvicorn's, with nothing of what it would do beside speaking HTTP."""
    config = Config(
        app,
        http=Connection,
        ws="none",
        lifespan="off",
        interface="asgi3",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        date_header=False,
        timeout_keep_alive=IDLE_SECONDS_MAX,
    )
    config.load()
    # What it would say there is said by us, or is no news: that a client spoke no HTTP, that a task was cancelled.
    logging.getLogger("uvicorn.error").disabled = True
    return config
