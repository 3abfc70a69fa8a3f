"""Common parts of the log suites: a writer, readers, and a record of the answers.

The helpers assume only the order of the answers, not their time. An engine may answer in the next pass of the loop, or
from a thread a second later.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager

from banksman.core.session.event import UPDATE, Entry, Event
from banksman.errors import NotOwner, StoreError
from banksman.store.log import Log
from banksman.store.log_values import READ_EVENTS_MAX, Chunk, Done, KnownSession, PositionedEvent

AT = 1700000000.25

Refusal = StoreError | NotOwner | None


def lines(*data: bytes) -> list[Entry]:
    return [("t-1", UPDATE, line) for line in data]


def data(events: Sequence[Event]) -> list[bytes]:
    return [event.data for event in events]


def chunk(first: int, *data: bytes, epoch: int = 1, at: float = AT) -> Chunk:
    return Chunk(first, epoch, at, lines(*data))


def known(log: Log, session: str = "s") -> KnownSession:
    """Return a session that exists."""
    found = log.find(session)
    assert found is not None
    return found


def is_free(log: Log, epoch: int, session: str = "s") -> bool:
    """Return whether this handle knows that the session was released under this epoch.

    An earlier epoch may have been released before.
    """
    found = log.find(session)
    return found is not None and found.owner is None and found.epoch >= epoch


class Opens:
    """Base of the suite's parts: opens a log."""

    async def open_log(self, *, retained_bytes: int | None = None) -> Log:
        """Open a new, empty log. `retained_bytes`: about how many bytes of a session the log keeps."""
        raise NotImplementedError

    @asynccontextmanager
    async def opened(self, *, retained_bytes: int | None = None) -> AsyncGenerator[Log]:
        log = await self.open_log(retained_bytes=retained_bytes)
        try:
            yield log
        finally:
            await log.close()


class Answers:
    """Record of the answers of a log, in the order in which they came."""

    def __init__(self) -> None:
        self.given: list[tuple[int, Refusal]] = []
        self._asked = 0
        self._more: asyncio.Future[None] | None = None

    def done(self) -> Done:
        """Return the callback for the next call. The calls are numbered from 0."""
        number, self._asked = self._asked, self._asked + 1

        def done(error: Refusal) -> None:
            self.given.append((number, error))
            if self._more is not None and not self._more.done():
                self._more.set_result(None)

        return done

    async def all(self) -> list[type[Exception] | None]:
        """Wait for all answers, check that each came once and in order, and return their kinds."""
        while len(self.given) < self._asked:
            self._more = asyncio.get_running_loop().create_future()
            await self._more
        assert [number for number, _ in self.given] == list(range(self._asked))
        return self.kinds

    async def last(self) -> Refusal:
        """Wait for all answers, and return that of the last call."""
        await self.all()
        return self.given[-1][1]

    @property
    def kinds(self) -> list[type[Exception] | None]:
        return [None if error is None else type(error) for _, error in self.given]


class Writer:
    """Owner of a session, with the head that it assumes. It continues without waiting for answers."""

    def __init__(self, log: Log, session: str, epoch: int, seq: int) -> None:
        self.log = log
        self.session = session
        self.epoch = epoch
        self.seq = seq
        self.answers = Answers()

    @classmethod
    async def claim(cls, log: Log, session: str = "s") -> Writer:
        epoch = await log.claim(session, agent="claude")
        return cls(log, session, epoch, log.head(session).seq)

    def append(
        self,
        *what: bytes | Entry,
        epoch: int | None = None,
        seq: int | None = None,
        at: float = AT,
        snapshot: bytes | None = None,
    ) -> None:
        entries = [("t-1", UPDATE, one) if isinstance(one, bytes) else one for one in what]
        epoch = self.epoch if epoch is None else epoch
        seq = self.seq if seq is None else seq
        self._call(lambda done: self.log.append(self.session, epoch, seq, at, entries, done, snapshot))
        if epoch == self.epoch:
            self.seq = seq + len(entries)

    def advance(self) -> None:
        self._call(lambda done: self.log.advance(self.session, self.epoch, done))
        self.epoch += 1

    def lease(self, name: str | None) -> None:
        self._call(lambda done: self.log.lease(self.session, self.epoch, name, done))

    def release(self) -> None:
        answered = len(self.answers.given)
        self.log.release(self.session, self.epoch)
        assert len(self.answers.given) == answered, "answered inside the call"

    async def commit(self, *what: bytes | Entry, snapshot: bytes | None = None) -> None:
        """Append, and wait until this append and all earlier ones are committed."""
        self.append(*what, snapshot=snapshot)
        assert set(await self.answers.all()) == {None}

    async def take(self, name: str | None) -> Refusal:
        """Take a lease, wait, and return the answer."""
        self.lease(name)
        return await self.answers.last()

    def _call(self, call: Callable[[Done], None]) -> None:
        answered = len(self.answers.given)
        call(self.answers.done())
        assert len(self.answers.given) == answered, "answered inside the call"


async def everything(log: Log, session: str = "s", after: int = 0, limit: int = READ_EVENTS_MAX) -> list[Event]:
    """Return all events after a seq, page by page, for a session without a gap."""
    events: list[Event] = []
    while (page := await log.read(session, after, limit)).events:
        assert page.gap is None
        assert len(page.events) <= limit
        assert [event.seq for event in page.events] == list(range(after + 1, after + 1 + len(page.events)))
        events += page.events
        after = events[-1].seq
    return events


async def follow(log: Log, last: int, session: str = "s", after: int = 0, limit: int = 7) -> list[Event]:
    """Read and wait in turns until the event `last` is read."""
    events: list[Event] = []
    while after < last:
        await log.wait_past(session, after)
        page = await log.read(session, after, limit)
        assert page.events, "woken for an event that cannot be read"
        events += page.events
        after = page.events[-1].seq
    return events


async def everything_placed(
    log: Log, after: str | None = None, limit: int = READ_EVENTS_MAX, sessions: Sequence[str] | None = None
) -> list[PositionedEvent]:
    """Return all events after a position, page by page, for a log without gaps."""
    placed: list[PositionedEvent] = []
    while (page := await log.read_many(after, limit, sessions=sessions)).events:
        assert not page.gaps
        assert len(page.events) <= limit
        placed += page.events
        after = page.position
    return placed


async def follow_all(log: Log, count: int, limit: int = 7, sessions: Sequence[str] | None = None) -> list[Event]:
    """Read many sessions until `count` events are read."""
    events: list[Event] = []
    position: str | None = None
    while len(events) < count:
        page = await log.read_many(position, limit, sessions=sessions)
        events += [placed.event for placed in page.events]
        position = page.position
        if not page.events:
            await log.wait_past_position(position)
    return events


async def outcomes(*calls: Awaitable[object]) -> list[object]:
    """Run the calls concurrently, and return the result or the error of each."""
    return await asyncio.gather(*calls, return_exceptions=True)


async def until(fact: Callable[[], bool]) -> None:
    """Poll for a change that no event reports, like a release."""
    while not fact():  # noqa: ASYNC110  There is no event to wait for.
        await asyncio.sleep(0)
