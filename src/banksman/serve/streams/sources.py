"""Where a stream comes from: one session, by cursor, or many, by the position in the store's order of commits.

A source knows how to make the page after a place. It makes none that is empty: when there is nothing, it says so
(`None`) or waits, as it is asked.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from banksman.errors import HistoryLost
from banksman.run.host import Host
from banksman.run.sessions.following import place_of
from banksman.run.sessions.session import Session
from banksman.serve.streams.encoding import Form, encode, placed, stored
from banksman.serve.streams.pages import Page
from banksman.store import log as store

# Read in one go, and encoded until there is enough: the loop is everybody's, and this is a millisecond or two of it. A
# page goes out as it is, so it is also what a client that does not read can hold.
PAGE_EVENTS_MAX = 250
PAGE_BYTES_MAX = 256 << 10

Place = TypeVar("Place", bound=Hashable)


class Source(Protocol[Place]):
    """`key` tells those apart that do not show the same."""

    @property
    def key(self) -> Hashable: ...
    async def next(self, place: Place, form: Form) -> Page[Place]:
        """The page after a place: what is there now, or, if there is nothing, what comes."""
        ...

    async def is_at_end(self, place: Place) -> bool:
        """Whether there is nothing after a place, at this moment."""
        ...

    def shown(self, place: Place) -> str | None:
        """A place, as a client knows it."""
        ...


class Cursor(NamedTuple):
    """After which event. `epoch` None: nobody can tell any more under which it was written, or it is the beginning."""

    epoch: int | None
    seq: int


class OneSession:
    """The events of one session.

    A place names its history: no epoch is given twice for an id, also if a session was deleted and another made under
    the same one. For the beginning, which has no epoch, the time at which the session was made says which it is.
    """

    def __init__(self, session: Session, *, raw: bool) -> None:
        self._session = session
        self._raw = raw
        self.key = (session.id, session.created, raw)

    async def begin(self, after: str | None) -> Cursor:
        """`HistoryLost`, `UsageError`: nobody can have been there."""
        epoch, seq = place_of(after)
        if not seq:
            return Cursor(None, 0)
        await self._session.page(after, limit=1)
        found = await self._session.page(seq - 1, limit=1)
        if found.gap is not None:
            return Cursor(epoch, seq)
        if not found.events:
            raise self._lost(f"the store has no event {seq}")
        return Cursor(found.events[0].epoch, seq)

    async def is_at_end(self, place: Cursor) -> bool:
        return self._session.committed <= place.seq

    async def next(self, place: Cursor, form: Form) -> Page[Cursor]:
        # First this: where there is something it costs nothing, and where there is nothing it spares a look at the disk
        # by another thread, which nearly everybody who is live would take before each event.
        await self._session.wait_past(place.seq)
        while not (page := await self._after(place)).events:
            await self._session.wait_past(place.seq)
        before = place.seq if page.gap is None else page.gap[1]
        assert page.events[0].seq == before + 1, "a page begins right after its place"
        data, taken = _joined(stored(form, event.cursor, encode(event, raw=self._raw)) for event in page.events)
        end = page.events[taken - 1]
        assert end.seq > place.seq, "a page leads on"
        gaps = {} if page.gap is None else {self._session.id: page.gap}
        return Page(data, taken, Cursor(end.epoch, end.seq), gaps)

    async def _after(self, place: Cursor) -> store.Page:
        """What follows, with the event at which the reader stands looked at in the same read: it must be the one that
        it was."""
        if place.epoch is None:
            return await self._session.page(place.seq, limit=PAGE_EVENTS_MAX)
        page = await self._session.page(place.seq - 1, limit=PAGE_EVENTS_MAX + 1)
        if page.gap is not None:
            # It is no longer kept, and what is missing for this reader begins after it.
            return store.Page(page.events, (place.seq + 1, page.gap[1]) if page.gap[1] > place.seq else None)
        if not page.events or page.events[0].epoch != place.epoch:
            raise self._lost(f"the store has no event {place.epoch}.{place.seq} any more")
        if len(page.events) == 1:
            # It may fill a page by itself: what comes after it is in the next then.
            return await self._session.page(f"{place.epoch}.{place.seq}", limit=PAGE_EVENTS_MAX)
        return store.Page(page.events[1:], None)

    def _lost(self, message: str) -> HistoryLost:
        return HistoryLost(message, hint="begin again from the first event", session=self._session.id)

    def shown(self, place: Cursor) -> str | None:
        if not place.seq:
            return None
        return str(place.seq) if place.epoch is None else f"{place.epoch}.{place.seq}"


class ManySessions:
    """The events of every session of the store, or of those named, in the order of their commits."""

    def __init__(self, host: Host, sessions: frozenset[str] | None, *, raw: bool) -> None:
        self._host = host
        self._sessions = sessions
        self._raw = raw
        self.key = (sessions, raw)

    async def begin(self, after: str | None) -> str | None:
        await self._host.read_many(after, limit=1, sessions=self._sessions)
        return after

    async def is_at_end(self, place: str | None) -> bool:
        page = await self._host.read_many(place, limit=1, sessions=self._sessions)
        return not page.events

    async def next(self, place: str | None, form: Form) -> Page[str | None]:
        page = await self._host.read_many(place, limit=PAGE_EVENTS_MAX, sessions=self._sessions)
        while not page.events and not page.gaps:
            await self._host.wait_past(page.position)
            page = await self._host.read_many(page.position, limit=PAGE_EVENTS_MAX, sessions=self._sessions)
        # All up to the last one are gone, whether this reader has seen some of them or not.
        gaps = {session: (1, last) for session, last in page.gaps.items()}
        data, taken = _joined(placed(form, one.position, encode(one.event, raw=self._raw)) for one in page.events)
        position = page.position if taken == len(page.events) else page.events[taken - 1].position
        assert position != place, "a page leads on"
        return Page(data, taken, position, gaps)

    def shown(self, place: str | None) -> str | None:
        return place


def _joined(lines: Iterable[bytes]) -> tuple[bytes, int]:
    """As many of these as make a page, at least one, and how many they are. The rest is not even made."""
    taken: list[bytes] = []
    size = 0
    for line in lines:
        if taken and size + len(line) > PAGE_BYTES_MAX:
            break
        taken.append(line)
        size += len(line)
    return b"".join(taken), len(taken)
