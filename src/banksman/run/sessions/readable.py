"""A session as its log has it: whoever owns it, and whether anybody does. Reading needs no more than the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, MutableSet
from typing import Any

from banksman.core.dialects.dialect import Dialect
from banksman.core.event import Event
from banksman.run.sessions.following import Readers, place_of
from banksman.store.log import READ_EVENTS_MAX, Log, Page


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
        self._store = store
        self._all_readers: MutableSet[Readers] = set() if readers is None else readers
        self._readers = self._reading(ends)

    def _reading(self, finished: asyncio.Future[None], since: int | None = None) -> Readers:
        readers = Readers(self._store, self.id, finished, self.dialect.project, since=since)
        self._all_readers.add(readers)
        return readers

    def follow(self, after: str | int | None = None) -> AsyncGenerator[Event]:
        """Every event of the log after a cursor, then each as it is committed, until the session is closed.

        A range that retention took is told by one `stream.gap` event. `HistoryLost`: the cursor is of a history that
        the store does not have any more. Once the host is closed, the log is too, and reading raises `StoreError`.
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

    @property
    def committed(self) -> int:
        """The seq of the last event that is committed."""
        return self._store.head(self.id).seq

    @property
    def created(self) -> float:
        """When it was made. Another session of the same id, after this one was deleted, was made at another time."""
        known = self._store.find(self.id)
        return 0.0 if known is None else known.created

    async def head(self) -> str | None:
        """The cursor of the last event that is committed."""
        page = await self._readers.page(max(0, self.committed - 1), 1)
        return page.events[0].cursor if page.events else None

    async def wait_past(self, seq: int) -> None:
        """Until an event after this one is committed. `StoreError`: there never will be one."""
        await self._readers.wait_past(seq)
