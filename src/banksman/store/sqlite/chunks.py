"""What one row holds: the entries of one append as one value, with a checksum, and how they become events again.

One row per append and not per event: a row costs about as much as forty events of a burst do, so this is most of what
makes the engine fast. The checksum is ours because SQLite has none in the pages of its file: a page that was zeroed or
misplaced below it, in the middle of a long value, is read back without a word. The sum begins with where the chunk
belongs, so that a whole one in another's place is noticed too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import msgspec

from banksman.core.session.event import Entry, Event, Project
from banksman.errors import StoreDamaged

# What a chunk weighs besides its blob: the row with its numbers, and its entry in the index.
CHUNK_BYTES = 128
_HINT = "restore a backup of the store; the events before and after these can still be read"

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[Entry, ...])


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
