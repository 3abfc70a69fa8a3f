"""Index of turns: the table `turns`, written with each append and completed from older chunks.

`sessions.indexed` is the seq up to which the table has every turn of a session. An append changes
it together with `seq` in the same row, so the index costs one row per turn and nothing per event.
It falls behind if an older version or a restore has written the chunks. The next lookup completes
it in pieces, so that no transaction takes long. The index is derived data: every row can be rebuilt
from the chunks.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from typing import NamedTuple

from banksman.store.log_values import TurnPlace
from banksman.store.memory_session import Mark, marks_of
from banksman.store.sqlite.operations import WriterContext
from banksman.store.sqlite.pages import unpacked

# How much of an unindexed history one transaction reads: some hundredths of a second.
PIECE_BYTES_MAX = 4 << 20

# The end of a turn may be indexed before its beginning. The condition avoids a write for the start
# event of a known turn, which changes nothing.
_KEEP = """
INSERT INTO turns (session, turn, first, last) SELECT number, ?, ?, ? FROM sessions WHERE id = ?
ON CONFLICT (session, turn) DO UPDATE
SET first = min(first, excluded.first), last = coalesce(excluded.last, last)
WHERE excluded.last IS NOT NULL OR excluded.first < first
"""


class FoundTurn(NamedTuple):
    """Result of a lookup. `is_complete`: every event of the session is indexed."""

    place: TurnPlace | None
    is_complete: bool


def keep(work: WriterContext, session: str, marks: Iterable[Mark]) -> None:
    """Index the begin and end marks of new events."""
    rows = [(turn, seq, seq if is_end else None, session) for turn, seq, is_end in marks]
    if rows:
        work.connection.executemany(_KEEP, rows)


def find(connection: sqlite3.Connection, session: str, turn: str) -> FoundTurn:
    """Look up a turn by its id."""
    rows = connection.execute(
        "SELECT s.seq, s.indexed, s.first, t.first, t.last FROM sessions s "
        "LEFT JOIN turns t ON t.session = s.number AND t.turn = ? WHERE s.id = ?",
        (turn, session),
    ).fetchall()
    if not rows:
        return FoundTurn(None, is_complete=True)
    ((seq, indexed, kept, first, last),) = rows
    is_complete = indexed >= seq
    if first is None or (last is not None and last < kept):
        # A turn that ended before the first retained event is gone.
        return FoundTurn(None, is_complete)
    return FoundTurn(TurnPlace(first, last, seq), is_complete)


def complete_some(work: WriterContext, session: str) -> None:
    """Index a piece of the unindexed events. Raises `StoreDamaged` for an unreadable chunk."""
    row = work.row("SELECT seq, indexed FROM sessions WHERE id = ?", session)
    if row is None or row[1] >= row[0]:
        return  # The session was deleted, or another caller has completed the index.
    end, indexed = row
    marks: list[Mark] = []
    size = 0
    cursor = work.execute(
        "SELECT first, last, epoch, crc, CAST(blob AS BLOB) FROM chunks "
        " WHERE session = ? AND last > ? ORDER BY last",
        (session, indexed),
    )
    try:
        for first, last, epoch, crc, blob in cursor:
            marks += marks_of(first, unpacked(session, first, last, epoch, crc, blob or b""))
            indexed = last
            size += len(blob or b"")
            if size > PIECE_BYTES_MAX:
                break
        else:
            indexed = end
    finally:
        cursor.close()
    keep(work, session, marks)
    work.execute("UPDATE sessions SET indexed = ? WHERE id = ?", (indexed, session))


def remove_before(work: WriterContext, session: str, last: int) -> None:
    """Remove the turns that ended at or before `last`, the end of the removed events."""
    work.execute(
        "DELETE FROM turns "
        "WHERE session = (SELECT number FROM sessions WHERE id = ?) AND last <= ?",
        (session, last),
    )


def remove_some(work: WriterContext, number: int, limit: int) -> bool:
    """Remove some turns of a deleted session. Return whether more may remain."""
    removed = work.execute(
        "DELETE FROM turns WHERE session = ? AND turn IN "
        "(SELECT turn FROM turns WHERE session = ? LIMIT ?)",
        (number, number, limit),
    ).rowcount
    return removed == limit
