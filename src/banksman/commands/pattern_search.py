"""Search a regular expression in output that arrives in pieces, as a module or a helper program.

output_watch.py uses both forms. The end of this text describes the program.

A match may begin in the present data and be decided only by later data. Therefore the last
`span_max` bytes are searched again with the next piece. A longer match may be missed. Each byte is
searched about twice if the pieces are as long as that, so a flood of output costs linear time.

`^` and `$` match at the ends of a line (MULTILINE), and `\\A` matches where the search began. A
pattern that depends on an end (`$`, `\\b`, a greedy repeat) takes the end of the present data for
that end. A pattern for a whole line must contain `\\n`.

A text pattern is matched against text in UTF-8, and invalid bytes stand for themselves
(`surrogateescape`). The result is in bytes nevertheless.

**As a program** (`python -I -S pattern_search.py`), this module reads requests from stdin and
answers on stdout. Python's `re` can take a lifetime for a bad pattern on a short text and cannot be
interrupted. In the host it would block everything. In a helper it costs one process, which is
killed when its time is up. Each message is a marshalled value with its length in front. A pattern
starts a new search. The answer to a piece `(data, begin, is_end)` is the match in it, or None. One
process thus serves one search after the other, until its stdin ends. It imports nothing else of
this package.
"""

from __future__ import annotations

import marshal
import re
import sys
from typing import Any, BinaryIO

# Maximum length of a match, and of the data that is searched again with each piece.
MATCH_BYTES_MAX = 65536
# Bytes kept before the possible start of a match: for `^`, `\b` and a lookbehind.
CONTEXT_BYTES = 1024
# Pattern characters that make a search try one position in many ways.
_BRANCHING = frozenset("*+?{|(")
# Without these characters, the time for each byte is at most the pattern's length. A match is also
# at most this long.
PLAIN_CHARS_MAX = 200
# Size of the length prefix of a message.
LENGTH_BYTES = 4

Found = tuple[int, bytes, tuple[str | None, ...]]  # start, matched bytes, groups


def is_plain(pattern: str | bytes) -> bool:
    """Return whether the search takes linear time on any data."""
    return len(pattern) <= PLAIN_CHARS_MAX and not _BRANCHING & set(_as_text(pattern))


class PatternSearch:
    """Incremental search of one pattern."""

    def __init__(self, pattern: str | bytes) -> None:
        """Compile the pattern. Raises the errors of `re.compile`."""
        self._of_bytes = re.compile(pattern, re.MULTILINE) if isinstance(pattern, bytes) else None
        self._of_text = re.compile(pattern, re.MULTILINE) if isinstance(pattern, str) else None
        # A character has at most four bytes.
        self._span_max = 4 * len(pattern) + 4 if is_plain(pattern) else MATCH_BYTES_MAX
        self._window = b""
        self._window_begin: int = 0
        # First position in the window at which a match may begin. The bytes before it are context.
        self._from = 0

    def feed(self, data: bytes, begin: int, is_end: bool) -> Found | None:
        """Search one more piece, which begins at byte `begin`.

        A piece that does not follow the previous one starts over: nothing matches across a gap.
        """
        if begin != self._window_begin + len(self._window):
            self._window, self._window_begin, self._from = b"", begin, 0
        self._window += data
        found = self._search(is_end)
        if found is None:
            self._forget_old()
        return found

    def _search(self, is_end: bool) -> Found | None:
        window = self._window
        if self._of_bytes is not None:
            match = self._of_bytes.search(window, self._from)
            return None if match is None else self._found(*match.span(), match.groups())
        assert self._of_text is not None
        # Exclude a character whose remaining bytes have not arrived.
        text = _decode(window if is_end else window[: len(window) - _begun_bytes(window)])
        match = self._of_text.search(text, len(_decode(window[: self._from])))
        if match is None:
            return None
        first, last = (len(_encode(text[:at])) for at in match.span())
        return self._found(first, last, match.groups())

    def _found(self, first: int, last: int, groups: tuple[str | bytes | None, ...]) -> Found:
        words = tuple(None if group is None else _as_text(group) for group in groups)
        return self._window_begin + first, self._window[first:last], words

    def _forget_old(self) -> None:
        window = self._window
        self._from = _at_character(window, max(self._from, len(window) - self._span_max))
        gone = _at_character(window, max(0, self._from - CONTEXT_BYTES))
        self._window, self._window_begin, self._from = (
            window[gone:],
            self._window_begin + gone,
            self._from - gone,
        )


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _as_text(words: str | bytes) -> str:
    """Decode for display. Invalid bytes are replaced."""
    data = _encode(words) if isinstance(words, str) else words
    return data.decode("utf-8", "replace")


def _begun_bytes(data: bytes) -> int:
    """Return how many bytes at the end are an incomplete character."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if length > back else 0
    return 0


def _at_character(data: bytes, at: int) -> int:
    """Return this position, or the start of the next character."""
    for place in range(at, min(at + 3, len(data))):
        if data[place] & 0xC0 != 0x80:
            return place
    return at


def pack(value: Any) -> bytes:
    """Encode a message with its length in front."""
    data = marshal.dumps(value)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_message(source: BinaryIO) -> Any:
    """Read the next message. Raises EOFError at the end, or for an incomplete message."""
    length = int.from_bytes(source.read(LENGTH_BYTES), "big")
    return marshal.loads(source.read(length))


def main() -> None:
    """Serve searches from stdin until it ends."""
    search: PatternSearch | None = None
    while True:
        try:
            message = read_message(sys.stdin.buffer)
        except EOFError:
            return
        if isinstance(message, str | bytes):
            search = PatternSearch(message)
            continue
        assert search is not None
        sys.stdout.buffer.write(pack(search.feed(*message)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
