"""Export a session to a file, and import it into another store.

The file has one JSON object per line:

    {"banksman": "session", "version": 1, "id": …, "name": …, "agent": …, "created": …, "first": 1, "last": 74}
    {"seq": 1, "epoch": 1, "at": 1700000000.25, "turn": "t-1", "kind": "turn.queued", "body": {…}}
    {"seq": 2, "epoch": 1, "at": …, "turn": "t-1", "kind": "update", "frame": "{\\"type\\":…}"}
    …
    {"end": true, "events": 74, "sha256": …}

**Encoding.** An import restores the data of each event byte for byte. This decides the encoding:

- An event of Banksman's own kinds is written as its `body`, if this version's encoder produces the
  same bytes.
- A frame is a text, because the spaces and escapes in the agent's JSON are part of the frame.
- Other data is base64, in `data64` and `frame64`.

The hash covers all lines before the last one, newlines included. It reveals a truncated, edited or
reordered file.

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
import base64
import binascii
import errno
import hashlib
import json
import os
import stat
import time
from collections.abc import AsyncGenerator, AsyncIterator, Generator, Iterator
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeGuard, cast

from banksman.core.dialects.claude import CLAUDE
from banksman.core.session import history as pasts
from banksman.core.session.event import FRAMES, SESSION_IMPORTED, Entry, Event, entry
from banksman.core.session.session_config import Config
from banksman.core.wire.redaction import Redactor
from banksman.core.wire.stream_redaction import StreamedRedactor
from banksman.errors import StoreError, StoreTooNew, UsageError
from banksman.store.log import NUMBER_MAX, Chunk, KnownSession, Log, Snapshot
from banksman.store.private_file import absolute, write_new

VERSION = 1
# A frame has at most 32 MiB, and as text at most twice that: beyond it base64 is shorter. A prompt
# has no limit, but no prompt of this length was ever sent.
LINE_BYTES_MAX = 256 << 20
# Banksman's own bodies are flat. A body that might be too deep for a decoder is not decoded.
BODY_BRACKETS_MAX = 500
# Limits of the chunks for the engine: larger than one event, smaller than a whole session.
CHUNK_EVENTS_MAX = 1000
CHUNK_BYTES_MAX = 4 << 20
# Limit of a session id and of an agent's name, which appear in listings and logs.
WORD_CHARACTERS_MAX = 255
# Errors that the path causes. ENXIO and ENODEV: a socket, or a device without a driver.
NOT_TO_BE_READ = frozenset(
    (
        *(
            errno.ENOENT,
            errno.ENOTDIR,
            errno.EISDIR,
            errno.EACCES,
            errno.EPERM,
            errno.ENAMETOOLONG,
            errno.ELOOP,
        ),
        *(errno.ENXIO, errno.ENODEV, errno.EINVAL),
    )
)

AGAIN = "export the session again, and copy the whole file"


# -- export --------------------------------------------------------------------------------------
async def export(log: Log, session: str) -> AsyncGenerator[bytes]:
    """Yield the lines of the file, each with its newline, up to the session's current head.

    `session`: its id or its name. Reading needs no claim. Raises `UsageError` if the session does
    not exist or has no events. Raises `StoreError` if it is deleted, or trimmed past the current
    event, during the export. The lines yielded until then have no end line.
    """
    known = found(log, session)
    snapshot = await log.snapshot(known.id) if known.first > 1 else None
    if snapshot is not None:
        known = found(log, session)  # The session has reached at least its snapshot.
    header = {
        **{
            "banksman": "session",
            "version": VERSION,
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
        line = _event_line(event)
        if len(line) > LINE_BYTES_MAX:
            hint = f"a line has at most {LINE_BYTES_MAX} bytes"
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


def found(log: Log, session: str) -> KnownSession:
    """Find a session that has at least one event, or raise `UsageError`."""
    known = log.find(session)
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


def line_of(value: dict[str, Any]) -> bytes:
    """Encode an object as one JSON line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _event_line(event: Event) -> bytes:
    """Encode an event as one line of the file."""
    data = event.data
    line: dict[str, Any] = {"seq": event.seq, "epoch": event.epoch, "at": event.at}
    line |= {"turn": event.turn, "kind": event.kind}
    if event.is_frame:
        line |= frame_of(data)
    elif _is_ours(event.kind, data):
        # The data goes into the line unchanged. It is one line, or the encoder would not have
        # produced it.
        return line_of(line)[:-2] + b',"body":' + data + b"}\n"
    else:
        line["data64"] = base64.b64encode(data).decode()
    return line_of(line)


def frame_of(data: bytes) -> dict[str, str]:
    """Return a frame as a line member: text, or base64 if it is not UTF-8 or doubles in JSON."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return {"frame64": base64.b64encode(data).decode()}
    # A control character takes six bytes in JSON. Quotes and backslashes take two.
    if sum(data.count(bytes((code,))) for code in range(32)) * 6 > len(data) + 64:
        return {"frame64": base64.b64encode(data).decode()}
    return {"frame": text}


def _is_ours(kind: str, data: bytes) -> bool:
    """Whether this version's encoder turns the decoded body into the same bytes."""
    if data.count(b"{") + data.count(b"[") > BODY_BRACKETS_MAX:
        return False
    try:
        body: Any = json.loads(data)
        return isinstance(body, dict) and _encoded(kind, cast(dict[str, Any], body)) == data
    except (ValueError, TypeError, OverflowError, RecursionError):
        return False


