"""Keyboard input: switch the terminal to single keys, decode its bytes, and edit a line.

`Keyboard` sets and restores the mode of the terminal. It is not raw mode: Ctrl-C and Ctrl-Z stay
signals. `Decoder` turns bytes into keys and pastes. `LineEditor` is the input line with its
history. It draws nothing: `screen.py` does.
"""

from __future__ import annotations

import codecs
import contextlib
import os
import re
import termios
from types import TracebackType
from typing import Self

from banksman.cli.output import as_line, cut, width

# Keys: the terminal mode that delivers each key immediately, and the decoding of its bytes.
#
# The mode is restored on every exit. Ctrl-C and Ctrl-Z stay signals: they reach the whole
# foreground group of the terminal, and work while this process is too busy to read.

# An escape sequence that does not end within this length is invalid.
_SEQUENCE_BYTES_MAX = 32
# Pasted text beyond this size is dropped.
PASTE_BYTES_MAX = 1 << 20
_PASTE_BEGIN, _PASTE_END = b"\x1b[200~", b"\x1b[201~"
_SEQUENCE = re.compile(rb"\x1b(?:\[[0-?]*[ -/]*[@-~]|O[@-~]|[^\[O\x1b])")
_NAMES = {
    b"\x1b[A": "up",
    b"\x1b[B": "down",
    b"\x1b[C": "right",
    b"\x1b[D": "left",
    b"\x1b[H": "home",
    b"\x1b[F": "end",
    b"\x1bOA": "up",
    b"\x1bOB": "down",
    b"\x1bOC": "right",
    b"\x1bOD": "left",
    b"\x1bOH": "home",
    b"\x1bOF": "end",
    b"\x1b[1~": "home",
    b"\x1b[4~": "end",
    b"\x1b[3~": "delete",
    b"\x1b[1;5C": "word-right",
    b"\x1b[1;5D": "word-left",
    b"\x1bb": "word-left",
    b"\x1bf": "word-right",
    b"\x1b\r": "newline",
}
_CONTROLS = {
    0x01: "home",
    0x02: "left",
    0x04: "end-of-input",
    0x05: "end",
    0x06: "right",
    0x08: "backspace",
    0x09: "tab",
    0x0A: "newline",
    0x0B: "erase-right",
    0x0C: "redraw",
    0x0D: "enter",
    0x0E: "down",
    0x10: "up",
    0x15: "erase-line",
    0x17: "erase-word",
    0x7F: "backspace",
}

# Maximum length of the line. Further typed or pasted text is dropped.
LINE_CHARACTERS_MAX = 200_000
HISTORY_MAX = 200
_NEWLINE = "⏎"


class KeyPress(str):
    """A key that is not a letter, by its name. A letter is a plain one-character string."""

    __slots__ = ()


class Pasted(str):
    """Pasted text. Nothing in it counts as a key."""

    __slots__ = ()


