"""What a turn is told to: the agent's words, lines of our own, and what is going on while nothing is said."""

from __future__ import annotations

import enum
import time
from collections.abc import Sequence
from typing import Protocol

from banksman.cli.output.style import Style
from banksman.cli.output.text_width import cut, width

# Silence that is worth a word.
QUIET_SECONDS = 1.0
TICK_SECONDS = 0.25
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


class TextStyle(enum.Enum):
    PLAIN, DIM, BOLD, GOOD, BAD, ASKS = range(6)

    def on(self, style: Style, text: str) -> str:
        match self:
            case TextStyle.PLAIN:
                return text
            case TextStyle.DIM:
                return style.dim(text)
            case TextStyle.BOLD:
                return style.bold(text)
            case TextStyle.GOOD:
                return style.green(text)
            case TextStyle.BAD:
                return style.red(text)
            case TextStyle.ASKS:
                return style.yellow(text)


class Screen(Protocol):
    """Nothing that it is given is trusted: it makes it safe to show."""

    @property
    def is_roomy(self) -> bool:
        """There is somebody to look, and room for what is nice to know."""
        ...

    @property
    def is_watched(self) -> bool:
        """It is a terminal that can be drawn on, and somebody sees what goes on."""
        ...

    def text(self, piece: str) -> None:
        """Words of the agent, which may end in the middle of a line."""
        ...

    def end_text(self) -> None:
        """What it says next begins on a line of its own."""
        ...

    def line(self, text: str, look: TextStyle = TextStyle.DIM) -> None:
        """A line of ours."""
        ...

    def block(self, lines: Sequence[str]) -> None:
        """What a person decides by: all of it, and marked as not ours."""
        ...

    def busy(self, what: str | None) -> None:
        """What is going on from now on; None: nothing."""
        ...

    def tick(self) -> None:
        """Time has passed, or something was said: draw what is to be drawn."""
        ...


class ScreenStatus:
    """One line that says what is going on, and for how long."""

    def __init__(self, hint: str) -> None:
        self.hint = hint
        self.what: str | None = None
        self._since = time.monotonic()
        self._said_at = self._since

    def busy(self, what: str | None) -> None:
        if (what is None) != (self.what is None):
            self._since = time.monotonic()
        self.what = what

    def note_said(self) -> None:
        self._said_at = time.monotonic()

    @property
    def is_due(self) -> bool:
        return self.what is not None and time.monotonic() - self._said_at >= QUIET_SECONDS

    def row(self, columns: int) -> str:
        """As much of it as there is room for; what is going on is cut first, and the hint is left out before that."""
        now = time.monotonic()
        sign = _SPINNER[int(now / TICK_SECONDS) % len(_SPINNER)]
        end = f" {seconds_in_words(now - self._since)}"
        hint = f" · {self.hint}" if self.hint else ""
        what = self.what or ""
        room = columns - width(sign) - 1 - width(end)
        if room < 4:
            return cut(f"{sign}{end}", max(columns, 0))
        if width(what) + width(hint) <= room:
            return f"{sign} {what}{end}{hint}"
        return f"{sign} {cut(what, room)}{end}"


def seconds_in_words(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def duration_in_words(seconds: float) -> str:
    """Of something that is over."""
    return seconds_in_words(seconds) if seconds >= 10 else f"{max(0.0, seconds):.1f} s"
