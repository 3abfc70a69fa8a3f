"""Tests of events that the log pushes to a follower which waits for them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from banksman.core.session.event import TURN_ENDED, UPDATE, Entry
from banksman.server.streams.event_format import StreamForm
from banksman.server.streams.follower import EventStreams, Follower, FollowerWakeup, StreamCounts
from banksman.server.streams.shared_pages import SharedPages
from banksman.server.streams.sources import LIVE_BYTES_MAX, PAGE_EVENTS_MAX, Cursor, OneSession
from banksman.sessions.readable_session import ReadableSession, SessionParts
from banksman.store.log import Log
from banksman.store.memory import MemoryLog
from banksman.store.sqlite import SqliteLog
from banksman.testing import sim

FRAME: Entry = (None, UPDATE, b'{"a":1}')
END: Entry = ("t", TURN_ENDED, b"{}")
SECONDS_MAX = 30.0


class Client:
    """A connection whose client reads everything. `marks` and `seqs`: what it has read."""

    def __init__(self) -> None:
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.can_push = True
        self.marks: list[str] = []
        self.seqs: list[int] = []

    def push(self, data: bytes) -> bool:
        if not self.can_push:
            return False
        self._read(data)
        return True

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.body":
            self._read(message["body"])

    def _read(self, data: bytes) -> None:
        for line in data.splitlines():
            shown = json.loads(line)
            if "seq" in shown:
                self.seqs.append(shown["seq"])
            else:
                self.marks.append(shown["kind"])

    async def until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(SECONDS_MAX):
            while not is_so():  # noqa: ASYNC110  The condition is a client's, which has no event.
                await asyncio.sleep(0.001)


class SilentDialect:
    """Dialect whose frames have no updates."""

    name = "silent"

    def project(self, _line: bytes) -> list[dict[str, Any]]:
        return []

    partial = project


class Writer:
    """The owner of a session. `pages`: those that its followers share."""

    def __init__(self, log: Log, epoch: int) -> None:
        self._log = log
        self._epoch = epoch
        self.seq = 0
        self.pages: SharedPages[Any] = SharedPages()

    def append(self, *entries: Entry) -> asyncio.Future[Any]:
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._log.append("s", self._epoch, self.seq, time.time(), entries, done.set_result)
        self.seq += len(entries)
        return done


engines = pytest.mark.parametrize("engine", ["memory", "sqlite"])


@asynccontextmanager
async def opened(engine: str, folder: Path) -> AsyncGenerator[Log]:
    level = "full" if engine == "full" else "normal"
    log: Log = MemoryLog() if engine == "memory" else SqliteLog(folder / "store.db", level=level)
    yield log
    await log.close()


@asynccontextmanager
async def following(
    log: Log, *, frames: bool = True, heartbeat_seconds: float = 1000.0, writer: Writer | None = None
) -> AsyncGenerator[tuple[Client, Callable[[], asyncio.Task[None]], Writer]]:
    """Prepare a follower that stands at the head of a session. The second value starts it.

    `writer`: that of an earlier follower. All of its followers share their pages.
    """
    loop = asyncio.get_running_loop()
    if writer is None:
        writer = Writer(log, await log.claim("s", agent="a"))
        await writer.append(FRAME)
    dialect: Any = SilentDialect()
    ends: asyncio.Future[None] = loop.create_future()
    parts = SessionParts(id="s", name=None, agent="a", dialect=dialect, store=log, ends=ends)
    session: Any = ReadableSession(parts)
    source = OneSession(session, raw=False, frames=frames)
    streams = EventStreams(
        closing=loop.create_future(),
        counts=StreamCounts(),
        pages=writer.pages,
        heartbeat_seconds=heartbeat_seconds,
        streams_max=10,
    )
    client = Client()
    place = await source.begin(str(log.head("s").seq))
    follower = Follower(streams, source, place, StreamForm.NDJSON, kind="session")
    scope: Any = {"method": "GET", "headers": [], "state": {"connection": client, "client": "c"}}
    started: list[asyncio.Task[None]] = []

    def start() -> asyncio.Task[None]:
        started.append(asyncio.ensure_future(follower(scope, cast(Any, None), cast(Any, client.send))))
        return started[0]

    yield client, start, writer
    client.lost.set_result(None)
    await asyncio.wait(started)
    await writer.pages.close()


@engines
async def test_push_of_more_than_a_page_leaves_no_event_behind(engine: str, tmp_path: Path) -> None:
    async with opened(engine, tmp_path) as log, following(log) as (client, start, writer):
        start()
        await client.until(lambda: client.marks == ["stream.live"])
        writer.append(FRAME)
        await client.until(lambda: client.seqs == [2])
        for _ in range(3):
            writer.append(*[FRAME] * (PAGE_EVENTS_MAX - 1))
        writer.append(END)
        # No other commit and no heartbeat comes.
        await client.until(lambda: client.seqs[-1] == writer.seq)
        assert client.seqs == list(range(2, writer.seq + 1))


@engines
async def test_large_page_is_looked_for_in_memory_once_for_all_followers(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    recent = OneSession.recent

    def counted(source: OneSession, place: Cursor, form: StreamForm) -> Any:
        looks.append(place.seq)
        return recent(source, place, form)

    async with (
        opened(engine, tmp_path) as log,
        following(log) as (one, start_one, writer),
        following(log, writer=writer) as (two, start_two, _),
    ):
        start_one()
        start_two()
        await one.until(lambda: one.marks == two.marks == ["stream.live"])
        monkeypatch.setattr(OneSession, "recent", counted)
        await writer.append(*[FRAME] * 100, (None, UPDATE, b"x" * LIVE_BYTES_MAX))
        await one.until(lambda: one.seqs[-1:] == two.seqs[-1:] == [writer.seq])
    assert looks.count(1) == 1


async def test_follower_ends_when_its_session_is_deleted_and_made_again_at_once(tmp_path: Path) -> None:
    async with opened("sqlite", tmp_path) as log, following(log) as (client, start, _):
        start()
        await client.until(lambda: client.marks == ["stream.live"])
        await asyncio.gather(log.delete("s"), log.claim("s", agent="a"))
        await client.until(lambda: client.marks[-1] == "stream.closing")


@engines
async def test_follower_without_frames_gets_heartbeats_while_the_agent_writes(engine: str, tmp_path: Path) -> None:
    quick: Any = {"frames": False, "heartbeat_seconds": 0.02}
    async with opened(engine, tmp_path) as log, following(log, **quick) as (client, start, writer):
        start()
        deadline = time.monotonic() + SECONDS_MAX
        while client.marks.count("stream.heartbeat") < 3 and time.monotonic() < deadline:
            await writer.append(FRAME)
            await asyncio.sleep(0.002)
        assert client.marks.count("stream.heartbeat") >= 3
        assert client.seqs == []


async def test_follower_is_live_although_a_commit_is_not_settled_when_it_comes(tmp_path: Path) -> None:
    # At this level the writer's thread commits.
    async with opened("full", tmp_path) as log, following(log) as (client, start, writer):
        writer.append(END)
        await asyncio.sleep(0)  # The loop gives it to the thread.
        # The follower begins in the next pass of the loop. By then the thread has committed, and the loop hears of it
        # only after that.
        start()
        while log.head("s").seq < writer.seq:
            time.sleep(0.001)
        await client.until(lambda: client.seqs == [2])
        for _ in range(5):
            await writer.append(END)
        await client.until(lambda: "stream.live" in client.marks)
        assert client.seqs == list(range(2, client.seqs[-1] + 1))


def test_pushed_event_restarts_the_time_until_the_heartbeat() -> None:
    seen: list[tuple[bool, float]] = []

    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        with FollowerWakeup(lost=loop.create_future(), closing=loop.create_future(), quiet_seconds=1.0) as waking:
            began = loop.time()
            loop.call_later(0.7, waking.restart)
            loop.call_later(1.5, waking.restart)
            seen.append((await waking.pause(quiet_since=began), loop.time() - began))

    sim.replay(scenario, "")
    ((was_woken, seconds),) = seen
    assert not was_woken
    assert seconds == pytest.approx(2.5)
