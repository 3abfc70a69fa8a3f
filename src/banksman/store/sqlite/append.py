"""Appends of a group, and a memory cache of the newest chunks.

The cache (`RecentChunks`) belongs to the event loop: followers get new events without a read of the
file. `no_owner` and `keep_snapshot` serve other operations of the writer too.

The appends of one session in one group become one compare-and-set and one insert. A *run* is a
sequence of appends of one writer in which each append expects to follow the one before. So only the
first append must be compared with the stored state. If it does not fit, none of the later ones
does. One statement compares and changes. Its condition names everything that the writer believes:
the epoch, the seq, and that this host is the owner. The runs of several sessions share a statement.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any

from banksman.core.session.event import Entry, Event, Project, is_output
from banksman.errors import NotOwner
from banksman.store.log_values import Done, Snapshot
from banksman.store.memory_session import marks_of
from banksman.store.sqlite import turn_table, usage_table
from banksman.store.sqlite.operations import WriterContext, WriterOperation, behind
from banksman.store.sqlite.pages import CHUNK_BYTES, checksum, events_of, packed

_MOVE = (
    # In an UPDATE, column names mean the old row. A session that is indexed, or
    # counted, up to its end stays so.
    "UPDATE sessions SET seq = ?, bytes = bytes + ?, changed = ?, "
    "indexed = CASE WHEN indexed = seq THEN ? ELSE indexed END, "
    "counted = CASE WHEN counted = seq THEN ? ELSE counted END "
    "WHERE id = ? AND epoch = ? AND seq = ? AND owner = ?"
)
_STAY = "SELECT 1 FROM sessions WHERE id = ? AND epoch = ? AND seq = ? AND owner = ?"
_INSERT = (
    "INSERT INTO chunks (session, first, last, epoch, at, crc, blob) VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_blob_of = itemgetter(6)


class AppendOperation(WriterOperation):
    """One append. The constructor encodes the entries.

    So the caller may reuse its list, and an entry that cannot be stored raises in the caller's
    code.
    """

    __slots__ = (
        "at",
        "blob",
        "can_wait",
        "entries",
        "expected_seq",
        "is_output",
        "kept_at",
        "seq",
        "size",
        "snapshot",
        "weight",
    )

    is_quick = True

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
        # Without the constructors of the base classes: every token takes this path.
        self.error = None
        self.settled = settled
        self.session = session
        self.epoch = epoch
        self.told = told
        self.done = done
        self.failure = 0
        self.expected_seq = expected_seq
        self.at = at
        self.entries = tuple(entries)
        # The seq of the last event.
        self.seq = expected_seq + len(self.entries)
        self.blob = packed(self.entries)
        self.snapshot = snapshot
        self.size = len(self.blob) + (len(snapshot) if snapshot else 0)
        # When the cache got it, by the monotonic clock, and its size there.
        self.kept_at = 0.0
        self.weight = 0
        # Whether all entries are frames of the agent.
        self.is_output = is_output(self.entries)
        # No caller waits for a frame of the agent. Every other kind of event is waited for: an
        # accepted prompt, an outcome, a receipt, a question.
        self.can_wait = self.is_output


class RunRefused(Exception):
    """A run of several that share a statement does not fit, and it is not known which one.

    The transaction must be rolled back. Performed alone, each operation gets its own error.
    """


class GroupedAppends:
    """The appends of the current group, as runs by session, until they are written."""

    def __init__(self, work: WriterContext) -> None:
        self._work = work
        self._runs: dict[str, list[AppendOperation]] = {}

    def add(self, append: AppendOperation) -> None:
        """Add an append to its session's run, or refuse it if it follows an undelivered failure."""
        run = self._runs.get(append.session)
        if run is not None:
            if append.epoch == run[-1].epoch and append.expected_seq == run[-1].seq:
                run.append(append)
                return
            # The append does not follow the run, so the run is decided first.
            del self._runs[append.session]
            self._write(run, _chunks_of(run))
        if self._work.failures.is_behind(append):
            self._work.failures.refuse(append, behind(append.session, append.epoch))
        else:
            self._runs[append.session] = [append]

    def write(self) -> None:
        """Write all runs.

        The caller does so before any other operation, to keep the order of the calls.
        """
        runs = [*self._runs.values()]
        self._runs.clear()
        rows = [*map(_chunks_of, runs)]
        if len(runs) > 1 and all(rows):
            self._write_all(runs, rows)
        else:
            for run, chunks in zip(runs, rows, strict=True):
                self._write(run, chunks)

    def forget(self) -> None:
        """Drop the runs of a transaction that was rolled back."""
        self._runs.clear()

    def _write_all(
        self, runs: list[list[AppendOperation]], rows: list[list[tuple[Any, ...]]]
    ) -> None:
        """Write the runs of several sessions, each with its rows, with two statements.

        Raises `RunRefused` if a run does not fit. The caller must roll back.
        """
        moves = [*map(self._move_of, runs, rows)]
        if self._work.executemany(_MOVE, moves).rowcount != len(runs):
            raise RunRefused
        self._work.executemany(_INSERT, chain.from_iterable(rows))
        for run in runs:
            self._keep_marks(run)

    def _move_of(self, run: list[AppendOperation], rows: list[tuple[Any, ...]]) -> tuple[Any, ...]:
        """Return the parameters of `_MOVE` for a run with these rows."""
        first, last = run[0], run[-1]
        weight = CHUNK_BYTES * len(rows) + sum(map(len, map(_blob_of, rows)))
        change = (last.seq, weight, rows[-1][4], last.seq, last.seq)
        return (*change, first.session, first.epoch, first.expected_seq, self._work.host)

    def _write(self, run: list[AppendOperation], rows: list[tuple[Any, ...]]) -> None:
        """Write a run with its rows, or refuse it."""
        execute = self._work.execute
        if rows:
            fits = execute(_MOVE, self._move_of(run, rows)).rowcount == 1
        else:
            first = run[0]
            believed = (first.session, first.epoch, first.expected_seq, self._work.host)
            fits = bool(execute(_STAY, believed).fetchall())
        if not fits:
            # The compare-and-set failed, so the session's row did not change and nothing was
            # inserted.
            self._refuse(run)
            return
        self._work.executemany(_INSERT, rows)
        self._keep_marks(run)

    def _keep_marks(self, run: list[AppendOperation]) -> None:
        """Write the turns, the usage and the snapshot of a run whose chunks are written."""
        snapshot: Snapshot | None = None
        for append in run:
            if not append.is_output:
                turn_table.keep(
                    self._work, append.session, marks_of(append.expected_seq + 1, append.entries)
                )
                usage_table.keep(self._work, append.session, append.at, append.entries)
            if append.snapshot is not None:
                snapshot = Snapshot(append.seq, append.snapshot)
        # The snapshots of one run share a commit, so readers only ever see the last one.
        if snapshot is not None:
            keep_snapshot(self._work, run[0].session, snapshot)

    def _refuse(self, run: list[AppendOperation]) -> None:
        first, *rest = run
        error = no_owner(self._work, first.session, first.epoch)
        if error is not None:
            for append in run:
                append.error = error
            return
        error = NotOwner(
            f"cannot append to session {first.session}: its last seq is not {first.expected_seq}",
            hint="open the session again, or use it at its owner",
            session=first.session,
            expected_seq=first.expected_seq,
        )
        self._work.failures.refuse(first, error)
        for append in rest:
            self._work.failures.refuse(append, behind(append.session, append.epoch))


