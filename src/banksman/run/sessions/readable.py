"""A session as its log has it: whoever owns it, and whether anybody does. Reading needs no more than the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableSet, Sequence
from typing import Any

from banksman.core.dialects.dialect import Dialect
from banksman.core.event import SENT, Event, Project
from banksman.run.sessions.following import Readers, place_of
from banksman.store.log import READ_EVENTS_MAX, Known, Log, Page, TurnPlace

# How far back the last frames are looked for. In a long answer the prompt may lie behind thousands of words.
FIRST_LOOK_EVENTS = 50
LOOK_BACK_PAGES_MAX = 10


class Readable:
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
        readers: MutableSet[Readers] | None = None,
    ) -> None:
        self.id = id
        self.name = name
        self.agent = agent
        self.dialect = dialect
        self._project = Project(dialect.project, dialect.partial)
        # What the store said of it, the last time that it was listed or looked for.
        self.seen: Known | None = None
        self._store = store
        self._all_readers: MutableSet[Readers] = set() if readers is None else readers
        self._readers = self._reading(ends)

    def _reading(self, finished: asyncio.Future[None], since: int | None = None) -> Readers:
        readers = Readers(self._store, self.id, finished, self._project, since=since)
        self._all_readers.add(readers)
        return readers

    def follow(self, after: str | int | None = None) -> AsyncGenerator[Event]:
        """Every event of the log after a cursor, then each as it is committed, until the session is closed.

        A range that retention took is told by one `stream.gap` event. `HistoryLost`: the cursor is of a history that
        the store does not have any more. Once the host is closed, the log is too: whoever follows by then is served to
        the end, as far as the host keeps it (64 MiB of all sessions together), and to begin raises `StoreError`.
        """
        epoch, seq = place_of(after)
        return self._readers.events(seq, waits=True, epoch=epoch)

    def events(
        self, after: int = 0, *, waits: bool = False, until: asyncio.Future[Any] | None = None
    ) -> AsyncGenerator[Event]:
        """The events after a seq that are there now; `waits`: and those to come, as `follow`, or until `until`."""
        return self._readers.events(after, waits=waits, until=until)

    async def page(self, after: str | int | None = None, *, limit: int = READ_EVENTS_MAX) -> Page:
        """The events after a cursor that are there now, at most `limit`, and the range that retention took before them,
        if it did. `HistoryLost` as in `follow`."""
        epoch, seq = place_of(after)
        return await self._readers.page(seq, limit, epoch=epoch)

    async def page_before(self, before: str | int, *, limit: int = READ_EVENTS_MAX) -> Sequence[Event]:
        """The last events before a cursor, at most `limit`, oldest first; fewer if they are very long. A bare seq may
        be beyond the end: then they are the last there are. `HistoryLost` as in `follow`."""
        epoch, seq = place_of(before)
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
    def known(self) -> Known | None:
        """What a listing says of it; None: it is not there any more."""
        return self.seen or self._store.find(self.id)

    async def head(self) -> str | None:
        """The cursor of the last event that is committed."""
        page = await self._readers.page(max(0, self.committed - 1), 1)
        return page.events[0].cursor if page.events else None

    async def wait_past(self, seq: int) -> None:
        """Until an event after this one is committed. `StoreError`: there never will be one."""
        await self._readers.wait_past(seq)
