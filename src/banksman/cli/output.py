"""Output of the CLI: safe text, widths, tables and JSON on stdout, messages on stderr.

`as_text` and `as_line` make text of an agent safe for a terminal. `width`, `cut` and `wrapped` fit
it to columns. `Style` says whether a stream gets colours, redrawn lines or plain text.
`ProgressMessage` tells a person what takes long. The screens of sessions are in `tui/screen.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import threading
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TextIO, cast

from banksman.errors import MachineError

# Each stream gets colours, redrawn lines, or only plain text.
#
# A pipe gets plain text. So does a terminal whose user asks for it (`NO_COLOR`) or that cannot do
# better (`TERM=dumb`).

# The size of a terminal that does not report one.
COLUMNS, ROWS = 80, 24

# A word of at most this width is not left alone on the last row.
SHORT_COLUMNS_MAX = 2
_MARKS = ("Mn", "Me", "Cf")
# The later parts of a Korean syllable. They combine with the first part and take no column.
_JOINED = range(0x1160, 0x1200)
# C0 except tab and newline, DEL, and C1.
_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
# Characters without a visible shape: the soft hyphen, the combining joiner, fillers, direction
# marks and overrides, zero-width characters, line separators, annotations, variation selectors and
# tags. Also lone surrogates, which cannot be encoded for a terminal at all.
_SHAPELESS = (
    r"\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    r"\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff\ud800-\udfff"
)
# Two of them are part of normal spelling. Emoji use one joiner (a family) and one selector (a
# coloured heart); Arabic and Indic scripts use joiners between letters. A second one in a row never
# is.
_PICTURE = (
    r"\xa9\xae\u203c\u2049\u2122\u2139\u2190-\u21ff\u2300-\u23ff\u24c2\u25a0-\u27bf\u2900-\u297f\u2b00-\u2bff"
    r"\u3030\u303d\u3297\u3299\U0001f000-\U0001faff"
)
_LETTER = r"\u0600-\u0dff\u1000-\u109f\u1780-\u17b3\u17b6-\u180a"
_SPELLING = re.compile(
    rf"(?<=[{_PICTURE}])[\ufe0e\ufe0f]|(?<=[#*0-9])\ufe0f(?=\u20e3)"
    rf"|(?<=[{_PICTURE}\ufe0f])\u200d(?=[{_PICTURE}])|(?<=[{_LETTER}])[\u200c\u200d](?=[{_LETTER}])"
)
_IN_TEXT = re.compile(rf"[{_CONTROLS}{_SHAPELESS}]")
_IN_LINE = re.compile(rf"[\t\n{_CONTROLS}{_SHAPELESS}]")
_SHORT = {"\t": "\\t", "\n": "\\n", "\r": "\\r"}
# A table column narrower than this is unreadable. The terminal wraps the line instead.
COLUMN_WIDTH_MIN = 6
# After this wait the program tells the user what it waits for.
PATIENCE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Style:
    """Capabilities of one output stream.

    `is_drawn`: the terminal understands control sequences, so lines can be redrawn. `has_colour`:
    colours are allowed, too.
    """

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
    """Return the style of a stream."""
    # Python sets the stream to None if it was closed when this process started.
    if stream is None or not is_terminal(stream):
        return PLAIN
    is_able = os.environ.get("TERM", "dumb") not in ("", "dumb")
    has_colour = is_able and not os.environ.get("NO_COLOR")
    return Style(is_terminal=True, is_drawn=is_able, has_colour=has_colour)


def is_terminal(stream: TextIO | None) -> bool:
    """Return whether the stream is an open terminal."""
    try:
        return stream is not None and stream.isatty()
    except ValueError:  # The stream was closed later.
        return False


def stdout_style() -> Style:
    """Return the style of stdout."""
    return style_of(cast("TextIO | None", sys.stdout))


def stderr_style() -> Style:
    """Return the style of stderr."""
    return style_of(cast("TextIO | None", sys.stderr))


def size_of(stream: TextIO | None) -> tuple[int, int]:
    """Return the current columns and rows of the terminal."""
    try:
        assert stream is not None
        found = os.get_terminal_size(stream.fileno())
    except (OSError, ValueError, AssertionError):
        return COLUMNS, ROWS
    # A terminal whose size was never set reports zero.
    return found.columns or COLUMNS, found.lines or ROWS


# Display width: most letters take one column, many Asian letters and most emoji two, combining
# marks none. Terminals disagree about some characters, so drawing must not break if this count is
# wrong.


@lru_cache(maxsize=4096)
def _columns(character: str) -> int:
    if unicodedata.category(character) in _MARKS or ord(character) in _JOINED:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def width(text: str) -> int:
    """Return the display width in columns. Expects one line of safe text."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def cut(text: str, columns: int) -> str:
    """Truncate text to this width, with an ellipsis."""
    if width(text) <= columns:
        return text
    if columns < 1:
        return ""
    kept = next(rows(text, columns - 1), "")
    # The first letter may be wider than the whole width.
    return f"{kept}…" if width(kept) < columns else "…"


def padded(text: str, columns: int) -> str:
    """Fill text with spaces to this width."""
    return text + " " * (columns - width(text))


def rows(text: str, columns: int) -> Iterator[str]:
    """Split text at the width, in the middle of words, as a terminal does.

    A letter wider than the row gets a row for itself.
    """
    begin = used = 0
    for index, character in enumerate(text):
        size = _columns(character)
        if used + size > columns and index > begin:
            yield text[begin:index]
            begin, used = index, 0
        used += size
    if begin < len(text):
        yield text[begin:]


