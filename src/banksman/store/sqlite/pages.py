"""Read queries of the store: pages of events, snapshots, and the encoding of chunk rows.

The reader thread runs the queries with its connection, each on one consistent view of the store.
The writer thread uses the encoding too (`packed`, `checksum`). A page has a limit in bytes besides
the limit in events. The events of an agent may be long, and a reader must not hold a whole history
in memory. A chunk is always read whole, whichever of its events are requested.

A row holds the entries of one append as one value with a checksum. One row per append, not per
event, is the main reason for the speed of this engine. A row costs about as much as forty events of
a burst. The checksum is necessary because SQLite has none in the pages of its file. If the disk
returns a zeroed or misplaced page in the middle of a long value, SQLite reads it without an error.
The checksum starts with the chunk's session, first seq and epoch. So an intact chunk in the wrong
place is detected too.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from banksman.core.session.event import Entry, Event, Project
from banksman.errors import StoreDamaged
from banksman.store.log_values import (
    BEGINNING,
    Page,
    Position,
    PositionedEvent,
    ProjectOf,
    Snapshot,
)

# Size of a chunk besides its blob: the row's other columns, and its index entry.
CHUNK_BYTES = 128
_HINT = "restore a backup of the store; the events before and after these can still be read"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Entry, ...])

# A page ends with the chunk that exceeds this size.
PAGE_BYTES_MAX = 4 << 20
# Slightly below the number of parameters that every SQLite version accepts in one statement.
VARIABLES_MAX = 900
# A row with a damaged header may hold text, which Python refuses to decode, or NULL.
_BLOB = "coalesce(CAST(c.blob AS BLOB), x'')"
# Whether the chunk has both its neighbours. The first retained chunk needs none before it, and the
# chunk with the session's last event needs none behind it. A reader of all sessions does not
# remember its place in each session, so each chunk is checked for its neighbours. The cost is two
# index lookups, some microseconds.
_HAS_NEIGHBOURS = """(
    (c.first <= s.first OR EXISTS (
        SELECT 1 FROM chunks b WHERE b.session = c.session AND b.last = c.first - 1))
    AND (c.last >= s.seq OR EXISTS (
        SELECT 1 FROM chunks b WHERE b.session = c.session AND b.last > c.last))
)"""


# Encodes the entries of a chunk. Raises TypeError or ValueError for an invalid entry.
packed: Callable[[Iterable[Entry]], bytes] = _encoder.encode


def checksum(session: str, first: int, epoch: int, blob: bytes) -> int:
    """Return the checksum of a chunk or snapshot, with its place in the store."""
    return zlib.crc32(blob, zlib.crc32(f"{session} {first} {epoch}".encode()))


def unpacked(  # noqa: PLR0917  The columns of a row, in their order.
    session: str, first: int, last: int, epoch: int, crc: int, blob: bytes
) -> tuple[Entry, ...]:
    """Verify and decode the entries of a chunk. Raises `StoreDamaged` if they were changed."""
    if checksum(session, first, epoch, blob) != crc:
        raise _damaged(session, first, last, "their checksum is wrong")
    try:
        entries = _decoder.decode(blob)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _damaged(session, first, last, str(exc)) from exc
    if len(entries) != last - first + 1:
        raise _damaged(session, first, last, f"their chunk has {len(entries)} events")
    return entries


def events_of(  # noqa: PLR0917  Called once per chunk and page, for every event that is read.
    session: str,
    epoch: int,
    at: float,
    first: int,
    entries: Sequence[Entry],
    skipped: int,
    limit: int,
    project: Project | None,
) -> list[Event]:
    """Return at most `limit` events of a chunk, after its first `skipped` ones."""
    events: list[Event] = []
    seq = first + skipped
    # A comprehension would be one more call, and most chunks have one event.
    for turn, kind, data in entries[skipped : skipped + limit]:
        events.append(Event(session, epoch, seq, at, turn, kind, data, project))
        seq += 1
    return events


def missing(session: str, first: int, last: int) -> StoreDamaged:
    """Build the error for events that the session's row counts and no chunk holds."""
    return _damaged(session, first, last, "they are missing")


def uncounted(session: str, first: int, last: int, head: int) -> StoreDamaged:
    """Build the error for events that a chunk holds and the session's row does not count."""
    return _damaged(session, first, last, f"the session's row ends at {head}")


def _damaged(session: str, first: int, last: int, why: str) -> StoreDamaged:
    return StoreDamaged(
        f"events {first} to {last} of session {session} are damaged: {why}",
        hint=_HINT,
        session=session,
        first=first,
        last=last,
    )


class PagePiece(NamedTuple):
    """A part of a chunk, after its first `skipped` entries.

    `is_torn`: the chunk is the session's last one, and the events behind it are missing.
    """

    chunk: int
    session: str
    epoch: int
    at: float
    first: int
    entries: Sequence[Entry]
    skipped: int
    is_torn: bool

    def after(self, count: int) -> Position:
        """Return the position after the first `count` entries of the chunk.

        A reader leaves a torn chunk only after it has received the gap. Until then the end of the
        chunk is a position inside of it.
        """
        is_whole = count == len(self.entries) and not self.is_torn
        return Position(self.chunk, 0 if is_whole else count)


