"""Record of a session whose process survives the death of its host, kept current while it lives.

A host that is killed cannot write down what its successor needs. So it does so before each append
to the log: the *moment* that the session is in once the append is durable. An append is durable as
a whole or not at all. So whatever the host is killed at, the record has a moment for the last
durable event, and the successor continues there.

    record:   header  moment(head 7)  moment(head 9)  moment(head 10)
    log:      …       …7              8 9                              killed before 10 is durable
    successor continues with moment(head 9): state, offset of the output, timers

The record is a private file beside the socket of the hold (`process/hold_record.py`), because it
has what the log must not have: the secret of the hold, prompts with secrets, half a line of the
agent. It need not survive the machine, because the process does not. It is a line of JSON for each
moment, with what has changed since the line before it. So the last line alone may be torn.
`crash_journal.py` takes the moments, and `held_session.py` continues from one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, Struct, UnsetType

from banksman.core.session import live_state, plain_frames
from banksman.core.session.session_config import Config
from banksman.core.session.state import Session
from banksman.errors import MachineError, Refused, StoreTooNew
from banksman.process import hold_record, syscalls

# Change the number with every change that another version cannot read.
FORMAT = "banksman-session-1"
# A file of this size is written anew, without what is over.
FILE_BYTES_MAX = 4 << 20

# The timers of a state as plain values: kind, name, and when it is due.
TimerDues = tuple[tuple[str, str, float], ...]
# Of `hold_record.first_lines`.
Lines = Iterable[tuple[str, bytes]]


class Header(Struct, frozen=True, kw_only=True):
    """First line of a record.

    `store`: see `Log.identity`; records of older versions have none. `clock`: see `HeldSession`.
    `process`: its number in the session. `seconds`: for how long it waits for the next host; 0 in
    records of older versions.
    """

    format: str
    store: str = ""
    session: str
    secret: bytes
    clock: float
    process: int
    seconds: float = 0.0


class Moment(NamedTuple):
    """State that the next host needs if the log ends with `head`.

    `state`: without the last frames, of which there are `frames`, the last one at the time `at`.
    `offset`: the bytes of stdout that were read. `line`, `line_bytes`: the incomplete line, which
    is the beginning of a buffer that grows. `timers`, `walls`, `turns`, `redaction`: see
    `HeldSession`. `finished`: the writes to stdin that the state knows to be finished. `writing`:
    the frame that is written next, or is being written. `lost`: why no host can continue from here;
    empty if one can.
    """

    head: int
    state: Session
    frames: int = 0
    at: float = 0.0
    offset: int = 0
    line: bytes | bytearray = b""
    line_bytes: int = 0
    timers: TimerDues = ()
    walls: TimerDues = ()
    turns: Mapping[str, int] = {}
    redaction: Any = None
    finished: int = 0
    writing: bytes | None = None
    lost: str = ""


class Row(Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """A moment, as its difference to the one before. A row with all `fields` stands alone.

    `more`: added to the line. `line`: replaces it.
    """

    head: int
    offset: int
    fields: dict[str, Any] | UnsetType = UNSET
    frames: int = 0
    at: float = 0.0
    line: bytes | UnsetType = UNSET
    more: bytes = b""
    timers: TimerDues | UnsetType = UNSET
    walls: TimerDues | UnsetType = UNSET
    turns: dict[str, int] | UnsetType = UNSET
    redaction: Any = UNSET
    finished: int = 0
    writing: bytes | None = None
    lost: str = ""


class Kept(NamedTuple):
    """A moment as the successor reads it, and its record. `fields`: see `session`."""

    header: Header
    fields: Mapping[str, Any]
    row: Row
    line: bytes
    timers: TimerDues
    walls: TimerDues
    turns: Mapping[str, int]
    redaction: Any

    def session(self, config: Config) -> Session:
        """Decode the state. `config`: of the session's first agent. Raises `BanksmanError`."""
        if self.row.lost:
            raise Refused(f"its host could not record the state: {self.row.lost}")
        state = live_state.decode(live_state.encoded(self.fields), config)
        return plain_frames.count_frames(state, self.row.frames, self.row.at)


_encoder = msgspec.json.Encoder()
_row_decoder = msgspec.json.Decoder(Row)
_header_decoder = msgspec.json.Decoder(Header)


