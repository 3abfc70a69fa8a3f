"""What makes chunks a history, whichever engine restores it, and wherever they come from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from banksman.errors import UsageError
from banksman.store.log import NUMBER_MAX, Chunk


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
