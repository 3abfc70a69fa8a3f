"""One connection: what it may send before it is let go, and how long it may take to send and to be sent to.

The HTTP itself is uvicorn's. What it leaves open is closed here, for every request alike: a head that never ends
(slowloris), a head that is too large, a body that goes on after its answer, requests that are sent ahead of all
answers, a client that does not take what it is sent. The last is told by the socket: as long as its buffer shrinks
somebody reads, however slowly; if it stands still for `stall_seconds` the connection is cut off. What the kernel has
taken and nobody acknowledges (a laptop that was closed, a cable that was pulled) is cut off by the kernel, after the
same time.

So a connection that is open is never only held: either a request of it runs, which has deadlines of its own, or one
timer runs for what is awaited of the client. There is one place that says which (`_watch`).
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
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from banksman import sockets
from banksman.server.http import peer_identity
from banksman.server.problems import MEDIA_TYPE, Problem

# Bytes to a client, in slices: the next one is made when the last has found room.
#
# A transport keeps a copy of what it could not send. Of one answer, or one event, of thirty megabytes that would be a
# copy for each client that does not read, and they may be a thousand. So each has at most a slice more than its buffer
# takes, and the rest is the one object that all of them share.

SLICE_BYTES = 64 << 10

HEAD_BYTES_MAX = 64 << 10
URL_BYTES_MAX = 8 << 10
# From the first byte of a request to the end of its head.
HEAD_SECONDS_MAX = 10.0
# From the end of its head to the end of its body.
BODY_SECONDS_MAX = 60.0
# A body that is not read, since its answer is known already, may run out for so long: who is cut off while it sends may
# never read what it was told.
LINGER_SECONDS_MAX = 5.0
# Requests that wait for the answers to those before them. Hardly anybody sends even one ahead.
PIPELINED_MAX = 64
# A connection that is kept for the next request.
IDLE_SECONDS_MAX = 75.0
# The same, of a connection that has shown no token.
STRANGER_IDLE_SECONDS_MAX = 10.0
# What the kernel is given beyond what is on its way: the rest waits here, where it is seen that nobody takes it.
UNSENT_BYTES_MAX = 128 << 10
# For browsers: nothing is guessed, nothing is shown inside of another page, no address is told to others.
HEADERS_FOR_BROWSERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


async def send_slices(send: Send, data: bytes) -> None:
    """More is to follow."""
    if len(data) <= SLICE_BYTES:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        return
    begin = 0
    while begin < len(data):
        # Between two events, if there is a border: who looks at what comes, as it comes, then sees whole ones.
        border = data.rfind(b"\n\n", begin, begin + SLICE_BYTES)
        end = begin + SLICE_BYTES if border < 0 else border + 2
        await send({"type": "http.response.body", "body": data[begin:end], "more_body": True})
        begin = end


class SlicedResponse(Response):
    """An answer whose body is sent so."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_slices(send, bytes(self.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class RequestPart(enum.Enum):
    """What of a request comes next."""

    BEGIN, HEAD, BODY = range(3)


class AwaitedInput(enum.Enum):
    """What the client owes us, when no request of it runs."""

    HEAD = "the head of a request"
    REST = "the end of a body whose answer it has"
    NEXT = "another request, or that it goes"


