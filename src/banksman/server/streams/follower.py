"""Follower: send the event stream of one client, with heartbeats, limits and counters.

`Follower` is the ASGI response. `FollowerWakeup` waits for the next page, the end, or the time of a
heartbeat. `EventStreams` is the state of all streams: their limit per client, their tokens, and the
shutdown. `StreamCounts` counts for the metrics. `shared_pages.py` has the pages.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Hashable
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from banksman.errors import StoreError
from banksman.server.http.auth import bearer
from banksman.server.http.connection import Connection, send_slices
from banksman.server.problems import Problem
from banksman.server.streams.event_format import RETRY_MILLISECONDS, StreamForm, made, preamble
from banksman.server.streams.shared_pages import EncodedPage, LivePages, SharedPages, StreamSource

log = logging.getLogger("banksman.serve")

# Whether the caller of an open stream may still have it.
Allowed = Callable[[], Awaitable[bool]]
# A revoked token's streams must end within a second.
CHECK_SECONDS = 0.4
# A stream shows one session, many sessions, or the ends of commands.
KINDS = ("session", "many", "commands")


def _nobody() -> dict[str, int]:
    """Return a count of zero followers for each kind."""
    return dict.fromkeys(KINDS, 0)


@dataclass(slots=True)
class StreamCounts:
    """Stream counters of one server since its start. Belongs to its event loop.

    `followers`: open streams by kind. `cut`: streams that were aborted because the client did not
    read. `gaps`: how often a follower got a gap mark, because retention had removed events.
    """

    followers: dict[str, int] = field(default_factory=_nobody)
    events: int = 0
    bytes: int = 0
    cut: int = 0
    gaps: int = 0

    @contextmanager
    def following(self, kind: str) -> Generator[None]:
        """Count one follower while the context is entered."""
        assert kind in self.followers, kind
        self.followers[kind] += 1
        try:
            yield
        finally:
            self.followers[kind] -= 1
            assert self.followers[kind] >= 0


# A follower waits for a page, for an end, or for its heartbeat. `asyncio.wait` could do the same.
# But it adds a callback to each future for every page. To remove the callback it scans all
# callbacks of the future; on the future of the server's end these are the callbacks of all
# followers. With a thousand followers each event would cost a million steps. So a follower adds its
# callbacks to the ends once, for its lifetime. Its timer is not moved for each page either: when
# the timer fires, it checks how long the stream has been quiet.
class FollowerWakeup:
    """Wakeups of one follower. Nothing is left to wait for once `lost` or `closing` is done."""

    def __init__(
        self, *, lost: asyncio.Future[None], closing: asyncio.Future[None], quiet_seconds: float
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends = (lost, closing)
        self._quiet_seconds = quiet_seconds
        # Start of the present wait; None outside of a wait.
        self._since: float | None = None
        self._waiter: asyncio.Future[bool] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> FollowerWakeup:
        for end in self._ends:
            end.add_done_callback(self.wake)
        self._timer = self._loop.call_later(self._quiet_seconds, self._on_time)
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.remove_done_callback(self.wake)
        assert self._timer is not None
        self._timer.cancel()

    @property
    def is_over(self) -> bool:
        """Whether the client is gone or the server closes its streams."""
        lost, closing = self._ends  # Called twice a page: avoid a generator.
        return lost.done() or closing.done()

    async def wait(self, task: asyncio.Task[Any], *, quiet_since: float | None = None) -> bool:
        """Wait until the task is done or the stream ends.

        Returns False if neither happened and the stream was quiet for `quiet_seconds`.
        `quiet_since`: start of that time; None takes the start of this wait. The task survives if
        this wait is cancelled.
        """
        since = self._loop.time() if quiet_since is None else quiet_since
        if task.done() or self.is_over:
            return True
        task.add_done_callback(self.wake)
        try:
            # Check again after each wakeup: a page that finished just as the timer fired may have
            # its wakeup still scheduled when the wait for the next page begins.
            while not (task.done() or self.is_over):
                if not await self.pause(quiet_since=since):
                    return False
            return True
        finally:
            task.remove_done_callback(self.wake)

    async def pause(self, *, quiet_since: float) -> bool:
        """Wait until `wake` is called. The caller has checked that there is nothing to do.

        Returns False if the stream was quiet for `quiet_seconds` since `quiet_since`.
        """
        self._since = quiet_since
        self._waiter = self._loop.create_future()
        try:
            return await self._waiter
        finally:
            self._since = None

    def restart(self) -> float:
        """Restart the quiet time of the present pause, and return the time."""
        now = self._loop.time()
        if self._since is not None:
            self._since = now
        return now

    def wake(self, _: object = None) -> None:
        """End the present pause. Without one, nothing happens."""
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
# A stream is a place in the log. It takes the page after that place, which other followers may
# share, sends it, and continues after it. There is no queue. While a follower waits at the end, the
# log pushes the page after its place, which is the page that it would take itself. So no event is
# sent twice or left out, whenever the client disconnects and wherever it resumes. A quiet stream
# sends heartbeats, so that both sides detect a dead connection.

Place = TypeVar("Place", bound=Hashable)

_HEADERS = (
    (b"cache-control", b"no-store"),
    # A buffering proxy would hold live events back.
    (b"x-accel-buffering", b"no"),
)


@dataclass(slots=True)
class EventStreams:
    """State that all streams share.

    `closing`: done when the server ends all streams. `is_ending`: set earlier, when the server
    refuses new work and lets running turns finish.
    """

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
        """Count a stream of this client. Raises a 429 Problem beyond the limit."""
        if self.by_client.get(client, 0) >= self.streams_max:
            hint = "close one, or follow many sessions over one stream (/v1/events)"
            raise Problem(
                429, "TooManyStreams", f"{self.streams_max} streams are open already", hint=hint
            )
        self.by_client[client] = self.by_client.get(client, 0) + 1
        try:
            yield
        finally:
            self.by_client[client] -= 1
            if not self.by_client[client]:
                del self.by_client[client]

    @contextmanager
    def opened_with(self, token: str, connection: Connection) -> Generator[None]:
        """Register a stream, so that it ends when its token is revoked.

        The token may have been revoked after the request was authenticated, while the source was
        opened. So it is checked again.
        """
        if self.is_revoked(token):
            hint = "log in again"
            raise Problem(401, "NotLetIn", "this page token was revoked by a logout", hint=hint)
        mine = self.by_token.setdefault(token, set())
        mine.add(connection)
        try:
            yield
        finally:
            mine.discard(connection)
            if not mine and self.by_token.get(token) is mine:
                del self.by_token[token]

    @contextmanager
    def opened(self, scope: Scope) -> Generator[None]:
        """Count and register the response to this request. Raises a Problem if it may not be."""
        state: dict[str, Any] = scope["state"]
        token = bearer(Headers(scope=scope))
        with self.place_for(state["client"]), self.opened_with(token, state["connection"]):
            yield

    @asynccontextmanager
    async def guarded(
        self, connection: Connection, is_allowed: Allowed | None
    ) -> AsyncGenerator[None]:
        """Abort the connection when the stream is not allowed any more."""
        if is_allowed is None:
            yield
            return
        task = asyncio.ensure_future(_abort_when_forbidden(connection, is_allowed))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait((task,))

    def revoke(self, token: str) -> None:
        """Abort all streams that were opened with this token, and drop unsent data."""
        for connection in self.by_token.pop(token, set()):
            connection.abort()


async def _abort_when_forbidden(connection: Connection, is_allowed: Allowed) -> None:
    try:
        # No event tells of a change of the file of tokens, or of the clock.
        while await is_allowed():  # noqa: ASYNC110
            await asyncio.sleep(CHECK_SECONDS)
    except Exception as exc:
        log.error("a stream ends, because its right cannot be checked: %s", exc)
    finally:
        # Also after an error: whether the stream is allowed is then unknown. The end of the stream
        # cancels this task, and leaves the connection to the next request.
        if (task := asyncio.current_task()) is None or not task.cancelling():
            connection.abort()


class Follower(Generic[Place]):
    """ASGI response that streams events to one client."""

    def __init__(
        self,
        streams: EventStreams,
        source: StreamSource[Place],
        place: Place,
        form: StreamForm,
        *,
        kind: str,
        is_allowed: Allowed | None = None,
    ) -> None:
        """Prepare a stream that begins after `place`.

        `kind`: one of `KINDS`, for the counters. `is_allowed`: checked all the time; the stream is
        aborted when it is false. None: the caller has no limits.
        """
        self._is_allowed = is_allowed
        self._streams = streams
        self._source = source
        self._place = place
        self._form = form
        self._kind = kind
        # Last seq of the gap that was reported, by session: each gap is reported once.
        self._gaps: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        # When data was last sent. An empty page is not visible to the client.
        self._quiet_since = self._loop.time()
        self._live: LivePages[Place] | None = None
        # The follower waits for a commit, so new events can be pushed.
        self._is_waiting = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"]["connection"]
        try:
            with self._streams.opened(scope), self._streams.counts.following(self._kind):
                async with self._streams.guarded(connection, self._is_allowed):
                    await self._answer(connection, send, has_body=scope["method"] != "HEAD")
        except Problem as problem:
            await problem.response()(scope, receive, send)

    async def _answer(self, connection: Connection, send: Send, *, has_body: bool) -> None:
        content_type = (b"content-type", self._form.value.encode())
        await send(
            {"type": "http.response.start", "status": 200, "headers": [content_type, *_HEADERS]}
        )
        if has_body:
            await self._write(send, preamble(self._form))
            closing, seconds = self._streams.closing, self._streams.heartbeat_seconds
            with FollowerWakeup(
                lost=connection.lost, closing=closing, quiet_seconds=seconds
            ) as waking:
                reason = await self._follow(connection, waking, send)
            if reason is not None:
                seconds = RETRY_MILLISECONDS / 1000
                await self._write(
                    send, made(self._form, "stream.closing", reason=reason, retry_seconds=seconds)
                )
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _follow(
        self, connection: Connection, waking: FollowerWakeup, send: Send
    ) -> str | None:
        """Send pages until the client is gone (None) or the server ends the stream (the reason)."""
        is_live = False
        on_commit = functools.partial(self._on_commit, connection, waking)
        with self._streams.pages.live(self._source, self._form, on_commit) as live:
            self._live = live
            while True:
                try:
                    # Checked after each page: a full page may be the last one. A commit that the
                    # tail has not seen yet is pushed when it has.
                    if not is_live and (
                        live.is_at_end(self._place) or await self._source.is_at_end(self._place)
                    ):
                        is_live = True
                        head = self._source.shown(self._place)
                        await self._write(send, made(self._form, "stream.live", head=head))
                    page = await self._next(waking, live, send)
                except StoreError as exc:
                    # The session was deleted, or the log is closed or unreadable. The client gets
                    # the exact error when it reconnects.
                    return "closing" if self._streams.is_ending else exc.args[0]
                if connection.lost.done():
                    return None
                if page is None:
                    return "closing"
                await self._send_page(page, send)
                self._place = page.place

    async def _next(
        self, waking: FollowerWakeup, live: LivePages[Place], send: Send
    ) -> EncodedPage[Place] | None:
        """Return the next page, and send heartbeats until it is ready; None if the stream ends."""
        has_waited = False
        while live.is_at_end(self._place) and not waking.is_over:
            has_waited = self._is_waiting = True
            try:
                is_quiet = not await waking.pause(quiet_since=self._quiet_since)
            finally:
                self._is_waiting = False
            if is_quiet:
                await self._heartbeat(send)
        page = live.next(self._place)
        if page is not None:
            if not has_waited:
                # A follower far behind sends page after page. Without this pause it would block
                # the event loop for all other tasks.
                await asyncio.sleep(0)
            return page
        key = (self._source.key, self._form, self._place)
        make = functools.partial(self._source.next, self._place, self._form)
        with self._streams.pages.at(key, make) as making:
            while not await waking.wait(making, quiet_since=self._quiet_since):
                await self._heartbeat(send)
            if not waking.is_over or making.done():
                return making.result()
        # The server ends its streams. Send the events that exist, and wait for no others.
        return None if await self._source.is_at_end(self._place) else await make()

    def _on_commit(self, connection: Connection, waking: FollowerWakeup) -> None:
        """Push the new events to a follower that waits for them.

        So a live event costs no task switch. If that is not possible, the follower wakes up and
        sends the events.
        """
        if not self._is_waiting:
            return
        try:
            is_pushed = self._push(connection, waking)
        except Exception:
            # The log calls this, and must not fail because of one follower. The follower gets the
            # same error when it wakes up.
            is_pushed = False
        if not is_pushed:
            waking.wake()

    def _push(self, connection: Connection, waking: FollowerWakeup) -> bool:
        """Push one page. Returns False if events are left."""
        live = self._live
        page = None if live is None else live.next(self._place)
        if page is None:
            return False
        assert not page.gaps, "pages from memory have no gaps"
        if page.data:
            if not connection.push(page.data):
                return False
            # An empty page is not visible to the client, so it does not postpone the heartbeat.
            self._quiet_since = waking.restart()
            self._streams.counts.bytes += len(page.data)
            self._streams.counts.events += page.events
        self._place = page.place
        return live is not None and live.has_all(self._place)

    async def _heartbeat(self, send: Send) -> None:
        head = self._source.shown(self._place)
        await self._write(send, made(self._form, "stream.heartbeat", head=head))

    async def _send_page(self, page: EncodedPage[Place], send: Send) -> None:
        counts = self._streams.counts
        for session, (first, last) in page.gaps.items():
            if self._gaps.get(session, 0) < last:
                self._gaps[session] = last
                counts.gaps += 1
                await self._write(
                    send, made(self._form, "stream.gap", session=session, first=first, last=last)
                )
        await self._write(send, page.data)
        counts.events += page.events

    async def _write(self, send: Send, data: bytes) -> None:
        if data:
            self._streams.counts.bytes += len(data)
            await send_slices(send, data)
            self._quiet_since = self._loop.time()
