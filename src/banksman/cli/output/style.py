"""What a stream of ours may be sent: colour, a line that is drawn over, or words and nothing else.

A pipe gets words. So does a terminal whose user says so (`NO_COLOR`) or that can do no better (`TERM=dumb`).
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import TextIO, cast

# Where nobody says how wide a terminal is.
COLUMNS, ROWS = 80, 24


@dataclass(frozen=True, slots=True)
class Style:
    """Of one stream. `is_drawn`: lines may be drawn over, and sequences be sent. `has_colour`: and colours be used."""

    is_terminal: bool = False
    is_drawn: bool = False
    has_colour: bool = False

    def dim(self, text: str) -> str:
        return self._in("2", text)

    def bold(self, text: str) -> str:
        return self._in("1", text)

    def red(self, text: str) -> str:
        return self._in("31", text)

    def green(self, text: str) -> str:
        return self._in("32", text)

    def yellow(self, text: str) -> str:
        return self._in("33", text)

    def _in(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.has_colour and text else text


PLAIN = Style()


def style_of(stream: TextIO | None) -> Style:
    # One that was closed when we were started is not there at all.
    if stream is None or not is_terminal(stream):
        return PLAIN
    is_able = os.environ.get("TERM", "dumb") not in ("", "dumb")
    has_colour = is_able and not os.environ.get("NO_COLOR")
    return Style(is_terminal=True, is_drawn=is_able, has_colour=has_colour)


def is_terminal(stream: TextIO | None) -> bool:
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # It was closed since.
        return False


def stdout_style() -> Style:
    return style_of(cast("TextIO | None", sys.stdout))


def stderr_style() -> Style:
    return style_of(cast("TextIO | None", sys.stderr))


def size_of(stream: TextIO | None) -> tuple[int, int]:
    """Columns and rows, as they are at this moment."""
    try:
        assert stream is not None
        found = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AssertionError):
        return COLUMNS, ROWS
    # A terminal that was told no size has none.
    return found.columns or COLUMNS, found.lines or ROWS
