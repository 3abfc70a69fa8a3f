"""The search for a pattern in output that comes piece by piece: here, or in a process of its own.

Whether a match begins in what has come cannot always be told before more comes, so the last `span_max` bytes are
searched again with the next piece. A match that spans more than that may be missed. In all each byte is searched about
twice when pieces are as long as that, so that a flood costs linear time.

`^` and `$` are the ends of a line (MULTILINE), and `\\A` is the place where the search began. What asks for an end
(`$`, `\\b`, "as many as there are") takes the end of what has come so far for one: who wants a line says `\\n`.

A text pattern is matched against text, UTF-8, and bytes that are none stand for themselves (`surrogateescape`). What is
told is in bytes all the same.

**As a program** (`python -I -S pattern_search.py`) it is told what to do on stdin and answers on stdout. Python's `re`
can take a lifetime for a bad pattern on a short text, and cannot be interrupted meanwhile: in the host it would stop
everything. Here it costs one process, which is killed when its time is up. Each message is a marshalled value behind
its length. A pattern begins a new search. A piece `(data, begin, is_end)` is answered by what was found in it, or None.
So one process serves one search after the other, until its stdin ends. It imports nothing of this package.
"""

from __future__ import annotations

import marshal
import re
import sys
from typing import Any, BinaryIO

# So long may a match be, and so much is searched again with each piece.
MATCH_BYTES_MAX = 65536
# Kept before the place where a match may begin: for `^`, `\b` and what looks behind.
CONTEXT_BYTES = 1024
# What a pattern can have that makes a search try one place in many ways.
_BRANCHING = frozenset("*+?{|(")
# Without that the time is at most that of the pattern's length for each byte; and no match is longer than this.
PLAIN_CHARS_MAX = 200
# Of a message's length, before the message.
LENGTH_BYTES = 4

Found = tuple[int, bytes, tuple[str | None, ...]]  # where it begins, what it is, its groups


def is_plain(pattern: str | bytes) -> bool:
    """Whether the search takes linear time, whatever is searched."""
    return len(pattern) <= PLAIN_CHARS_MAX and not _BRANCHING & set(_as_text(pattern))


class PatternSearch:
    def __init__(self, pattern: str | bytes) -> None:
        """Raises what `re.compile` does."""
        self._of_bytes = re.compile(pattern, re.MULTILINE) if isinstance(pattern, bytes) else None
        self._of_text = re.compile(pattern, re.MULTILINE) if isinstance(pattern, str) else None
        # A character is four bytes at most.
        self._span_max = 4 * len(pattern) + 4 if is_plain(pattern) else MATCH_BYTES_MAX
        self._window = b""
        self._window_begin: int = 0
        # Where in the window a match may begin; what is before it is context.
        self._from = 0

    def feed(self, data: bytes, begin: int, is_end: bool) -> Found | None:
        """Look at one more piece, which begins at byte `begin`. One that does not follow the last is a new beginning:
        nothing matches across a gap."""
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
        # A character of which the rest is still to come is not there yet.
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
        self._window, self._window_begin, self._from = window[gone:], self._window_begin + gone, self._from - gone


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


def _encode(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _as_text(words: str | bytes) -> str:
    """For people: what is no text is replaced."""
    data = _encode(words) if isinstance(words, str) else words
    return data.decode("utf-8", "replace")


def _begun_bytes(data: bytes) -> int:
    """How many bytes at the end are the beginning of a character."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte < 0x80:
            return 0
        if byte >= 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if length > back else 0
    return 0


def _at_character(data: bytes, at: int) -> int:
    """Here, or where the next character begins."""
    for place in range(at, min(at + 3, len(data))):
        if data[place] & 0xC0 != 0x80:
            return place
    return at


def pack(value: Any) -> bytes:
    data = marshal.dumps(value)
    return len(data).to_bytes(LENGTH_BYTES, "big") + data


def read_message(source: BinaryIO) -> Any:
    """The next one; EOFError if there is none, or not a whole one."""
    length = int.from_bytes(source.read(LENGTH_BYTES), "big")
    return marshal.loads(source.read(length))


def main() -> None:
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
