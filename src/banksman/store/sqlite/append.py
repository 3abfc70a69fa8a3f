"""Appends, as the writer performs them: what one session appends in one group is one compare-and-set and one insert.

A run is what a session's writer appended in a row: each append expects to follow the one before. So only the first of
them need be compared with what is stored, and if it does not fit, none behind it does. The comparison and the change
are one statement, and the condition names all that the writer believes: its epoch, its seq, and that it is the owner.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from banksman.core.session.event import Entry, Event, Project
from banksman.errors import NotOwner
from banksman.store.log import Done, Snapshot
from banksman.store.memory_session import marks_of
from banksman.store.sqlite import turn_table
from banksman.store.sqlite.operations import WriterContext, WriterOperation, behind
from banksman.store.sqlite.pages import CHUNK_BYTES, checksum, events_of, packed

_MOVE = (
    # In an update the names are those of the row as it was: what is indexed to its end stays so.
    "UPDATE sessions SET seq = ?, bytes = bytes + ?, changed = ?, "
    "indexed = CASE WHEN indexed = seq THEN ? ELSE indexed END "
    "WHERE id = ? AND epoch = ? AND seq = ? AND owner = ?"
)
_STAY = "SELECT 1 FROM sessions WHERE id = ? AND epoch = ? AND seq = ? AND owner = ?"
_INSERT = "INSERT INTO chunks (session, first, last, epoch, at, crc, blob) VALUES (?, ?, ?, ?, ?, ?, ?)"


class AppendOperation(WriterOperation):
    """One append. It is packed when it is made: the caller may go on using its list, and what cannot be stored raises
    in the face of who wrote it."""

    __slots__ = ("at", "blob", "entries", "expected_seq", "size", "snapshot")

    def __init__(  # noqa: PLR0917
        self,
        settled: Callable[[Any], None],
        session: str,
        epoch: int,
        told: int,
        done: Done,
        expected_seq: int,
        at: float,
        entries: Sequence[Entry],
        snapshot: bytes | None,
    ) -> None:
        super().__init__(settled, session, epoch, told, done)
        self.expected_seq = expected_seq
        self.at = at
        self.entries = tuple(entries)
        self.blob = packed(self.entries)
        self.snapshot = snapshot
        self.size = len(self.blob) + (len(snapshot) if snapshot else 0)

    def lighten(self) -> None:
        """It was written. What is kept of it for readers is its entries."""
        self.blob = b""
        self.snapshot = None

    @property
    def seq(self) -> int:
        """Of its last event."""
        return self.expected_seq + len(self.entries)


class GroupedAppends:
    """The appends of the group at hand, by session, until they are written."""

    def __init__(self, work: WriterContext) -> None:
        self._work = work
        self._runs: dict[str, list[AppendOperation]] = {}

    def add(self, append: AppendOperation) -> None:
        run = self._runs.get(append.session)
        if run is not None:
            if append.epoch == run[-1].epoch and append.expected_seq == run[-1].seq:
                run.append(append)
                return
            # It does not follow: what was before it is decided first.
            self._write(self._runs.pop(append.session))
        if self._work.failures.is_behind(append):
            self._work.failures.refuse(append, behind(append.session, append.epoch))
        else:
            self._runs[append.session] = [append]

    def write(self) -> None:
        """All that was added. Whatever else is performed comes after it, in the order of the calls."""
        while self._runs:
            self._write(self._runs.popitem()[1])

    def forget(self) -> None:
        """The transaction is over, and was not committed."""
        self._runs.clear()

    def _write(self, run: list[AppendOperation]) -> None:
        first, last = run[0], run[-1]
        believed = (first.session, first.epoch, first.expected_seq, self._work.host)
        rows = [
            (
                append.session,
                append.expected_seq + 1,
                append.seq,
                append.epoch,
                append.at,
                checksum(append.session, append.expected_seq + 1, append.epoch, append.blob),
                append.blob,
            )
            for append in run
            if append.entries
        ]
        execute = self._work.execute
        if rows:
            weight = sum(len(row[-1]) + CHUNK_BYTES for row in rows)
            fits = execute(_MOVE, (last.seq, weight, rows[-1][4], last.seq, *believed)).rowcount == 1
        else:
            fits = bool(execute(_STAY, believed).fetchall())
        if not fits:
            self._refuse(run)
            return
        self._work.connection.executemany(_INSERT, rows)
        for append in run:
            turn_table.keep(self._work, append.session, marks_of(append.expected_seq + 1, append.entries))
        # Of several in one commit only the last is ever seen.
        snapshots = [append for append in run if append.snapshot is not None]
        if snapshots:
            last = snapshots[-1]
            assert last.snapshot is not None
            keep_snapshot(self._work, last.session, Snapshot(last.seq, last.snapshot))

    def _refuse(self, run: list[AppendOperation]) -> None:
        first, *rest = run
        error = no_owner(self._work, first.session, first.epoch)
        if error is not None:
            for append in run:
                append.error = error
            return
        error = NotOwner(
            "the session is not where its writer believes",
            hint="claim it anew",
            session=first.session,
            expected_seq=first.expected_seq,
        )
        self._work.failures.refuse(first, error)
        for append in rest:
            self._work.failures.refuse(append, behind(append.session, append.epoch))


def no_owner(work: WriterContext, session: str, epoch: int) -> NotOwner | None:
    """Why this host does not own a session under this epoch, if so."""
    row = work.row("SELECT epoch, owner FROM sessions WHERE id = ?", session)
    current, owner = row or (0, None)
    if current != epoch:
        return NotOwner(
            "another writer has the session", hint="claim it anew", session=session, epoch=epoch, current=current
        )
    if owner is None:
        return NotOwner("the session was released", hint="claim it anew", session=session, epoch=epoch)
    if owner != work.host:
        return NotOwner("another host has the session", hint="claim it anew", session=session, epoch=epoch)
    return None


def keep_snapshot(work: WriterContext, session: str, snapshot: Snapshot) -> None:
    crc = checksum(session, snapshot.seq, 0, snapshot.data)
    work.execute(
        "INSERT OR REPLACE INTO snapshots (session, seq, crc, data) VALUES (?, ?, ?, ?)",
        (session, snapshot.seq, crc, snapshot.data),
    )


# The newest chunks of the sessions that are written here, kept in memory for those who follow them.
#
# Who follows a live session wants each event as it is committed. It was in this process a moment ago, so it need not be
# read back by another thread, from the disk, and unpacked. Only what is committed is ever in here, and only of sessions
# that this host has: nobody else can write or delete those.

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
