"""What is left of a session that was deleted: its chunks and the index of its turns. They go in pieces, so that no
transaction takes long.

What belongs to a session is what its row vouches for. With the row gone, nobody sees its chunks any more: whoever asks
for chunks asks for the row too. They are the session's *rest*, and a line in `store` says so until the last of them is
gone, so that a crash in between leaves work for the next host and nothing else. What is removed is overwritten: the
connection is told to, so that nothing of it stays in the free pages of the file.

Who makes a session of the same id anew meanwhile removes all of the rest first, in its own transaction: the chunks of
two sessions could not be told apart. Ids are random, so nobody does but who restores what was deleted a moment ago.
"""

from __future__ import annotations

from banksman.store.sqlite import turn_table
from banksman.store.sqlite.operations import WriterContext

# Of one piece, whichever is first: some hundredths of a second.
PIECE_CHUNKS_MAX = 1000
PIECE_BYTES_MAX = 8 << 20

# Before the session's id, in a line of `store`.
_REST_OF = "rest of "


def begin(work: WriterContext, session: str, number: int) -> bool:
    """Its row was deleted in this transaction: remove a first piece of it. Whether there is more. The session's number
    is kept with the rest: its turns have no other name."""
    work.execute("INSERT INTO store VALUES (?, ?)", (_REST_OF + session, number))
    work.rests[session] = None
    return remove_some(work, session)


def remove_some(work: WriterContext, session: str) -> bool:
    """A piece, if there is a rest: whether there is more."""
    number = _rest(work, session)
    if number is None:
        work.rests.pop(session, None)  # Another host was faster, or it was cleared.
        return False
    last: int | None = None
    size = 0
    cursor = work.execute(
        "SELECT last, length(blob) FROM chunks WHERE session = ? ORDER BY last LIMIT ?", (session, PIECE_CHUNKS_MAX)
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


def clear(work: WriterContext, session: str) -> None:
    """A session of this id is about to be made: none of the last one's chunks may become its own."""
    number = _rest(work, session)
    if number is not None:
        work.execute("DELETE FROM chunks WHERE session = ?", (session,))
        work.execute("DELETE FROM turns WHERE session = ?", (number,))
        _end(work, session)


def found(work: WriterContext) -> list[str]:
    """The sessions that have a rest, whoever deleted them."""
    rows = work.execute(
        # What lies between has the words above at its beginning: "!" is next to the space.
        "SELECT key FROM store WHERE key > ? AND key < ?",
        (_REST_OF, f"{_REST_OF.rstrip()}!"),
    ).fetchall()
    return [key.removeprefix(_REST_OF) for (key,) in rows]


def _rest(work: WriterContext, session: str) -> int | None:
    """The number that the session had; 0 where a version without the index of turns has deleted it."""
    row = work.row("SELECT value FROM store WHERE key = ?", _REST_OF + session)
    return None if row is None else row[0]


def _end(work: WriterContext, session: str) -> None:
    work.execute("DELETE FROM store WHERE key = ?", (_REST_OF + session,))
    work.rests.pop(session, None)
    work.is_tidy_due = True
