"""Cost of followers that wait or do not read, counted in a server in this process.

A client that does not read holds what fits into its connection, and its current page. It makes no pages, so the number
of pages is the same with and without it.
"""

from __future__ import annotations

import asyncio
import gc
import socket
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from tests.server.kit import no_drain

from banksman import Host, Kind
from banksman.server import app, http_service
from banksman.server.context import Context
from banksman.server.http import listener as server
from banksman.server.http.connection import SLICE_BYTES
from banksman.server.http.start_policy import StartPolicy
from banksman.server.server_settings import ServerSettings
from banksman.server.streams.event_format import StreamForm
from banksman.server.streams.follower import EventStreams, FollowerWakeup, StreamCounts
from banksman.server.streams.shared_pages import PAGES_BYTES_MAX, EncodedPage, SharedPages
from banksman.server.streams.sources import PAGE_BYTES_MAX, PAGE_EVENTS_MAX, Cursor, OneSession
from banksman.store.log_values import Page
from banksman.testing import fake_agent

TOKEN = "a-token-of-the-tests"
STOPPED = 10
# The turns together exceed twice the page cache, and many times the buffers of the connections. The agent repeats the
# text of a turn at its end, and no event should be more than a slice.
TURNS = 60
PROMPT = f"@@stream 20 0 {'x' * 4_000}"
# asyncio's default: a connection with more in its buffer pauses writing until it has less.
HIGH_WATER_BYTES = 64 << 10
# The chunk size line of HTTP, and the framing of an event.
AROUND_BYTES = 1 << 10


@dataclass
class Served:
    host: Host
    streams: EventStreams
    server: http_service.HttpServer
    port: int

    def connections(self) -> list[Any]:
        return list(self.server._state.connections)  # pyright: ignore[reportPrivateUsage]


@asynccontextmanager
async def serving() -> AsyncGenerator[Served]:
    """Serve as `main.py` does, without cutting off slow clients: they stay for the whole test."""
    settings = ServerSettings(port=0, token=TOKEN, stall_seconds=600.0)
    listener = server.bind(settings)
    port = int(listener.getsockname()[1])
    async with Host("memory:") as host:
        streams = EventStreams(
            closing=asyncio.get_running_loop().create_future(),
            counts=StreamCounts(),
            pages=SharedPages(),
            heartbeat_seconds=settings.heartbeat_seconds,
            streams_max=settings.streams_max,
        )
        context = Context(host, settings, StartPolicy(settings), streams, drain=no_drain, store="")
        one = http_service.HttpServer(app.make(context, token=TOKEN, port=port), [listener], settings, streams)
        one.start()
        try:
            yield Served(host, streams, one, port)
        finally:
            await one.close()
            listener.close()


class Client:
    """Follows a session, and reads on demand."""

    def __init__(self, port: int, path: str, *, is_reading: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.peer = socket.socket()
        self.peer.setblocking(False)
        if not is_reading:
            # Before it connects, because the handshake announces the window. The kernel then buffers little.
            self.peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 10)
        head = f"Host: 127.0.0.1:{port}\r\nAuthorization: Bearer {TOKEN}\r\nAccept: text/event-stream\r\n"
        self._address = ("127.0.0.1", port)
        self._request = f"GET {path} HTTP/1.1\r\n{head}\r\n".encode()

    async def begin(self) -> None:
        await self._loop.sock_connect(self.peer, self._address)
        await self._loop.sock_sendall(self.peer, self._request)
        await self.read_until(b"event: stream.live")

    async def read_until(self, word: bytes) -> None:
        end = b""
        while word not in end:
            data = await self._loop.sock_recv(self.peer, 1 << 20)
            assert data, end
            end = end[-len(word) :] + data


@asynccontextmanager
async def following(served: Served, path: str, *, stopped: int) -> AsyncGenerator[Client]:
    """Connect a client that reads on demand, and `stopped` clients that do not read once they are live."""
    reader = Client(served.port, path, is_reading=True)
    clients = [reader, *(Client(served.port, path, is_reading=False) for _ in range(stopped))]
    try:
        for client in clients:
            await client.begin()
        yield reader
    finally:
        for client in clients:
            client.peer.close()


def pages_in_memory() -> list[EncodedPage[Any]]:
    """Return all pages in memory."""
    return [each for each in gc.get_objects() if isinstance(each, EncodedPage)]


async def test_followers_that_do_not_read_hold_a_page_and_a_slice_only() -> None:
    async with serving() as served:
        session = await served.host.open("claude", command=fake_agent.command())
        async with following(served, f"/v1/sessions/{session.id}/events?raw=1", stopped=STOPPED) as reader:
            tasks = len(asyncio.all_tasks())
            for _ in range(TURNS):
                turn = await session.ask(PROMPT)
                # The reader gets everything, to the last word of each turn.
                await reader.read_until(b'"kind":"turn.ended"')
                assert (await turn.outcome()).kind is Kind.DONE
            counts = served.streams.counts
            assert counts.bytes > 2 * PAGES_BYTES_MAX
            unread = sorted(each.transport.get_write_buffer_size() for each in served.connections())
            assert len(unread) == STOPPED + 1
            # All but the reader have stopped, and each holds a bounded amount.
            assert unread[1] > HIGH_WATER_BYTES
            assert unread[-1] <= HIGH_WATER_BYTES + SLICE_BYTES + AROUND_BYTES
            # The page cache is bounded too, and so are the pages that clients hold besides it.
            kept = served.streams.pages._bytes  # pyright: ignore[reportPrivateUsage]
            assert kept <= PAGES_BYTES_MAX
            pages = pages_in_memory()
            held = {id(page): len(page.data) for page in pages}
            assert all(len(page.data) <= PAGE_BYTES_MAX or page.events == 1 for page in pages)
            assert sum(held.values()) <= PAGES_BYTES_MAX + STOPPED * max(held.values())
            # They have received the first turn or two, and nothing after that.
            assert counts.events <= session.status().seq + STOPPED * PAGE_EVENTS_MAX
            assert len(asyncio.all_tasks()) <= tasks
        await session.close()


