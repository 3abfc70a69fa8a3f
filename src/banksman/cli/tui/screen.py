"""Screens that show a turn: streamed text, messages, questions and the current activity.

`Screen` is the protocol that `event_view.py` writes to. `PlainScreen` only appends, for pipes and
terminals. `LiveScreen` keeps a question and an input line at the bottom, for `attach`.
`ScreenStatus` is the status line of both. The table of `top` is in `session_board.py`.
"""

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
    write_terminal,
)
from banksman.cli.tui.keyboard import LineEditor
from banksman.cli.tui.question_view import QuestionView, block_rows

# Seconds of silence after which the status line appears.
QUIET_SECONDS = 1.0
TICK_SECONDS = 0.25
_SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"

ROOMY_COLUMNS = 40
# Maximum length of a message line. Longer ones are cut, whatever their source.
LINE_CHARACTERS_MAX = 2000
# Columns left free at the right edge: terminals disagree about the width of some letters.
_MARGIN = 8
PROMPT = "> "


class TextStyle(enum.Enum):
    """Look of a message line."""

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
    """Output surface for a turn. It trusts no input and escapes everything it shows."""

    @property
    def is_roomy(self) -> bool:
        """Whether a person watches and there is room for optional details."""
        ...

    @property
    def is_watched(self) -> bool:
        """Whether the screen is a terminal that can be redrawn and a person sees live changes."""
        ...

    def text(self, piece: str) -> None:
        """Append text of the agent. It may end in the middle of a line."""
        ...

    def end_text(self) -> None:
        """End the agent's current line. Its next text begins on a new line."""
        ...

    def line(self, text: str, look: TextStyle = TextStyle.DIM) -> None:
        """Print a message line of Banksman."""
        ...

    def block(self, lines: Sequence[str]) -> None:
        """Print the subject of a decision in full, marked as text of the agent."""
        ...

    def busy(self, what: str | None) -> None:
        """Set the current activity; None if nothing happens."""
        ...

    def tick(self) -> None:
        """Redraw what has changed. Called when time has passed or output arrived."""
        ...