def _encoded(kind: str, body: dict[str, Any]) -> bytes:
    return entry(None, kind, **body)[2]


# -- import --------------------------------------------------------------------------------------
class _Header(NamedTuple):
    id: str
    agent: str
    first: int
    last: int
    snapshot: Snapshot | None


class _Line(NamedTuple):
    """One event of the file."""

    seq: int
    epoch: int
    at: float
    entry: Entry


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


def _check(path: str) -> _Header:
    """Read the whole file, check it, and return its header."""
    reader = _Reader(path)
    for _ in reader.lines():
        pass
    assert reader.header is not None
    return reader.header


def _history(path: str, header: _Header) -> Generator[Chunk]:
    """Yield the chunks for the engine: the events of the checked file, then `session.imported`."""
    reader = _Reader(path)
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


def _chunks(reader: _Reader) -> Generator[Chunk]:
    """Group consecutive events with the same epoch and time into chunks."""
    waiting: list[_Line] = []
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


def _chunk(lines: list[_Line]) -> Chunk:
    return Chunk(lines[0].seq, lines[0].epoch, lines[0].at, [line.entry for line in lines])


class _Reader:
    """One pass over a file, with every line checked."""

    def __init__(self, path: str) -> None:
        self.header: _Header | None = None
        self._path = path
        self._number = 0

    def lines(self) -> Generator[_Line]:
        try:
            with self._open() as file:
                yield from self._lines(file)
        except OSError as exc:
            if exc.errno in NOT_TO_BE_READ:
                raise self._unreadable(exc.strerror) from exc
            raise StoreError(f"cannot read {self._path}: {exc.strerror}", path=self._path) from exc

    def _open(self) -> BinaryIO:
        """Open the path as a regular file only.

        A pipe or a device might block the thread forever, and the interpreter's exit waits for the
        thread. So the open must not block, and must not make a terminal the controlling one.
        """
        if "\0" in self._path:
            raise self._unreadable("a path cannot contain a zero byte")
        fd = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise self._unreadable("it is not a regular file")
            return open(fd, "rb")
        except BaseException:
            os.close(fd)
            raise

    def _unreadable(self, why: str | None) -> UsageError:
        hint = "pass an exported file that this user may read"
        return UsageError(f"cannot read {self._path}: {why}", hint=hint, path=self._path)

    def _lines(self, file: BinaryIO) -> Generator[_Line]:
        digest = hashlib.sha256()
        raw = self._next(file)
        digest.update(raw)
        header = self.header = self._header(self._decoded(raw))
        seq, epoch = header.first - 1, 1
        while True:
            raw = self._next(file)
            value = self._decoded(raw)
            if "end" in value:
                break
            digest.update(raw)
            line = self._line(value)
            if line.seq != seq + 1 or line.seq > header.last:
                self._refuse(f"event {line.seq} does not follow {seq}", AGAIN)
            if line.epoch < epoch:
                self._refuse(f"the epoch falls from {epoch} to {line.epoch}", AGAIN)
            seq, epoch = line.seq, line.epoch
            yield line
        if seq != header.last or value.get("events") != header.last - header.first + 1:
            self._refuse(f"the events end at {seq}, but must go up to {header.last}", AGAIN)
        if value.get("sha256") != digest.hexdigest():
            self._refuse("the lines differ from the exported ones: wrong hash", AGAIN)
        if file.read(1):
            self._number += 1
            self._refuse("data follows the end", AGAIN)

    def _next(self, file: BinaryIO) -> bytes:
        self._number += 1
        raw = file.readline(LINE_BYTES_MAX + 1)
        if len(raw) > LINE_BYTES_MAX:
            hint = "check that the file is an exported session"
            self._refuse(f"a line has at most {LINE_BYTES_MAX} bytes", hint)
        if not raw and self._number == 1:
            self._refuse("the file is empty", AGAIN)
        if not raw.endswith(b"\n"):
            self._refuse("the file was cut here", AGAIN)
        return raw

    def _decoded(self, raw: bytes) -> dict[str, Any]:
        try:
            value: Any = json.loads(raw)
        except (ValueError, RecursionError) as exc:
            self._refuse(f"this is not JSON: {exc}"[:200], AGAIN, exc)
        if not isinstance(value, dict):
            self._refuse("this is not a JSON object", AGAIN)
        return cast(dict[str, Any], value)

    def _header(self, value: dict[str, Any]) -> _Header:
        if value.get("banksman") != "session":
            is_bundle = value.get("banksman") == "bundle"
            what = "a bundle for a bug report" if is_bundle else "not an exported session"
            self._refuse(f"this is {what}", "pass a file that was made by an export")
        version = value.get("version")
        if not _is_number(version):
            self._refuse("the version is not a number", AGAIN)
        if version != VERSION:
            hint = "use that Banksman, or a newer one"
            self._refuse(f"a newer Banksman has written this, in version {version}", hint)
        first, last = value.get("first"), value.get("last")
        # The import adds one event, so `last` must be below the limit.
        if not _is_number(first) or not _is_number(last) or last < first or last >= NUMBER_MAX:
            self._refuse(f"there are no events from {first!r:.40} to {last!r:.40}", AGAIN)
        id, agent = value.get("id"), value.get("agent")
        if not _is_word(id) or not _is_word(agent):
            most = f"at most {WORD_CHARACTERS_MAX} printable characters"
            self._refuse(f"id and agent must be texts of {most}", AGAIN)
        return _Header(id, agent, first, last, self._snapshot(value, first, last))

    def _snapshot(self, value: dict[str, Any], first: int, last: int) -> Snapshot | None:
        seq, data = value.get("snapshot_seq"), value.get("snapshot")
        if seq is None and data is None:
            if first > 1:
                what = f"the events begin at {first}, without a snapshot of earlier ones"
                self._refuse(what, AGAIN)
            return None
        if not _is_number(seq) or not isinstance(data, str):
            self._refuse("the snapshot must be a text with a seq", AGAIN)
        snapshot = Snapshot(seq, data.encode(errors="surrogatepass"))
        if not snapshot.is_beside(first, last):
            self._refuse(
                f"the snapshot at {seq} is not of the events from {first} to {last}", AGAIN
            )
        self._check_snapshot(snapshot)
        return snapshot

    def _check_snapshot(self, snapshot: Snapshot) -> None:
        """Check that the snapshot is readable and covers the events up to its seq.

        Every open of the session starts from the snapshot. A snapshot of other events would make
        every open fail.
        """
        try:
            # The opener passes the real configuration. No part of a snapshot depends on it.
            head = pasts.decode(snapshot.data, Config(dialect=CLAUDE)).session.head
        except StoreTooNew as exc:
            hint = "use that Banksman, or a newer one"
            self._refuse(f"a newer Banksman has written this: {exc}", hint, exc)
        except ValueError as exc:
            self._refuse(f"the snapshot cannot be read: {exc}"[:200], AGAIN, exc)
        if head != snapshot.seq:
            self._refuse(f"the snapshot at {snapshot.seq} is of the events up to {head}", AGAIN)

    def _line(self, value: dict[str, Any]) -> _Line:
        seq, epoch, at = value.get("seq"), value.get("epoch"), value.get("at")
        turn, kind = value.get("turn"), value.get("kind")
        if not _is_number(seq) or not _is_number(epoch):
            self._refuse("seq and epoch must be numbers from 1 on", AGAIN)
        if not _is_time(at):
            self._refuse("the time is not a number", AGAIN)
        if not (turn is None or _is_text(turn)) or not _is_text(kind) or not kind:
            self._refuse("the turn must be a text or null, and the kind must be a text", AGAIN)
        return _Line(seq, epoch, float(at), (turn, kind, self._data(kind, value)))

    def _data(self, kind: str, value: dict[str, Any]) -> bytes:
        allowed = ("frame", "frame64") if kind in FRAMES else ("body", "data64")
        held = [name for name in ("body", "data64", "frame", "frame64") if name in value]
        if len(held) != 1 or held[0] not in allowed:
            self._refuse(f"an event of this kind must have either {' or '.join(allowed)}", AGAIN)
        content = value[held[0]]
        try:
            match held[0]:
                case "body" if isinstance(content, dict):
                    return _encoded(kind, cast(dict[str, Any], content))
                case "frame" if isinstance(content, str):
                    return content.encode()
                case "frame64" | "data64" if isinstance(content, str):
                    return base64.b64decode(content, validate=True)
                case _:
                    self._refuse(f"{held[0]} has the wrong type", AGAIN)
        except (ValueError, TypeError, OverflowError, RecursionError, binascii.Error) as exc:
            if isinstance(exc, UsageError):
                raise
            self._refuse(f"{held[0]} cannot be stored: {exc}"[:200], AGAIN, exc)

    def _refuse(self, what: str, hint: str, cause: BaseException | None = None) -> NoReturn:
        message = f"{self._path}, line {self._number}: {what}"
        raise UsageError(message, hint=hint, path=self._path, line=self._number) from cause


def _is_number(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= NUMBER_MAX


def _is_time(value: Any) -> TypeGuard[int | float]:
    """Whether the value is a time.

    It is compared, not converted: an integer may exceed every float.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and -NUMBER_MAX <= value <= NUMBER_MAX


def _is_text(value: Any) -> TypeGuard[str]:
    """Whether the value is a string without lone surrogates. JSON can encode them, UTF-8 cannot."""
    if not isinstance(value, str):
        return False
    return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)


def _is_word(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and len(value) <= WORD_CHARACTERS_MAX and value.isprintable()
