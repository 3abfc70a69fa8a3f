"""What a turn is told to: the agent's words, lines of our own, and what is going on while nothing is said."""

from __future__ import annotations

import contextlib
import enum
import os
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from banksman.cli.output.terminal import (
    Style,
    as_line,
    as_text,
    cut,
    say,
    say_aside,
    size_of,
    stderr_style,
    stdout_style,
    width,
    wrapped,
)
from banksman.cli.tui.question_view import block_rows

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


# A screen that is only ever added to: the agent's words to stdout, all else to stderr. A pipe gets it, and a terminal.
#
# On a terminal one line below what was said tells what is going on, when nothing was said for a while. It is drawn over
# before anything else is. In the middle of a line of the agent's it is drawn right of it, and the cursor put back: so
# no column has to be known exactly, and nothing that was said can be torn.

ROOMY_COLUMNS = 40
# A line of ours is to be read. What is longer is cut, whoever made it long.
LINE_CHARACTERS_MAX = 2000
# So much room is left free at the right edge: terminals disagree about the width of some letters.
_MARGIN = 8


class PlainScreen:
    """`has_text` False: the agent's words are not for here. `has_lines` False: nothing is told aside but questions, and
    what goes wrong."""

    def __init__(self, *, hint: str = "Ctrl-C interrupts", has_text: bool = True, has_lines: bool = True) -> None:
        self._out, self._err = stdout_style(), stderr_style()
        self._has_text, self._has_lines = has_text, has_lines
        self._status = ScreenStatus(hint)
        self._is_drawn = False
        # Where the agent's last line ends, if it has not ended: only for how much room there is right of it.
        self._column = 0
        self._is_open = False

    @property
    def is_watched(self) -> bool:
        return self._err.has_colour and self._has_lines

    @property
    def is_roomy(self) -> bool:
        return self.is_watched and size_of(sys.stderr)[0] >= ROOMY_COLUMNS

    def text(self, piece: str) -> None:
        if not self._has_text or not piece:
            return
        self._said()
        safe = as_text(piece)
        say(safe, end="")
        self._is_open = not safe.endswith("\n")
        *before, last = safe.split("\n")
        self._column = (0 if before else self._column) + width(last.expandtabs())

    def end_text(self) -> None:
        if self._is_open:
            self._said()
            say()
            self._is_open, self._column = False, 0

    def line(self, text: str, look: TextStyle = TextStyle.DIM) -> None:
        if not self._has_lines and look not in (TextStyle.BAD, TextStyle.ASKS):
            return
        self._begin_line()
        line = as_line(text, characters_max=LINE_CHARACTERS_MAX)
        for row in wrapped(line, size_of(sys.stderr)[0], indent="  ") if self._err.is_terminal else (line,):
            say_aside(look.on(self._err, row))

    def block(self, lines: Sequence[str]) -> None:
        self._begin_line()
        for row in block_rows(lines, size_of(sys.stderr)[0] if self._err.is_terminal else None):
            say_aside(row)

    def busy(self, what: str | None) -> None:
        self._status.busy(None if what is None else as_line(what))

    def tick(self) -> None:
        if self.is_watched and self._status.is_due and self._is_ours:
            self._draw()

    def close(self) -> None:
        """Leave the line as it would be without us."""
        self._erase()
        with contextlib.suppress(Exception):
            self.end_text()

    @property
    def _is_ours(self) -> bool:
        """In the background somebody else has the terminal, and a line that moves is not for him."""
        try:
            return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            return True

    def _begin_line(self) -> None:
        self._said()
        if self._is_open and self._out.is_terminal and self._err.is_terminal:
            # The same terminal: what the agent goes on saying begins at the left again.
            say_aside("")
            self._is_open, self._column = False, 0

    def _said(self) -> None:
        self._erase()
        self._status.note_said()

    def _draw(self) -> None:
        columns = size_of(sys.stderr)[0]
        if not self._is_open or not self._out.is_terminal:
            self._put(f"\r\x1b[K{self._err.dim(self._status.row(columns - 1))}\r")
        else:
            room = columns - self._column % columns - _MARGIN
            if room < _MARGIN:
                return
            self._put(f"\x1b7 {self._err.dim(self._status.row(min(room, 2 * _MARGIN)))}\x1b[K\x1b8")
        self._is_drawn = True

    def _erase(self) -> None:
        if self._is_drawn:
            self._is_drawn = False
            # The cursor is where the agent's line ends, or at the left.
            self._put("\x1b[K")

    def _put(self, sequence: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(sequence)
            sys.stderr.flush()
