"""A line that is being typed. Pure: keys in, a row to draw out.

It has one row however long it is, and shows the part around the cursor: a prompt of many rows would have to be counted,
and what is counted wrongly tears what is above it. A line may hold newlines (pasted, or by Ctrl-J), shown as a sign.
"""

from __future__ import annotations

from banksman.cli.output.terminal import as_line, cut, width
from banksman.cli.tui.keyboard import KeyPress, Pasted

# More is not typed, and what is pasted beyond it is not taken.
LINE_CHARACTERS_MAX = 200_000
HISTORY_MAX = 200
_NEWLINE = "⏎"


class LineEditor:
    def __init__(self) -> None:
        self.text = ""
        self.cursor = 0
        self._history: list[str] = []
        # Where in the history we are; at its end is what was being typed.
        self._place = 0
        self._typed = ""

    def take(self, key: str) -> str | None:
        """The line, if this key ends it."""
        if isinstance(key, Pasted):
            self._insert(key.replace("\r\n", "\n").replace("\r", "\n"))
        elif not isinstance(key, KeyPress):
            self._insert(key)
        elif key == "enter":
            return self._entered()
        else:
            self._edit(key)
        return None

    def clear(self) -> None:
        self.text, self.cursor = "", 0
        self._place = len(self._history)

    def put_back(self, line: str) -> None:
        """It could not be sent: whoever typed it has it again, unless the next one is being typed already."""
        if not self.text:
            self.text, self.cursor = line, len(line)

    def row(self, columns: int, prompt: str) -> tuple[str, int]:
        """What is to be drawn, prompt included, and where the cursor is in it. Never wider than that."""
        prompt = cut(prompt, max(columns - 2, 0))
        room = max(columns - width(prompt) - 1, 1)
        before, after = _shown(self.text[: self.cursor]), _shown(self.text[self.cursor :])
        kept = _end_of(before, room)
        if kept != before:
            kept = "…" + _end_of(before, room - 1) if room > 1 else kept
        return prompt + kept + cut(after, room - width(kept)), width(prompt) + width(kept)

    def _insert(self, text: str) -> None:
        text = text[: max(0, LINE_CHARACTERS_MAX - len(self.text))]
        self.text = self.text[: self.cursor] + text + self.text[self.cursor :]
        self.cursor += len(text)

    def _entered(self) -> str:
        line = self.text
        if line.strip() and (not self._history or self._history[-1] != line):
            self._history = [*self._history, line][-HISTORY_MAX:]
        self.clear()
        return line

    def _edit(self, key: KeyPress) -> None:
        match str(key):
            case "newline":
                self._insert("\n")
            case "left":
                self.cursor = _before(self.text, self.cursor)
            case "right":
                self.cursor = _after(self.text, self.cursor)
            case "word-left":
                self.cursor = self._word_begin()
            case "word-right":
                rest = self.text[self.cursor :]
                self.cursor += len(rest) - len(rest.lstrip()) + len((rest.split(None, 1) or [""])[0])
            case "home":
                self.cursor = 0
            case "end":
                self.cursor = len(self.text)
            case "backspace":
                self._erase(_before(self.text, self.cursor), self.cursor)
            case "delete":
                self._erase(self.cursor, _after(self.text, self.cursor))
            case "erase-line":
                self._erase(0, self.cursor)
            case "erase-right":
                self._erase(self.cursor, len(self.text))
            case "erase-word":
                self._erase(self._word_begin(), self.cursor)
            case "up":
                self._recall(self._place - 1)
            case "down":
                self._recall(self._place + 1)
            case _:
                pass

    def _erase(self, begin: int, end: int) -> None:
        self.text = self.text[:begin] + self.text[end:]
        self.cursor = begin

    def _word_begin(self) -> int:
        before = self.text[: self.cursor].rstrip()
        return len(before) - len((before.rsplit(None, 1) or [""])[-1])

    def _recall(self, place: int) -> None:
        if not 0 <= place <= len(self._history):
            return
        if self._place == len(self._history):
            self._typed = self.text
        self._place = place
        self.text = self._typed if place == len(self._history) else self._history[place]
        self.cursor = len(self.text)


def _shown(text: str) -> str:
    return as_line(text.replace("\n", _NEWLINE))


def _end_of(text: str, columns: int) -> str:
    """The last of it, as much as there is room for."""
    kept = text[-max(columns, 0) :] if columns > 0 else ""
    while width(kept) > columns:
        kept = kept[1:]
    return kept


def _before(text: str, cursor: int) -> int:
    """A letter back, with the marks that sit on it."""
    cursor = max(0, cursor - 1)
    while cursor and not width(text[cursor]):
        cursor -= 1
    return cursor


def _after(text: str, cursor: int) -> int:
    cursor = min(len(text), cursor + 1)
    while cursor < len(text) and not width(text[cursor]):
        cursor += 1
    return cursor
