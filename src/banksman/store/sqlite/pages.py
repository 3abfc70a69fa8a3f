"""What is read of histories, each in one look at the store: a page of a session, a page of all, a snapshot.

These run in the reader's thread, with its connection. A page has a bound in bytes besides that in events: those of one
agent may be long, and a reader must not hold a whole history in memory. A chunk is read whole, whatever of it is
wanted.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from banksman.core.event import Entry, Event, Project
from banksman.errors import StoreDamaged
from banksman.store.log import Page, Snapshot, history_lost
from banksman.store.positions import Position
from banksman.store.sqlite.chunks import checksum, events_of, unpacked

# A page ends with the chunk that exceeds it.
PAGE_BYTES_MAX = 4 << 20
# As many values as SQLite has always taken in one statement, less some.
VARIABLES_MAX = 900
# Where the row's own header is damaged, it may be text, which Python refuses to decode, or nothing.
_BLOB = "coalesce(CAST(blob AS BLOB), x'')"


class Piece(NamedTuple):
    """A part of a chunk, behind the `skipped` first of its entries."""

    chunk: int
    session: str
    epoch: int
    at: float
    first: int
    entries: Sequence[Entry]
    skipped: int


class Pieces(NamedTuple):
    """What lies after a position, in the order of the commits, until `end`. See `ManyPage`."""

    pieces: list[Piece]
    end: Position
    gaps: dict[str, int]


def read(connection: sqlite3.Connection, session: str, after: int, limit: int, project: Project | None) -> Page:
    events: list[Event] = []
    gap: tuple[int, int] | None = None
    size = 0
    cursor = connection.execute(
        f"SELECT first, last, epoch, at, crc, {_BLOB} FROM chunks WHERE session = ? AND last > ? "
        "AND EXISTS (SELECT 1 FROM sessions WHERE id = ?) ORDER BY last",
        (session, after, session),
    )
    try:
        for first, last, epoch, at, crc, blob in cursor:
            entries = unpacked(session, first, last, epoch, crc, blob)
            skipped = 0
            if not events:
                # Histories are dense: only before the first chunk there is can anything be missing.
                skipped = max(0, after + 1 - first)
                gap = (after + 1, first - 1) if first > after + 1 else None
            events += events_of(session, epoch, at, first, entries, skipped, limit - len(events), project)
            size += len(blob)
            if len(events) >= limit or size > PAGE_BYTES_MAX:
                break
    finally:
        # A statement that was not read to its end would keep the log of the store from being folded back.
        cursor.close()
    return Page(events or (), gap)


def read_many(connection: sqlite3.Connection, after: Position, limit: int, sessions: Collection[str] | None) -> Pieces:
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
        pieces: list[Piece] = []
        end = Position(newest)
        left, size = limit, 0
        for piece, blob_bytes in _pieces(connection, after, sessions):
            pieces.append(piece)
            count = len(piece.entries) - piece.skipped
            size += blob_bytes
            if count >= left or size > PAGE_BYTES_MAX:
                is_whole = count <= left
                end = Position(piece.chunk, 0 if is_whole else piece.skipped + left)
                break
            left -= count
        return Pieces(pieces, end, gaps)
    finally:
        connection.execute("COMMIT")


def _pieces(
    connection: sqlite3.Connection, after: Position, sessions: Collection[str] | None
) -> Iterator[tuple[Piece, int]]:
    wanted = None if sessions is None else frozenset(sessions)
    parameters: list[object] = [after.whole]
    # Not what is left of those that were deleted.
    clause = "+session IN (SELECT id FROM sessions)"
    if wanted is not None and len(wanted) <= VARIABLES_MAX:
        clause += f" AND +session IN ({', '.join('?' * len(wanted))})"
        parameters += wanted
    cursor = connection.execute(
        # The plus keeps SQLite from sorting what it finds by session: in the order of the ids it can stop early.
        f"SELECT id, session, first, last, epoch, at, crc, {_BLOB} FROM chunks WHERE id > ? AND {clause} ORDER BY id",
        parameters,
    )
    try:
        for id, session, first, last, epoch, at, crc, blob in cursor:
            if wanted is not None and session not in wanted:
                continue
            entries = unpacked(session, first, last, epoch, crc, blob)
            skipped = after.taken if id == after.chunk else 0
            if skipped < len(entries):
                yield Piece(id, session, epoch, at, first, entries, skipped), len(blob)
    finally:
        cursor.close()


def snapshot(connection: sqlite3.Connection, session: str) -> Snapshot | None:
    rows = connection.execute(
        "SELECT seq, crc, coalesce(CAST(data AS BLOB), x'') FROM snapshots WHERE session = ?", (session,)
    ).fetchall()
    if not rows:
        return None
    ((seq, crc, data),) = rows
    if checksum(session, seq, 0, data) != crc:
        raise StoreDamaged(
            f"the snapshot at {seq} of session {session} is damaged",
            hint="restore a backup of the store",
            session=session,
            seq=seq,
        )
    return Snapshot(seq, data)
