"""Readers of a session's log: pages, following new events, and `ReadableSession`.

`LogReaders` reads pages up to the head, waits for new events, and continues. A reader is only a
cursor. A closing host serves its current followers from a buffer. `ReadableSession` is the base
class of `Session`: a session as its log describes it, whichever host owns it. Reading needs only
the store.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Coroutine, MutableSet, Sequence
from typing import Any, NamedTuple, TypeVar

from banksman.core.dialects.dialect import Dialect
from banksman.core.session import event as kinds
from banksman.core.session.event import SENT, Event, Project
from banksman.errors import HistoryLost, UsageError
from banksman.store.log import READ_EVENTS_MAX, KnownSession, Log, Page, TurnPlace
from banksman.tasks import Waiters

R = TypeVar("R")
# `epoch.seq`, or only a seq. 18 digits are enough for any number of events.
CURSOR = re.compile(r"([0-9]{1,18}\.)?[0-9]{1,18}")

# A closing host closes its log before all followers have read it. So the host keeps the unread
# events of all sessions in memory, up to this size, and serves the followers from there. A follower
# that needs more gets an error at the end of this buffer.
REST_BYTES_MAX = 64 << 20
# Estimated memory of an event besides its data.
EVENT_BYTES = 200


class _Rest(NamedTuple):
    """Buffer of the events after a seq that followers had not read when the log was closed.

    `is_whole`: the buffer reaches to the last event.
    """

    after: int
    events: Sequence[Event]
    is_whole: bool


class LogReaders:
    """All readers of one session's log.

    `finished`: done when nothing more can be read. For an owned session this is its end. For any
    other session it is the close of this host's log. A session of another host also ends at the
    event by which that host closed it.
    """

    def __init__(
        self,
        store: Log,
        session: str,
        finished: asyncio.Future[None],
        project: Project,
        *,
        since: int | None = None,
    ) -> None:
        """Create the readers of one session.

        `since`: the last seq before this host claimed the session; None if this host does not own
        it.
        """
        self._store = store
        self._since = since
        self._project = project
        self._session = session
        self._finished = finished
        # Number of calls inside the store. The session's end waits for them, because the host then
        # closes the log.
        self._reading = 0
        self._pauses = Waiters()
        # Last seq of the page that each follower currently holds.
        self._places: dict[object, int] = {}
        self._rest: _Rest | None = None

    @property
    def _is_ours(self) -> bool:
        return self._since is not None

    async def events(
        self,
        after: int,
        *,
        waits: bool,
        until: asyncio.Future[Any] | None = None,
        epoch: int | None = None,
    ) -> AsyncGenerator[Event]:
        """Yield the events after a seq.

        `waits`: also wait for new events, until the session is closed or `until` is done. `epoch`:
        the epoch of the event at `after`, if the reader knows it.
        """
        seq = after
        is_closed = await self._look_back(after, epoch)
        ends = (self._finished,) if until is None else (self._finished, until)
        reader = object()
        try:
            while True:
                # Check the end before the read. An event that is committed after this read may be
                # the last one, and the next pass must read it.
                is_last = not waits or any(end.done() for end in ends)
                page = self._page_of_rest(seq)
                if page is None:
                    page = await self._read(
                        self._store.read(self._session, seq, project=self._project)
                    )
                self._places[reader] = page.events[-1].seq if page.events else seq
                if page.gap is not None:
                    first, last = page.gap
                    yield kinds.gap(self._session, first, last)
                    seq = last
                for event in page.events:
                    yield event
                    seq = event.seq
                    is_closed = event.kind == kinds.SESSION_CLOSED
                    if (
                        is_closed
                        and self._is_ours
                        and self._finished.done()
                        and seq > (self._since or 0)
                    ):
                        return  # Nothing follows this event, and the log may already be closed.
                if page.events:
                    continue
                if is_last or (is_closed and not self._is_ours):
                    return
                await self._read(self._wait_past(seq, ends))
        finally:
            self._places.pop(reader, None)

    async def _look_back(self, after: int, epoch: int | None) -> bool:
        """Return whether the event at the reader's cursor closed the session.

        Raises `HistoryLost` if that event has another epoch or does not exist. An epoch is never
        given twice, so in both cases the store has a different history.
        """
        if not after or (epoch is None and self._is_ours):
            return False
        page = await self._read(self._store.read(self._session, after - 1, 1))
        if page.gap is not None:
            # Retention removed the event, so its epoch cannot be checked. The reader gets a gap.
            return False
        found = page.events[0] if page.events else None
        if epoch is not None and (found is None or found.epoch != epoch):
            hint = "begin again at the first event, without a cursor"
            raise HistoryLost(
                f"the store has no event {epoch}.{after}", hint=hint, session=self._session
            )
        return found is not None and found.kind == kinds.SESSION_CLOSED

    async def page(self, after: int, limit: int, *, epoch: int | None = None) -> Page:
        """Return at most `limit` events after a cursor.

        `HistoryLost`: the store does not have the event at the cursor.
        """
        if epoch is not None:
            await self._look_back(after, epoch)
        return await self._read(
            self._store.read(self._session, after, limit, project=self._project)
        )

    async def page_before(
        self, before: int, limit: int, *, epoch: int | None = None
    ) -> Sequence[Event]:
        """Return at most `limit` events before a cursor, oldest first.

        Returns fewer events if they are too long for one page of the store. Returns no event if the
        store keeps nothing before the cursor. Raises `HistoryLost` like `page`.
        """
        if epoch is not None:
            await self._look_back(before, epoch)
        before = min(before, self._store.head(self._session).seq + 1)
        limit = min(limit, READ_EVENTS_MAX)
        while before > 1:
            # The store only reads forward. Seqs are dense, so the last `count` events before the
            # cursor are the first `count` events after `before - 1 - count`.
            count = min(limit, before - 1)
            reading = self._store.read(
                self._session, before - 1 - count, count, project=self._project
            )
            page = await self._read(reading)
            # If retention removed the first of them, the page extends beyond the cursor.
            events = [event for event in page.events if event.seq < before]
            if not events or events[-1].seq == before - 1:
                return events
            assert count > 1, "a page has one event at least"
            limit = count // 2
        return ()

    async def find_turn(self, turn: str) -> TurnPlace | None:
        """Return the place of a turn in the kept part of the log; None if it is not there."""
        return await self._read(self._store.find_turn(self._session, turn))

    async def wait_past(self, seq: int) -> None:
        """Wait until an event after `seq` exists.

        `StoreError`: no event can follow, because the log was closed or the session was deleted.
        """
        # Not counted in `_reading`: only the close of the log ends this wait.
        await self._store.wait_past(self._session, seq, is_known=True)

    async def wait_left(self) -> None:
        """Wait until no reader is inside the store."""
        while self._reading:
            await self._pauses.wait()

    async def keep_rest(self, bytes_max: int) -> int:
        """Buffer the events that followers have not read yet, and return the number of bytes.

        Called before the log is closed, when nothing is written to it. `bytes_max`: approximate
        limit.
        """
        await self.wait_left()
        if not self._places or self._rest is not None:
            return 0
        after = seq = min(self._places.values())
        events: list[Event] = []
        size, is_whole = 0, False
        while size < bytes_max and not is_whole:
            page = await self._store.read(self._session, seq, project=self._project)
            events += page.events
            size += sum(len(event.data) + EVENT_BYTES for event in page.events)
            is_whole = not page.events
            seq = seq if is_whole else page.events[-1].seq
        self._rest = _Rest(after, events, is_whole)
        # A follower that requested its next page during this read is still inside the store, and
        # the store is closed next.
        await self.wait_left()
        return size

    def _page_of_rest(self, after: int) -> Page | None:
        """Return the page after a seq from the buffer; None if the buffer does not cover it."""
        if self._rest is None or after < self._rest.after:
            return None
        events = self._rest.events
        # Seqs are dense, except for events that retention removed before the first one.
        index = max(0, after + 1 - events[0].seq) if events else 0
        found = events[index : index + READ_EVENTS_MAX]
        if not found:
            return Page((), None) if self._rest.is_whole else None
        gap = (after + 1, found[0].seq - 1) if found[0].seq > after + 1 else None
        return Page(found, gap)

    async def _read(self, reading: Coroutine[Any, Any, R]) -> R:
        self._reading += 1
        try:
            return await reading
        finally:
            self._reading -= 1
            self._pauses.wake()

    async def _wait_past(self, seq: int, ends: Sequence[asyncio.Future[Any]]) -> None:
        """Wait until an event after `seq` exists or one of the ends is done."""
        more = asyncio.ensure_future(self._store.wait_past(self._session, seq, is_known=True))
        try:
            await asyncio.wait((more, *ends), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not more.done():
                more.cancel()
                await asyncio.wait((more,))
            elif not more.cancelled() and not any(end.done() for end in ends):
                # If the wait failed, for example because the log was closed, raise the error.
                # Otherwise the reader would call again immediately and spin.
                more.result()
            elif not more.cancelled():
                more.exception()


def parse_cursor(cursor: Any) -> tuple[int | None, int]:
    """Split a cursor into its epoch, if it has one, and its seq.

    `cursor`: `epoch.seq`, only a seq, or None for the beginning.
    """
    if cursor is None:
        return None, 0
    is_one = isinstance(cursor, str | int) and not isinstance(cursor, bool)
    if not is_one or CURSOR.fullmatch(str(cursor)) is None:
        hint = "use the `cursor` of an event, or leave it out to begin at the first event"
        raise UsageError(f"not a cursor: {cursor!r:.60}", hint=hint)
    epoch, _, seq = str(cursor).rpartition(".")
    return int(epoch) if epoch else None, int(seq)


# Limits on the search for the last frames. In a long answer the prompt may be thousands of events
# back.
FIRST_LOOK_EVENTS = 50
LOOK_BACK_PAGES_MAX = 10


class ReadableSession:
    """Read access to a session.

    `ends`: done when the host closes. `readers`: the log readers that the host then waits for.
    """

    def __init__(
        self,
        id: str,
        *,
        name: str | None,
        agent: str,
        dialect: Dialect,
        store: Log,
        ends: asyncio.Future[None],
        readers: MutableSet[LogReaders] | None = None,
    ) -> None:
        self.id = id
        self.name = name
        self.agent = agent
        self.dialect = dialect
        self._project = Project(dialect.project, dialect.partial)
        # The store's latest listing or lookup result for this session.
        self.seen: KnownSession | None = None
        self._store = store
        self._all_readers: MutableSet[LogReaders] = set() if readers is None else readers
        self._readers = self._reading(ends)

    def _reading(self, finished: asyncio.Future[None], since: int | None = None) -> LogReaders:
        readers = LogReaders(self._store, self.id, finished, self._project, since=since)
        self._all_readers.add(readers)
        return readers

    def follow(self, after: str | int | None = None) -> AsyncGenerator[Event]:
        """Yield every event after a cursor, then each new event, until the session is closed.

        A range that retention removed becomes one `stream.gap` event. `HistoryLost`: the cursor
        belongs to a history that the store does not have. A host that closes also closes its log.
        It serves the current followers to the end from a buffer (64 MiB for all sessions together).
        A new call then raises `StoreError`.
        """
        epoch, seq = parse_cursor(after)
        return self._readers.events(seq, waits=True, epoch=epoch)

    def events(
        self, after: int = 0, *, waits: bool = False, until: asyncio.Future[Any] | None = None
    ) -> AsyncGenerator[Event]:
        """Yield the existing events after a seq.

        `waits`: also yield new events like `follow`, or until `until` is done.
        """
        return self._readers.events(after, waits=waits, until=until)

    async def page(self, after: str | int | None = None, *, limit: int = READ_EVENTS_MAX) -> Page:
        """Return at most `limit` existing events after a cursor.

        The page also has the range that retention removed before them. Raises `HistoryLost` like
        `follow`.
        """
        epoch, seq = parse_cursor(after)
        return await self._readers.page(seq, limit, epoch=epoch)

    async def page_before(
        self, before: str | int, *, limit: int = READ_EVENTS_MAX
    ) -> Sequence[Event]:
        """Return at most `limit` events before a cursor, oldest first.

        Returns fewer events if they are very long. A cursor without an epoch may be beyond the end.
        The result then has the last events of the log. Raises `HistoryLost` like `follow`.
        """
        epoch, seq = parse_cursor(before)
        return await self._readers.page_before(seq, limit, epoch=epoch)

    async def find_turn(self, id: str) -> TurnPlace | None:
        """Return the place of a turn in the kept part of the log; None if it is not there."""
        return await self._readers.find_turn(id)

    async def last_frames(self) -> tuple[Event | None, Event | None]:
        """Return the events of the last frame from the agent and the last frame to the agent.

        None: no frame was found within the bounded search.
        """
        heard: Event | None = None
        told: Event | None = None
        place = self.committed + 1
        for number in range(LOOK_BACK_PAGES_MAX):
            events = await self.page_before(
                place, limit=READ_EVENTS_MAX if number else FIRST_LOOK_EVENTS
            )
            for event in reversed(events):
                if event.kind == SENT:
                    told = told or event
                elif event.is_frame:
                    heard = heard or event
            if not events or (heard and told):
                break
            place = events[0].seq
        return heard, told

    @property
    def committed(self) -> int:
        """The seq of the last committed event."""
        return self._store.head(self.id).seq

    @property
    def created(self) -> float:
        """The time of creation.

        A session that is created under the same id after a deletion has a different time.
        """
        known = self._store.find(self.id)
        return 0.0 if known is None else known.created

    @property
    def known(self) -> KnownSession | None:
        """The session's entry in a listing; None if the session was deleted."""
        return self.seen or self._store.find(self.id)

    async def head(self) -> str | None:
        """Return the cursor of the last committed event."""
        page = await self._readers.page(max(0, self.committed - 1), 1)
        return page.events[0].cursor if page.events else None

    async def wait_past(self, seq: int) -> None:
        """Wait until an event after `seq` is committed.

        `StoreError`: no event can follow.
        """
        await self._readers.wait_past(seq)
