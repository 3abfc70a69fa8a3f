"""What is read of histories, each in one look at the store: a page of a session, a page of all, a snapshot.

These run in the reader's thread, with its connection. A page has a bound in bytes besides that in events: those of one
agent may be long, and a reader must not hold a whole history in memory. A chunk is read whole, whatever of it is
wanted.

What one row holds: the entries of one append as one value, with a checksum, and how they become events again.

One row per append and not per event: a row costs about as much as forty events of a burst do, so this is most of what
makes the engine fast. The checksum is ours because SQLite has none in the pages of its file: a page that was zeroed or
misplaced below it, in the middle of a long value, is read back without a word. The sum begins with where the chunk
belongs, so that a whole one in another's place is noticed too.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from banksman.core.session.event import Entry, Event, Project
from banksman.errors import StoreDamaged
from banksman.store.log import BEGINNING, Page, Position, Snapshot, history_lost

# What a chunk weighs besides its blob: the row with its numbers, and its entry in the index.
CHUNK_BYTES = 128
_HINT = "restore a backup of the store; the events before and after these can still be read"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Entry, ...])

# A page ends with the chunk that exceeds it.
PAGE_BYTES_MAX = 4 << 20
# As many values as SQLite has always taken in one statement, less some.
VARIABLES_MAX = 900
# Where the row's own header is damaged, it may be text, which Python refuses to decode, or nothing.
_BLOB = "coalesce(CAST(c.blob AS BLOB), x'')"
# Whether the chunk before this one is there, unless it is the first that is kept, and whether there is one behind it,
# unless it ends with the session's last event. A reader of all sessions does not remember where it was in each of
# them, so each chunk is asked for its neighbours. Two looks at an index, some microseconds.
_HAS_NEIGHBOURS = """(
    (c.first <= s.first OR EXISTS (SELECT 1 FROM chunks b WHERE b.session = c.session AND b.last = c.first - 1))
    AND (c.last >= s.seq OR EXISTS (SELECT 1 FROM chunks b WHERE b.session = c.session AND b.last > c.last))
)"""


def packed(entries: Iterable[Entry]) -> bytes:
    """Raises TypeError or ValueError for what is no entry."""
    return _encoder.encode(entries)


def checksum(session: str, first: int, epoch: int, blob: bytes) -> int:
    return zlib.crc32(blob, zlib.crc32(f"{session} {first} {epoch}".encode()))


def unpacked(  # noqa: PLR0917  A row's columns, in their order.
    session: str, first: int, last: int, epoch: int, crc: int, blob: bytes
) -> tuple[Entry, ...]:
    """`StoreDamaged` if this is not what was written."""
    if checksum(session, first, epoch, blob) != crc:
        raise _damaged(session, first, last, "their checksum is wrong")
    try:
        entries = _decoder.decode(blob)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise _damaged(session, first, last, str(exc)) from exc
    if len(entries) != last - first + 1:
        raise _damaged(session, first, last, f"there are {len(entries)} of them")
    return entries


def events_of(  # noqa: PLR0917  Called once per chunk and page, on the way of every event.
    session: str,
    epoch: int,
    at: float,
    first: int,
    entries: Sequence[Entry],
    skipped: int,
    limit: int,
    project: Project | None,
) -> list[Event]:
    """At most `limit` of a chunk's events, from the one behind the `skipped` first."""
    return [
        Event(session, epoch, seq, at, turn, kind, data, project)
        for seq, (turn, kind, data) in enumerate(entries[skipped : skipped + limit], first + skipped)
    ]


def missing(session: str, first: int, last: int) -> StoreDamaged:
    """The error for events that the session's row counts and no chunk holds."""
    return _damaged(session, first, last, "they are missing")


def uncounted(session: str, first: int, last: int, head: int) -> StoreDamaged:
    """The error for events that a chunk holds and the session's row does not count."""
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
    """A part of a chunk, behind the `skipped` first of its entries. `is_torn`: it is the session's last chunk, and the
    events behind it are missing."""

    chunk: int
    session: str
    epoch: int
    at: float
    first: int
    entries: Sequence[Entry]
    skipped: int
    is_torn: bool

    def after(self, count: int) -> Position:
        """The place after so many of the chunk's entries. A torn chunk is left only when its reader was told: until
        then its end is a place inside of it."""
        is_whole = count == len(self.entries) and not self.is_torn
        return Position(self.chunk, 0 if is_whole else count)


class PagePieces(NamedTuple):
    """What lies after a position, in the order of the commits, until `end`. See `MultiSessionPage`."""

    pieces: list[PagePiece]
    end: Position
    gaps: dict[str, int]


def read(connection: sqlite3.Connection, session: str, after: int, limit: int, project: Project | None) -> Page:
    events: list[Event] = []
    gap: tuple[int, int] | None = None
    size = 0
    chunks = chunks_after(connection, session, after)
    try:
        for first, epoch, at, entries, blob_bytes in chunks:
            skipped = 0
            if not events:
                # Histories are dense: only before the first chunk that is kept can retention have taken anything.
                skipped = max(0, after + 1 - first)
                gap = (after + 1, first - 1) if first > after + 1 else None
            events += events_of(session, epoch, at, first, entries, skipped, limit - len(events), project)
            size += blob_bytes
            if len(events) >= limit or size > PAGE_BYTES_MAX:
                break
    finally:
        # A statement that was not read to its end would keep the log of the store from being folded back.
        chunks.close()
    return Page(events or (), gap)


