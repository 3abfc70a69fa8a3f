"""Read a session's log: pages, then a wait past the head, then pages. A reader is a cursor and nothing more.

`ReadableSession` is a session as its log has it, whichever host owns it. Reading needs no more than the store.
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
# `epoch.seq`, or a bare seq; no number of events has more digits.
CURSOR = re.compile(r"([0-9]{1,18}\.)?[0-9]{1,18}")

# A host that closes keeps in memory what its followers have not read yet, of all sessions together, and serves them
# from there: the log is closed by then. A follower that needs more is told so when it has come to the end of this.
REST_BYTES_MAX = 64 << 20
# What an event takes besides its data.
EVENT_BYTES = 200


class _Rest(NamedTuple):
    """What the followers had not read when the log was closed: the events after a seq. `is_whole`: to the last one."""

    after: int
    events: Sequence[Event]
    is_whole: bool


class LogReaders:
    """Everybody who reads one session's log. Of one that is ours `finished` is done when nothing more will be written
    to it; of another host's, or nobody's, when our log is closed: it ends where that host has closed it."""

    def __init__(
        self, store: Log, session: str, finished: asyncio.Future[None], project: Project, *, since: int | None = None
    ) -> None:
        """`since`: the last seq of before it was ours; None: it is not."""
        self._store = store
        self._since = since
        self._project = project
        self._session = session
        self._finished = finished
        # Those inside the store just now: they are waited for at the end, because the host closes the log then.
        self._reading = 0
        self._pauses = Waiters()
        # The last seq of the page that each follower has in its hands.
        self._places: dict[object, int] = {}
        self._rest: _Rest | None = None

    @property
    def _is_ours(self) -> bool:
        return self._since is not None

    async def events(
        self, after: int, *, waits: bool, until: asyncio.Future[Any] | None = None, epoch: int | None = None
    ) -> AsyncGenerator[Event]:
        """`waits`: also for what is not there yet, until the session is closed or `until` is done. `epoch`: under which
        the event at `after` was written, as far as the reader knows."""
        seq = after
        is_closed = await self._look_back(after, epoch)
        ends = (self._finished,) if until is None else (self._finished, until)
        reader = object()
        try:
            while True:
                # Looked at before it is read: what is committed after the reading may be the last.
                is_last = not waits or any(end.done() for end in ends)
                page = self._page_of_rest(seq)
                if page is None:
                    page = await self._read(self._store.read(self._session, seq, project=self._project))
                self._places[reader] = page.events[-1].seq if page.events else seq
                if page.gap is not None:
                    first, last = page.gap
                    yield kinds.gap(self._session, first, last)
                    seq = last
                for event in page.events:
                    yield event
                    seq = event.seq
                    is_closed = event.kind == kinds.SESSION_CLOSED
                    if is_closed and self._is_ours and self._finished.done() and seq > (self._since or 0):
                        return  # There is nothing after it; and the log may be closed by now.
                if page.events:
                    continue
                if is_last or (is_closed and not self._is_ours):
                    return
                await self._read(self._wait_past(seq, ends))
        finally:
            self._places.pop(reader, None)

    async def _look_back(self, after: int, epoch: int | None) -> bool:
        """Whether the event at which the reader stands closed the session. It must be the one that it was: an epoch is
        never given twice, so another one there, or none at all, is another history."""
        if not after or (epoch is None and self._is_ours):
            return False
        page = await self._read(self._store.read(self._session, after - 1, 1))
        if page.gap is not None:
            return False  # It is no longer kept; nobody can tell, and what follows is told as a gap.
        found = page.events[0] if page.events else None
        if epoch is not None and (found is None or found.epoch != epoch):
            hint = "begin again from the first event (after=None)"
            raise HistoryLost(f"the store has no event {epoch}.{after}", hint=hint, session=self._session)
        return found is not None and found.kind == kinds.SESSION_CLOSED

    async def page(self, after: int, limit: int, *, epoch: int | None = None) -> Page:
        """What is there after a cursor, at most `limit` events. `HistoryLost`: there is no such cursor in the store."""
        if epoch is not None:
            await self._look_back(after, epoch)
        return await self._read(self._store.read(self._session, after, limit, project=self._project))

    async def page_before(self, before: int, limit: int, *, epoch: int | None = None) -> Sequence[Event]:
        """The events right before a cursor, at most `limit`, oldest first; fewer where they are so long that a page of
        the store does not hold them. None at all: nothing before it is kept. `HistoryLost` as in `page`."""
        if epoch is not None:
            await self._look_back(before, epoch)
        before = min(before, self._store.head(self._session).seq + 1)
        limit = min(limit, READ_EVENTS_MAX)
        while before > 1:
            # The store reads forward, and seq is dense: so many before it are so many after the one before those.
            count = min(limit, before - 1)
            reading = self._store.read(self._session, before - 1 - count, count, project=self._project)
            page = await self._read(reading)
            # Where retention took the first of them, it is read on past the end.
            events = [event for event in page.events if event.seq < before]
            if not events or events[-1].seq == before - 1:
                return events
            assert count > 1, "a page has one event at least"
            limit = count // 2
        return ()

    async def find_turn(self, turn: str) -> TurnPlace | None:
        """Where a turn is in the log; None: there is no such turn in what is kept of it."""
        return await self._read(self._store.find_turn(self._session, turn))

    async def wait_past(self, seq: int) -> None:
        """Until there is an event after this one. `StoreError`: there never will be one, for the log was closed or the
        session deleted."""
        # Not counted among those who read: closing the log is what ends it.
        await self._store.wait_past(self._session, seq, is_known=True)

    async def wait_left(self) -> None:
        """Until nobody is inside the store."""
        while self._reading:
            await self._pauses.wait()

    async def keep_rest(self, bytes_max: int) -> int:
        """Read what the followers have still to read, up to about so many bytes: how many it were. The log is about to
        be closed, and nothing more is written to it."""
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
        # A follower that came back for more while this was read is still in the store, which is closed next.
        await self.wait_left()
        return size

    def _page_of_rest(self, after: int) -> Page | None:
        """The page after a seq, from what was kept at the end; None: it is in the log, if anywhere."""
        if self._rest is None or after < self._rest.after:
            return None
        events = self._rest.events
        # Dense, but for what retention has taken before the first of them.
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
        """Until there is more, or there never will be."""
        more = asyncio.ensure_future(self._store.wait_past(self._session, seq, is_known=True))
        try:
            await asyncio.wait((more, *ends), return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not more.done():
                more.cancel()
                await asyncio.wait((more,))
            elif not more.cancelled() and not any(end.done() for end in ends):
                # A reader that can never be woken is told so, and does not come back at once to be told again.
                more.result()
            elif not more.cancelled():
                more.exception()


def parse_cursor(cursor: Any) -> tuple[int | None, int]:
    """The epoch, if it is said, and the seq of a cursor: `epoch.seq`, a bare seq, or None for the beginning."""
    if cursor is None:
        return None, 0
    is_one = isinstance(cursor, str | int) and not isinstance(cursor, bool)
    if not is_one or CURSOR.fullmatch(str(cursor)) is None:
        raise UsageError(f"not a cursor: {cursor!r:.60}", hint="the `cursor` of an event, or None for the beginning")
    epoch, _, seq = str(cursor).rpartition(".")
    return int(epoch) if epoch else None, int(seq)


# How far back the last frames are looked for. In a long answer the prompt may lie behind thousands of words.
FIRST_LOOK_EVENTS = 50
LOOK_BACK_PAGES_MAX = 10


class ReadableSession:
    """What can be read of a session. `ends`: the host closes, and waits for `readers`."""

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
        # What the store said of it, the last time that it was listed or looked for.
        self.seen: KnownSession | None = None
        self._store = store
        self._all_readers: MutableSet[LogReaders] = set() if readers is None else readers
        self._readers = self._reading(ends)

    def _reading(self, finished: asyncio.Future[None], since: int | None = None) -> LogReaders:
        readers = LogReaders(self._store, self.id, finished, self._project, since=since)
        self._all_readers.add(readers)
        return readers

    def follow(self, after: str | int | None = None) -> AsyncGenerator[Event]:
        """Every event of the log after a cursor, then each as it is committed, until the session is closed.

        A range that retention took is told by one `stream.gap` event. `HistoryLost`: the cursor is of a history that
        the store does not have any more. Once the host is closed, the log is too: whoever follows by then is served to
        the end, as far as the host keeps it (64 MiB of all sessions together), and to begin raises `StoreError`.
        """
        epoch, seq = parse_cursor(after)
        return self._readers.events(seq, waits=True, epoch=epoch)

    def events(
        self, after: int = 0, *, waits: bool = False, until: asyncio.Future[Any] | None = None
    ) -> AsyncGenerator[Event]:
        """The events after a seq that are there now; `waits`: and those to come, as `follow`, or until `until`."""
        return self._readers.events(after, waits=waits, until=until)

    async def page(self, after: str | int | None = None, *, limit: int = READ_EVENTS_MAX) -> Page:
        """The events after a cursor that are there now, at most `limit`, and the range that retention took before them,
        if it did. `HistoryLost` as in `follow`."""
        epoch, seq = parse_cursor(after)
        return await self._readers.page(seq, limit, epoch=epoch)

    async def page_before(self, before: str | int, *, limit: int = READ_EVENTS_MAX) -> Sequence[Event]:
        """The last events before a cursor, at most `limit`, oldest first; fewer if they are very long. A bare seq may
        be beyond the end: then they are the last there are. `HistoryLost` as in `follow`."""
        epoch, seq = parse_cursor(before)
        return await self._readers.page_before(seq, limit, epoch=epoch)

    async def find_turn(self, id: str) -> TurnPlace | None:
        """Where a turn is in the log; None: there is no such turn in what is kept of it."""
        return await self._readers.find_turn(id)

    async def last_frames(self) -> tuple[Event | None, Event | None]:
        """The last line from the agent, and the last to it, as its log has them. None: there is none, or so much came
        after it that it is not looked for."""
        heard: Event | None = None
        told: Event | None = None
        place = self.committed + 1
        for number in range(LOOK_BACK_PAGES_MAX):
            events = await self.page_before(place, limit=READ_EVENTS_MAX if number else FIRST_LOOK_EVENTS)
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
        """The seq of the last event that is committed."""
        return self._store.head(self.id).seq

    @property
    def created(self) -> float:
        """When it was made. Another session of the same id, after this one was deleted, was made at another time."""
        known = self._store.find(self.id)
        return 0.0 if known is None else known.created

    @property
    def known(self) -> KnownSession | None:
        """What a listing says of it; None: it is not there any more."""
        return self.seen or self._store.find(self.id)

    async def head(self) -> str | None:
        """The cursor of the last event that is committed."""
        page = await self._readers.page(max(0, self.committed - 1), 1)
        return page.events[0].cursor if page.events else None

    async def wait_past(self, seq: int) -> None:
        """Until an event after this one is committed. `StoreError`: there never will be one."""
        await self._readers.wait_past(seq)
