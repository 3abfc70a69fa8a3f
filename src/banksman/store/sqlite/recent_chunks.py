"""The newest chunks of the sessions that are written here, kept in memory for those who follow them.

Who follows a live session wants each event as it is committed. It was in this process a moment ago, so it need not be
read back by another thread, from the disk, and unpacked. Only what is committed is ever in here, and only of sessions
that this host has: nobody else can write or delete those.
"""

from __future__ import annotations

from collections import OrderedDict, deque

from banksman.core.session.event import Event, Project
from banksman.store.sqlite.append import AppendOperation
from banksman.store.sqlite.chunks import CHUNK_BYTES, events_of

# For all sessions together. A follower that is behind by more is served from the disk.
RECENT_BYTES_MAX = 16 << 20
# What an entry takes besides its data, in memory.
ENTRY_BYTES = 128
# Of one session. A reader that keeps up is at the end, and its place is looked for from there. One that does not keep
# up goes by the index of the file.
CHUNKS_MAX = 64


class RecentChunks:
    """The last chunks of each session, within a bound for all of them. The session that was written to least recently
    loses its oldest chunk first."""

    def __init__(self, bytes_max: int = RECENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # In the order in which the sessions were last written to. No tail is empty.
        self._tails: OrderedDict[str, deque[AppendOperation]] = OrderedDict()
        self._weight = 0

    def add(self, append: AppendOperation) -> None:
        """The events of this append were committed."""
        tail = self._tails.get(append.session)
        if tail and tail[-1].seq != append.expected_seq:
            # Somebody else wrote in between: what is here has no end that could be gone on from.
            self.drop(append.session)
        tail = self._tails.setdefault(append.session, deque())
        self._tails.move_to_end(append.session)
        tail.append(append)
        self._weight += _weight(append)
        if len(tail) > CHUNKS_MAX:
            self._weight -= _weight(tail.popleft())
        while self._weight > self._bytes_max:
            session, oldest = next(iter(self._tails.items()))
            self._weight -= _weight(oldest.popleft())
            if not oldest:
                del self._tails[session]

    def drop(self, session: str) -> None:
        """It is no longer ours, or no longer there."""
        self._weight -= sum(map(_weight, self._tails.pop(session, ())))

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
        while tail[index].expected_seq > after:
            if index == 0:
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


def _weight(append: AppendOperation) -> int:
    return append.size + ENTRY_BYTES * len(append.entries) + CHUNK_BYTES
