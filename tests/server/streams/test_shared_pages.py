"""A page is made once for all readers at one place, only for a waiting reader, and cached within a limit."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.server.streams.stream_clients import SSE, Received, is_live

from banksman import Event, Host, Session
from banksman.server.streams import shared_pages
from banksman.server.streams.event_format import StreamForm
from banksman.server.streams.follower import EventStreams, Follower, FollowerWakeup, StreamCounts
from banksman.server.streams.shared_pages import PAGES_BYTES_MAX, EncodedPage, SharedPages
from banksman.server.streams.sources import Cursor, ManySessions, OneSession
from banksman.testing import checks, fake_agent
from banksman.testing.checks import Message, Visit

FOLLOWERS = 100


class Counted(OneSession):
    """Counts the events that all instances have encoded."""

    made = 0

    def _line(self, event: Event, form: StreamForm) -> bytes | None:
        Counted.made += 1
        return super()._line(event, form)


class CountedMany(ManySessions):
    made = 0

    async def next(self, place: str | None, form: StreamForm) -> EncodedPage[str | None]:
        page = await super().next(place, form)
        CountedMany.made += page.events
        return page


@dataclass(eq=False)
class _Connection:
    lost: asyncio.Future[None]

    def push(self, data: bytes) -> bool:
        del data
        return False


class Reader:
    """A client without a socket: it receives what a follower sends."""

    def __init__(self, streams: EventStreams, source: Any, place: Any, kind: str) -> None:
        self._follower = Follower(streams, source, place, StreamForm.SSE, kind=kind)
        self._received = Received(SSE)
        self._received.status = 200
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.came = asyncio.Event()
        self._running: asyncio.Task[None] | asyncio.Future[None] = self.lost

    @property
    def messages(self) -> list[Message]:
        return self._received.messages

    def start(self) -> asyncio.Task[None]:
        """Start the follower. Its end wakes a caller of `until`, too."""
        task = self._running = asyncio.ensure_future(self._run())
        task.add_done_callback(lambda _: self.came.set())
        return task

    async def _run(self) -> None:
        scope: dict[str, Any] = {
            "type": "http",
            "method": "GET",
            "headers": [],
            "state": {"connection": _Connection(self.lost), "client": ""},
        }
        await self._follower(scope, self._receive, self._send)

    async def _receive(self) -> Any:
        raise AssertionError("a stream reads nothing")

    async def _send(self, message: Any) -> None:
        data = message.get("body", b"")
        if data:
            self._received.feed(b"%x\r\n%b\r\n" % (len(data), data))
        self.came.set()

    async def until(self, seq: int) -> None:
        """Wait until the stream is live and has shown `seq` events."""
        while not (any(map(is_live, self.messages)) and sum(m.id is not None for m in self.messages) >= seq):
            assert not self._running.done(), "the stream has ended"
            self.came.clear()
            await self.came.wait()


def streams_of(heartbeat_seconds: float = 100.0) -> EventStreams:
    return EventStreams(
        closing=asyncio.get_running_loop().create_future(),
        counts=StreamCounts(),
        pages=SharedPages(),
        heartbeat_seconds=heartbeat_seconds,
        streams_max=1000,
    )


async def last_seq(session: Session) -> int:
    head = await session.head()
    assert head is not None
    return int(head.rpartition(".")[2])


@pytest.mark.thorough
@pytest.mark.parametrize("is_many", [False, True], ids=["one", "many"])
async def test_page_is_encoded_once_for_many_followers(is_many: bool) -> None:
    Counted.made = CountedMany.made = 0
    async with Host("memory:") as host:
        session = await host.open("claude", command=fake_agent.command())
        await (await session.ask("@@stream 600 0 漢")).outcome()
        streams = streams_of()
        readers: list[Reader] = []
        for _ in range(FOLLOWERS):
            source = CountedMany(host, None, raw=False) if is_many else Counted(session, raw=False)
            readers.append(Reader(streams, source, await source.begin(None), "many" if is_many else "session"))
        running = [reader.start() for reader in readers]
        count = await last_seq(session)
        await asyncio.gather(*(reader.until(count) for reader in readers))
        # And also live.
        await (await session.ask("@@stream 60 0.005 字")).outcome()
        count = await last_seq(session)
        await asyncio.gather(*(reader.until(count) for reader in readers))
        streams.closing.set_result(None)
        await asyncio.gather(*running)
        join = checks.joined_many if is_many else checks.joined
        views = [join([Visit(None, reader.messages)]) for reader in readers]
        checks.views_agree(*views[:10])
        assert all(view.events == views[0].events for view in views)
        assert streams.counts.events == FOLLOWERS * count
        made = CountedMany.made if is_many else Counted.made
        # Once, or a few times where the machine is so slow that some readers came after the page expired.
        assert count <= made <= 3 * count, f"{made} were encoded for {FOLLOWERS} who follow {count}"
        await streams.pages.close()


async def test_page_without_a_waiter_is_not_made() -> None:
    pages = SharedPages[int]()
    begun: list[int] = []
    ended: list[str] = []
    go_on = asyncio.Event()

    async def make() -> EncodedPage[int]:
        begun.append(1)
        try:
            await go_on.wait()
        except asyncio.CancelledError:
            ended.append("cancelled")
            raise
        ended.append("made")
        return EncodedPage(b"x", 1, 1, {})

    with pages.at("here", make) as first:
        with pages.at("here", make) as second:
            assert first is second
            await asyncio.sleep(0)
        # One of them still waits for it.
        assert not first.cancelling()
    await asyncio.wait((first,))
    assert (begun, ended) == ([1], ["cancelled"])
    # The next reader gets another page, which is made.
    with pages.at("here", make) as third:
        await asyncio.sleep(0)
        go_on.set()
        assert (await third).data == b"x"
    # A reader shortly after that finds it in the cache.
    with pages.at("here", make) as fourth:
        assert fourth is third
    assert (begun, ended) == ([1, 1], ["cancelled", "made"])
    await pages.close()


async def test_page_cache_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_pages, "PAGE_SECONDS_MAX", 0.05)
    pages = SharedPages[int]()

    async def make() -> EncodedPage[int]:
        return EncodedPage(bytes(1 << 20), 1, 1, {})

    def kept() -> int:
        return sum(len(made[1].task.result().data) for made in pages._made.values())  # pyright: ignore[reportPrivateUsage]

    for number in range(40):
        with pages.at(number, make) as task:
            await task
        await asyncio.sleep(0)
        assert kept() <= PAGES_BYTES_MAX
    assert kept() > 0
    # No reader comes, and the pages expire all the same.
    async with asyncio.timeout(10):
        while kept():  # noqa: ASYNC110 - no event reports the expiry.
            await asyncio.sleep(0.01)
    await pages.close()


async def test_page_ready_as_the_timer_fires_is_not_taken_for_the_next() -> None:
    loop = asyncio.get_running_loop()
    lost, closing, came = loop.create_future(), loop.create_future(), asyncio.Event()
    page = asyncio.ensure_future(came.wait())
    with FollowerWakeup(lost=lost, closing=closing, quiet_seconds=100) as waking:
        # The callback of the page before is still pending.
        loop.call_soon(waking.wake)
        loop.call_later(0.05, came.set)
        assert await waking.wait(page)
        assert page.done()


async def test_page_after_an_event_that_fills_one_is_not_empty(tmp_path: Path) -> None:
    """The reader is after the event, and the page that begins with that event has nothing else."""
    store = f"sqlite:{tmp_path / 'log.sqlite'}"
    async with Host(store) as host:
        session = await host.open("claude", command=fake_agent.command())
        turn = await session.ask("@@say hello\n" + "z" * (5 << 20))
        await turn.outcome()
    # A new host: the first has the last writes in memory.
    async with Host(store) as host, asyncio.timeout(30):
        session = host.session(session.id)
        events = [event async for event in session.events(waits=False)]
        huge = next(event for event in events if event.kind == "turn.queued")
        page = await OneSession(session, raw=False).next(Cursor(huge.epoch, huge.seq), StreamForm.SSE)
        assert page.events > 0