def wrapped(text: str, columns: int, *, indent: str = "") -> list[str]:
    """Wrap text between words, and split words longer than a row.

    `indent`: the prefix of every row after the first.
    """
    found: list[str] = []
    line = ""
    words = text.lstrip(" ").split(" ")
    # Leading spaces are part of the text.
    words[0] = text[: len(text) - len(text.lstrip(" "))] + words[0]
    for word in words:
        joined = f"{line} {word}" if line else f"{indent if found else ''}{word}"
        if width(joined) <= columns:
            line = joined
            continue
        if width(word) <= SHORT_COLUMNS_MAX and " " in line.strip():
            # Keeps `4 s` together: a unit alone on a row means nothing.
            line, _, before = line.rpartition(" ")
            word = f"{before} {word}"  # noqa: PLW2901
        if line:
            found.append(line)
        *whole, line = list(rows(f"{indent if found else ''}{word}", max(columns, 1))) or [""]
        found += whole
    return [*found, line]


# Output for a person, or for a program that reads the pipe.
#
# A terminal must not obey the text of an agent. Tool output, a file name or a model's words may
# hold sequences that clear the screen, rename the window or type. In text mode every control
# character is shown as an escape. So is every character without a shape, because it could reverse
# the direction of the text, or hide words that a program still sees. In JSON the encoding does
# this.


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if _SPELLING.match(found.string, found.start()):
        return character
    code = ord(character)
    long = f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else long)


def as_text(text: str) -> str:
    """Make text safe for a terminal. Keeps newlines and tabs."""
    return _IN_TEXT.sub(_escape, text)


def as_line(value: object, *, characters_max: int | None = None) -> str:
    """Make text safe and put it on one line. `characters_max`: truncate with an ellipsis."""
    text = str(value)
    if characters_max is not None and len(text) > characters_max:
        text = text[: characters_max - 1] + "…"
    return _IN_LINE.sub(_escape, text)


class CannotWrite(MachineError):
    """stdout cannot be written, because of a full disk for example.

    A reader that closed the pipe is a `BrokenPipeError` instead.
    """


def write_terminal(sequence: str) -> None:
    """Write text with control sequences to the terminal, and flush it. Raises `CannotWrite`."""
    try:
        sys.stdout.write(sequence)
        sys.stdout.flush()
    except OSError as exc:
        raise CannotWrite(f"cannot write to the terminal: {exc.strerror or exc}") from exc


def say(text: str = "", *, end: str = "\n") -> None:
    """Write to stdout and flush, so that a reader of the pipe sees each event immediately."""
    # sys.stdout is missing if it was closed when this process started (`>&-`).
    stdout = cast("TextIO | None", sys.stdout)
    if stdout is None:
        raise CannotWrite("cannot write to stdout: it is closed")
    try:
        stdout.write(text + end)
        stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        raise CannotWrite(f"cannot write to stdout: {exc.strerror or exc}") from exc


def say_aside(text: str) -> None:
    """Print a message for a person on stderr. Programs that read stdout do not see it."""
    # stderr may be closed or full. That is no reason to fail.
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    """Write a value to stdout as one line of JSON."""
    # ASCII, so that the JSON is the same in every locale and fits one line. DEL is ASCII, but a
    # control character for a terminal.
    say(json.dumps(value, separators=(",", ":")).replace("\x7f", "\\u007f"))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print a table with columns as wide as their content.

    On a narrower terminal the widest columns are cut, with an ellipsis. A pipe gets everything.
    """

    cells = [
        list(head),
        *([as_line("-" if cell is None or cell == "" else cell) for cell in row] for row in rows),
    ]
    widths = [max(width(row[column]) for row in cells) for column in range(len(head))]
    if stdout_style().is_terminal:
        room = size_of(sys.stdout)[0]
        while sum(widths) + 2 * (len(widths) - 1) > room and max(widths) > COLUMN_WIDTH_MIN:
            widths[widths.index(max(widths))] -= 1
    for row in cells:
        cut_row = (padded(cut(cell, size), size) for cell, size in zip(row, widths, strict=True))
        say("  ".join(cut_row).rstrip())


def speak_any_language() -> None:
    """Print characters that the locale lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        # The stream may be None, or a replacement by a test.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]


def close_stdout() -> None:
    """Redirect stdout to /dev/null.

    Otherwise the interpreter retries a failed write at exit.
    """
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)


class ProgressMessage:
    """Context manager that prints what the program is doing, if it takes long.

    Acts only in the main thread. A full-screen verb does not block there, and shows its progress on
    the screen.
    """

    def __init__(self, doing: str) -> None:
        self._timer: threading.Timer | None = None
        if has_person() and threading.current_thread() is threading.main_thread():
            self._timer = threading.Timer(PATIENCE_SECONDS, say_progress, (doing,))
            self._timer.daemon = True

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.start()

    def __exit__(self, *exc_info: object) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()


def say_progress(doing: str) -> None:
    """Print a progress message on stderr, if a person can see it."""
    if has_person():
        say_aside(f"banksman: {doing} …")


def has_person() -> bool:
    """Return whether stderr is a terminal.

    A program that reads stderr expects no progress messages.
    """
    return sys.stderr is not None and sys.stderr.isatty()


def how_to_answer(session: str, question: str) -> str:
    """Return the command that answers a question, quoted for a shell."""
    return f"banksman answer {shlex.quote(session)} {shlex.quote(question)} allow|deny"
