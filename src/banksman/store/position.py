"""A place in the order of the store's commits, and its text: short, and opaque to who holds it.

All up to the chunk `chunk` is behind it: the whole of that chunk if `taken` is 0, else its first `taken` events. There
is one way to write each, so that a chunk that was read to its end and then taken by retention is no gap.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from banksman.errors import UsageError

_TEXT = re.compile(r"(0|[1-9a-f][0-9a-f]{0,14})(?:\.([1-9][0-9]{0,9}))?")


class Position(NamedTuple):
    chunk: int
    taken: int = 0

    @classmethod
    def of(cls, text: str | None) -> Position:
        """`UsageError` for what is no position at all."""
        if text is None:
            return BEGINNING
        match = _TEXT.fullmatch(text)
        if match is None:
            hint = "take one that it gave"
            raise UsageError("there is no such position in this store", hint=hint, position=text)
        return cls(int(match[1], 16), int(match[2] or 0))

    @property
    def text(self) -> str:
        return f"{self.chunk:x}.{self.taken}" if self.taken else f"{self.chunk:x}"

    @property
    def whole(self) -> int:
        """The last chunk of which nothing is left to read."""
        return self.chunk - 1 if self.taken else self.chunk


BEGINNING = Position(0)
