"""Sources of event streams: one session, many in the store's commit order, ends of commands.

A source makes the page after a place, and waits while there is nothing. For a reader without frames
a page may be empty and still advance the place. Otherwise this reader could never be seen to reach
the end, and would scan a million frames again for each page. `shared_pages.py` makes each page once
for all followers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Iterable
from operator import attrgetter
from typing import NamedTuple

from banksman import Command, Event
from banksman.commands.registry import CommandRegistry
from banksman.errors import HistoryLost, UsageError
from banksman.runtime.base_host import Host
from banksman.server.streams.event_format import StreamForm, encode, made, placed, stored
from banksman.server.streams.shared_pages import NO_GAPS, EncodedPage
from banksman.sessions.readable_session import parse_cursor
from banksman.sessions.session import Session
from banksman.store.log import LogTail
from banksman.store.log_values import READ_EVENTS_MAX, Page, PositionedEvent

# Limit of the data of a page that is made in the log's callback. One such page is kept for each
# source with several followers.
LIVE_BYTES_MAX = 32 << 10
# Limits of one page. Encoding it takes a millisecond or two of the event loop. A page is sent
# whole, so it is also the amount of data that a client can hold without reading.
PAGE_EVENTS_MAX = 250
PAGE_BYTES_MAX = 256 << 10
# Limit of events that are read where frames are skipped: skipping costs almost nothing.
SCAN_EVENTS_MAX = 1000


_data_of = attrgetter("data")


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
        if sum(map(len, map(_data_of, events))) > LIVE_BYTES_MAX:
            return None
        return self._encoded(Page(events, None), place, form)

    def _encoded(self, page: Page, place: Cursor, form: StreamForm) -> EncodedPage[Cursor]:
        before = place.seq if page.gap is None else page.gap[1]
        assert page.events[0].seq == before + 1, "a page begins right after its cursor"
        data, shown, taken = _joined(self._line(event, form) for event in page.events)
        end = page.events[taken - 1]
        assert end.seq > place.seq, "a page moves forward"
        gaps = NO_GAPS if page.gap is None else {self._session.id: page.gap}
        return EncodedPage(data, shown, Cursor(end.epoch, end.seq), gaps)

    def _line(self, event: Event, form: StreamForm) -> bytes | None:
        if not self._frames and event.is_frame:
            return None
        cursor = event.cursor
        data = encode(event, raw=self._raw, partial=self._partial, cursor=cursor)
        return stored(form, cursor, data)

    async def _after(self, place: Cursor) -> Page:
        """Read the events after a place, and check in the same read that its event is unchanged."""
        if place.epoch is None:
            return await self._session.page(place.seq, limit=self._page_events_max)
        page = await self._session.page(
            place.seq - 1, limit=min(self._page_events_max + 1, READ_EVENTS_MAX)
        )
        if page.gap is not None:
            # The event of this place is not kept. The gap for this reader begins after it.
            return Page(
                page.events, (place.seq + 1, page.gap[1]) if page.gap[1] > place.seq else None
            )
        if not page.events or page.events[0].epoch != place.epoch:
            raise self._lost(f"the store no longer has event {place.epoch}.{place.seq}")
        if len(page.events) == 1:
            # The event may fill the whole page. Then the following events are on the next page.
            return await self._session.page(
                f"{place.epoch}.{place.seq}", limit=self._page_events_max
            )
        return Page(page.events[1:], None)

    def _lost(self, message: str) -> HistoryLost:
        hint = "start again from the first event"
        return HistoryLost(message, hint=hint, session=self._session.id)

    def shown(self, place: Cursor) -> str | None:
        if not place.seq:
            return None
        return str(place.seq) if place.epoch is None else f"{place.epoch}.{place.seq}"


class Viewer(NamedTuple):
    """A reader that sees only some sessions. `key`: equal for readers that see the same."""

    key: Hashable
    sees: Callable[[str], Awaitable[bool]]


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
        viewer: Viewer | None = None,
    ) -> None:
        self._host = host
        self._sessions = sessions
        self._raw = raw
        self._partial = partial
        self._frames_of = frames_of
        self._page_events_max = PAGE_EVENTS_MAX if frames_of is None else SCAN_EVENTS_MAX
        self._viewer = viewer
        self.key = (sessions, raw, partial, frames_of, None if viewer is None else viewer.key)

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
        hidden = await self._hidden({one.event.session for one in page.events} | set(page.gaps))
        gaps = {id: (1, last) for id, last in page.gaps.items() if id not in hidden}
        data, shown, taken = _joined(
            None if one.event.session in hidden else self._line(one, form) for one in page.events
        )
        position = page.position if taken == len(page.events) else page.events[taken - 1].position
        assert position != place, "a page moves forward"
        return EncodedPage(data, shown, position, gaps)

    async def _hidden(self, sessions: Iterable[str]) -> set[str]:
        """Return those of these sessions that the reader may not see."""
        if self._viewer is None:
            return set()
        return {id for id in sessions if not await self._viewer.sees(id)}

    def tail(self, place: str | None, wake: Callable[[], None]) -> LogTail | None:
        del place, wake
        return None

    def seq(self, place: str | None) -> int:
        raise AssertionError("a stream of many sessions has no tail")

    def recent(self, place: str | None, form: StreamForm) -> EncodedPage[str | None] | None:
        del place, form
        return None

    def _line(self, one: PositionedEvent, form: StreamForm) -> bytes | None:
        event = one.event
        if event.is_frame and self._frames_of is not None and event.session not in self._frames_of:
            return None
        return placed(form, one.position, encode(event, raw=self._raw, partial=self._partial))

    def shown(self, place: str | None) -> str | None:
        return place


class CommandEnds:
    """Source for the ends of a host's commands, in their order.

    A place is the number of an end. It belongs to one host: the next one counts from 1 again.
    """

    def __init__(self, registry: CommandRegistry, as_json: Callable[[Command, str], bytes]) -> None:
        """`as_json`: returns an end as JSON; gets the command and its cursor."""
        self._registry = registry
        self._as_json = as_json
        self.key = registry.name

    def begin(self, after: str | None) -> int:
        """Return the place of the client's cursor. Raises `HistoryLost` and `UsageError`."""
        if after is None:
            return 0
        name, _, number = after.partition(".")
        if not (number.isascii() and number.isdecimal() and len(number) < 20):
            hint = "pass the id of an event of this stream"
            raise UsageError(f"there is no cursor {after!r:.60}", hint=hint)
        if name != self._registry.name or int(number) > self.end():
            hint = "start again without a cursor"
            raise HistoryLost("the cursor belongs to another server", hint=hint)
        return int(number)

    def end(self) -> int:
        """Return the place after all present ends."""
        return self._registry.ends

    async def is_at_end(self, place: int) -> bool:
        return self._registry.ends <= place

    async def next(self, place: int, form: StreamForm) -> EncodedPage[int]:
        await self._registry.wait_past(place)
        first, commands = self._registry.ended_after(place)
        # The mark of a gap names a session elsewhere, so this one is a part of the page.
        gap = (
            made(form, "stream.gap", first=place + 1, last=first - 1) if first > place + 1 else b""
        )
        numbered = enumerate(commands, first)
        data, shown, taken = _joined(self._line(number, each, form) for number, each in numbered)
        return EncodedPage(gap + data, shown, first - 1 + taken, NO_GAPS)

    def tail(self, place: int, wake: Callable[[], None]) -> LogTail | None:
        del place, wake
        return None

    def seq(self, place: int) -> int:
        raise AssertionError("a stream of commands has no tail")

    def recent(self, place: int, form: StreamForm) -> EncodedPage[int] | None:
        del place, form
        return None

    def _line(self, number: int, command: Command, form: StreamForm) -> bytes:
        cursor = f"{self._registry.name}.{number}"
        return stored(form, cursor, self._as_json(command, cursor))

    def shown(self, place: int) -> str | None:
        return f"{self._registry.name}.{place}"


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