def chunks_after(
    connection: sqlite3.Connection, session: str, after: int
) -> Generator[tuple[int, int, float, Sequence[Entry], int]]:
    """The chunks of a session that have events after a seq: first seq, epoch, time, entries, bytes.

    Raises `StoreDamaged` for a chunk that was changed, that is missing, or that the session's row does not count. The
    row says which events there are: those from `first` on, which is where retention ended, up to `seq`. The row and
    the chunks are read by one statement, so both are of the same moment. A session without chunks is one row of nulls.
    """
    cursor = connection.execute(
        f"SELECT s.first, s.seq, c.first, c.last, c.epoch, c.at, c.crc, {_BLOB} "
        "FROM sessions s LEFT JOIN chunks c ON c.session = s.id AND c.last > ? WHERE s.id = ? ORDER BY c.last",
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
    connection: sqlite3.Connection, after: Position | None, limit: int, sessions: Collection[str] | None
) -> PagePieces:
    """`after` None: from the beginning.

    Who stood behind a session's last chunk when what follows it was lost is not told: nothing says where that was."""
    is_new, after = after is None, after or BEGINNING
    connection.execute("BEGIN")  # All of it as of one moment.
    try:
        ((newest,),) = connection.execute("SELECT coalesce(max(id), 0) FROM chunks").fetchall()
        if after.chunk > newest:
            raise history_lost(after.text)
        gaps = {
            session: first - 1
            for session, first in connection.execute(
                "SELECT id, first FROM sessions WHERE trimmed > ?", (after.whole,)
            ).fetchall()
            if sessions is None or session in sessions
        }
        # Where there is no chunk at all, the beginning is the end: who was there was told.
        if after == BEGINNING and (is_new or newest):
            gaps.update(_emptied(connection, sessions))
        pieces: list[PagePiece] = []
        end = Position(newest)
        left, size = limit, 0
        for piece, blob_bytes in _pieces(connection, after, sessions):
            if isinstance(piece, _Hole):
                if pieces:
                    # A page tells its gaps first, so this one begins the next page.
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
    """Events up to `last` that are damaged or missing. Who reads by position is told of a gap and goes on; who reads
    the session by its seqs gets the error."""

    session: str
    last: int


def _emptied(connection: sqlite3.Connection, sessions: Collection[str] | None) -> dict[str, int]:
    """The sessions that have events by their row, and no chunk: each with its last seq. They have no place in the order
    of the chunks, so they are told to who begins there."""
    clause, parameters = "", list[str]()
    if sessions is not None and len(sessions) <= VARIABLES_MAX:
        clause, parameters = f"AND s.id IN ({', '.join('?' * len(sessions))})", [*sessions]
    # In the order of the ids both indexes are read from their beginning to their end, and no table: some microseconds
    # for each session of the store. What is found is next to nothing.
    found = connection.execute(
        "SELECT s.id FROM sessions s WHERE NOT EXISTS (SELECT 1 FROM chunks c WHERE c.session = s.id) "
        f"{clause} ORDER BY s.id",
        parameters,
    ).fetchall()
    emptied: dict[str, int] = {}
    for (session,) in found:
        if sessions is None or session in sessions:
            ((first, seq),) = connection.execute("SELECT first, seq FROM sessions WHERE id = ?", (session,)).fetchall()
            if first <= seq:
                emptied[session] = seq
    return emptied


def _pieces(
    connection: sqlite3.Connection, after: Position, sessions: Collection[str] | None
) -> Iterator[tuple[PagePiece | _Hole, int]]:
    """In the order of their commits, with the size of each."""
    wanted = None if sessions is None else frozenset(sessions)
    parameters: list[object] = [after.whole]
    clause = ""
    if wanted is not None and len(wanted) <= VARIABLES_MAX:
        clause = f"AND +c.session IN ({', '.join('?' * len(wanted))})"
        parameters += wanted
    cursor = connection.execute(
        # The plus keeps SQLite from sorting what it finds by session: in the order of the ids it can stop early. The
        # join leaves out what is left of sessions that were deleted.
        "SELECT c.id, c.session, c.first, c.last, c.epoch, c.at, c.crc, "
        f"{_BLOB}, s.first, s.seq, {_HAS_NEIGHBOURS} FROM chunks c CROSS JOIN sessions s ON s.id = +c.session "
        f"WHERE c.id > ? {clause} ORDER BY c.id",
        parameters,
    )
    try:
        for id, session, first, last, epoch, at, crc, blob, kept_first, seq, has_neighbours in cursor:
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


def _lost_beside(  # noqa: PLR0917  A row's columns, in their order.
    connection: sqlite3.Connection, session: str, first: int, last: int, kept_first: int, seq: int
) -> tuple[bool, bool]:
    """Whether events are missing right before the chunk `first` to `last`, and whether all behind it are."""
    ((expected, has_next),) = connection.execute(
        "SELECT (SELECT coalesce(max(last) + 1, ?) FROM chunks WHERE session = ? AND last < ?), "
        "EXISTS (SELECT 1 FROM chunks WHERE session = ? AND last > ?)",
        (kept_first, session, first, session, last),
    ).fetchall()
    return expected < first, last < seq and not has_next


def snapshot(connection: sqlite3.Connection, session: str) -> Snapshot | None:
    rows = connection.execute(
        "SELECT n.seq, n.crc, coalesce(CAST(n.data AS BLOB), x''), coalesce(s.seq, n.seq) "
        "FROM snapshots n LEFT JOIN sessions s ON s.id = n.session WHERE n.session = ?",
        (session,),
    ).fetchall()
    if not rows:
        return None
    ((seq, crc, data, head),) = rows
    # One of events that the row does not count is as little to be gone on from as a changed one.
    if seq > head or checksum(session, seq, 0, data) != crc:
        raise StoreDamaged(
            f"the snapshot at {seq} of session {session} is damaged"
            + (f": the session's row ends at {head}" if seq > head else ""),
            hint="restore a backup of the store",
            session=session,
            seq=seq,
        )
    return Snapshot(seq, data)
