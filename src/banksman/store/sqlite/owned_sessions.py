"""Sessions that this handle has claimed: their heads, their newest events, and their waiters.

No other host can write or delete an owned session. So the event loop knows its head, has its newest
events in memory, and sees each of its commits, all without a query. A session that is missing here
may still belong to this host. The log then serves it like any other session.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from banksman.core.session.event import Event, Project
from banksman.errors import StoreError
from banksman.store.log import LogTail
from banksman.store.sqlite.append import AppendOperation, RecentChunks
from banksman.store.sqlite.ownership import ClaimedSession
from banksman.store.sqlite.tail_wait import Lookup, TailWaiters


class OwnedSessions:
    """The owned sessions of one log. Belongs to one event loop.

    `waiting`: the waiters of all sessions, also of those that other hosts may write.
    """

    def __init__(self, look: Lookup) -> None:
        self._look = look
        self._held: dict[str, ClaimedSession] = {}
        self._recent = RecentChunks()
        self.waiting = TailWaiters(look, self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, session: str) -> bool:
        return session in self._held

    def add(self, session: str, held: ClaimedSession) -> None:
        """Add a session that was claimed."""
        self._held[session] = held
        # From here on the watch skips the session, because only this host writes it. So the waiters
        # must see everything that other hosts committed until now.
        self.waiting.on_placed(session, held.seq, held.number)

    def drop(self, session: str, epoch: int) -> None:
        """Drop a session that other hosts may write now.

        A session that was claimed again under a higher epoch stays.
        """
        held = self._held.get(session)
        if held is not None and held.epoch <= epoch:
            del self._held[session]
            self._recent.drop(session)
            self.waiting.on_released(session)

    def on_appended(self, append: AppendOperation) -> None:
        """Keep the events of an append, and wake their waiters."""
        held = self._held.get(append.session)
        if held is not None:
            held.seq = append.seq
            self._recent.add(append, time.monotonic())
        self.waiting.on_committed(append.session, append.seq)

    def on_deleted(self, session: str, number: int | None) -> None:
        """Drop a deleted session. `number`: the identity that it had; None if it did not exist."""
        self._held.pop(session, None)
        self._recent.drop(session)
        self.waiting.tails.end(session)
        if number is not None:
            self.waiting.on_deleted(session, number)
            # Waiters for a future session of this id wait for a creation by any host. They need the
            # watch.
            self.waiting.on_released(session)

    def recent(
        self, session: str, after: int, limit: int, project: Project | None, *, is_live: bool
    ) -> list[Event] | None:
        """Return the events after a seq from memory; None if they must be read from the file.

        Events that any host has trimmed are not returned, even if they are still in memory: all
        readers see the same log. `is_live`: the reader follows each commit. If an event of the last
        moment was removed meanwhile, a live reader would have got it before. So the file is asked
        only for older events.
        """
        events = self._recent.newest(session, after, limit, project)
        if events is not None:
            return events
        events = self._recent.read(session, after, limit, project)
        is_kept = (
            events is None
            or (is_live and self._recent.is_new(session, after, time.monotonic()))
            or self._look.place(session).head.first <= after + 1
        )
        return events if is_kept else None

    def tail(self, session: str, wake: Callable[[], None]) -> LogTail | None:
        """Open a tail, see `Log.tail`."""
        held = self._held.get(session)
        return None if held is None else self.waiting.tails.open(session, held.seq, wake)

    def close(self, error: StoreError) -> None:
        """Drop all sessions, and fail all waiters."""
        self.waiting.close(error)
        self._held.clear()
