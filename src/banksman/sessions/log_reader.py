"""Readers of a session's log: pages of events, and following new events.

`LogReaders` reads pages up to the head, waits for new events, and continues. A reader is only a
cursor. A closing host serves its current followers from a buffer. `readable_session.py` has the
calls of a session that read.
"""

from __future__ import annotations

import asyncio
import enum
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from banksman.core.session import event as kinds
from banksman.core.session.event import Event, Project
from banksman.errors import HistoryLost, StoreError
from banksman.store.log import Log, LogTail
from banksman.store.log_values import READ_EVENTS_MAX, Page, TurnPlace
from banksman.tasks import Waiters

R = TypeVar("R")

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


class CommitWaitEnd(enum.Enum):
    """Why a wait by a tail is over.

    `NO_TAIL`: other hosts may write the session. `TAIL_ENDED`: this host has released the session,
    or it was deleted, and another one may have its id.
    """

    WOKEN, NO_TAIL, TAIL_ENDED = range(3)


class _CommitWait:
    """Wait of one reader for the next commit of a session that this host owns.

    `ends`: end the wait too. The callbacks are registered once for the life of the reader.
    """

    def __init__(self, readers: LogReaders, ends: Sequence[asyncio.Future[Any]]) -> None:
        self._readers = readers
        self._ends = ends
        self._tail: LogTail | None = None
        self._woken: asyncio.Future[None] | None = None

    def is_at_end(self, seq: int) -> bool:
        """Whether the tail has seen no event after `seq`; False without a tail."""
        return self._tail is not None and self._tail.is_live and self._tail.seq <= seq

    async def past(self, seq: int) -> CommitWaitEnd:
        """Wait until an event after `seq` exists, or one of the ends is done."""
        if self._tail is None:
            self._tail = self._readers.tail(self._wake)
            if self._tail is None:
                return CommitWaitEnd.NO_TAIL
            for end in self._ends:
                end.add_done_callback(self._wake)
        while self.is_at_end(seq) and not self._is_over:
            self._woken = asyncio.get_running_loop().create_future()
            await self._woken
        if self._tail.is_live or self._is_over:
            return CommitWaitEnd.WOKEN
        self.close()
        return CommitWaitEnd.TAIL_ENDED

    @property
    def _is_over(self) -> bool:
        return any(end.done() for end in self._ends)

    def _wake(self, _: object = None) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None
            for end in self._ends:
                end.remove_done_callback(self._wake)


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
        waiting = _CommitWait(self, ends)
        is_woken = False
        last_epoch = epoch
        try:
            while True:
                # Check the end before the read. An event that is committed after this read may be
                # the last one, and the next pass must read it.
                is_last = not waits or any(end.done() for end in ends)
                page = self._page_of_rest(seq)
                # A read pauses, so that a reader far behind does not block the event loop. A reader
                # that has just waited needs no pause.
                if page is None and is_woken and (events := self.recent(seq, READ_EVENTS_MAX)):
                    page = Page(events, None)
                if page is None:
                    page = await self._read(
                        self._store.read(self._session, seq, project=self._project)
                    )
                is_woken = False
                self._places[reader] = page.events[-1].seq if page.events else seq
                if page.gap is not None:
                    first, last = page.gap
                    yield kinds.gap(self._session, first, last)
                    seq = last
                for event in page.events:
                    yield event
                    seq, last_epoch = event.seq, event.epoch
                    is_closed = event.kind == kinds.SESSION_CLOSED
                    if (
                        is_closed
                        and self._is_ours
                        and self._finished.done()
                        and seq > (self._since or 0)
                    ):
                        return  # Nothing follows this event, and the log may already be closed.
                # A reader that has caught up waits without a further read.
                if page.events and (is_last or not waiting.is_at_end(seq)):
                    continue
                if is_last or (is_closed and not self._is_ours):
                    return
                end = await waiting.past(seq)
                if end is CommitWaitEnd.TAIL_ENDED:
                    await self._check_history(seq, last_epoch)
                if end is not CommitWaitEnd.WOKEN:
                    await self._read(self._wait_past(seq, ends))
                is_woken = True
        finally:
            waiting.close()
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

    async def _check_history(self, seq: int, epoch: int | None) -> None:
        """Raise `StoreError` if the session was deleted since the reader took the event at `seq`.

        Another session of the same id has other epochs.
        """
        if not seq or epoch is None:
            return
        page = await self._read(self._store.read(self._session, seq - 1, 1))
        if page.gap is None and (not page.events or page.events[0].epoch != epoch):
            message = f"cannot wait for events of session {self._session}: it was deleted"
            raise StoreError(message, session=self._session)

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

    def recent(self, after: int, limit: int) -> list[Event] | None:
        """Return the events after a seq from memory; None if they must be read."""
        return self._store.recent(self._session, after, limit, self._project)

    def tail(self, wake: Callable[[], None]) -> LogTail | None:
        """Open a tail of the session, see `Log.tail`."""
        return self._store.tail(self._session, wake)

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
