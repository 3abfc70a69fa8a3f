"""Usage of the store: the table `usage`, written with each append and completed from older chunks.

`sessions.counted` is the seq up to which the table has the usage of a session. An append changes it
together with `seq` in the same row, and adds its usage in the same transaction. The column falls
behind if an older version has written the chunks. An append then adds nothing, because a piece of
the completion reads it: every event is counted once. The next query completes the table in pieces,
so that no transaction takes long.

Rows stay when their session is deleted, or when retention removes the events.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from banksman.core.dialects.tokens import Tokens
from banksman.core.session.event import Entry
from banksman.core.session.usage import Usage, additions
from banksman.errors import StoreDamaged
from banksman.store.log_values import UsageRow, day_of
from banksman.store.sqlite.operations import WriterContext
from banksman.store.sqlite.pages import unpacked
from banksman.store.sqlite.tables import has_usage
from banksman.store.usage_sums import UsageQuery, sorted_rows

log = logging.getLogger("banksman")

# How much of the uncounted history one transaction reads: some hundredths of a second.
PIECE_BYTES_MAX = 4 << 20
PIECE_SESSIONS_MAX = 1000

_ADD = """
INSERT INTO usage
SELECT ?, id, coalesce(?, agent), ?, ?, ?, ?, ?, ?, ?, ? FROM sessions WHERE id = ? {}
ON CONFLICT (day, session, agent, caller) DO UPDATE SET
    input = input + excluded.input,
    output = output + excluded.output,
    cache_read = cache_read + excluded.cache_read,
    cache_write = cache_write + excluded.cache_write,
    usd = CASE WHEN excluded.usd IS NULL THEN usd ELSE coalesce(usd, 0) + excluded.usd END,
    working_seconds = working_seconds + excluded.working_seconds,
    turns = turns + excluded.turns
"""
_ADD_COUNTED = _ADD.format("AND counted = seq")
_ADD_OLDER = _ADD.format("")


class UncountedSession(NamedTuple):
    """A session with events that the table does not have. `number`: its identity."""

    id: str
    agent: str
    number: int
    counted: int
    seq: int


class FoundUsage(NamedTuple):
    """Result of a query: the rows, and some of the sessions that are not counted to their end."""

    rows: list[UsageRow]
    uncounted: list[UncountedSession]


def keep(work: WriterContext, session: str, at: float, entries: Sequence[Entry]) -> None:
    """Add the usage of an append whose events are written, unless the session is behind."""
    rows = _rows(session, at, entries)
    if rows:
        work.executemany(_ADD_COUNTED, rows)


def _rows(session: str, at: float, entries: Sequence[Entry]) -> list[tuple[Any, ...]]:
    return [
        (
            day_of(at),
            other_agent,
            caller or "",
            *(used.tokens.input, used.tokens.output),
            *(used.tokens.cache_read, used.tokens.cache_write),
            *(used.usd, used.working_seconds, used.turns),
            session,
        )
        for caller, other_agent, used in additions(entries)
    ]


def find(connection: sqlite3.Connection, query: UsageQuery) -> FoundUsage:
    """Query the table. It may be missing in a read-only file."""
    if not has_usage(connection):
        return FoundUsage([], _uncounted(connection, "0", limit=-1))
    found = connection.execute(
        f"SELECT {query.by}, sum(input), sum(output), sum(cache_read), sum(cache_write), "
        "sum(usd), sum(working_seconds), sum(turns) FROM usage "
        "WHERE day >= coalesce(?, day) AND day <= coalesce(?, day) GROUP BY 1",
        (query.since, query.until),
    ).fetchall()
    rows = [
        UsageRow(key or None, Usage(Tokens(*counts[:4]), *counts[4:])) for key, *counts in found
    ]
    return FoundUsage(sorted_rows(rows), _uncounted(connection, "counted", limit=-1))


def _uncounted(
    connection: sqlite3.Connection, counted: str, *, limit: int
) -> list[UncountedSession]:
    rows = connection.execute(
        f"SELECT id, agent, number, {counted}, seq FROM sessions WHERE {counted} < seq LIMIT ?",
        (limit,),
    ).fetchall()
    return [UncountedSession(*row) for row in rows]


def complete_some(work: WriterContext) -> None:
    """Count a piece of the uncounted events. An unreadable chunk is skipped."""
    size = 0
    for session in _uncounted(work.connection, "counted", limit=PIECE_SESSIONS_MAX):
        size += _complete(work, session.id, PIECE_BYTES_MAX - size)
        if size > PIECE_BYTES_MAX:
            return


def complete_before(work: WriterContext, session: str) -> None:
    """Count all events of a session that is about to lose some."""
    while True:
        row = work.row("SELECT counted < seq FROM sessions WHERE id = ?", session)
        if row is None or not row[0]:
            return
        _complete(work, session, PIECE_BYTES_MAX)


def _complete(work: WriterContext, session: str, bytes_max: int) -> int:
    """Count uncounted events of a session, at least one chunk. Return the size of what was read."""
    end, counted = work.row("SELECT seq, counted FROM sessions WHERE id = ?", session)
    rows: list[tuple[Any, ...]] = []
    size = 0
    cursor = work.execute(
        "SELECT first, last, epoch, at, crc, CAST(blob AS BLOB) FROM chunks "
        " WHERE session = ? AND last > ? ORDER BY last",
        (session, counted),
    )
    try:
        for first, last, epoch, at, crc, blob in cursor:
            try:
                rows += _rows(session, at, unpacked(session, first, last, epoch, crc, blob or b""))
            except StoreDamaged as exc:
                # A reader of this session gets the error. The other sessions still have usage, and
                # this one can still be deleted.
                log.warning("usage not counted: %s (session=%s)", exc, session)
            counted = last
            size += len(blob or b"")
            if size > bytes_max:
                break
        else:
            counted = end
    finally:
        cursor.close()
    if rows:
        work.executemany(_ADD_OLDER, rows)
    work.execute("UPDATE sessions SET counted = ? WHERE id = ?", (counted, session))
    return size
