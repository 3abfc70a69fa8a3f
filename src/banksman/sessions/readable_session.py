"""Base class of `Session`: a session as its log describes it, whichever host owns it.

Reading needs only the store. `log_reader.py` reads the events, and `parse_cursor` checks the cursor
of a caller.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, MutableSet, Sequence
from dataclasses import dataclass, field
from typing import Any

from banksman.core.dialects.dialect import Dialect
from banksman.core.dialects.log_dialect import reader_of
from banksman.core.session.event import SENT, Event, Project
from banksman.errors import UsageError
from banksman.sessions.log_reader import LogReaders
from banksman.store.log import Log, LogTail
from banksman.store.log_values import READ_EVENTS_MAX, KnownSession, Page, TurnPlace

# `epoch.seq`, or only a seq. 18 digits are enough for any number of events.
CURSOR = re.compile(r"([0-9]{1,18}\.)?[0-9]{1,18}")
# Limits on the search for the last frames. In a long answer the prompt may be thousands of events
# back.
FIRST_LOOK_EVENTS = 50
LOOK_BACK_PAGES_MAX = 10


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


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionParts:
    """Parts of a session object of a host.

    `ends`: done when the host closes. `readers`: the log readers that the host then waits for.
    """

    id: str
    name: str | None
    agent: str
    dialect: Dialect
    store: Log
    ends: asyncio.Future[None]
    readers: MutableSet[LogReaders] = field(default_factory=set[LogReaders])


class ReadableSession:
    """Read access to a session."""

    def __init__(self, parts: SessionParts) -> None:
        self.id = parts.id
        self.name = parts.name
        self.agent = parts.agent
        self.dialect = parts.dialect
        self.frames = reader_of(parts.dialect)
        self._project = Project(self.frames.project, self.frames.partial)
        # The store's latest listing or lookup result for this session.
        self.seen: KnownSession | None = None
        self._store = parts.store
        self._all_readers = parts.readers
        self._readers = self._reading(parts.ends)

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

    def recent(self, after: int, limit: int) -> list[Event] | None:
        """Return the events after a seq from memory; None if they must be read."""
        return self._store.recent(self.id, after, limit, self._project)

    def tail(self, wake: Callable[[], None]) -> LogTail | None:
        """Call `wake` at each commit; None if another host may commit. See `Log.tail`."""
        return self._readers.tail(wake)

    async def wait_past(self, seq: int) -> None:
        """Wait until an event after `seq` is committed.

        `StoreError`: no event can follow, because the log was closed or the session was deleted.
        """
        # Not a read of `_readers`, which the session's end waits for: only the close of the log
        # ends this wait.
        await self._store.wait_past(self.id, seq, is_known=True)
