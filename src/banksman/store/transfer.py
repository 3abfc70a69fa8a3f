"""Export a session to a file, and import it into another store.

`export_file.py` has the format of the file.

**Range.** The export ends at the head of the session at its start. The session may be written
during the export. Events that retention has removed are missing. In that case the header has the
snapshot that replaces them, because without it no host could resume the session. Otherwise the
header has no snapshot: it can be derived from the events, and another version may derive another
one.

**Import.** The import reads the file twice, line by line. So neither a large nor an invalid file
costs memory or leaves half a session. The first pass checks the whole file, and in the second pass
the engine takes it. The second pass checks as much as the first, because the file may have changed.
The engine takes all or nothing.

**Trust.** The hash proves that a file is complete. It does not prove the author, and the author may
be a stranger. So the import adds an event after the last one, `session.imported`, with the original
session id and the time. Everything before it is read-only history. At this event recovery forgets
how the session was opened, its process, its questions, and its open and queued asks: see
core/session/history.py. To resume the session, a caller opens it by its name with a command of the
caller's choice. A later export contains this event, and each further import adds another one.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Generator, Iterator
from typing import TypeVar

from banksman.core.redaction.redactor import Redactor
from banksman.core.redaction.stream_redactor import StreamedRedactor
from banksman.core.session.event import SESSION_IMPORTED, Event, entry
from banksman.errors import StoreError, UsageError
from banksman.store import export_file
from banksman.store.export_file import ExportHeader, ExportLine, ExportReader, event_line, line_of
from banksman.store.log import Log
from banksman.store.log_values import Chunk, KnownSession
from banksman.store.private_file import absolute, write_new

# Limits of the chunks for the engine: larger than one event, smaller than a whole session.
CHUNK_EVENTS_MAX = 1000
CHUNK_BYTES_MAX = 4 << 20
# Larger values are handled in a thread: the patterns of a bundle need 0.5 s for a MiB.
THREAD_BYTES_MIN = 16 << 10

T = TypeVar("T")


# -- export --------------------------------------------------------------------------------------
async def export(log: Log, session: str) -> AsyncGenerator[bytes]:
    """Yield the lines of the file, each with its newline, up to the session's current head.

    `session`: its id or its name. Reading needs no claim. Raises `UsageError` if the session does
    not exist or has no events. Raises `StoreError` if it is deleted, or trimmed past the current
    event, during the export. The lines yielded until then have no end line.
    """
    known = await found(log, session)
    snapshot = await log.snapshot(known.id) if known.first > 1 else None
    if snapshot is not None:
        known = await found(log, session)  # The session has reached at least its snapshot.
    header = {
        **{
            "banksman": "session",
            "version": export_file.VERSION,
            "id": known.id,
            "name": known.name,
            "agent": known.agent,
        },
        **{"created": known.created, "first": known.first, "last": known.seq},
        **(
            {}
            if snapshot is None
            else {"snapshot_seq": snapshot.seq, "snapshot": snapshot.data.decode()}
        ),
    }
    digest = hashlib.sha256()
    line = line_of(header)
    digest.update(line)
    yield line
    async for event in events_of(log, known):
        line = await in_thread(len(event.data), functools.partial(event_line, event))
        if len(line) > export_file.LINE_BYTES_MAX:
            hint = f"a line has at most {export_file.LINE_BYTES_MAX} bytes"
            message = f"cannot export session {known.id}: event {event.seq} is too large for a file"
            raise UsageError(message, hint=hint, session=known.id, seq=event.seq)
        digest.update(line)
        yield line
    yield line_of(
        {"end": True, "events": known.seq - known.first + 1, "sha256": digest.hexdigest()}
    )


async def export_to(log: Log, session: str, path: str | os.PathLike[str]) -> None:
    """Write an export to a new private file, atomically. See `write_new`."""
    await write_new(path, export(log, session))


async def in_thread(size: int, work: Callable[[], T]) -> T:
    """Call a function, in a thread if this many bytes would stop the event loop for long."""
    return work() if size < THREAD_BYTES_MIN else await asyncio.to_thread(work)


async def found(log: Log, session: str) -> KnownSession:
    """Find a session that has at least one event, or raise `UsageError`."""
    known = log.find(session)
    if known is not None:
        # A log of many hosts learns of the events of another host when it reads them.
        await log.read(known.id, known.seq, 1)
        known = log.find(known.id)
    if known is None:
        message = f"there is no session {session!r:.100}"
        raise UsageError(message, hint="pass its id or its name", session=session)
    if known.seq < known.first:
        message = f"cannot export session {known.id}: it has no events"
        raise UsageError(message, hint="ask it something first", session=known.id)
    return known


async def events_of(log: Log, known: KnownSession) -> AsyncIterator[Event]:
    """Yield every event of the session up to the head in `known`, or raise `StoreError`."""
    after = known.first - 1
    while after < known.seq:
        page = await log.read(known.id, after)
        if page.gap is not None or not page.events:
            hint = "try again; the session was trimmed or deleted meanwhile"
            lost = f"the events after {after} are no longer there"
            message = f"cannot read session {known.id}: {lost}"
            raise StoreError(message, hint=hint, session=known.id, after=after)
        for event in page.events:
            assert event.seq == after + 1
            if event.seq > known.seq:
                return
            yield event
            after = event.seq


# -- import --------------------------------------------------------------------------------------
async def import_session(
    log: Log,
    path: str | os.PathLike[str],
    *,
    session: str,
    name: str | None,
    redactor: Redactor | None = None,
) -> int:
    """Create a session from an exported file and return its number of events.

    The number includes the added `session.imported`. The file is only data: its contents never
    start a process, see the module docstring.

    `redactor`: removes secrets that must not enter this store. Raises `UsageError` with the invalid
    line, or if the session id exists, and `NameTaken` if another session has the name. In these
    cases nothing is written. A cancellation during the first pass writes nothing either; the pass
    continues in its thread to the end of the file.
    """
    file = absolute(path)
    header = await asyncio.to_thread(_check, file)

    def chunks() -> Iterator[Chunk]:
        streamed = None if redactor is None else StreamedRedactor(redactor)
        for chunk in _history(file, header):
            yield (
                chunk
                if streamed is None
                else chunk._replace(entries=streamed.entries(chunk.entries))
            )

    snapshot = header.snapshot
    if snapshot is not None and redactor is not None:
        snapshot = snapshot._replace(data=redactor.redact(snapshot.data))
    await log.restore(session, name=name, agent=header.agent, chunks=chunks, snapshot=snapshot)
    return header.last + 1 - header.first + 1


def _check(path: str) -> ExportHeader:
    """Read the whole file, check it, and return its header."""
    reader = ExportReader(path)
    for _ in reader.lines():
        pass
    assert reader.header is not None
    return reader.header


def _history(path: str, header: ExportHeader) -> Generator[Chunk]:
    """Yield the chunks for the engine: the events of the checked file, then `session.imported`."""
    reader = ExportReader(path)
    epoch = 1
    for chunk in _chunks(reader):
        epoch = chunk.epoch
        yield chunk
    if reader.header != header:
        # The snapshot comes from the first pass. If the file now had fewer events, the snapshot
        # could claim the seq of the event that is added next, and recovery from it would not detect
        # this.
        message = f"cannot import {path}: it was changed while it was read"
        raise UsageError(message, hint="try again when no process writes it", path=path)
    now = time.time()
    yield Chunk(
        header.last + 1, epoch, now, [entry(None, SESSION_IMPORTED, origin=header.id, at=now)]
    )


def _chunks(reader: ExportReader) -> Generator[Chunk]:
    """Group consecutive events with the same epoch and time into chunks."""
    waiting: list[ExportLine] = []
    weight = 0
    for line in reader.lines():
        if waiting:
            is_other = (line.epoch, line.at) != (waiting[0].epoch, waiting[0].at)
            if is_other or len(waiting) >= CHUNK_EVENTS_MAX or weight >= CHUNK_BYTES_MAX:
                yield _chunk(waiting)
                waiting, weight = [], 0
        waiting.append(line)
        weight += len(line.entry[2])
    assert waiting
    yield _chunk(waiting)


def _chunk(lines: list[ExportLine]) -> Chunk:
    return Chunk(lines[0].seq, lines[0].epoch, lines[0].at, [line.entry for line in lines])