class RecordFile:
    """The file of one hold, open for this host."""

    def __init__(self, name: str, header: Header, moments: Sequence[Moment] = ()) -> None:
        """Write a new file in place of the old one. Raises `MachineError`."""
        self.name = name
        self.header = header
        self._fd = -1
        self._encode: live_state.Encoder | None = None
        self._last: Moment | None = None
        self._bytes = 0
        # The size when it was last written anew: one moment alone may be large.
        self._bytes_before = 0
        self.rewrite(moments)

    @property
    def is_large(self) -> bool:
        """Whether it should be written anew."""
        return self._bytes > max(FILE_BYTES_MAX, 2 * self._bytes_before)

    def rewrite(self, moments: Sequence[Moment]) -> None:
        """Write the file anew with these moments alone. Raises `MachineError`."""
        self._last = None
        lines = [_encoder.encode(self.header) + b"\n", *map(self._row, moments)]
        hold_record.write(self.name, b"".join(lines))
        self._close()
        self._fd = hold_record.open_to_append(self.name)
        self._bytes = self._bytes_before = sum(map(len, lines))

    def add(self, moment: Moment) -> None:
        """Add a moment. Raises `MachineError`."""
        row = self._row(moment)
        try:
            written = syscalls.write(self._fd, row)
        except OSError as exc:
            message = f"cannot write the record of process {self.name}: {exc.strerror}"
            raise MachineError(message, number=exc.errno or 0, hint="check the disk") from exc
        if written < len(row):
            raise MachineError(f"cannot write the record of process {self.name}: no room")
        self._bytes += len(row)

    def _row(self, after: Moment) -> bytes:
        before, self._last = self._last, after
        fields, lost = self._fields(before, after)
        row = Row(
            head=after.head,
            offset=after.offset,
            fields=fields,
            frames=after.frames,
            at=after.at,
            line=UNSET if _continues(before, after) else bytes(after.line[: after.line_bytes]),
            more=bytes(after.line[before.line_bytes : after.line_bytes])
            if before is not None and _continues(before, after)
            else b"",
            timers=_changed(before, after, "timers"),
            walls=_changed(before, after, "walls"),
            turns=_changed(before, after, "turns"),
            redaction=_changed(before, after, "redaction"),
            finished=after.finished,
            writing=after.writing,
            lost=after.lost or lost,
        )
        return _encoder.encode(row) + b"\n"

    def _fields(
        self, before: Moment | None, after: Moment
    ) -> tuple[dict[str, Any] | UnsetType, str]:
        """Return the fields of the state that differ, and why they have no form."""
        if before is not None and before.state is after.state:
            return UNSET, ""
        names = live_state.NAMES
        if before is not None:
            names = [
                name
                for name in names
                if getattr(before.state, name) is not getattr(after.state, name)
            ]
        if self._encode is None:
            self._encode = live_state.Encoder(after.state)
        try:
            return self._encode.fields(live_state.surviving(after.state), names), ""
        except (TypeError, ValueError) as exc:
            self._last = None  # The next row stands alone.
            return UNSET, str(exc)

    def remove(self) -> None:
        """Remove the file, because no host may continue the process. Never raises."""
        self._close()
        hold_record.remove(self.name)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            os.close(fd)

    __del__ = _close


def _continues(before: Moment | None, after: Moment) -> bool:
    return before is not None and before.line is after.line


def _changed(before: Moment | None, after: Moment, name: str) -> Any:
    value = getattr(after, name)
    return UNSET if before is not None and getattr(before, name) == value else value


class Beginning(NamedTuple):
    """Where the journal of a process begins: at its start, or where the former host has stopped.

    `last`: the last moment of `record`. `offset`, `line`, `finished`: see `Moment`.
    """

    record: RecordFile | None = None
    last: Moment | None = None
    offset: int = 0
    line: bytes = b""
    finished: int = 0


# -- the next host ---------------------------------------------------------------------------------
def find(store: str, session: str) -> list[tuple[str, Header]]:
    """Return the holds of the processes of a session of this store, the newest first. Never raises.

    There are several if the host was killed before it has released the process before the last.
    """
    return among(
        hold_record.first_lines(FORMAT.encode(), msgspec.json.encode(session)), store, session
    )


def among(lines: Lines, store: str, session: str) -> list[tuple[str, Header]]:
    """Return those of some holds, of which the caller has read the first lines."""
    found = [(name, header) for name, header in _headers(lines, store) if header.session == session]
    return sorted(found, key=lambda each: each[1].process, reverse=True)


def sessions(lines: Lines, store: str) -> set[str]:
    """Return the sessions of this store with a process that survives its host."""
    return {header.session for _name, header in _headers(lines, store)}


def seconds_elsewhere(store: str, session: str) -> float:
    """Return for how long the process of a session may be held for another store. Never raises.

    This store is a copy of it, or has moved. Its host cannot take the process over, nor end it.
    """
    lines = hold_record.first_lines(FORMAT.encode(), msgspec.json.encode(session))
    found = [header for _name, header in _decoded(lines) if header.session == session]
    return max((each.seconds for each in found if each.store not in ("", store)), default=0.0)


def _headers(lines: Lines, store: str) -> Iterator[tuple[str, Header]]:
    return (each for each in _decoded(lines) if each[1].store in ("", store))


def _decoded(lines: Lines) -> Iterator[tuple[str, Header]]:
    for name, line in lines:
        # The record of something else, or of another version, has another first line.
        with contextlib.suppress(msgspec.MsgspecError):
            header = _header_decoder.decode(line)
            if header.format == FORMAT:
                yield name, header


def read(name: str, head: int) -> Kept:
    """Read the moment at which the log ends with `head`. Raises `BanksmanError`."""
    first, *lines = hold_record.read(name).split(b"\n")
    header = _header_decoder.decode(first)
    # The last item is empty, or a line that the host was killed at.
    try:
        rows = [_row_decoder.decode(line) for line in lines[:-1]]
    except msgspec.MsgspecError as exc:
        message = f"cannot read the record of held process {name}: {exc}"
        raise StoreTooNew(message, hint="use the version of Banksman that wrote it") from exc
    last = max((index for index, row in enumerate(rows) if row.head == head), default=None)
    if last is None:
        raise Refused(f"its record has no moment for event {head}, the last one of the log")
    return _folded(header, rows[: last + 1])


def _folded(header: Header, rows: Sequence[Row]) -> Kept:
    fields: dict[str, Any] = {}
    line = bytearray()
    others: dict[str, Any] = {"timers": (), "walls": (), "turns": {}, "redaction": None}
    for row in rows:
        if row.fields is not UNSET:
            fields |= row.fields
        if row.line is not UNSET:
            line = bytearray(row.line)
        line += row.more
        for name in others:
            if (value := getattr(row, name)) is not UNSET:
                others[name] = value
    return Kept(header, fields, rows[-1], bytes(line), **others)