def _chunks_of(run: list[AppendOperation]) -> list[tuple[Any, ...]]:
    """Return the rows of a run's chunks."""
    return [
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


def no_owner(work: WriterContext, session: str, epoch: int) -> NotOwner | None:
    """Explain why this host does not own the session under this epoch; None if it does."""
    row = work.row("SELECT epoch, owner FROM sessions WHERE id = ?", session)
    current, owner = row or (0, None)
    hint = "open the session again, or use it at its owner"
    if current != epoch:
        message = f"cannot write session {session}: another writer owns it"
        return NotOwner(message, hint=hint, session=session, epoch=epoch, current=current)
    if owner is None:
        message = f"cannot write session {session}: it was released"
        return NotOwner(message, hint=hint, session=session, epoch=epoch)
    if owner != work.host:
        message = f"cannot write session {session}: another host owns it"
        return NotOwner(message, hint=hint, session=session, epoch=epoch)
    return None


def keep_snapshot(work: WriterContext, session: str, snapshot: Snapshot) -> None:
    """Replace the session's snapshot. The checksum covers the session id and the seq too."""
    crc = checksum(session, snapshot.seq, 0, snapshot.data)
    work.execute(
        "INSERT OR REPLACE INTO snapshots (session, seq, crc, data) VALUES (?, ?, ?, ?)",
        (session, snapshot.seq, crc, snapshot.data),
    )


# The newest chunks of the sessions that this host writes, cached in memory for followers.
#
# A follower of a live session wants each event as soon as it is committed. The event was in this
# process a moment ago, so another thread does not have to read it from disk and decode it. The
# cache holds only committed events, and only of sessions that this host owns: no other host can
# write or delete these.

# Limit for all sessions together. A follower that is further behind reads from disk.
RECENT_BYTES_MAX = 16 << 20
# Memory of an entry besides its data.
ENTRY_BYTES = 128
# A reader of live events is at most this far behind a commit.
MOMENT_SECONDS = 0.1
# Limit per session. A reader that keeps up is near the end, and the search for its place starts
# there. A slower reader uses the index of the file.
CHUNKS_MAX = 64


class RecentChunks:
    """The last chunks of each session, within one memory limit for all sessions.

    At the limit, the session that was written least recently loses its oldest chunk first.
    """

    def __init__(self, bytes_max: int = RECENT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # Ordered by the time of the last write. No deque is empty.
        self._tails: OrderedDict[str, deque[AppendOperation]] = OrderedDict()
        self._weight = 0

    def add(self, append: AppendOperation, now: float) -> None:
        """Cache a committed append. `now`: the monotonic time."""
        append.kept_at = now
        append.weight = append.size + ENTRY_BYTES * len(append.entries) + CHUNK_BYTES
        # Readers need only the entries.
        append.blob = b""
        append.snapshot = None
        tail = self._tails.get(append.session)
        if tail is None or tail[-1].seq != append.expected_seq:
            # The first chunk, or another host wrote in between, so the cached chunks and this
            # append are not contiguous.
            self.drop(append.session)
            tail = self._tails[append.session] = deque()
        else:
            self._tails.move_to_end(append.session)
        tail.append(append)
        self._weight += append.weight
        if len(tail) > CHUNKS_MAX:
            self._weight -= tail.popleft().weight
        while self._weight > self._bytes_max:
            session, oldest = next(iter(self._tails.items()))
            self._weight -= oldest.popleft().weight
            if not oldest:
                del self._tails[session]

    def drop(self, session: str) -> None:
        """Drop a session that this host does not own, or that was deleted."""
        self._weight -= sum(append.weight for append in self._tails.pop(session, ()))

    def newest(
        self, session: str, after: int, limit: int, project: Project | None
    ) -> list[Event] | None:
        """Return the events after a seq if the next one is in the newest chunk; None otherwise.

        Retention never removes that chunk. A live reader nearly always wants this one.
        """
        tail = self._tails.get(session)
        if tail is None:
            return None
        append = tail[-1]
        skipped = after - append.expected_seq
        if skipped < 0 or after >= append.seq:
            return None
        first, entries = append.expected_seq + 1, append.entries
        return events_of(session, append.epoch, append.at, first, entries, skipped, limit, project)

    def is_new(self, session: str, after: int, now: float) -> bool:
        """Whether the event after this seq was committed a moment ago. `now`: see `add`."""
        for append in reversed(self._tails.get(session, ())):
            if append.expected_seq <= after:
                return now - append.kept_at < MOMENT_SECONDS
        return False

    def read(
        self, session: str, after: int, limit: int, project: Project | None
    ) -> list[Event] | None:
        """Return the events after a seq, or None if the cache does not hold all of them."""
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
