"""Changes of whole sessions in the writer's transaction: rename, trim, retain, delete, restore.

`spool.py` has collected the history of a restore before. `deleted_sessions.py` removes the data of
a deleted session afterwards, in pieces.

Retention and trim remove only whole chunks, from the front. They never remove the newest chunk,
because the session's place could not be read without it. They never remove events that the last
snapshot does not cover, because the session's state could not be derived from the rest. Without a
snapshot they remove nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec import Struct

from banksman.errors import UsageError
from banksman.store.log_values import Snapshot
from banksman.store.sqlite import deleted_sessions, turn_table, usage_table
from banksman.store.sqlite.append import keep_snapshot
from banksman.store.sqlite.operations import WriterContext
from banksman.store.sqlite.ownership import check_free, check_name, deleted_epoch, epoch_past
from banksman.store.sqlite.pages import CHUNK_BYTES
from banksman.store.sqlite.spool import History


class SqliteRetention(Struct, frozen=True):
    """Retention limits of each session, in bytes and seconds. None is no limit."""

    bytes_max: int | None = None
    seconds_max: float | None = None

    def __post_init__(self) -> None:
        for name, bound in (("bytes_max", self.bytes_max), ("seconds_max", self.seconds_max)):
            if bound is not None and not bound > 0:
                message = f"{name} cannot be {bound!r}"
                raise UsageError(message, hint="pass more than 0", **{name: bound})

    def __bool__(self) -> bool:
        return self.bytes_max is not None or self.seconds_max is not None


def rename(work: WriterContext, session: str, name: str | None, expected: str | None) -> None:
    """Change the session's name if the current one is `expected`, see `Log.rename`."""
    row = work.row("SELECT name FROM sessions WHERE id = ?", session)
    if row is None:
        message = f"cannot rename session {session}: there is no such session"
        raise UsageError(message, session=session)
    if row[0] != expected:
        message = f"cannot rename session {session}: its name has changed meanwhile"
        raise UsageError(message, session=session, name=row[0], expected=expected)
    check_name(work, name, session)
    work.execute("UPDATE sessions SET name = ? WHERE id = ?", (name, session))


def trim(work: WriterContext, session: str, before: int) -> int:
    """Remove whole chunks before a seq and return the first retained seq, see `Log.trim`."""
    row = work.row(f"SELECT first, {_REMOVABLE} FROM sessions s WHERE id = ?", session)
    if row is None:
        return 1
    first, removable = row
    found = work.row(
        "SELECT max(last) FROM chunks WHERE session = ? AND last <= ?",
        session,
        min(removable, before - 1),
    )
    return first if found[0] is None else _remove(work, session, found[0])


def retain(work: WriterContext, session: str, retention: SqliteRetention, now: float) -> None:
    """Remove the chunks beyond the limits."""
    last = excess(work, session, retention, now)
    if last is not None:
        _remove(work, session, last)


# How many chunks with a time in the future are skipped in the search for old ones. They come from a
# clock that was ahead. Their age is that of the chunks behind them. Without the search, one such
# chunk would protect all later ones from removal.
AHEAD_MAX = 100


def excess(work: WriterContext, session: str, retention: SqliteRetention, now: float) -> int | None:
    """Return the last seq that is beyond the limits and removable; None if no chunk is."""
    row = work.row(f"SELECT bytes, {_REMOVABLE} FROM sessions s WHERE id = ?", session)
    if row is None:
        return None
    weight, removable = row
    last: int | None = None
    ahead = 0
    # The cursor reads only the chunks that are removed, usually one or two: this runs after each
    # commit.
    cursor = work.execute(
        "SELECT last, at, length(blob) FROM chunks WHERE session = ? AND last <= ? ORDER BY last",
        (session, removable),
    )
    try:
        for seq, at, size in cursor:
            is_heavy = retention.bytes_max is not None and weight > retention.bytes_max
            is_old = retention.seconds_max is not None and at < now - retention.seconds_max
            if is_heavy or is_old:
                last = seq
            elif at <= now or ahead == AHEAD_MAX:
                break
            else:
                ahead += 1
            weight -= size + CHUNK_BYTES
    finally:
        cursor.close()
    return last