class Connection(HttpToolsProtocol):
    """A client's connection. `lost` is done when it is gone, by whichever side."""

    def __init__(self, *, stall_seconds: float, on_stall: Callable[[bool], None], **rest: Any) -> None:
        """`on_stall` is told of each that is cut off because it does not read, and whether that was a stream."""
        super().__init__(**rest)
        self.lost: asyncio.Future[None] = self.loop.create_future()
        # It came by a socket of this machine, which no browser can.
        self.is_local = False
        # A request of it has shown who it is from.
        self.is_admitted = False
        # Against the limits of accept_loop.py.
        self.is_counted = True
        # Who is at the other end of that; None: nobody knows.
        self.uid: int | None = None
        self.standing = peer_identity.PeerIdentity.FREE
        self._stall_seconds = stall_seconds
        self._on_stall = on_stall
        self._stall_timer: asyncio.TimerHandle | None = None
        self._unsent = 0
        self._awaited: AwaitedInput | None = None
        self._timer: asyncio.TimerHandle | None = None
        # The one that was started last. Those that were sent ahead of its answer wait in `pipeline`.
        self._running: RequestResponseCycle | None = None
        self._head_bytes = 0
        self._fields_bytes = 0
        self._part = RequestPart.BEGIN
        self._requests = 0
        self._has_said_something = False
        self._refusal: Problem | None = None

    # -- beginning and end -------------------------------------------------------------------------------------------
    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        peer = cast("socket.socket | None", transport.get_extra_info("socket"))
        if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6):
            # Head and body are two writes, and what is small is news: neither may wait for the client to say that it
            # has the one before. (asyncio does this for sockets that were made for TCP by name, and accepted ones were
            # not.)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        elif peer is not None and peer.family == socket.AF_UNIX:
            # A client that cannot be looked at stays what this line says, and is refused.
            self.is_local, self.uid, self.standing = True, -1, peer_identity.PeerIdentity.UNCLEAR
            with suppress(OSError):
                self.uid = sockets.peer_uid(peer)
                self.standing = peer_identity.standing_of(peer)
            self.is_admitted = sockets.is_ours(self.uid) and self.standing is peer_identity.PeerIdentity.FREE
        if peer is not None and peer.family in (socket.AF_INET, socket.AF_INET6) and sys.platform == "linux":
            milliseconds = max(1, int(self._stall_seconds * 1000))
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES_MAX)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        if isinstance(exc, TimeoutError):
            self._on_stall(self._is_streaming)  # The kernel was the first to see it.
        super().connection_lost(exc)
        for timer in (self._timer, self._stall_timer):
            if timer is not None:
                timer.cancel()
        if not self.lost.done():
            self.lost.set_result(None)

    def abort(self) -> None:
        """Cut it off, whatever is still to be sent."""
        self.transport.abort()

    # -- what is awaited ---------------------------------------------------------------------------------------------
    def _watch(self) -> None:
        """Arm the timer for what is awaited now. If it is what was awaited before, the time for it runs on: who sends a
        byte now and then does not win any.
        """
        if self.transport.is_closing():
            return
        awaited = self._what_is_awaited()
        if awaited is not self._awaited:
            if self._timer is not None:
                self._timer.cancel()
            self._awaited = awaited
            self._timer = (
                None if awaited is None else self.loop.call_later(self._seconds(awaited), self._on_late, awaited)
            )
        is_running = self._running is not None and not self._running.response_complete
        assert (self._timer is None) == is_running, "a connection that nobody ends"

    def _what_is_awaited(self) -> AwaitedInput | None:
        """None: nothing, a request runs. For what is sent ahead of its answer, which we may not even listen to, the
        time begins afterwards.
        """
        newest: Any = self.cycle  # None before the first request, whatever its type says.
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
        # Browsers open connections that they may need later. Who asked nothing is told nothing.
        if awaited is AwaitedInput.HEAD and self._has_said_something and not self.transport.is_closing():
            self._refuse(Problem(408, "TooSlow", f"the head of a request takes at most {HEAD_SECONDS_MAX:g} s"))
        else:
            self.transport.close()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        assert self._running is None or self._running.response_complete, "two answers at once"
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # -- the head of a request ---------------------------------------------------------------------------------------
    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return  # Refused already. What it still sends is nothing to us.
        self._has_said_something = True
        before = self._requests
        super().data_received(data)
        # Of a head that has not ended nothing may have been handed to us yet that could have been counted. If another
        # request ended in the same piece, it is counted from the next one on.
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
            raise self._remember(Problem(414, "UrlTooLong", f"a URL has at most {URL_BYTES_MAX} bytes"))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields_bytes += len(name) + len(value)
        if self._fields_bytes > HEAD_BYTES_MAX:
            raise self._remember(_too_large())
        # What comes after the body must not pass for what stood before it: that was looked at already, here or by a
        # proxy.
        if self._part is RequestPart.HEAD:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._fields_bytes = 0
        super().on_headers_complete()
        self._part = RequestPart.BODY
        if len(self.pipeline) > PIPELINED_MAX:
            # It is cut off. An answer would be taken for the one to a request before it. To raise stops the parser.
            self.abort()
            raise ConnectionAbortedError

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._part = RequestPart.BEGIN
        self._requests += 1

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # uvicorn's own timer for an idle connection knows nothing of bodies that go on.
        self._unset_keepalive_if_required()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """What the parser could not go on with: it is not HTTP, or we have stopped it."""
        if self.transport.is_closing():
            return
        hint = "send HTTP/1.1"
        self._refuse(self._refusal or Problem(400, "BadRequest", "this is not an HTTP request", hint=hint))

    def _remember(self, problem: Problem) -> Problem:
        self._refusal = problem
        return problem

    def _refuse(self, problem: Problem) -> None:
        """The request could not be read to its end, so it is the connection that is answered."""
        cycle: Any = self.cycle  # None before the first request, whatever its type says.
        if cycle is not None and not cycle.response_complete:
            # Into the middle of another answer, or in its place, nothing may be written. But the last request that is
            # not answered may be the very one that is refused: its body is what could not be read.
            is_own = self._part is RequestPart.BODY and not self.pipeline
            if cycle.response_started or not is_own:
                self.abort()
                return
        elif self._part is RequestPart.BODY and cycle is not None:
            self.transport.close()  # It was answered already, and the rest of it is of no interest.
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
        self.abort()
        self._on_stall(self._is_streaming)

    @property
    def _is_streaming(self) -> bool:
        """Whether the answer that is being sent is one whose length nobody knows: no other is sent in chunks."""
        running = self._running
        return running is not None and running.chunked_encoding is True and not running.response_complete


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
    )
    config.load()
    # What it would say there is said by us, or is no news: that a client spoke no HTTP, that a task was cancelled.
    logging.getLogger("uvicorn.error").disabled = True
    return config
