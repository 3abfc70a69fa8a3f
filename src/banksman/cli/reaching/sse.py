"""Server-sent events: bytes in, split anywhere, and messages out. Pure: no socket, no clock.

It follows the standard's rules for a stream to the letter, because what a server or a proxy may send is all of it: a
line ends with CR, LF or CRLF (also where the CR is the last byte of one read and the LF the first of the next), one
byte order mark may come first, a line that begins with a colon is a comment, `data` may have several lines, an `id`
with a NUL is ignored, and `retry` is digits or nothing.

A message counts from its empty line on. What the stream ends in the middle of was never said; whoever comes back with
the `id` of the last whole message is told it again, and told it once.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

# A frame of an agent has at most 32 MiB, and JSON may write each of its bytes as six.
MESSAGE_BYTES_MAX = 256 << 20
# The pause that a server asks for. More than this is no pause, and more digits than this no number.
RETRY_MILLISECONDS_MAX = 3_600_000
_RETRY_DIGITS_MAX = 15

_LINE_END = re.compile(rb"\r\n|\r|\n")
_MARK = b"\xef\xbb\xbf"


class Oversize(ValueError):
    """One message is larger than any that is meant. The stream is of no use any more."""


@dataclass(frozen=True, slots=True)
class Message:
    """`event`: its kind, empty if none was said. `id`: the last one said until here, empty if there was none."""

    event: str
    data: str
    id: str


class Parser:
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

    def feed(self, data: bytes) -> list[Message]:
        """The messages that are whole by now. Raises `Oversize`; the parser is of no use then."""
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
        messages: list[Message] = []
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

    def _take(self, line: bytes) -> Message | None:
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

    def _dispatch(self) -> Message | None:
        self.id = self._next_id
        event, data = self._event, self._data
        self._event, self._data, self._data_bytes = "", [], 0
        # Without a `data` line there is no message, whatever else was said. With an empty one there is.
        return Message(event, "\n".join(data), self.id) if data else None

    def _check(self, size: int) -> None:
        if size > self._message_bytes_max:
            raise Oversize(f"a message of more than {self._message_bytes_max} bytes")
