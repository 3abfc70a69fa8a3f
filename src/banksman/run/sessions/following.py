"""Readers of a session's log: pages, then waiting past the head, then pages. Each is a cursor, and nothing more."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from banksman.core import event as kinds
from banksman.core.event import Event, Project
from banksman.errors import HistoryLost, UsageError
from banksman.run.waiters import Waiters
from banksman.store.log import READ_EVENTS_MAX, Log, Page

R = TypeVar("R")
# `epoch.seq`, or a bare seq; no number of events has more digits.
CURSOR = re.compile(r"([0-9]{1,18}\.)?[0-9]{1,18}")

# The log is closed behind a session that is over. A reader with a page in its hands by then has so long to come to the
# end; one that stands still is told, when it goes on, that the log is closed.
PAGE_SECONDS_MAX = 1.0


class Readers:
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
        # Those inside the store just now, and those with a page in their hands, each with the task that took it. They
        # are waited for at the end, because the host closes the log then.
        self._reading = 0
        self._holding: dict[object, asyncio.Task[Any] | None] = {}
        self._pauses = Waiters()
        self._loop = finished.get_loop()
        # One moment for all who close, again and again or one session after the other.
        self._left_by = math.inf

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
                page = await self._read(self._store.read(self._session, seq, project=self._project))
                self._holding[reader] = asyncio.current_task()
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
            self._holding.pop(reader, None)
            self._pauses.wake()

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

    async def wait_past(self, seq: int) -> None:
        """Until there is an event after this one. `StoreError`: there never will be one, for the log was closed or the
        session deleted."""
        # Not counted among those who read: closing the log is what ends it.
        await self._store.wait_past(self._session, seq, is_known=True)

    async def wait_left(self) -> None:
        """Until nobody is inside the store, or reads what it has of it; for the latter only a moment."""
        me = asyncio.current_task()
        self._left_by = min(self._left_by, self._loop.time() + PAGE_SECONDS_MAX)
        with suppress(TimeoutError):
            async with asyncio.timeout_at(self._left_by):
                while self._reading or any(task is not me for task in self._holding.values()):
                    await self._pauses.wait()
        while self._reading:
            await self._pauses.wait()

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


def place_of(cursor: Any) -> tuple[int | None, int]:
    """The epoch, if it is said, and the seq of a cursor: `epoch.seq`, a bare seq, or None for the beginning."""
    if cursor is None:
        return None, 0
    is_one = isinstance(cursor, str | int) and not isinstance(cursor, bool)
    if not is_one or CURSOR.fullmatch(str(cursor)) is None:
        raise UsageError(f"not a cursor: {cursor!r:.60}", hint="the `cursor` of an event, or None for the beginning")
    epoch, _, seq = str(cursor).rpartition(".")
    return int(epoch) if epoch else None, int(seq)
