"""Checks of arguments that the log engines share: limits, seqs, texts, ids, restored histories.

Not every engine needs every check: only the cluster reserves ids of hosts (`check_no_host`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from banksman.errors import UsageError
from banksman.store.log_values import NUMBER_MAX, READ_EVENTS_MAX, Chunk


def checked_limit(limit: int) -> int:
    """Return the page limit, capped at `READ_EVENTS_MAX`; raise `UsageError` below 1."""
    if limit < 1:
        message = f"cannot read a page of {limit} events"
        raise UsageError(message, hint="pass a limit of 1 or more", limit=limit)
    return min(limit, READ_EVENTS_MAX)


def check_after(session: str, after: int) -> None:
    """Raise `UsageError` for a negative seq to read after."""
    if after < 0:
        message = f"cannot read session {session} after seq {after}"
        raise UsageError(message, hint="pass 0 or more as after", session=session, after=after)


def check_seq(session: str, seq: int) -> None:
    """Raise `UsageError` for a negative seq to wait past."""
    if seq < 0:
        message = f"cannot wait for events of session {session} after seq {seq}"
        raise UsageError(message, hint="pass 0 or more as seq", session=session, seq=seq)


def check_text(*texts: str | None) -> None:
    """Raise `UsageError` for a text with a lone surrogate, which no engine can store as UTF-8."""
    for text in texts:
        try:
            (text or "").encode()
        except UnicodeEncodeError as exc:
            message = "cannot store an id or a name: it has a lone surrogate"
            hint = "pass text that can be encoded as UTF-8"
            raise UsageError(message, hint=hint, text=text) from exc


def check_no_host(session: str) -> None:
    """Raise `UsageError` for a session id that begins with "host:".

    The cluster bus addresses a host like a session, under this prefix and the host's id. A session
    with such an id would receive messages that are meant for the host.
    """
    if session.startswith("host:"):
        hint = 'pass an id that does not begin with "host:"'
        raise UsageError("a session cannot have the id of a host", hint=hint, session=session)


def checked(session: str, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks unchanged, and raise `UsageError` as soon as they are not a valid history.

    A valid history has at least one event, has no gaps, never lowers its epoch, and keeps its
    numbers within `NUMBER_MAX`.
    """
    seq, epoch = None, 1
    for chunk in chunks:
        first = chunk.first if seq is None else seq + 1
        if chunk.first != first or chunk.first < 1 or not chunk.entries:
            message = f"cannot restore session {session}: its history is not dense"
            hint = "begin each chunk where the previous one ended"
            raise UsageError(message, hint=hint, session=session, seq=seq)
        if chunk.epoch < epoch:
            message = f"cannot restore session {session}: the epochs of its history fall"
            raise UsageError(message, session=session, first=chunk.first, epoch=chunk.epoch)
        seq, epoch = chunk.last, chunk.epoch
        if seq > NUMBER_MAX or epoch > NUMBER_MAX:
            raise UsageError(
                f"cannot restore session {session}: the numbers of its history are too high",
                hint=f"use no seq and no epoch above {NUMBER_MAX}",
                session=session,
                seq=seq,
                epoch=epoch,
            )
        yield chunk
    if seq is None:
        message = f"cannot restore session {session}: its history is empty"
        raise UsageError(message, hint="pass at least one event", session=session)
