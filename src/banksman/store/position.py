"""Place in the commit order of a store, with a short text form that is opaque to clients.

The engines on SQLite and NATS use `Position`. The in-memory engine has another form, in
`memory_session.py`. `history_lost` is the error of all engines for a place past the end.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from banksman.errors import HistoryLost, UsageError

_TEXT = re.compile(r"(0|[1-9a-f][0-9a-f]{0,14})(?:\.([1-9][0-9]{0,9}))?")

# Everything up to the chunk `chunk` lies behind the position: the whole chunk if `taken` is 0, else
# its first `taken` events. Each position has exactly one text form. So a reader that has finished a
# chunk sees no gap when retention removes that chunk.


class Position(NamedTuple):
    """Place in the commit order of a store: a chunk, and the number of its events already read."""

    chunk: int
    taken: int = 0

    @classmethod
    def of(cls, text: str | None) -> Position:
        """Parse the text of a position; None is the beginning.

        Raise `UsageError` for malformed text.
        """
        if text is None:
            return BEGINNING
        match = _TEXT.fullmatch(text)
        if match is None:
            hint = "pass a position that this store has returned"
            raise UsageError("there is no such position in this store", hint=hint, position=text)
        return cls(int(match[1], 16), int(match[2] or 0))

    @property
    def text(self) -> str:
        """The text form: the chunk in hexadecimal, then the number of events taken."""
        return f"{self.chunk:x}.{self.taken}" if self.taken else f"{self.chunk:x}"

    @property
    def whole(self) -> int:
        """The last chunk that has been read completely."""
        return self.chunk - 1 if self.taken else self.chunk


BEGINNING = Position(0)


def history_lost(position: str) -> HistoryLost:
    """Build the error for a position past the end of this store.

    The reader got the position from a longer history, for example before a restore of a backup.
    """
    hint = "begin again at the first event, without a position"
    message = f"cannot read after position {position}: the store ends before it"
    return HistoryLost(message, hint=hint, position=position)