class ScreenStatus:
    """Status line with the current activity and its duration."""

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
        """Return the status line for this width.

        If there is not enough room, the hint is dropped first, then the activity is cut.
        """
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
    """Format seconds for people, such as "3 min 05 s"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours < 48 else f"{hours // 24} d {hours % 24} h"


def duration_in_words(seconds: float) -> str:
    """Format the duration of something that is over."""
    return seconds_in_words(seconds) if seconds >= 10 else f"{max(0.0, seconds):.1f} s"


# Screen that only appends: the agent's text to stdout, everything else to stderr. For pipes and
# terminals.
#
# On a terminal a status line appears below the text after some silence. It is erased before any
# other output. While a line of the agent is open, the status is drawn to the right of it, and the
# cursor is put back. So no column must be known exactly, and the status cannot damage the agent's
# text.


class PlainScreen:
    """Screen that only appends.

    `has_text`: show the agent's text. `has_lines`: show message lines; without it only questions
    and failures are shown.
    """

    def __init__(
        self, *, hint: str = "Ctrl-C interrupts", has_text: bool = True, has_lines: bool = True
    ) -> None:
        self._out, self._err = stdout_style(), stderr_style()
        self._has_text, self._has_lines = has_text, has_lines
        self._status = ScreenStatus(hint)
        self._is_drawn = False
        # The column at which the agent's open line ends. Only an estimate of the room to the right
        # of it.
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
        for row in (
            wrapped(line, size_of(sys.stderr)[0], indent="  ") if self._err.is_terminal else (line,)
        ):
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
        """Erase the status line and end an open line."""
        self._erase()
        with contextlib.suppress(Exception):
            self.end_text()

    @property
    def _is_ours(self) -> bool:
        """Whether this process is in the foreground.

        In the background another job uses the terminal.
        """
        try:
            return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
        except (OSError, ValueError):
            return True

    def _begin_line(self) -> None:
        self._said()
        if self._is_open and self._out.is_terminal and self._err.is_terminal:
            # stdout and stderr are the same terminal: the agent's next text begins at the left
            # edge.
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
            # The cursor is at the end of the agent's line, or at the left edge.
            self._put("\x1b[K")

    def _put(self, sequence: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(sequence)
            sys.stderr.flush()


# Screen with an input line at the bottom.
#
# Complete lines are written once and never touched again. Everything else is a few rows at the
# bottom, redrawn as a whole on each change: the agent's open line, the activity, the question and
# the input line. The terminal does not wrap these rows. Each is cut to the width here, so their
# number is known, whatever width the terminal gives a letter. A line of the agent is written whole
# when it ends, so that the terminal wraps it and the user can copy it.

_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
_WRAP_ON, _WRAP_OFF = "\x1b[?7h", "\x1b[?7l"


class LiveScreen:
    """Screen with an input line. Call `enter` before the first draw, and `leave` in any case."""

    is_watched = True

    def __init__(self, editor: LineEditor) -> None:
        self._editor = editor
        self._style: Style = stdout_style()
        self._status = ScreenStatus("Ctrl-C interrupts")
        # The question and the line with its keys. `_is_kept`: its subject was written in full
        # above.
        self._question: QuestionView | None = None
        self._asks = ""
        self._is_kept = False
        self._complete: list[str] = []
        # The agent's open line.
        self._open = ""
        # The rows at the bottom; the cursor is in the last one.
        self._drawn: list[str] = []
        self._place: tuple[list[str], int] | None = None

    @property
    def is_roomy(self) -> bool:
        return size_of(sys.stdout)[0] >= ROOMY_COLUMNS

    @property
    def moves(self) -> bool:
        """Whether the screen changes with time."""
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
        """Print a message line. It goes above the agent's open line, which stays whole."""
        safe = as_line(text, characters_max=LINE_CHARACTERS_MAX)
        for row in wrapped(safe, size_of(sys.stdout)[0], indent="  "):
            self._complete.append(f"{look.on(self._style, row)}\n")

    def block(self, lines: Sequence[str]) -> None:
        self._complete.extend(f"{row}\n" for row in block_rows(lines, size_of(sys.stdout)[0]))

    def ask(self, question: QuestionView | None, line: str = "") -> None:
        """Show a question at the bottom with as much of its subject as fits; None removes it.

        The subject of a removed question stays on the screen as a block.
        """
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
        """Prepare the terminal."""
        write_terminal(_PASTE_ON)

    def leave(self) -> None:
        """Keep the complete lines on the terminal and erase the rest."""
        self.end_text()
        said = "".join(self._complete)
        self._complete.clear()
        write_terminal(f"{self._erasing()}{said}{_PASTE_OFF}")

    def redraw(self) -> None:
        """Draw everything at the next tick, because the terminal has changed."""
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
        # Return to the left edge, then move right. A miscounted column then affects only the
        # cursor.
        right = f"\x1b[{cursor}C" if cursor else ""
        write_terminal(f"{self._erasing()}{said}{_WRAP_OFF}{drawn}\r{right}{_WRAP_ON}")
        self._drawn, self._place = bottom, (bottom, cursor)

    def _bottom(self, columns: int, height: int) -> tuple[list[str], int, bool]:
        """Return the rows, the cursor's column in the last row, and whether a question was cut."""
        room = max(1, height - 1)
        is_cut = False
        line, cursor = self._editor.row(columns, PROMPT)
        bottom = [line]
        if self._question is not None:
            asked = wrapped(
                as_line(self._asks, characters_max=LINE_CHARACTERS_MAX), columns, indent="  "
            )
            # The keys are at the end of the question and must be visible.
            shown = asked[-max(1, room - 2) :]
            bottom = [*(self._style.yellow(row) for row in shown), *bottom]
            free = max(0, room - len(bottom) - 1)
            subject = list(itertools.islice(block_rows(self._question.subject, columns), free + 1))
            is_cut = len(subject) > free or len(shown) < len(asked)
            if len(subject) > free:
                more = cut("┊ … the full text is above", columns)
                subject = [*subject[: free - 1], self._style.yellow(more)] if free else []
            bottom = [*subject, *bottom]
        elif self._status.what is not None and room > 1:
            bottom = [self._style.dim(self._status.row(columns - 1)), *bottom]
        if self._open:
            # Only the end of a long open line is shown.
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
