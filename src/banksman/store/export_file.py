"""File format of an exported session: encode the lines, and read them with every line checked.

`transfer.py` has the export and the import. The file has one JSON object per line:

    {"banksman": "session", "version": 1, "id": …, "name": …, "agent": …, "created": …,
     "first": 1, "last": 74}
    {"seq": 1, "epoch": 1, "at": 1700000000.25, "turn": "t-1", "kind": "turn.queued", "body": {…}}
    {"seq": 2, "epoch": 1, "at": …, "turn": "t-1", "kind": "update", "frame": "{\\"type\\":…}"}
    …
    {"end": true, "events": 74, "sha256": …}

The header is wrapped here; in the file it is one line.

**Encoding.** An import restores the data of each event byte for byte. This decides the encoding:

- An event of Banksman's own kinds is written as its `body`, if this version's encoder produces the
  same bytes.
- A frame is a text, because the spaces and escapes in the agent's JSON are part of the frame.
- Other data is base64, in `data64` and `frame64`.

The hash covers all lines before the last one, newlines included. It reveals a truncated, edited or
reordered file.
"""

from __future__ import annotations

import base64
import binascii
import errno
import hashlib
import json
import os
import stat
from collections.abc import Generator
from typing import Any, BinaryIO, NamedTuple, NoReturn, TypeGuard, cast

from banksman.core.dialects.claude import CLAUDE
from banksman.core.session import history as pasts
from banksman.core.session.event import FRAMES, Entry, Event, entry
from banksman.core.session.session_config import Config
from banksman.errors import StoreError, StoreTooNew, UsageError
from banksman.store.log_values import NUMBER_MAX, Snapshot

VERSION = 1
# A frame has at most 32 MiB, and as text at most twice that: beyond it base64 is shorter. A prompt
# has no limit, but no prompt of this length was ever sent.
LINE_BYTES_MAX = 256 << 20
# Banksman's own bodies are flat. A body that might be too deep for a decoder is not decoded.
BODY_BRACKETS_MAX = 500
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


# -- encoding ------------------------------------------------------------------------------------
def line_of(value: dict[str, Any]) -> bytes:
    """Encode an object as one JSON line."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def event_line(event: Event) -> bytes:
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


# -- reading -------------------------------------------------------------------------------------
class ExportHeader(NamedTuple):
    """Header of the file."""

    id: str
    agent: str
    first: int
    last: int
    snapshot: Snapshot | None


class ExportLine(NamedTuple):
    """One event of the file."""

    seq: int
    epoch: int
    at: float
    entry: Entry


class ExportReader:
    """One pass over a file, with every line checked."""

    def __init__(self, path: str) -> None:
        self.header: ExportHeader | None = None
        self._path = path
        self._number = 0

    def lines(self) -> Generator[ExportLine]:
        """Yield the events of the file. Raises `UsageError` with the first invalid line."""
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

    def _lines(self, file: BinaryIO) -> Generator[ExportLine]:
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

    def _header(self, value: dict[str, Any]) -> ExportHeader:
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
        return ExportHeader(id, agent, first, last, self._snapshot(value, first, last))

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

    def _line(self, value: dict[str, Any]) -> ExportLine:
        seq, epoch, at = value.get("seq"), value.get("epoch"), value.get("at")
        turn, kind = value.get("turn"), value.get("kind")
        if not _is_number(seq) or not _is_number(epoch):
            self._refuse("seq and epoch must be numbers from 1 on", AGAIN)
        if not _is_time(at):
            self._refuse("the time is not a number", AGAIN)
        if not (turn is None or _is_text(turn)) or not _is_text(kind) or not kind:
            self._refuse("the turn must be a text or null, and the kind must be a text", AGAIN)
        return ExportLine(seq, epoch, float(at), (turn, kind, self._data(kind, value)))

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
