"""What a turn is told to: the agent's words, lines of our own, and what is going on while nothing is said."""

from __future__ import annotations

import contextlib
import enum
import itertools
import os
import sys
import time
from collections.abc import Sequence
from typing import Protocol

from banksman.cli.output import (
    CannotWrite,
    Style,
    as_line,
    as_text,
    cut,
    rows,
    say,
    say_aside,
    size_of,
    stderr_style,
    stdout_style,
    width,
    wrapped,
)
from banksman.cli.tui.keyboard import LineEditor
from banksman.cli.tui.question_view import QuestionView, block_rows

# Silence that is worth a word.
QUIET_SECONDS = 1.0
TICK_SECONDS = 0.25
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

ROOMY_COLUMNS = 40
# A line of ours is to be read. What is longer is cut, whoever made it long.
LINE_CHARACTERS_MAX = 2000
# So much room is left free at the right edge: terminals disagree about the width of some letters.
_MARGIN = 8
PROMPT = "> "


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


# A screen with a line to type in, below what is said.
#
# What is complete is written once and never touched again. What is not (the agent's last line, what is going on, what
# it asks, the line that is typed) is a few rows at the bottom, which are drawn over as a whole when anything comes. The
# terminal does not wrap them: each is cut to the width here, so their number is known, however wide it thinks a letter
# is. A line of the agent's is written whole when it has ended, for the terminal to wrap and to copy.

_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
_WRAP_ON, _WRAP_OFF = "\x1b[?7h", "\x1b[?7l"


class LiveScreen:
    """`enter` before it is drawn, and `leave` always."""

    is_watched = True

    def __init__(self, editor: LineEditor) -> None:
        self._editor = editor
        self._style: Style = stdout_style()
        self._status = ScreenStatus("Ctrl-C interrupts")
        # A question, and the line with its keys. `_is_kept`: what it is about was written whole, above.
        self._question: QuestionView | None = None
        self._asks = ""
        self._is_kept = False
        self._complete: list[str] = []
        # The agent's line that has not ended.
        self._open = ""
        # What is drawn at the bottom, the cursor in its last row.
        self._drawn: list[str] = []
        self._place: tuple[list[str], int] | None = None

    @property
    def is_roomy(self) -> bool:
        return size_of(sys.stdout)[0] >= ROOMY_COLUMNS

    @property
    def moves(self) -> bool:
        """Something in it changes with the time."""
        return self._status.what is not None

    def text(self, piece: str) -> None:
        ended, newline, rest = as_text(piece).rpartition("\n")
        if newline:
            self._complete.append(f"{self._open}{ended}\n")
            self._open = ""
        self._open += rest

    def end_text(self) -> None:
        if self._open:
            self._complete.append(f"{self._open}\n")
            self._open = ""

    def line(self, text: str, look: TextStyle = TextStyle.DIM) -> None:
        """Above the agent's line, if that has not ended: that one stays whole."""
        safe = as_line(text, characters_max=LINE_CHARACTERS_MAX)
        for row in wrapped(safe, size_of(sys.stdout)[0], indent="  "):
            self._complete.append(f"{look.on(self._style, row)}\n")

    def block(self, lines: Sequence[str]) -> None:
        self._complete.extend(f"{row}\n" for row in block_rows(lines, size_of(sys.stdout)[0]))

    def ask(self, question: QuestionView | None, line: str = "") -> None:
        """Show a question at the bottom, with its subject as far as there is room; None: there is none any more. What
        it was about stays on the screen as a block."""
        if question is not self._question:
            if self._question is not None:
                self._keep(self._question.subject)
            self._question, self._is_kept = question, False
        self._asks = line

    def _keep(self, lines: Sequence[str]) -> None:
        if not self._is_kept:
            self._is_kept = True
            self.block(lines)

    def busy(self, what: str | None) -> None:
        self._status.busy(None if what is None else as_line(what))

    def enter(self) -> None:
        self._put(_PASTE_ON)

    def leave(self) -> None:
        """What is complete stays, and nothing else."""
        self.end_text()
        said = "".join(self._complete)
        self._complete.clear()
        self._put(f"{self._erasing()}{said}{_PASTE_OFF}")

    def redraw(self) -> None:
        """The terminal is not as we left it."""
        self._place = None

    def tick(self) -> None:
        columns, height = size_of(sys.stdout)
        bottom, cursor, is_cut = self._bottom(columns, height)
        if is_cut and self._question is not None:
            self._keep((*self._question.subject, self._question.title))
        if not self._complete and self._place == (bottom, cursor):
            return
        said = "".join(self._complete)
        self._complete.clear()
        drawn = "\r\n".join(bottom)
        # To the beginning of the row, and right from there: a column that is counted wrongly moves nothing else.
        right = f"\x1b[{cursor}C" if cursor else ""
        self._put(f"{self._erasing()}{said}{_WRAP_OFF}{drawn}\r{right}{_WRAP_ON}")
        self._drawn, self._place = bottom, (bottom, cursor)

    def _bottom(self, columns: int, height: int) -> tuple[list[str], int, bool]:
        """The rows, the cursor's column in the last, and whether a question's subject is not all there."""
        room = max(1, height - 1)
        is_cut = False
        line, cursor = self._editor.row(columns, PROMPT)
        bottom = [line]
        if self._question is not None:
            asked = wrapped(as_line(self._asks, characters_max=LINE_CHARACTERS_MAX), columns, indent="  ")
            # The keys are at the end of it, and are what must be seen.
            shown = asked[-max(1, room - 2) :]
            bottom = [*(self._style.yellow(row) for row in shown), *bottom]
            free = max(0, room - len(bottom) - 1)
            subject = list(itertools.islice(block_rows(self._question.subject, columns), free + 1))
            is_cut = len(subject) > free or len(shown) < len(asked)
            if len(subject) > free:
                more = cut("┊ … all of it is written above", columns)
                subject = [*subject[: free - 1], self._style.yellow(more)] if free else []
            bottom = [*subject, *bottom]
        elif self._status.what is not None and room > 1:
            bottom = [self._style.dim(self._status.row(columns - 1)), *bottom]
        if self._open:
            # Of a long one its end.
            most = max(1, (room - len(bottom)) // 2)
            tail = self._open[-most * columns :].expandtabs()
            bottom = [*list(rows(tail, columns))[-most:], *bottom]
        return bottom[-room:], cursor, is_cut

    def _erasing(self) -> str:
        if not self._drawn:
            return ""
        up = len(self._drawn) - 1
        self._drawn, self._place = [], None
        rise = f"\x1b[{up}A" if up else ""
        return f"\r{rise}\x1b[J"

    def _put(self, sequence: str) -> None:
        try:
            sys.stdout.write(sequence)
            sys.stdout.flush()
        except OSError as exc:
            raise CannotWrite(f"cannot write to the terminal: {exc.strerror or exc}") from exc