# The last removable seq: the end of the second newest chunk or the snapshot's seq, whichever is
# smaller.
_REMOVABLE = """min(
    coalesce((SELECT seq FROM snapshots WHERE session = s.id), 0),
    coalesce((SELECT last FROM chunks WHERE session = s.id ORDER BY last DESC LIMIT 1 OFFSET 1), 0)
)"""


def _remove(work: WriterContext, session: str, last: int) -> int:
    """Remove every chunk up to `last`, which is the end of a chunk.

    Return the first retained seq.
    """
    usage_table.complete_before(work, session)
    weight, number = work.row(
        "SELECT sum(length(blob) + ?), max(id) FROM chunks WHERE session = ? AND last <= ?",
        CHUNK_BYTES,
        session,
        last,
    )
    work.execute("DELETE FROM chunks WHERE session = ? AND last <= ?", (session, last))
    turn_table.remove_before(work, session, last)
    work.execute(
        "UPDATE sessions SET first = ?, trimmed = ?, bytes = bytes - ? WHERE id = ?",
        (last + 1, number, weight, session),
    )
    return last + 1


class Deleted(NamedTuple):
    """Result of a deletion.

    `number`: the identity that the session had. `has_rest`: whether some of its data is still to be
    removed, see `deleted_sessions.py`.
    """

    number: int
    has_rest: bool


def delete(work: WriterContext, session: str) -> Deleted | None:
    """Delete a session. None: the session does not exist.

    Raises `NotOwner` if a live host owns it.
    """
    row = work.row("SELECT number, epoch, owner FROM sessions WHERE id = ?", session)
    if row is None:
        return None
    number, epoch, owner = row
    check_free(work, session, owner)
    usage_table.complete_before(work, session)
    # Include the epoch that a fenced-off owner may still reach by an advance. New sessions begin
    # past it.
    past = max(deleted_epoch(work), epoch_past(epoch, owner))
    work.execute("UPDATE store SET value = ? WHERE key = 'deleted_epoch'", (past,))
    work.execute("UPDATE store SET value = value + 1 WHERE key = 'deletions'")
    # SQLite would reuse the highest chunk id after its removal. So that row stays, as an empty one:
    # see `tables.py`.
    work.execute(
        "UPDATE chunks "
        "SET session = NULL, first = 0, last = 0, epoch = 0, at = 0.0, crc = 0, blob = x'' "
        "WHERE id = (SELECT max(id) FROM chunks) AND session = ?",
        (session,),
    )
    work.execute("DELETE FROM chunks WHERE session IS NULL AND id < (SELECT max(id) FROM chunks)")
    work.execute("DELETE FROM snapshots WHERE session = ?", (session,))
    work.execute("DELETE FROM sessions WHERE number = ?", (number,))
    return Deleted(number, deleted_sessions.begin(work, session, number))


def restore(  # noqa: PLR0917
    work: WriterContext,
    session: str,
    name: str | None,
    agent: str,
    history: History,
    snapshot: Snapshot | None,
) -> None:
    """Create a session from the attached spool."""
    if snapshot is not None and not snapshot.is_beside(history.first, history.last):
        message = f"cannot restore session {session}: the snapshot is of other events"
        raise UsageError(message, session=session, seq=snapshot.seq)
    if work.row("SELECT 1 FROM sessions WHERE id = ?", session) is not None:
        message = f"cannot restore session {session}: it exists already"
        raise UsageError(message, hint="delete it, or use another id", session=session)
    check_name(work, name, session)
    deleted_sessions.clear(work, session)
    work.execute(
        "INSERT INTO chunks (session, first, last, epoch, at, crc, blob) "
        "SELECT ?, first, last, epoch, at, crc, blob FROM spool.chunks ORDER BY rowid",
        (session,),
    )
    if snapshot is not None:
        keep_snapshot(work, session, snapshot)
    # No epoch may be issued twice for this id, also not one from before a deletion in this store.
    epoch = max(history.epoch, deleted_epoch(work))
    work.execute(
        "INSERT INTO sessions "
        "(counted, seq, bytes, changed, epoch, first, trimmed, created, id, name, agent) "
        "VALUES (?, ?, ?, ?, ?, ?, 0, ?, ?, ?, ?)",
        (
            history.last,
            history.last,
            history.weight,
            history.changed,
            epoch,
            history.first,
            history.created,
            session,
            name,
            agent,
        ),
    )
