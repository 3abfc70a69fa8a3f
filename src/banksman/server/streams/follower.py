"""One client that follows a stream of events over SSE: what it gets, what wakes it, and the counts of all streams."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Generator, Hashable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from banksman.errors import StoreError
from banksman.server.http.auth import bearer
from banksman.server.http.connection import Connection, send_slices
from banksman.server.problems import Problem
from banksman.server.streams.sources import (
    RETRY_MILLISECONDS,
    EncodedPage,
    SharedPages,
    StreamForm,
    StreamSource,
    made,
    preamble,
)

# A stream is of one session, or of many at once.
KINDS = ("session", "many")


def _nobody() -> dict[str, int]:
    return dict.fromkeys(KINDS, 0)


@dataclass(slots=True)
class StreamCounts:
    """Of one server, from its start. For its loop only.

    `followers`: who follows now, by kind. `cut`: streams that were cut off because nobody took their bytes. `gaps`: how
    often a follower was told that retention had taken what it wanted.
    """

    followers: dict[str, int] = field(default_factory=_nobody)
    events: int = 0
    bytes: int = 0
    cut: int = 0
    gaps: int = 0

    @contextmanager
    def following(self, kind: str) -> Generator[None]:
        """One more follows, as long as this is entered."""
        assert kind in self.followers, kind
        self.followers[kind] += 1
        try:
            yield
        finally:
            self.followers[kind] -= 1
            assert self.followers[kind] >= 0


# What wakes a follower is a page, an end, or that it is time for a sign of life. `asyncio.wait` says the same. But it
# hangs itself on every one of them for each page, and to take itself off again it walks past all who hang there: on the
# future that tells the server's end, that is everybody. A thousand followers would pay for a million steps at each
# event. So a follower hangs on its ends once, for as long as it lasts. Its timer is not moved at each page either, but
# when it fires: then it is seen how long nothing has come.
class FollowerWakeup:
    """Of one follower, while it is entered. After `lost` or `closing` is done there is nothing to wait for."""

    def __init__(self, *, lost: asyncio.Future[None], closing: asyncio.Future[None], quiet_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends = (lost, closing)
        self._quiet_seconds = quiet_seconds
        # Since when it waits; None while it does not.
        self._since: float | None = None
        self._waiter: asyncio.Future[bool] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> FollowerWakeup:
        for end in self._ends:
            end.add_done_callback(self._wake)
        self._timer = self._loop.call_later(self._quiet_seconds, self._on_time)
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.remove_done_callback(self._wake)
        assert self._timer is not None
        self._timer.cancel()

    @property
    def is_over(self) -> bool:
        lost, closing = self._ends  # Asked twice a page: no generator.
        return lost.done() or closing.done()

    async def wait(self, task: asyncio.Task[Any], *, quiet_since: float | None = None) -> bool:
        """Until it is done, or one of the ends; False: neither, and it is quiet for so long: since this wait began, or
        longer. The task is not cancelled with who waits for it."""
        if task.done() or self.is_over:
            return True
        self._since = self._loop.time() if quiet_since is None else quiet_since
        task.add_done_callback(self._wake)
        try:
            while not (task.done() or self.is_over):
                self._waiter = self._loop.create_future()
                if not await self._waiter:
                    return False
                # Else look again: a page that was done in the moment in which the timer fired has its word to us still
                # on its way when we wait for the next one.
            return True
        finally:
            self._since = None
            task.remove_done_callback(self._wake)

    def _wake(self, _: object) -> None:
        if not self._waiter.done():
            self._waiter.set_result(True)

    def _on_time(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._quiet_seconds
        if due <= now:
            due = now + self._quiet_seconds
            if not self._waiter.done():
                self._waiter.set_result(False)
        self._timer = self._loop.call_at(due, self._on_time)


# One client's stream, from its first byte to its last.
#
# It is a place in the log. It takes the page after it, which others may be taking too, sends it, and goes on from where
# that ended; there is no queue, and no second way by which something new could come. So nothing can be sent twice or
# left out, whenever the client goes and wherever it comes back. When there is nothing to send it says so now and then,
# so that both sides learn of a connection that is no more.

Place = TypeVar("Place", bound=Hashable)

_HEADERS = (
    (b"cache-control", b"no-store"),
    # A proxy that collects before it passes on would hold back what is live.
    (b"x-accel-buffering", b"no"),
)


@dataclass(slots=True)
class EventStreams:
    """What all streams share. `closing` is done when the server lets go of its clients; from before that, when what
    runs may finish and nothing new is taken, `is_ending`."""

    closing: asyncio.Future[None]
    counts: StreamCounts
    pages: SharedPages[Any]
    heartbeat_seconds: float
    streams_max: int
    by_client: dict[str, int] = field(default_factory=dict[str, int])
    is_revoked: Callable[[str], bool] = lambda _: False
    by_token: dict[str, set[Connection]] = field(default_factory=dict[str, set[Connection]])
    is_ending: bool = False

    @contextmanager
    def place_for(self, client: str) -> Generator[None]:
        """One of those that this client may have open at once."""
        if self.by_client.get(client, 0) >= self.streams_max:
            hint = "close one, or follow many sessions over one stream (/v1/events)"
            raise Problem(429, "TooManyStreams", f"{self.streams_max} streams are open already", hint=hint)
        self.by_client[client] = self.by_client.get(client, 0) + 1
        try:
            yield
        finally:
            self.by_client[client] -= 1
            if not self.by_client[client]:
                del self.by_client[client]

    @contextmanager
    def opened_with(self, token: str, connection: Connection) -> Generator[None]:
        """A stream that ends when its token is revoked. It may have been since the request was let in: what was to be
        streamed was looked for meanwhile."""
        if self.is_revoked(token):
            raise Problem(401, "NotLetIn", "this token was logged out", hint="log in again")
        mine = self.by_token.setdefault(token, set())
        mine.add(connection)
        try:
            yield
        finally:
            mine.discard(connection)
            if not mine and self.by_token.get(token) is mine:
                del self.by_token[token]

    def revoke(self, token: str) -> None:
        """Cut off what was opened with this token, with what is not sent yet."""
        for connection in self.by_token.pop(token, set()):
            connection.transport.abort()


class Follower(Generic[Place]):
    """The answer to a request for a stream: an ASGI response."""

    def __init__(
        self, streams: EventStreams, source: StreamSource[Place], place: Place, form: StreamForm, *, kind: str
    ) -> None:
        """`kind`, for counting: "session" or "many"."""
        self._streams = streams
        self._source = source
        self._place = place
        self._form = form
        self._kind = kind
        # What was said of retention, by session: it is said once.
        self._gaps: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        # When something was sent last. A page may have nothing to show, and is no sign of life.
        self._quiet_since = self._loop.time()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state: dict[str, Any] = scope["state"]
        connection: Connection = state["connection"]
        try:
            with (
                self._streams.place_for(state["client"]),
                self._streams.opened_with(bearer(Headers(scope=scope)), connection),
                self._streams.counts.following(self._kind),
            ):
                await self._answer(connection, send, has_body=scope["method"] != "HEAD")
        except Problem as problem:
            await problem.response()(scope, receive, send)

    async def _answer(self, connection: Connection, send: Send, *, has_body: bool) -> None:
        content_type = (b"content-type", self._form.value.encode())
        await send({"type": "http.response.start", "status": 200, "headers": [content_type, *_HEADERS]})
        if has_body:
            await self._write(send, preamble(self._form))
            closing, seconds = self._streams.closing, self._streams.heartbeat_seconds
            with FollowerWakeup(lost=connection.lost, closing=closing, quiet_seconds=seconds) as waking:
                reason = await self._follow(connection, waking, send)
            if reason is not None:
                seconds = RETRY_MILLISECONDS / 1000
                await self._write(send, made(self._form, "stream.closing", reason=reason, retry_seconds=seconds))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(self, connection: Connection, waking: FollowerWakeup, send: Send) -> str | None:
        """Until the client is gone (None), or for a reason of ours."""
        is_live = False
        while True:
            try:
                # Asked after each page: a full one may be the last.
                if not is_live and await self._source.is_at_end(self._place):
                    is_live = True
                    head = self._source.shown(self._place)
                    await self._write(send, made(self._form, "stream.live", head=head))
                page = await self._next(waking, send)
            except StoreError as exc:
                # The session was deleted, or the log is closed or cannot be read: who comes back is told which.
                return "closing" if self._streams.is_ending else exc.args[0]
            if connection.lost.done():
                return None
            if page is None:
                return "closing"
            await self._send_page(page, send)
            self._place = page.place

    async def _next(self, waking: FollowerWakeup, send: Send) -> EncodedPage[Place] | None:
        """None: there will be none for this client. Heartbeats until there is one."""
        key = (self._source.key, self._form, self._place)
        make = functools.partial(self._source.next, self._place, self._form)
        with self._streams.pages.at(key, make) as making:
            while not await waking.wait(making, quiet_since=self._quiet_since):
                head = self._source.shown(self._place)
                await self._write(send, made(self._form, "stream.heartbeat", head=head))
            if not waking.is_over or making.done():
                return making.result()
        # The server lets go of its clients: what is there is still theirs, and nothing is waited for any more.
        return None if await self._source.is_at_end(self._place) else await make()

    async def _send_page(self, page: EncodedPage[Place], send: Send) -> None:
        counts = self._streams.counts
        for session, (first, last) in page.gaps.items():
            if self._gaps.get(session, 0) < last:
                self._gaps[session] = last
                counts.gaps += 1
                await self._write(send, made(self._form, "stream.gap", session=session, first=first, last=last))
        await self._write(send, page.data)
        counts.events += page.events

    async def _write(self, send: Send, data: bytes) -> None:
        if data:
            self._streams.counts.bytes += len(data)
            await send_slices(send, data)
            self._quiet_since = self._loop.time()
