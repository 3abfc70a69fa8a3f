"""Sources of event streams: one session by cursor, or many sessions in the store's commit order.

A source makes the page after a place, and waits while there is nothing. For a reader without frames
a page may be empty and still advance the place. Otherwise this reader could never be seen to reach
the end, and would scan a million frames again for each page. `shared_pages.py` makes each page once
for all followers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from banksman import Event
from banksman.errors import HistoryLost
from banksman.runtime.base_host import Host
from banksman.server.streams.event_format import StreamForm, encode, placed, stored
from banksman.server.streams.shared_pages import NO_GAPS, EncodedPage
from banksman.sessions.readable_session import parse_cursor
from banksman.sessions.session import Session
from banksman.store import log as store
from banksman.store.log import READ_EVENTS_MAX, LogTail

# Limit of the data of a page that is made in the log's callback. One such page is kept for each
# source with several followers.
LIVE_BYTES_MAX = 32 << 10
# Limits of one page. Encoding it takes a millisecond or two of the event loop. A page is sent
# whole, so it is also the amount of data that a client can hold without reading.
PAGE_EVENTS_MAX = 250
PAGE_BYTES_MAX = 256 << 10
# Limit of events that are read where frames are skipped: skipping costs almost nothing.
SCAN_EVENTS_MAX = 1000


class Cursor(NamedTuple):
    """A place after an event.

    `epoch`: None at the beginning, and for an event whose epoch is unknown.
    """

    epoch: int | None
    seq: int


class OneSession:
    """Source for the events of one session.

    A place identifies its history. An id never gets the same epoch twice, even if its session was
    deleted and another one was created under the id. The beginning has no epoch: there the creation
    time of the session identifies the history.
    """

    def __init__(
        self, session: Session, *, raw: bool, partial: bool = False, frames: bool = True
    ) -> None:
        self._session = session
        self._raw = raw
        self._partial = partial
        self._frames = frames
        self._page_events_max = PAGE_EVENTS_MAX if frames else SCAN_EVENTS_MAX
        self._created = session.created
        self.key = (session.id, self._created, raw, partial, frames)

    async def begin(self, after: str | None) -> Cursor:
        """Validate the client's cursor and return its place.

        Raises `HistoryLost` or `UsageError` if no reader can have been there.
        """
        epoch, seq = parse_cursor(after)
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

    async def next(self, place: Cursor, form: StreamForm) -> EncodedPage[Cursor]:
        # The session may have been deleted, and another one created under its id, since the last
        # page. A wait for the seq of the old one would not end.
        if self._session.created != self._created:
            raise self._lost("the session was deleted")
        # Wait first. If events exist, the wait returns immediately. If not, it saves a read in
        # another thread, which nearly every live follower would need before each event.
        await self._session.wait_past(place.seq)
        while not (page := await self._after(place)).events:
            await self._session.wait_past(place.seq)
        return self._encoded(page, place, form)

    def tail(self, place: Cursor, wake: Callable[[], None]) -> LogTail | None:
        known = self._session.recent(place.seq - 1, 1) if place.seq else None
        is_same = known is not None and known[0].epoch == place.epoch
        return self._session.tail(wake) if is_same else None

    def seq(self, place: Cursor) -> int:
        return place.seq

    def recent(self, place: Cursor, form: StreamForm) -> EncodedPage[Cursor] | None:
        events = self._session.recent(place.seq, self._page_events_max)
        if events is None:
            return None
        if len(events) == 1:
            # A lone event, as an agent writes them: it needs no page around it.
            (event,) = events
            assert event.seq == place.seq + 1, "a page begins right after its cursor"
            if len(event.data) > LIVE_BYTES_MAX:
                return None
            line = self._line(event, form)
            end = Cursor(event.epoch, event.seq)
            return EncodedPage(line or b"", 0 if line is None else 1, end, NO_GAPS)
        if sum(len(event.data) for event in events) > LIVE_BYTES_MAX:
            return None
        return self._encoded(store.Page(events, None), place, form)

    def _encoded(self, page: store.Page, place: Cursor, form: StreamForm) -> EncodedPage[Cursor]:
        before = place.seq if page.gap is None else page.gap[1]
        assert page.events[0].seq == before + 1, "a page begins right after its cursor"
        data, shown, taken = _joined(self._line(event, form) for event in page.events)
        end = page.events[taken - 1]
        assert end.seq > place.seq, "a page moves forward"
        gaps = NO_GAPS if page.gap is None else {self._session.id: page.gap}
        return EncodedPage(data, shown, Cursor(end.epoch, end.seq), gaps)

    def _line(self, event: Event, form: StreamForm) -> bytes | None:
        if event.is_frame and not self._frames:
            return None
        return stored(form, event.cursor, encode(event, raw=self._raw, partial=self._partial))

    async def _after(self, place: Cursor) -> store.Page:
        """Read the events after a place, and check in the same read that its event is unchanged."""
        if place.epoch is None:
            return await self._session.page(place.seq, limit=self._page_events_max)
        page = await self._session.page(
            place.seq - 1, limit=min(self._page_events_max + 1, READ_EVENTS_MAX)
        )
        if page.gap is not None:
            # The event of this place is not kept. The gap for this reader begins after it.
            return store.Page(
                page.events, (place.seq + 1, page.gap[1]) if page.gap[1] > place.seq else None
            )
        if not page.events or page.events[0].epoch != place.epoch:
            raise self._lost(f"the store no longer has event {place.epoch}.{place.seq}")
        if len(page.events) == 1:
            # The event may fill the whole page. Then the following events are on the next page.
            return await self._session.page(
                f"{place.epoch}.{place.seq}", limit=self._page_events_max
            )
        return store.Page(page.events[1:], None)

    def _lost(self, message: str) -> HistoryLost:
        hint = "start again from the first event"
        return HistoryLost(message, hint=hint, session=self._session.id)

    def shown(self, place: Cursor) -> str | None:
        if not place.seq:
            return None
        return str(place.seq) if place.epoch is None else f"{place.epoch}.{place.seq}"


class ManySessions:
    """Source for the events of all sessions of the store, or of some, in commit order.

    `frames_of`: the sessions whose frames are shown; None shows all frames.
    """

    def __init__(
        self,
        host: Host,
        sessions: frozenset[str] | None,
        *,
        raw: bool,
        partial: bool = False,
        frames_of: frozenset[str] | None = None,
    ) -> None:
        self._host = host
        self._sessions = sessions
        self._raw = raw
        self._partial = partial
        self._frames_of = frames_of
        self._page_events_max = PAGE_EVENTS_MAX if frames_of is None else SCAN_EVENTS_MAX
        self.key = (sessions, raw, partial, frames_of)

    async def begin(self, after: str | None) -> str | None:
        """Check that the client's position is valid, and return it."""
        await self._host.read_many(after, limit=1, sessions=self._sessions)
        return after

    async def end(self) -> str:
        """Return the place after all present events."""
        # An empty selection reads no events, and still returns the position of the end.
        return (await self._host.read_many(None, limit=1, sessions=())).position

    async def is_at_end(self, place: str | None) -> bool:
        page = await self._host.read_many(place, limit=1, sessions=self._sessions)
        return not page.events and not page.gaps

    async def next(self, place: str | None, form: StreamForm) -> EncodedPage[str | None]:
        page = await self._host.read_many(
            place, limit=self._page_events_max, sessions=self._sessions
        )
        while not page.events and not page.gaps:
            await self._host.wait_past(page.position)
            page = await self._host.read_many(
                page.position, limit=self._page_events_max, sessions=self._sessions
            )
        # All events up to `last` are gone, whether this reader has seen some of them or not.
        gaps = {session: (1, last) for session, last in page.gaps.items()}
        data, shown, taken = _joined(self._line(one, form) for one in page.events)
        position = page.position if taken == len(page.events) else page.events[taken - 1].position
        assert position != place, "a page moves forward"
        return EncodedPage(data, shown, position, gaps)

    def tail(self, place: str | None, wake: Callable[[], None]) -> LogTail | None:
        del place, wake
        return None

    def seq(self, place: str | None) -> int:
        raise AssertionError("a stream of many sessions has no tail")

    def recent(self, place: str | None, form: StreamForm) -> EncodedPage[str | None] | None:
        del place, form
        return None

    def _line(self, one: store.PositionedEvent, form: StreamForm) -> bytes | None:
        event = one.event
        if event.is_frame and self._frames_of is not None and event.session not in self._frames_of:
            return None
        return placed(form, one.position, encode(event, raw=self._raw, partial=self._partial))

    def shown(self, place: str | None) -> str | None:
        return place


def _joined(lines: Iterable[bytes | None]) -> tuple[bytes, int, int]:
    """Join lines to one page of at least one line.

    Returns the data, the number of lines in it, and the number of events consumed. None stands for
    a skipped event. Lines beyond the page are never generated.
    """
    shown: list[bytes] = []
    size = taken = 0
    for line in lines:
        if line is not None:
            if shown and (size + len(line) > PAGE_BYTES_MAX or len(shown) == PAGE_EVENTS_MAX):
                break
            shown.append(line)
            size += len(line)
        taken += 1
    return b"".join(shown), len(shown), taken