async def test_pages_are_made_once_for_waiting_and_stopped_followers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[str, Cursor]] = []
    makes = OneSession._encoded  # pyright: ignore[reportPrivateUsage]

    def counted(self: OneSession, page: Page, place: Cursor, form: StreamForm) -> EncodedPage[Cursor]:
        made.append((self.key[0], place))
        return makes(self, page, place, form)

    monkeypatch.setattr(OneSession, "_encoded", counted)
    async with serving() as served:
        quiet = await served.host.open("claude", command=fake_agent.command())
        session = await served.host.open("claude", command=fake_agent.command())
        async with (
            following(served, f"/v1/sessions/{quiet.id}/events", stopped=STOPPED),
            following(served, f"/v1/sessions/{session.id}/events?raw=1", stopped=STOPPED) as reader,
        ):
            made.clear()
            for _ in range(TURNS):
                turn = await session.ask(PROMPT)
                await reader.read_until(b'"kind":"turn.ended"')
                assert (await turn.outcome()).kind is Kind.DONE
            # One page for each place, and none for the followers of the quiet session.
            assert TURNS <= len(made) <= session.status().seq
            assert len(set(made)) == len(made)
            assert {key for key, _ in made} == {session.id}
        await session.close()
        await quiet.close()


async def test_follower_registers_once_for_the_end_of_the_server() -> None:
    """One registration per page would make the server remove a thousand callbacks at each event."""
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()
    closing: asyncio.Future[None] = loop.create_future()
    with FollowerWakeup(lost=lost, closing=closing, quiet_seconds=60.0) as waking:
        for _ in range(10):
            assert await waking.wait(asyncio.create_task(asyncio.sleep(0)))
            assert [hanging(end) for end in (lost, closing)] == [1, 1]
    assert [hanging(end) for end in (lost, closing)] == [0, 0]


async def test_follower_wakeup_reports_end_and_silence_and_keeps_the_shared_page() -> None:
    loop = asyncio.get_running_loop()
    lost: asyncio.Future[None] = loop.create_future()
    never = loop.create_task(asyncio.Event().wait())
    with FollowerWakeup(lost=lost, closing=loop.create_future(), quiet_seconds=0.02) as waking:
        began = loop.time()
        for count in range(1, 4):
            assert not await waking.wait(never)
            assert loop.time() - began >= count * 0.02
        assert not waking.is_over
        waiting = asyncio.ensure_future(waking.wait(never))
        loop.call_soon(waiting.cancel)
        with pytest.raises(asyncio.CancelledError):
            await waiting
        loop.call_soon(lost.set_result, None)
        while not await waking.wait(never):
            pass  # On a slow machine, silence may come first.
        assert waking.is_over
    assert not never.done()
    assert hanging(never) == 0
    never.cancel()
    await asyncio.wait((never,))


async def test_follower_wakeup_by_a_page_during_silence_does_not_wake_for_the_next() -> None:
    loop = asyncio.get_running_loop()
    said: asyncio.Future[None] = loop.create_future()

    async def say() -> None:
        await said

    first = asyncio.create_task(say())
    never = asyncio.create_task(asyncio.Event().wait())
    await asyncio.sleep(0)  # The task now waits for the future.
    with FollowerWakeup(lost=loop.create_future(), closing=loop.create_future(), quiet_seconds=0.0) as waking:
        # In one iteration of the loop, the timer fires and then the page is done. The callback of the page then runs
        # after this task already waits for the next page.
        loop.call_soon(waking._on_time)  # pyright: ignore[reportPrivateUsage]
        said.set_result(None)
        assert not await waking.wait(first)
        assert await waking.wait(first)
        assert not await waking.wait(never)
    never.cancel()
    await asyncio.wait((never,))


def hanging(future: asyncio.Future[Any]) -> int:
    """Return the number of callbacks of a future."""
    return len(getattr(future, "_callbacks") or ())  # noqa: B009


async def test_huge_event_is_shared_by_followers_that_do_not_read() -> None:
    """One frame of many megabytes, and clients that stop before it: all of them share one object."""
    async with serving() as served:
        session = await served.host.open("claude", command=fake_agent.command({"prompt 1": ["huge_result 8000000"]}))
        async with following(served, f"/v1/sessions/{session.id}/events?raw=1", stopped=STOPPED) as reader:
            turn = await session.ask("go")
            await reader.read_until(b'"kind":"turn.ended"')
            assert (await turn.outcome()).kind is Kind.DONE
            unread = [each.transport.get_write_buffer_size() for each in served.connections()]
            assert max(unread) <= HIGH_WATER_BYTES + SLICE_BYTES + AROUND_BYTES
        await session.close()


async def test_connection_sets_tcp_nodelay() -> None:
    """Otherwise the kernel waits for the client's acknowledgement: forty milliseconds for each answer."""
    async with serving() as served:
        session = await served.host.open("claude", command=fake_agent.command())
        async with following(served, f"/v1/sessions/{session.id}/events", stopped=1):
            for each in served.connections():
                peer = each.transport.get_extra_info("socket")
                assert peer.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        await session.close()
