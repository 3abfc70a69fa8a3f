"""What is asked of a log must make sense, whichever engine it is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from banksman.errors import UsageError
from banksman.store.log import NUMBER_MAX, READ_EVENTS_MAX, Chunk


def checked_limit(limit: int) -> int:
    if limit < 1:
        raise UsageError("a page holds an event or more", hint="limit is 1 or more", limit=limit)
    return min(limit, READ_EVENTS_MAX)


def check_after(session: str, after: int) -> None:
    if after < 0:
        raise UsageError("no event is before the first", hint="after is 0 or more", session=session, after=after)


def check_seq(session: str, seq: int) -> None:
    if seq < 0:
        raise UsageError("no event is before the first", hint="seq is 0 or more", session=session, seq=seq)


def check_text(*texts: str | None) -> None:
    """What is no Unicode cannot be stored."""
    for text in texts:
        try:
            (text or "").encode()
        except UnicodeEncodeError as exc:
            raise UsageError("an id or a name must be text", hint="it has half of a character", text=text) from exc


def check_no_host(session: str) -> None:
    """On the bus a host is asked as a session is, under its own id behind this word. Whoever had a session of that id
    would hear what is meant for the host."""
    if session.startswith("host:"):
        raise UsageError("a session cannot have the id of a host", hint="one that does not begin so", session=session)


# What makes chunks a history, whichever engine restores it, and wherever they come from.


def checked(session: str, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks, as they come. `UsageError` as soon as they are no history: it has an event or more and is dense, its
    epochs do not fall, and its numbers leave room to count on."""
    seq, epoch = None, 1
    for chunk in chunks:
        first = chunk.first if seq is None else seq + 1
        if chunk.first != first or chunk.first < 1 or not chunk.entries:
            raise UsageError(
                "the history is not dense", hint="each chunk begins where the last one ended", session=session, seq=seq
            )
        if chunk.epoch < epoch:
            raise UsageError("the history's epochs fall", session=session, first=chunk.first, epoch=chunk.epoch)
        seq, epoch = chunk.last, chunk.epoch
        if seq > NUMBER_MAX or epoch > NUMBER_MAX:
            raise UsageError(
                "the history's numbers are too high",
                hint=f"no seq and no epoch is more than {NUMBER_MAX}",
                session=session,
                seq=seq,
                epoch=epoch,
            )
        yield chunk
    if seq is None:
        raise UsageError("there is no history", hint="a session that is restored has an event or more", session=session)
