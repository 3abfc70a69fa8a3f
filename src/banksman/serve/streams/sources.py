"""Where a stream comes from: one session, by cursor, or many, by the position in the store's order of commits.

A source knows how to make the page after a place. It makes none that is empty: when there is nothing, it says so
(`None`) or waits, as it is asked.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol, TypeVar

from banksman.errors import HistoryLost
from banksman.run.host import Host
from banksman.run.sessions.following import place_of
from banksman.run.sessions.session import Session
from banksman.serve.streams.encoding import Form, encode, placed, stored
from banksman.serve.streams.pages import Page

# Encoded in one go: the loop is everybody's, and this is a millisecond or two of it.
PAGE_EVENTS_MAX = 250
# Sent in one go; a page is cut into such pieces between events.
PIECE_BYTES_MAX = 256 << 10

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
    """`text` None: before the first event."""

    seq: int
    text: str | None


class OneSession:
    """The events of one session."""

    def __init__(self, session: Session, *, raw: bool) -> None:
        self._session = session
        self._raw = raw
        self.key = (session.id, raw)

    async def begin(self, after: str | None) -> Cursor:
        """`HistoryLost`, `UsageError`: nobody can have been there."""
        epoch, seq = place_of(after)
        page = await self._session.page(after, limit=1)
        if epoch is None and seq and not page.events and not (await self._session.page(seq - 1, limit=1)).events:
            hint = "begin again from the first event"
            raise HistoryLost(f"the store has no event {seq}", hint=hint, session=self._session.id)
        return Cursor(seq, after)

    async def is_at_end(self, place: Cursor) -> bool:
        page = await self._session.page(place.seq, limit=1)
        return not page.events

    async def next(self, place: Cursor, form: Form) -> Page[Cursor]:
        # First this: where there is something it costs nothing, and where there is nothing it spares a look at the disk
        # by another thread, which nearly everybody who is live would take before each event.
        await self._session.wait_past(place.seq)
        while not (page := await self._session.page(place.seq, limit=PAGE_EVENTS_MAX)).events:
            await self._session.wait_past(place.seq)
        lines = [stored(form, event.cursor, encode(event, raw=self._raw)) for event in page.events]
        end = page.events[-1]
        gaps = {} if page.gap is None else {self._session.id: page.gap}
        return Page(_pieces(lines), len(lines), Cursor(end.seq, end.cursor), gaps)

    def shown(self, place: Cursor) -> str | None:
        return place.text


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
        lines = [placed(form, one.position, encode(one.event, raw=self._raw)) for one in page.events]
        return Page(_pieces(lines), len(lines), page.position, gaps)

    def shown(self, place: str | None) -> str | None:
        return place


def _pieces(lines: list[bytes]) -> tuple[bytes, ...]:
    pieces: list[bytes] = []
    begin = size = 0
    for number, line in enumerate(lines):
        if size and size + len(line) > PIECE_BYTES_MAX:
            pieces.append(b"".join(lines[begin:number]))
            begin, size = number, 0
        size += len(line)
    if lines:
        pieces.append(b"".join(lines[begin:]))
    return tuple(pieces)