class PagePieces(NamedTuple):
    """The parts of chunks after a position, in commit order, up to `end`.

    See `MultiSessionPage`.
    """

    pieces: list[PagePiece]
    end: Position
    gaps: dict[str, int]


def positioned(
    pieces: Iterable[PagePiece], limit: int, project_of: ProjectOf | None
) -> list[PositionedEvent]:
    """Return at most `limit` events of the parts, each with its position."""
    found: list[PositionedEvent] = []
    for piece in pieces:
        events = events_of(
            piece.session,
            piece.epoch,
            piece.at,
            piece.first,
            piece.entries,
            piece.skipped,
            limit - len(found),
            None if project_of is None else project_of(piece.session),
        )
        found += [
            PositionedEvent(piece.after(count).text, event)
            for count, event in enumerate(events, piece.skipped + 1)
        ]
    return found


def read(
    connection: sqlite3.Connection, session: str, after: int, limit: int, project: Project | None
) -> Page:
    """Read one page of a session, see `Log.read`."""
    events: list[Event] = []
    gap: tuple[int, int] | None = None
    size = 0
    chunks = chunks_after(connection, session, after)
    try:
        for first, epoch, at, entries, blob_bytes in chunks:
            skipped = 0
            if not events:
                # Histories have no gaps inside, so retention can only have removed events before
                # the first chunk.
                skipped = max(0, after + 1 - first)
                gap = (after + 1, first - 1) if first > after + 1 else None
            events += events_of(
                session, epoch, at, first, entries, skipped, limit - len(events), project
            )
            size += blob_bytes
            if len(events) >= limit or size > PAGE_BYTES_MAX:
                break
    finally:
        # A statement that is not read to its end would keep the write-ahead log from being
        # checkpointed.
        chunks.close()
    return Page(events or (), gap)


def chunks_after(
    connection: sqlite3.Connection, session: str, after: int
) -> Generator[tuple[int, int, float, Sequence[Entry], int]]:
    """Yield the chunks with events after a seq: first seq, epoch, time, entries, size of the blob.

    Raises `StoreDamaged` for a chunk that was changed, that is missing, or that the session's row
    does not count. The row defines which events exist: from `first`, where retention ended, up to
    `seq`. One statement reads the row and the chunks, so both are from the same moment. A session
    without chunks gives one row of NULLs.
    """
    cursor = connection.execute(
        f"SELECT s.first, s.seq, c.first, c.last, c.epoch, c.at, c.crc, {_BLOB} "
        "FROM sessions s LEFT JOIN chunks c ON c.session = s.id AND c.last > ? "
        "WHERE s.id = ? ORDER BY c.last",
        (after, session),
    )
    expected, end = 1, 0
    try:
        for kept_first, seq, first, last, epoch, at, crc, blob in cursor:
            expected, end = max(expected, after + 1, kept_first), seq
            if first is None:
                break
            if first > expected:
                raise missing(session, expected, first - 1)
            if last > seq:
                raise uncounted(session, max(first, seq + 1), last, seq)
            yield first, epoch, at, unpacked(session, first, last, epoch, crc, blob), len(blob)
            expected = last + 1
    finally:
        cursor.close()
    if expected <= end:
        raise missing(session, expected, end)


def read_many(
    connection: sqlite3.Connection,
    after: Position | None,
    limit: int,
    sessions: Collection[str] | None,
) -> PagePieces:
    """Read the parts of chunks after a position, see `Log.read_many`.

    `after`: None is the beginning.

    A reader whose position is behind a session's last chunk gets no gap if the events after that
    chunk are lost. The store has no record of where they were in the commit order.
    """
    is_new, after = after is None, after or BEGINNING
    connection.execute("BEGIN")  # One consistent view for all queries.
    try:
        ((newest,),) = connection.execute("SELECT coalesce(max(id), 0) FROM chunks").fetchall()
        after.check(newest)
        gaps = {
            session: first - 1
            for session, first in connection.execute(
                "SELECT id, first FROM sessions WHERE trimmed > ?", (after.whole,)
            ).fetchall()
            if sessions is None or session in sessions
        }
        # In a store without chunks the beginning is also the end. A reader at that position has
        # received these gaps already.
        if after == BEGINNING and (is_new or newest):
            gaps.update(_emptied(connection, sessions))
        pieces: list[PagePiece] = []
        end = Position(newest)
        left, size = limit, 0
        for piece, blob_bytes in _pieces(connection, after, sessions):
            if isinstance(piece, _Hole):
                if pieces:
                    # A page reports its gaps before its events, so this gap starts the next page.
                    end = pieces[-1].after(len(pieces[-1].entries))
                    break
                gaps[piece.session] = max(piece.last, gaps.get(piece.session, 0))
                continue
            pieces.append(piece)
            count = len(piece.entries) - piece.skipped
            size += blob_bytes
            if count >= left or size > PAGE_BYTES_MAX:
                end = piece.after(piece.skipped + min(count, left))
                break
            left -= count
        return PagePieces(pieces, end, gaps)
    finally:
        connection.execute("COMMIT")


