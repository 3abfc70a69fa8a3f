"""HTTP connection with limits on time and size, so that no client can hold it open for nothing.

uvicorn implements HTTP itself. `Connection` adds the limits that uvicorn lacks, for every request.
`send_slices` and `SlicedResponse` send large bodies without a copy for each client.
`accept_loop.py` limits the number of connections. The limits apply to:

- a head that never ends (slowloris);
- a head that is too large;
- a body that continues after its response was sent;
- pipelined requests far ahead of their responses;
- a client that does not read.

A client that does not read shows in the socket's write buffer. As long as the buffer shrinks, the
client reads, however slowly. If it does not shrink for `stall_seconds`, the connection is aborted.
The kernel aborts a connection whose sent data is not acknowledged (a closed laptop, a pulled cable)
after the same time.

So an open connection is always in one of two states: a request runs, which has its own deadlines,
or one timer runs for the input that the client owes. `_watch` alone decides which.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from banksman import sockets
from banksman.server.http import peer_identity
from banksman.server.problems import MEDIA_TYPE, Problem

# Send bytes to a client in slices: the next slice is made when the previous one had room.
#
# A transport copies the data that it could not send. For a response or an event of thirty megabytes
# that would be one copy for each client that does not read, of which there may be a thousand. So
# each transport holds at most one slice more than its buffer takes. The rest stays in the one
# object that all of them share.

SLICE_BYTES = 64 << 10

HEAD_BYTES_MAX = 64 << 10
URL_BYTES_MAX = 8 << 10
# From the first byte of a request to the end of its head.
HEAD_SECONDS_MAX = 10.0
# From the end of the head to the end of the body.
BODY_SECONDS_MAX = 60.0
# How long the rest of a body is read and dropped after its response was sent. A client that is cut
# off while it sends may never read that response.
LINGER_SECONDS_MAX = 5.0
# Limit of pipelined requests. Few clients pipeline at all.
PIPELINED_MAX = 64
# How long an idle connection is kept for the next request.
IDLE_SECONDS_MAX = 75.0
# The same for a connection that has not been authenticated.
STRANGER_IDLE_SECONDS_MAX = 10.0
# Unsent bytes that the kernel accepts. The rest stays in the transport's buffer, where a client
# that does not read is detected.
UNSENT_BYTES_MAX = 128 << 10
# Headers for browsers: no content sniffing, no framing by other pages, no referrer.
HEADERS_FOR_BROWSERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


async def send_slices(send: Send, data: bytes) -> None:
    """Send a part of a response body, in slices. More parts follow."""
    if len(data) <= SLICE_BYTES:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        return
    begin = 0
    while begin < len(data):
        # Cut between two events where possible, so that a client that looks at each chunk sees
        # whole events.
        border = data.rfind(b"\n\n", begin, begin + SLICE_BYTES)
        end = begin + SLICE_BYTES if border < 0 else border + 2
        await send({"type": "http.response.body", "body": data[begin:end], "more_body": True})
        begin = end


class SlicedResponse(Response):
    """A response whose body is sent in slices."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send(
            {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        )
        await send_slices(send, bytes(self.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class RequestPart(enum.Enum):
    """The part of a request that the parser expects next."""

    BEGIN, HEAD, BODY = range(3)


class AwaitedInput(enum.Enum):
    """The input that the client owes while no request runs."""

    HEAD = "the head of a request"
    REST = "the rest of a body that is already answered"
    NEXT = "another request, or a disconnect"


class Connection(HttpToolsProtocol):
    """Connection of one client. The future `lost` is done when either side has closed it."""

    def __init__(
        self, *, stall_seconds: float, on_stall: Callable[[bool], None], **rest: Any
    ) -> None:
        """Create the protocol object of one client.

        `on_stall`: called when the connection is aborted because the client does not read; its
        argument says whether the response was a stream.
        """
        super().__init__(**rest)
        self.lost: asyncio.Future[None] = self.loop.create_future()
        # The client connected by a Unix socket, which no browser can.
        self.is_local = False
        # A request on this connection was authenticated.
        self.is_admitted = False
        # Counts against the limits of accept_loop.py.
        self.is_counted = True
        # User id of the peer of a Unix socket; None for other sockets.
        self.uid: int | None = None
        self.standing = peer_identity.PeerIdentity.FREE
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        # With TLS, the transport of the socket; None without TLS.
        self._lower: asyncio.Transport | None = None
        self._awaited: AwaitedInput | None = None
        self._timer: asyncio.TimerHandle | None = None
        # The request that was started last. Pipelined requests wait in `pipeline`.
        self._running: RequestResponseCycle | None = None
        self._head_bytes = 0
        self._fields_bytes = 0
        self._part = RequestPart.BEGIN
        self._requests = 0
        self._has_said_something = False
        self._refusal: Problem | None = None

    def push(self, data: bytes) -> bool:
        """Write a part of the running stream without a pause.

        Returns False, and writes nothing, if the client has not read enough, or if the part is
        large. `send_slices` writes it and waits.
        """
        running = self._running
        if (
            len(data) > SLICE_BYTES
            or running is None
            or not running.chunked_encoding
            or self.flow.write_paused
            or self.transport.is_closing()
        ):
            return False
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))
        return True

    # -- beginning and end ------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        peer = cast("socket.socket | None", transport.get_extra_info("socket"))
        family = None if peer is None else peer.family
        if peer is not None and family in (socket.AF_INET, socket.AF_INET6):
            # Head and body are two writes, and small data is urgent: neither may wait for the ack
            # of the previous one (Nagle's algorithm). asyncio sets this option only for sockets
            # whose protocol is TCP explicitly, and accepted sockets have protocol 0.
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        elif peer is not None and family == socket.AF_UNIX:
            # If the peer cannot be identified, these values stay, and the client is refused.
            self.is_local, self.uid, self.standing = True, -1, peer_identity.PeerIdentity.UNCLEAR
            with suppress(OSError):
                self.uid = sockets.peer_uid(peer)
                self.standing = peer_identity.standing_of(peer)
            self.is_admitted = (
                sockets.is_ours(self.uid) and self.standing is peer_identity.PeerIdentity.FREE
            )
        if self.scheme == "https":
            # asyncio has no public name for the transport below TLS.
            self._lower = cast("Any", transport)._ssl_protocol._transport
            # The same limit as without TLS, for which asyncio has 512 KiB.
            transport.set_write_buffer_limits(high=SLICE_BYTES)
        if (
            peer is not None
            and family in (socket.AF_INET, socket.AF_INET6)
            and sys.platform == "linux"
        ):
            milliseconds = max(1, int(self._stall_seconds * 1000))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, TimeoutError):
            # The kernel detected the stall first (TCP_USER_TIMEOUT).
            self._on_stall(self._is_streaming)
        super().connection_lost(exc)
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def shutdown(self) -> None:
        """Close the connection after the response of its running request."""
        # A second `close()` of a TLS transport cuts it off from its connection: asyncio then
        # ignores `abort()`, and the client's answer to the end of TLS is awaited.
        if not self.transport.is_closing():
            super().shutdown()

    def abort(self) -> None:
        """Close the connection now and drop unsent data."""
        # The transport below TLS does not depend on the state of TLS.
        (self._lower or self.transport).abort()

    # -- timers for client input ------------------------------------------------------------------
    def _watch(self) -> None:
        """Arm the timer for the input that is awaited now.

        If the same input was awaited before, its timer keeps running: a client that sends a byte
        now and then gains no time.
        """
        if self.transport.is_closing():
            return
        awaited = self._what_is_awaited()
        if awaited is not self._awaited:
            if self._timer is not None:
                self._timer.cancel()
            self._awaited = awaited
            self._timer = (
                None
                if awaited is None
                else self.loop.call_later(self._seconds(awaited), self._on_late, awaited)
            )
        is_running = self._running is not None and not self._running.response_complete
        assert (self._timer is None) == is_running, "a timer runs exactly while no request runs"

    def _what_is_awaited(self) -> AwaitedInput | None:
        """Return the input that is awaited; None while a request runs.

        The time for pipelined input begins only after the response: this side may not even read
        until then.
        """
        newest: Any = self.cycle  # None before the first request, despite its declared type.
        if newest is None:
            return AwaitedInput.HEAD
        if not newest.response_complete:
            return None
        match self._part:
            case RequestPart.BEGIN:
                return AwaitedInput.NEXT
            case RequestPart.HEAD:
                return AwaitedInput.HEAD
            case RequestPart.BODY:
                return AwaitedInput.REST

    def _on_late(self, awaited: AwaitedInput) -> None:
        assert awaited is self._awaited
        if self.transport.is_closing():
            return
        # Browsers open connections in advance. A client that sent nothing gets no response.
        if awaited is AwaitedInput.HEAD and self._has_said_something:
            self._refuse(
                Problem(
                    408,
                    "TooSlow",
                    f"the request head arrived too slowly: at most {HEAD_SECONDS_MAX:g} s",
                ),
            )
        else:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        assert self._running is None or self._running.response_complete, "two responses at once"
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # -- the head of a request --------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # Already refused: drop further input.
        self._has_said_something = True
        before = self._requests
        super().data_received(data)
        # The parser may have reported nothing of an unfinished head yet, so the raw bytes are
        # counted, too. If another request ended in the same data, counting starts with the next
        # data.
        if self._part is RequestPart.HEAD and not self.transport.is_closing():
            self._head_bytes += len(data) if self._requests == before else 0
            if self._head_bytes > HEAD_BYTES_MAX:
                self._refuse(_too_large())
        self._watch()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._part = RequestPart.HEAD
        self._head_bytes = self._fields_bytes = 0
        self.scope["state"]["connection"] = self  # pyright: ignore[reportTypedDictNotRequiredAccess]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > URL_BYTES_MAX:
            raise self._remember(
                Problem(414, "UrlTooLong", f"the URL is too long: at most {URL_BYTES_MAX} bytes")
            )

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields_bytes += len(name) + len(value)
        if self._fields_bytes > HEAD_BYTES_MAX:
            raise self._remember(_too_large())
        # Drop trailers. A header after the body must not pass for one of the head: the head was
        # checked already, here or by a proxy.
        if self._part is RequestPart.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._fields_bytes = 0
        super().on_headers_complete()
        self._part = RequestPart.BODY
        if len(self.pipeline) > PIPELINED_MAX:
            # Abort without a response: the client would match it to an earlier request. The
            # exception stops the parser.
            self.abort()
            raise ConnectionAbortedError

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._part = RequestPart.BEGIN
        self._requests += 1

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # uvicorn's keep-alive timer ignores bodies that are still being sent.
        self._unset_keepalive_if_required()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Respond to a parser failure: no HTTP, or an exception of this class."""
        if self.transport.is_closing():
            return
        hint = "send HTTP/1.1"
        self._refuse(
            self._refusal or Problem(400, "BadRequest", "this is not an HTTP request", hint=hint)
        )

    def _remember(self, problem: Problem) -> Problem:
        self._refusal = problem
        return problem

    def _refuse(self, problem: Problem) -> None:
        """Respond to a request that cannot be read to its end, and close the connection."""
        cycle: Any = self.cycle  # None before the first request, despite its declared type.
        if cycle is not None and not cycle.response_complete:
            # Nothing may be written into another response, or in its place. But the unanswered
            # request may be the refused one itself: then its body is the part that cannot be read.
            is_own = self._part is RequestPart.BODY and not self.pipeline
            if cycle.response_started or not is_own:
                self.abort()
                return
        elif self._part is RequestPart.BODY and cycle is not None:
            # The response was sent already; the rest of the body is irrelevant.
            self.transport.close()
            return
        body = problem.body()
        headers = (
            *((name.lower().encode(), value.encode()) for name, value in problem.headers.items()),
            (b"content-type", MEDIA_TYPE.encode()),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            *HEADERS_FOR_BROWSERS,
        )
        lines = b"".join(b"%b: %b\r\n" % header for header in headers)
        self.transport.write(b"%b%b\r\n%b" % (STATUS_LINE[problem.status], lines, body))
        self.transport.close()

    def _seconds(self, awaited: AwaitedInput) -> float:
        match awaited:
            case AwaitedInput.HEAD:
                return HEAD_SECONDS_MAX
            case AwaitedInput.REST:
                return LINGER_SECONDS_MAX
            case AwaitedInput.NEXT:
                return IDLE_SECONDS_MAX if self.is_admitted else STRANGER_IDLE_SECONDS_MAX

    # -- a client that does not read --------------------------------------------------------------
    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_stall()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _watch_stall(self) -> None:
        self._unsent = self._unsent_bytes()
        self._stall_timer = self.loop.call_later(self._stall_seconds, self._on_stall_timer)

    def _on_stall_timer(self) -> None:
        if self._unsent_bytes() < self._unsent:
            self._watch_stall()  # The client reads, but slowly.
            return
        self._stall_timer = None
        self.abort()
        self._on_stall(self._is_streaming)

    def _unsent_bytes(self) -> int:
        """Return the bytes in the buffer of the transport and, with TLS, in the one below it.

        The upper buffer does not shrink while the lower one drains, so a slow reader would look
        like a client that does not read.
        """
        below = 0 if self._lower is None else self._lower.get_write_buffer_size()
        return self.transport.get_write_buffer_size() + below

    @property
    def _is_streaming(self) -> bool:
        """Whether the response in progress is a stream: only streams are sent in chunks."""
        running = self._running
        return (
            running is not None
            and running.chunked_encoding is True
            and not running.response_complete
        )


def _too_large() -> Problem:
    return Problem(
        431, "HeadersTooLarge", f"the request head is too large: at most {HEAD_BYTES_MAX} bytes"
    )


def config_for(app: Any) -> Config:
    """Return a uvicorn configuration that does nothing besides HTTP."""
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
    )
    config.load()
    # This server logs these events itself, or they are not worth a line: a client that does not
    # speak HTTP, a cancelled task.
    logging.getLogger("uvicorn.error").disabled = True
    return config
