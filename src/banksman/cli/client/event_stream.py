"""Server-sent events: bytes in, split anywhere, and messages out. Pure: no socket, no clock.

It follows the standard's rules for a stream to the letter, because what a server or a proxy may send is all of it: a
line ends with CR, LF or CRLF (also where the CR is the last byte of one read and the LF the first of the next), one
byte order mark may come first, a line that begins with a colon is a comment, `data` may have several lines, an `id`
with a NUL is ignored, and `retry` is digits or nothing.

A message counts from its empty line on. What the stream ends in the middle of was never said; whoever comes back with
the `id` of the last whole message is told it again, and told it once.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from banksman.cli.client.client import (
    Client,
    ClientError,
    Lost,
    NoServer,
    Problem,
    Query,
    ServerReply,
    checked,
    decode,
    segment,
)

# A frame of an agent has at most 32 MiB, and JSON may write each of its bytes as six.
MESSAGE_BYTES_MAX = 256 << 20
# The pause that a server asks for. More than this is no pause, and more digits than this no number.
RETRY_MILLISECONDS_MAX = 3_600_000
_RETRY_DIGITS_MAX = 15

_LINE_END = re.compile(rb"\r\n|\r|\n")
_MARK = b"\xef\xbb\xbf"

# A server says something every 15 seconds, if only that it is there. Where that was set to more, we come back for
# nothing now and then, and miss nothing.
SILENCE_SECONDS_MAX = 45.0
# So long a server may be gone: long enough for a restart that finishes what runs.
GONE_SECONDS_MAX = 300.0
# A connection without an event is as good as one with, if it was there for so long: the session was quiet.
HELD_SECONDS_MIN = 5.0
READ_BYTES_MAX = 65536
# "Not now": too many streams, a server behind a proxy that is starting, or one that is going. Any other no is final.
_NOT_NOW = (429, 502, 503, 504)


class OversizeMessage(ValueError):
    """One message is larger than any that is meant. The stream is of no use any more."""


@dataclass(frozen=True, slots=True)
class SseMessage:
    """`event`: its kind, empty if none was said. `id`: the last one said until here, empty if there was none."""

    event: str
    data: str
    id: str


class SseParser:
    """Of one connection. `retry`: what the server last asked for, in milliseconds; `id`: where to come back to."""

    def __init__(self, *, message_bytes_max: int = MESSAGE_BYTES_MAX) -> None:
        self.retry: int | None = None
        self.id = ""
        self._message_bytes_max = message_bytes_max
        # What may still turn out to be the mark; None once that is settled.
        self._head: bytes | None = b""
        # A line ended with CR at the end of what was fed: an LF that comes now is the rest of that end.
        self._ended_with_cr = False
        # The line that is being said, in the pieces that it came in: joined once, however slowly it trickles.
        self._pieces: list[bytes] = []
        self._line_bytes = 0
        # The message that is being said. Its id counts when it is whole.
        self._event = ""
        self._data: list[str] = []
        self._data_bytes = 0
        self._next_id = ""

    def feed(self, data: bytes) -> list[SseMessage]:
        """The messages that are whole by now. Raises `OversizeMessage`; the parser is of no use then."""
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
        # No colon: all of it is the name of a field without a value. A colon first: a comment, a field without a name.
        name, _, value = line.partition(b":")
        text = value.removeprefix(b" ").decode(errors="replace")
        match name:
            case b"data":
                self._data.append(text)
                # An empty line is a line too: a server that says nothing but those shall not fill us either.
                self._data_bytes += len(value) + 1
                self._check(self._data_bytes)
            case b"event":
                self._event = text
            case b"id" if "\0" not in text:
                self._next_id = text
            case b"retry" if re.fullmatch(rb"[0-9]+", value.removeprefix(b" ")):
                is_sane = len(text) <= _RETRY_DIGITS_MAX
                self.retry = min(int(text), RETRY_MILLISECONDS_MAX) if is_sane else RETRY_MILLISECONDS_MAX
            case _:
                pass
        return None

    def _dispatch(self) -> SseMessage | None:
        self.id = self._next_id
        event, data = self._event, self._data
        self._event, self._data, self._data_bytes = "", [], 0
        # Without a `data` line there is no message, whatever else was said. With an empty one there is.
        return SseMessage(event, "\n".join(data), self.id) if data else None

    def _check(self, size: int) -> None:
        if size > self._message_bytes_max:
            raise OversizeMessage(f"a message of more than {self._message_bytes_max} bytes")


# A session's events as they come, from a cursor on: each once, none left out, across lost connections and restarts.
#
# The reader's place is the last event that it was given, and nothing else. Whatever happens to a connection (it is cut
# in the middle of an event, it falls silent, the server says that it goes), the next one begins after that event. `seq`
# is dense, so this need not be believed: an event that was given before is dropped, and one that would leave a hole is
# not given; the reader comes back for what is between.
#
# A server that cannot be reached is looked for again, with pauses that grow up to a bound, and not for ever. So is one
# that answers and lets go before it has said anything new.

PAUSE_SECONDS_MIN, PAUSE_SECONDS_MAX = 0.1, 5.0

Event = dict[str, Any]


class StreamBroken(ClientError):
    """What comes is no stream of ours, or one with a hole that is there again when it is asked for what is in it."""


class EventFollower:
    """One reader of one session. `events` may be called again after it raised or was left: it goes on where it was."""

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
        """`is_over` True: the reader has enough, and `events` ends. Asked at each sign of life of the server's.

        `query`: more words for each request. `on_lost` is told once when a connection that was there is lost and is
        looked for again, and `on_back` at the first sign of life after that."""
        # Of the last event that was given.
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
        # The last event given, or told to be gone; None: the server must say what comes after that cursor.
        self._seq = 0 if after is None else seq_of(after)
        self._asks_pause: float | None = None
        self._saw_hole = False

    def events(self) -> Generator[Event]:
        """Stored events, and `stream.gap` for what retention took. It does not end by itself, but for `is_over`: a
        session that is closed, also by a server that goes, may be opened again.

        Raises `Problem` if the server says no (the session was deleted, perhaps), and `NoServer` if it is not there at
        first, or stays away or says nothing for too long.
        """
        tries = 0
        # The end of the last connection that was worth something.
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
                # An end is no error; to do nothing else, each time, is one.
                raise Lost("the server ends each connection before it says anything", hint="its log may say why")
            except (NoServer, Problem) as exc:
                now = time.monotonic()
                was_there = was_there or isinstance(exc, Lost)
                if is_alive and now - began >= HELD_SECONDS_MIN:
                    tries, gone_since = 0, None
                gone_since = now if gone_since is None else gone_since
                if not was_there or not _may_pass(exc) or now - gone_since > GONE_SECONDS_MAX:
                    raise
                if isinstance(exc, Problem):
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
        # Not all clients of a server that comes back at the same moment.
        return min(base, PAUSE_SECONDS_MAX) * random.uniform(0.75, 1.0)

    def _connection(self) -> Generator[Event | None]:
        """What one connection says: events, and None for a sign of life. Returns when it ends without an error."""
        headers = {"Accept": "text/event-stream", "Cache-Control": "no-store"}
        # What the caller said is a word of a query, where it may be anything; what the server said is a cursor.
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
                    raise Lost("the connection was lost in the middle of its head")
                raise StreamBroken("what answers there is not Banksman", hint="see --url and BANKSMAN_URL")
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
        """There is a hole before it. Once it is come back for; if it is there again, it will be there for ever."""
        seq = event.get("seq")
        if not isinstance(seq, int) or self._seq is None or seq <= self._seq + 1:
            return False
        if self._saw_hole:
            raise StreamBroken(
                f"the server leaves out the events {self._seq + 1} to {seq - 1}",
                hint="this is a bug; banksman log without --follow reads them another way",
            )
        self._saw_hole = True
        return True

    def _taken(self, event: Event) -> Event | None:
        """The event, if it is the next one; None: it is known already, or only a sign of life."""
        if event.get("kind") == "stream.gap":
            return self._taken_gap(event)
        seq, cursor = event.get("seq"), event.get("cursor")
        if not isinstance(seq, int) or not isinstance(cursor, str):
            return None  # stream.live, a heartbeat.
        if seq_of(cursor) != seq:
            raise StreamBroken("an event's cursor is not its place")
        if self._seq is not None and seq <= self._seq:
            return None
        self._seq, self.cursor, self._saw_hole = seq, cursor, False
        return event

    def _taken_gap(self, gap: Event) -> Event | None:
        """A gap has no id: whoever comes back before the next event is told of it again, perhaps of more."""
        first, last = gap.get("first"), gap.get("last")
        if not isinstance(first, int) or not isinstance(last, int) or last <= (self._seq or 0):
            return None
        first = max(first, (self._seq or 0) + 1)
        self._seq = last
        return {**gap, "first": first}


def seq_of(cursor: str) -> int | None:
    """The number in `epoch.seq` or in a bare seq; None: it is no cursor, and the server shall say so."""
    found = re.fullmatch(r"(?:[0-9]{1,18}\.)?([0-9]{1,18})", cursor)
    return None if found is None else int(found[1])


def _parsed(parser: SseParser, data: bytes) -> Iterator[Event]:
    try:
        for message in parser.feed(data):
            event: Any = decode(message.data)
            if isinstance(event, ServerReply):
                yield checked(event)
    except (ValueError, RecursionError) as exc:  # Oversize is one, and says more than the others.
        why = f": {exc}" if isinstance(exc, OversizeMessage) else ""
        raise StreamBroken(f"what answers there does not speak as our server does{why}") from exc


def _seconds(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and 0 <= value <= 3600 else None


def _may_pass(exc: NoServer | Problem) -> bool:
    return isinstance(exc, NoServer) or exc.status in _NOT_NOW