class _Hole(NamedTuple):
    """Damaged or missing events up to `last`.

    A reader by position gets a gap and continues. A reader of the session by seq gets the error.
    """

    session: str
    last: int


def _emptied(connection: sqlite3.Connection, sessions: Collection[str] | None) -> dict[str, int]:
    """Return the sessions whose row counts events but that have no chunk, each with its last seq.

    They have no place in the commit order, so a reader that starts at the beginning gets these
    gaps.
    """
    clause, parameters = "", list[str]()
    if sessions is not None and len(sessions) <= VARIABLES_MAX:
        clause, parameters = f"AND s.id IN ({', '.join('?' * len(sessions))})", [*sessions]
    # In the order of ids, SQLite scans both indexes once and reads no table: some microseconds per
    # session of the store. The result is almost always empty.
    found = connection.execute(
        "SELECT s.id FROM sessions s WHERE NOT EXISTS "
        f"(SELECT 1 FROM chunks c WHERE c.session = s.id) {clause} ORDER BY s.id",
        parameters,
    ).fetchall()
    emptied: dict[str, int] = {}
    for (session,) in found:
        if sessions is None or session in sessions:
            ((first, seq),) = connection.execute(
                "SELECT first, seq FROM sessions WHERE id = ?", (session,)
            ).fetchall()
            if first <= seq:
                emptied[session] = seq
    return emptied


def _pieces(
    connection: sqlite3.Connection, after: Position, sessions: Collection[str] | None
) -> Iterator[tuple[PagePiece | _Hole, int]]:
    """Yield parts of chunks and holes in commit order, with the size of each."""
    wanted = None if sessions is None else frozenset(sessions)
    parameters: list[object] = [after.whole]
    clause = ""
    if wanted is not None and len(wanted) <= VARIABLES_MAX:
        clause = f"AND +c.session IN ({', '.join('?' * len(wanted))})"
        parameters += wanted
    cursor = connection.execute(
        # The plus keeps SQLite from using the index by session, which would need a sort. In the
        # order of chunk ids the query can stop early. The join leaves out the remaining chunks of
        # deleted sessions.
        "SELECT c.id, c.session, c.first, c.last, c.epoch, c.at, c.crc, "
        f"{_BLOB}, s.first, s.seq, {_HAS_NEIGHBOURS} "
        "FROM chunks c CROSS JOIN sessions s ON s.id = +c.session "
        f"WHERE c.id > ? {clause} ORDER BY c.id",
        parameters,
    )
    try:
        for (
            id,
            session,
            first,
            last,
            epoch,
            at,
            crc,
            blob,
            kept_first,
            seq,
            has_neighbours,
        ) in cursor:
            if wanted is not None and session not in wanted:
                continue
            skipped = after.taken if id == after.chunk else 0
            is_hollow, is_torn = False, False
            if not has_neighbours:
                is_hollow, is_torn = _lost_beside(connection, session, first, last, kept_first, seq)
            if is_hollow and not skipped:
                yield _Hole(session, first - 1), 0
            try:
                entries = unpacked(session, first, last, epoch, crc, blob)
            except StoreDamaged:
                yield _Hole(session, seq if is_torn else last), 0
                continue
            if skipped < len(entries):
                yield PagePiece(id, session, epoch, at, first, entries, skipped, is_torn), len(blob)
            if is_torn:
                yield _Hole(session, seq), 0
    finally:
        cursor.close()


def _lost_beside(  # noqa: PLR0917  The columns of a row, in their order.
    connection: sqlite3.Connection, session: str, first: int, last: int, kept_first: int, seq: int
) -> tuple[bool, bool]:
    """Whether events directly before this chunk are missing, and whether all behind it are."""
    ((expected, has_next),) = connection.execute(
        "SELECT (SELECT coalesce(max(last) + 1, ?) FROM chunks WHERE session = ? AND last < ?), "
        "EXISTS (SELECT 1 FROM chunks WHERE session = ? AND last > ?)",
        (kept_first, session, first, session, last),
    ).fetchall()
    return expected < first, last < seq and not has_next


def snapshot(connection: sqlite3.Connection, session: str) -> Snapshot | None:
    """Return the session's snapshot, or None. Raises `StoreDamaged` if it is damaged."""
    rows = connection.execute(
        "SELECT n.seq, n.crc, coalesce(CAST(n.data AS BLOB), x''), coalesce(s.seq, n.seq) "
        "FROM snapshots n LEFT JOIN sessions s ON s.id = n.session WHERE n.session = ?",
        (session,),
    ).fetchall()
    if not rows:
        return None
    ((seq, crc, data, head),) = rows
    # Recovery can use neither a changed snapshot nor one of events that the session's row does not
    # count.
    if seq > head or checksum(session, seq, 0, data) != crc:
        raise StoreDamaged(
            f"the snapshot at {seq} of session {session} is damaged"
            + (f": the session's row ends at {head}" if seq > head else ""),
            hint="restore a backup of the store",
            session=session,
            seq=seq,
        )
    return Snapshot(seq, data)
