"""Read server-sent events: a pure parser, and a follower that reconnects without losing events.

`EventFollower` follows the events of one session from a cursor, over any number of connections.
`news` in `tui/event_loop.py` follows all sessions.

`SseParser` takes bytes, split anywhere, and returns messages. It uses no socket and no clock. It
follows the standard exactly, because a server or a proxy may use all of it:

- A line ends with CR, LF or CRLF, even if one read ends with the CR and the next begins with the
  LF.
- One byte order mark may come first.
- A line that begins with a colon is a comment.
- `data` may have several lines.
- An `id` that contains NUL is ignored.
- `retry` is digits only; other values are ignored.

A message counts only when its empty line has arrived. A stream that ends in the middle of a message
has not sent it. A reader that reconnects with the `id` of the last complete message gets the cut
message again, exactly once.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from banksman.cli.client.client import Client, segment
from banksman.cli.client.exchange import ClientError, Lost, NoServer, Query, RequestRefused
from banksman.cli.client.server_reply import ServerReply, checked, decode

# A frame of an agent has at most 32 MiB, and JSON may encode each byte as six.
MESSAGE_BYTES_MAX = 256 << 20
# Upper bound of the pause that a server asks for. Longer digit strings are not parsed as a number.
RETRY_MILLISECONDS_MAX = 3_600_000
_RETRY_DIGITS_MAX = 15

_LINE_END = re.compile(rb"\r\n|\r|\n")
_MARK = b"\xef\xbb\xbf"

# A server sends a heartbeat every 15 seconds. If it is configured to a longer interval, the client
# reconnects now and then without need, and misses nothing.
SILENCE_SECONDS_MAX = 45.0
# How long a server may be gone: long enough for a restart that finishes running turns.
GONE_SECONDS_MAX = 300.0
# A connection without any event counts as good if it lasted this long: the session was quiet.
HELD_SECONDS_MIN = 5.0
READ_BYTES_MAX = 65536
# Temporary refusals: too many streams, or a server that starts or stops behind a proxy. Every other
# refusal is final.
_NOT_NOW = (429, 502, 503, 504)


class OversizeMessage(ValueError):
    """A message exceeds the size limit. The stream cannot be used further."""


@dataclass(frozen=True, slots=True)
class SseMessage:
    """One message.

    `event`: its type; empty if the server gave none. `id`: the last id that the stream has sent;
    empty if it sent none.
    """

    event: str
    data: str
    id: str


class SseParser:
    """Parser of one connection.

    `retry`: the pause that the server last asked for, in milliseconds. `id`: the position for a
    reconnect.
    """

    def __init__(self, *, message_bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self.retry: int | None = None
        self.id = ""
        self._message_bytes_max = message_bytes_max
        # The first bytes, which may be part of a byte order mark; None when that is decided.
        self._head: bytes | None = b""
        # The last fed bytes ended with CR. An LF that comes next belongs to the same line end.
        self._ended_with_cr = False
        # The pieces of the incomplete line. They are joined once, however slowly the bytes arrive.
        self._pieces: list[bytes] = []
        self._line_bytes = 0
        # The incomplete message. Its id counts when the message is complete.
        self._event = ""
        self._data: list[str] = []
        self._data_bytes = 0
        self._next_id = ""

    def feed(self, data: bytes) -> list[SseMessage]:
        """Add bytes and return the messages that are complete.

        Raises `OversizeMessage`; the parser cannot be used afterwards.
        """
        if self._head is not None:
            data = self._without_mark(data)
        if not data:
            return []
        if self._ended_with_cr and data[:1] == b"\n":
            data = data[1:]
        if data:
            self._ended_with_cr = data[-1:] == b"\r"
        else:
            self._ended_with_cr = False
        *ended, rest = _LINE_END.split(data)
        messages: list[SseMessage] = []
        for line in ended:
            if self._pieces:
                line = b"".join((*self._pieces, line))  # noqa: PLW2901
                self._pieces.clear()
                self._line_bytes = 0
            message = self._take(line)
            if message is not None:
                messages.append(message)
        if rest:
            self._pieces.append(rest)
            self._line_bytes += len(rest)
            self._check(self._line_bytes)
        return messages

    def _without_mark(self, data: bytes) -> bytes:
        assert self._head is not None
        head = self._head + data
        if len(head) < len(_MARK) and _MARK.startswith(head):
            self._head = head
            return b""
        self._head = None
        return head.removeprefix(_MARK)

    def _take(self, line: bytes) -> SseMessage | None:
        if not line:
            return self._dispatch()
        self._check(len(line))
        # Without a colon the whole line is a field name with an empty value. A leading colon gives
        # an empty field name, which is a comment.
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode(errors="replace")
        match name:
            case b"data":
                self._data.append(text)
                # An empty data line counts as one byte. A server that sends only empty lines must
                # not fill the memory.
                self._data_bytes += len(value) + 1
                self._check(self._data_bytes)
            case b"event":
                self._event = text
            case b"id" if "\0" not in text:
                self._next_id = text
            case b"retry" if re.fullmatch(rb"[0-9]+", value.removeprefix(b" ")):
                is_sane = len(text) <= _RETRY_DIGITS_MAX
                self.retry = (
                    min(int(text), RETRY_MILLISECONDS_MAX) if is_sane else RETRY_MILLISECONDS_MAX
                )
            case _:
                pass
        return None

    def _dispatch(self) -> SseMessage | None:
        self.id = self._next_id
        event, data = self._event, self._data
        self._event, self._data, self._data_bytes = "", [], 0
        # Without a `data` line there is no message, whatever other fields came. An empty `data`
        # line makes one.
        return SseMessage(event, "\n".join(data), self.id) if data else None

    def _check(self, size: int) -> None:
        if size > self._message_bytes_max:
            raise OversizeMessage(f"a message of more than {self._message_bytes_max} bytes")


# Follow a session's events from a cursor: each event once, without holes, across reconnects.
#
# The reader's position is the last event that it got. A connection may break in the middle of an
# event, fall silent, or end with the server. The next one always starts after that event. `seq` is
# dense, so the reader verifies this. It drops an event that it has seen before. It does not deliver
# an event after a hole, but reconnects for the missing ones.
#
# If the server cannot be reached, the reader retries with growing pauses, up to a time limit. It
# does the same if the server closes each connection before it sends a new event.

PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.1, 5.0

Event = dict[str, Any]


class StreamBroken(ClientError):
    """The response is no Banksman event stream, or it has a gap that a reconnect did not fill."""


class EventFollower:
    """Reader of one session's events.

    `events` may be called again after it raised or was closed. It resumes at the same position.
    """

    def __init__(
        self,
        client: Client,
        session: str,
        *,
        after: str | None = None,
        raw: bool = False,
        pause: Callable[[float], None] = time.sleep,
        is_over: Callable[[], bool] | None = None,
        query: Query | None = None,
        on_lost: Callable[[ClientError], None] | None = None,
        on_back: Callable[[], None] | None = None,
    ) -> None:
        """Create a reader.

        `is_over`: returns True when the reader has enough, and `events` then ends. It is called at
        each sign of life of the server. `query`: further query parameters for each request.
        `on_lost`: called once when a live connection breaks and the reader retries. `on_back`:
        called at the first sign of life after that.
        """
        # The cursor of the last delivered event.
        self.cursor: str | None = None
        self._after = after
        self._client = client
        self._path = f"/v1/sessions/{segment(session)}/events"
        self._raw = raw
        self._pause = pause
        self._is_over = is_over or (lambda: False)
        self._query = dict(query or {})
        self._on_lost = on_lost
        self._on_back = on_back
        self._is_lost = False
        # The seq of the last event that was delivered or reported as a gap. None if the caller's
        # cursor has no seq: only the server can then tell which event comes first.
        self._seq = 0 if after is None else seq_of(after)
        self._asks_pause: float | None = None
        self._saw_hole = False

    def events(self) -> Generator[Event]:
        """Yield stored events, and a `stream.gap` for events that retention removed.

        Ends only when `is_over` says so: a closed session, even one closed by a stopping server,
        may be opened again. Raises `RequestRefused` if the server refuses, for example because the
        session was deleted. Raises `NoServer` if the server is missing at first, or stays away or
        silent for too long.
        """
        tries = 0
        # The end of the last useful connection.
        gone_since: float | None = None
        was_there = False
        while not self._is_over():
            began, is_alive = time.monotonic(), False
            try:
                with contextlib.closing(self._connection()) as events:
                    for event in events:
                        was_there = is_alive = True
                        self._note_back()
                        if event is not None:
                            tries, gone_since = 0, None
                            yield event
                        if self._is_over():
                            return
                # A connection may end without an error. A server that does nothing else, each time,
                # is an error.
                raise Lost(
                    "the server closed the connection before it sent an event",
                    hint="see the server's log",
                )
            except (NoServer, RequestRefused) as exc:
                now = time.monotonic()
                was_there = was_there or isinstance(exc, Lost)
                if is_alive and now - began >= HELD_SECONDS_MIN:
                    tries, gone_since = 0, None
                gone_since = now if gone_since is None else gone_since
                if not was_there or not _may_pass(exc) or now - gone_since > GONE_SECONDS_MAX:
                    raise
                if isinstance(exc, RequestRefused):
                    self._asks_pause = exc.retry_seconds
                self._note_lost(exc)
            self._pause(self._pause_seconds(tries))
            tries += 1

    def _note_lost(self, exc: ClientError) -> None:
        if not self._is_lost and self._on_lost is not None:
            self._on_lost(exc)
        self._is_lost = True

    def _note_back(self) -> None:
        if self._is_lost and self._on_back is not None:
            self._on_back()
        self._is_lost = False

    def _pause_seconds(self, tries: int) -> float:
        asked, self._asks_pause = self._asks_pause, None
        base = max(PAUSE_SECONDS_MIN, asked or 0.0) * 2 ** min(tries, 10)
        # Jitter, so that the clients of a restarted server do not all return at the same moment.
        return min(base, PAUSE_SECONDS_MAX) * random.uniform(0.75, 1.0)

    def _connection(self) -> Generator[Event | None]:
        """Yield the events of one connection, and None for a sign of life.

        Returns when the connection ends without an error.
        """
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        # The caller's cursor goes into the query, where any text is allowed. The server's cursor is
        # known to be valid as a header.
        query: Query = {
            **self._query,
            "raw": 1 if self._raw else None,
            "after": self._after if self.cursor is None else None,
        }
        if self.cursor is not None:
            headers["Last-Event-ID"] = self.cursor
        parser = SseParser()
        with self._client.stream(
            self._path, query=query, headers=headers, silence_seconds_max=SILENCE_SECONDS_MAX
        ) as response:
            if response.headers.get_content_type() != "text/event-stream":
                if not response.read1(1):
                    raise Lost("the connection was lost in the middle of the HTTP header")
                raise StreamBroken(
                    "cannot follow the events: the server is not Banksman",
                    hint="check --url and BANKSMAN_URL",
                )
            while data := response.read1(READ_BYTES_MAX):
                for event in _parsed(parser, data):
                    if event.get("kind") == "stream.closing":
                        self._asks_pause = _seconds(event.get("retry_seconds"))
                        return
                    if self._is_too_early(event):
                        return
                    yield self._taken(event)
                if parser.retry is not None:
                    self._asks_pause = parser.retry / 1000

    def _is_too_early(self, event: Event) -> bool:
        """Return whether there is a hole before this event.

        The first time, the reader reconnects for the missing events. A hole that is still there
        will never be filled, so this raises.
        """
        seq = event.get("seq")
        if not isinstance(seq, int) or self._seq is None or seq <= self._seq + 1:
            return False
        if self._saw_hole:
            raise StreamBroken(
                f"cannot follow the events: the server skipped events {self._seq + 1} to {seq - 1}",
                hint="this is a bug; `banksman log` without --follow reads them in another way",
            )
        self._saw_hole = True
        return True

    def _taken(self, event: Event) -> Event | None:
        """Return the event if it is the next one; None for a duplicate or a sign of life."""
        if event.get("kind") == "stream.gap":
            return self._taken_gap(event)
        seq, cursor = event.get("seq"), event.get("cursor")
        if not isinstance(seq, int) or not isinstance(cursor, str):
            return None  # stream.live or a heartbeat.
        if seq_of(cursor) != seq:
            raise StreamBroken(
                "cannot follow the events: the cursor of an event does not match its seq"
            )
        if self._seq is not None and seq <= self._seq:
            return None
        self._seq, self.cursor, self._saw_hole = seq, cursor, False
        return event

    def _taken_gap(self, gap: Event) -> Event | None:
        """Return the unseen part of a gap, or None.

        A gap has no id. A reader that reconnects before the next event gets it again, perhaps
        larger.
        """
        first, last = gap.get("first"), gap.get("last")
        if not isinstance(first, int) or not isinstance(last, int) or last <= (self._seq or 0):
            return None
        first = max(first, (self._seq or 0) + 1)
        self._seq = last
        return {**gap, "first": first}


def seq_of(cursor: str) -> int | None:
    """Return the number in `epoch.seq` or in a bare seq.

    Return None for another text, which the server then rejects.
    """
    found = re.fullmatch(r"(?:[0-9]{1,18}\.)?([0-9]{1,18})", cursor)
    return None if found is None else int(found[1])


def _parsed(parser: SseParser, data: bytes) -> Iterator[Event]:
    try:
        for message in parser.feed(data):
            event: Any = decode(message.data)
            if isinstance(event, ServerReply):
                yield checked(event)
    # `OversizeMessage` is a ValueError with a better text.
    except (ValueError, RecursionError) as exc:
        why = f": {exc}" if isinstance(exc, OversizeMessage) else ""
        raise StreamBroken(
            f"cannot follow the events: the server sent an invalid message{why}"
        ) from exc


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value <= 3600 else None


def _may_pass(exc: NoServer | RequestRefused) -> bool:
    return isinstance(exc, NoServer) or exc.status in _NOT_NOW
