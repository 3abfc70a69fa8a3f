"""Removal of the data of deleted sessions, in pieces, so that no transaction takes long.

`maintenance.py` deletes the session's row and calls `begin`. The event loop queues the removal of
the rest (`queue_removal`), and `writer_thread.py` removes what is left over.

A session's row decides what belongs to the session. Every query for chunks also asks for the row.
So when the row is gone, no reader sees the chunks. The remaining chunks and turns are the *rest* of
the session. A line in the table `store` records the rest until it is removed. So a crash only
leaves work for the next host. The connection overwrites removed data, so that nothing of it stays
in the free pages of the file.

A transaction that creates a session with the same id first removes the whole rest, because the
chunks of the two sessions could not be distinguished. Ids are random, so this happens only when a
caller restores a session that was deleted a moment ago.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial

from banksman.store.sqlite import turn_table
from banksman.store.sqlite.operations import AwaitedOperation, WriterContext

log = logging.getLogger("banksman")

# Limits of one piece, whichever comes first: some hundredths of a second.
PIECE_CHUNKS_MAX = 1000
PIECE_BYTES_MAX = 8 << 20

# Prefix of the session id in a key of the table `store`.
_REST_OF = "rest of "


def begin(work: WriterContext, session: str, number: int) -> bool:
    """Record the rest of a session, and remove a first piece of it.

    This transaction has deleted the session's row. `number`: the session's identity, which is
    recorded because its turns have no other key. Returns whether data remains.
    """
    work.execute("INSERT INTO store VALUES (?, ?)", (_REST_OF + session, number))
    work.rests[session] = None
    return remove_some(work, session)


def remove_some(work: WriterContext, session: str) -> bool:
    """Remove a piece of the rest. Return whether data remains."""
    number = _rest(work, session)
    if number is None:
        work.rests.pop(session, None)  # Another host has removed the rest, or `clear` has.
        return False
    last: int | None = None
    size = 0
    cursor = work.execute(
        "SELECT last, length(blob) FROM chunks WHERE session = ? ORDER BY last LIMIT ?",
        (session, PIECE_CHUNKS_MAX),
    )
    try:
        for seq, weight in cursor:
            last = seq
            size += weight
            if size > PIECE_BYTES_MAX:
                break
    finally:
        cursor.close()
    work.execute("DELETE FROM chunks WHERE session = ? AND last <= ?", (session, last))
    has_turns = turn_table.remove_some(work, number, PIECE_CHUNKS_MAX)
    if has_turns or work.row("SELECT EXISTS (SELECT 1 FROM chunks WHERE session = ?)", session)[0]:
        return True
    _end(work, session)
    return False


def queue_removal(
    session: str,
    put: Callable[[AwaitedOperation], None],
    goes_on: Callable[[], bool],
    removed: asyncio.Future[None],
) -> None:
    """Remove the rest by operations of the writer, one per piece, queued among the others.

    Runs in the event loop. `goes_on`: whether another piece may be queued. `removed`: set at the
    end, also after a failure.
    """

    def settled(call: AwaitedOperation) -> None:
        if call.error is None and call.value and goes_on():
            put(AwaitedOperation(settled, function))
            return
        if call.error is not None:
            # The session is deleted, which is what the caller asked for. The next host removes the
            # remaining data.
            message = "removal of deleted data failed: %s, the next host retries (session=%s)"
            log.warning(message, call.error, session)
        if not removed.done():
            removed.set_result(None)

    function = partial(remove_some, session=session)
    put(AwaitedOperation(settled, function))


def clear(work: WriterContext, session: str) -> None:
    """Remove the whole rest of an id, before a new session with this id is created."""
    number = _rest(work, session)
    if number is not None:
        work.execute("DELETE FROM chunks WHERE session = ?", (session,))
        work.execute("DELETE FROM turns WHERE session = ?", (number,))
        _end(work, session)


def found(work: WriterContext) -> list[str]:
    """Return the sessions that have a rest, of deletions by any host."""
    rows = work.execute(
        # This range holds exactly the keys with the prefix: "!" is the next character after the
        # space.
        "SELECT key FROM store WHERE key > ? AND key < ?",
        (_REST_OF, f"{_REST_OF.rstrip()}!"),
    ).fetchall()
    return [key.removeprefix(_REST_OF) for (key,) in rows]


def _rest(work: WriterContext, session: str) -> int | None:
    """Return the deleted session's number, or None if it has no rest.

    The number is 0 if a version without the index of turns deleted the session.
    """
    row = work.row("SELECT value FROM store WHERE key = ?", _REST_OF + session)
    return None if row is None else row[0]


def _end(work: WriterContext, session: str) -> None:
    """Remove the record of the rest, and request a truncation of the write-ahead log."""
    work.execute("DELETE FROM store WHERE key = ?", (_REST_OF + session,))
    work.rests.pop(session, None)
    work.is_tidy_due = True
