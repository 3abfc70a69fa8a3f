"""A screen with a line to type in, below what is said.

What is complete is written once and never touched again. What is not (the agent's last line, what is going on, what it
asks, the line that is typed) is a few rows at the bottom, which are drawn over as a whole when anything comes. The
terminal does not wrap them: each is cut to the width here, so their number is known, however wide it thinks a letter
is. A line of the agent's is written whole when it has ended, for the terminal to wrap and to copy.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence

from banksman.cli.output.terminal import CannotWrite, Style, as_line, as_text, cut, rows, size_of, stdout_style, wrapped
from banksman.cli.tui.line_editor import LineEditor
from banksman.cli.tui.question_view import QuestionView, block_rows
from banksman.cli.tui.screen import LINE_CHARACTERS_MAX, ROOMY_COLUMNS, ScreenStatus, TextStyle

PROMPT = "> "
_PASTE_ON, _PASTE_OFF = "\x1b[?2004h", "\x1b[?2004l"
_WRAP_ON, _WRAP_OFF = "\x1b[?7h", "\x1b[?7l"


class Live:
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
