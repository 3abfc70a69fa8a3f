"""The newest chunks of the sessions that are written here, kept in memory for those who follow them.

Who follows a live session wants each event as it is committed. It was in this process a moment ago, so it need not be
read back by another thread, from the disk, and unpacked. Only what is committed is ever in here, and only of sessions
that this host has: nobody else can write or delete those.
"""

from __future__ import annotations

from collections import deque

from banksman.core.event import Event, Project
from banksman.store.sqlite.appending import Append
from banksman.store.sqlite.chunks import CHUNK_BYTES, events_of

# For all sessions together. A follower that is behind by more is served from the disk.
RECENT_BYTES_MAX = 16 << 20
# What an entry takes besides its data, in memory.
ENTRY_BYTES = 128
# How far back a reader's place is looked for. One that keeps up is at the end; one that does not goes by the index.
WALK_CHUNKS_MAX = 64


class Recent:
    """What is added is taken out again, oldest first, whosever it is, so that the whole stays within its bound."""

    def __init__(self, bytes_max: int = RECENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._tails: dict[str, deque[Append]] = {}
        # Whose turn it is to lose its oldest: one place for each chunk, in the order of the commits. Some places are of
        # what was dropped, and are stale.
        self._order: deque[deque[Append]] = deque()
        self._stale = 0
        self._weight = 0

    def add(self, append: Append) -> None:
        """The events of this append were committed."""
        tail = self._tails.get(append.session)
        if tail and tail[-1].seq != append.expected_seq:
            # Somebody else wrote in between: what is here has no end that could be gone on from.
            self.drop(append.session)
            tail = None
        if tail is None:
            tail = self._tails[append.session] = deque()
        tail.append(append)
        self._order.append(tail)
        self._weight += _weight(append)
        while self._weight > self._bytes_max:
            oldest = self._order.popleft()
            # It may have been dropped since, and is then empty.
            if oldest:
                self._weight -= _weight(oldest.popleft())
            else:
                self._stale -= 1

    def drop(self, session: str) -> None:
        """It is no longer ours, or no longer there."""
        tail = self._tails.pop(session, None)
        if tail is not None:
            self._weight -= sum(map(_weight, tail))
            self._stale += len(tail)
            tail.clear()
            # What is light never comes to its turn: months of short sessions would leave a place for each chunk. Not
            # before they are half of all, so that each place is looked at once or twice in its life.
            if 2 * self._stale > len(self._order):
                self._order = deque(kept for kept in self._order if kept)
                self._stale = 0

    def is_newest(self, session: str, after: int) -> bool:
        """Whether the event after this seq is in the newest chunk there is, which is never taken by retention."""
        tail = self._tails.get(session)
        return bool(tail) and tail[-1].expected_seq <= after

    def read(self, session: str, after: int, limit: int, project: Project | None) -> list[Event] | None:
        """The events after a seq; None if they are not, or not all, in here."""
        tail = self._tails.get(session)
        if not tail or after >= tail[-1].seq:
            return None
        index = len(tail) - 1
        furthest = max(0, len(tail) - WALK_CHUNKS_MAX)
        while tail[index].expected_seq > after:
            if index == furthest:
                return None
            index -= 1
        events: list[Event] = []
        while index < len(tail) and len(events) < limit:
            append = tail[index]
            skipped = max(0, after - append.expected_seq)
            events += events_of(
                session,
                append.epoch,
                append.at,
                append.expected_seq + 1,
                append.entries,
                skipped,
                limit - len(events),
                project,
            )
            index += 1
        return events


def _weight(append: Append) -> int:
    return append.size + ENTRY_BYTES * len(append.entries) + CHUNK_BYTES