class Decoder:
    """Decode bytes, split anywhere, into letters, keys and pastes.

    Unknown sequences are dropped.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._pasted: bytearray | None = None
        self._tail = b""
        # A letter may be split between two reads, too. An invalid byte becomes a replacement
        # character.
        self._letters = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def is_waiting(self) -> bool:
        """Whether the last byte was an Escape, which may be the key or the start of a sequence."""
        return self._rest == b"\x1b"

    def flush(self) -> list[str]:
        """Return the Escape key: no byte followed it in time."""
        if not self.is_waiting:
            return []
        self._rest = b""
        return [KeyPress("escape")]

    def feed(self, data: bytes) -> list[str]:
        """Decode bytes."""
        found: list[str] = []
        data = self._rest + data
        self._rest = b""
        while data:
            if self._pasted is not None:
                data = self._paste(data, found)
            elif data[:1] == b"\x1b":
                size = self._sequence(data, found)
                if size == 0:
                    self._rest = data
                    return found
                data = data[size:]
            elif data[0] in _CONTROLS:
                found.append(KeyPress(_CONTROLS[data[0]]))
                data = data[1:]
            else:
                size = next(
                    (at for at, byte in enumerate(data) if byte < 0x20 or byte == 0x7F), len(data)
                )
                # An unknown control character is skipped.
                found += self._letters.decode(data[:size])
                data = data[size or 1 :]
        return found

    def _sequence(self, data: bytes, found: list[str]) -> int:
        """Decode an escape sequence. Return its length; 0 if it is incomplete."""
        matched = _SEQUENCE.match(data)
        if matched is None:
            if data[:2] == b"\x1b\x1b":
                found.append(KeyPress("escape"))
                return 1
            return 0 if len(data) < _SEQUENCE_BYTES_MAX else 1
        if matched[0] == _PASTE_BEGIN:
            self._pasted = bytearray()
        elif matched[0] in _NAMES:
            found.append(KeyPress(_NAMES[matched[0]]))
        return matched.end()

    def _paste(self, data: bytes, found: list[str]) -> bytes:
        assert self._pasted is not None
        # The end mark of a paste may be split between reads. So the last few bytes are searched
        # again together with the next ones.
        window = self._tail + data
        end = window.find(_PASTE_END)
        sure = window[:end] if end >= 0 else window[: 1 - len(_PASTE_END)]
        self._pasted += sure[: max(0, PASTE_BYTES_MAX - len(self._pasted))]
        if end < 0:
            self._tail = window[len(sure) :]
            return b""
        found.append(Pasted(bytes(self._pasted).decode(errors="replace")))
        self._pasted, self._tail = None, b""
        return window[end + len(_PASTE_END) :]


class Keyboard:
    """The controlling terminal of this process.

    Between `enter` and `leave` each key arrives immediately. Raises OSError if the process has no
    terminal.
    """

    def __init__(self) -> None:
        # stdin is not used, because the prompt may come from it.
        self.fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        self._before: list[object] | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this process is in the foreground.

        In the background, changing the mode would stop it.
        """
        try:
            return os.tcgetpgrp(self.fd) == os.getpgrp()
        except OSError:
            return False

    def enter(self) -> None:
        """Set the mode. Earlier input is discarded, because it was meant for something else."""
        if self._before is not None:
            return
        self._before = termios.tcgetattr(self.fd)
        wanted = termios.tcgetattr(self.fd)
        # Enter and Ctrl-J become different keys. Ctrl-S must not stop the output. Ctrl-\ would kill
        # the process and leave the terminal in this mode.
        wanted[0] &= ~(termios.ICRNL | termios.INLCR | termios.IGNCR | termios.IXON)
        wanted[3] &= ~(termios.ICANON | termios.ECHO | termios.IEXTEN)
        wanted[3] |= termios.ISIG
        controls = list(wanted[6])
        controls[termios.VMIN], controls[termios.VTIME] = 1, 0
        controls[termios.VQUIT] = b"\x00"
        wanted[6] = controls
        termios.tcsetattr(self.fd, termios.TCSAFLUSH, wanted)

    def leave(self) -> None:
        """Restore the mode."""
        if self._before is None:
            return
        before, self._before = self._before, None
        # If the terminal is gone, there is nothing to restore.
        with contextlib.suppress(termios.error, OSError):
            termios.tcsetattr(self.fd, termios.TCSADRAIN, before)  # pyright: ignore[reportArgumentType]

    def close(self) -> None:
        """Restore the mode and close the terminal."""
        self.leave()
        os.close(self.fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def open_keyboard() -> Keyboard | None:
    """Open the keyboard. Return None without a terminal that this process may use now."""
    try:
        keyboard = Keyboard()
    except OSError:
        return None
    if not keyboard.is_ours:
        keyboard.close()
        return None
    return keyboard


class LineEditor:
    """Editor of the input line, with history.

    Pure: keys in, a row to draw out.

    The line takes one row, however long it is, and shows the part around the cursor. Several rows
    would have to be counted, and a wrong count damages the text above them. Newlines in the line
    (pasted, or typed by Ctrl-J) are shown as a sign.
    """

    def __init__(self) -> None:
        self.text = ""
        self.cursor = 0
        self._history: list[str] = []
        # The position in the history. The position after the last entry is the line being typed.
        self._place = 0
        self._typed = ""

    def take(self, key: str) -> str | None:
        """Handle a key. Return the line if this key completes it."""
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
        """Empty the line."""
        self.text, self.cursor = "", 0
        self._place = len(self._history)

    def put_back(self, line: str) -> None:
        """Restore a line that could not be sent, unless the user is already typing the next one."""
        if not self.text:
            self.text, self.cursor = line, len(line)

    def row(self, columns: int, prompt: str) -> tuple[str, int]:
        """Return the row with the prompt, and the cursor's column. Never wider than `columns`."""
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
                self.cursor += (
                    len(rest) - len(rest.lstrip()) + len((rest.split(None, 1) or [""])[0])
                )
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
    """Return the end of the text that fits this width."""
    kept = text[-max(columns, 0) :] if columns > 0 else ""
    while width(kept) > columns:
        kept = kept[1:]
    return kept


def _before(text: str, cursor: int) -> int:
    """Return the position one letter to the left, past its combining marks."""
    cursor = max(0, cursor - 1)
    while cursor and not width(text[cursor]):
        cursor -= 1
    return cursor


def _after(text: str, cursor: int) -> int:
    """Return the position one letter to the right, past its combining marks."""
    cursor = min(len(text), cursor + 1)
    while cursor < len(text) and not width(text[cursor]):
        cursor += 1
    return cursor
