"""What is said to a person, or to the program at the other end of a pipe.

What an agent says is not for the terminal to obey: a tool's output, a file's name or a model's words may hold sequences
that clear the screen, rename the window, or type. In text mode every control character is shown as its escape, and so
is what turns the direction of the text round. In JSON the encoding does that.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from typing import Any, TextIO, cast

from banksman.errors import MachineError

# C0 but for tab and newline, DEL and C1; then what is invisible and moves the text about: marks and overrides of
# direction, the separators of lines, and halves of a pair, which no terminal could be sent at all.
_CONTROLS = [*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0)]
_INVISIBLE = [0x061C, 0x200E, 0x200F, 0x2028, 0x2029, *range(0x202A, 0x202F), *range(0x2066, 0x206A), 0xFEFF]


# A column of a table that is cut to less is not read any more; the terminal may wrap the line then.
COLUMN_WIDTH_MIN = 6


def _escape(code: int) -> str:
    if code == 0x0D:
        return "\\r"
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


_TEXT = {code: _escape(code) for code in (*_CONTROLS, *_INVISIBLE, *range(0xD800, 0xE000))}
_LINE = {**_TEXT, 0x09: "\\t", 0x0A: "\\n"}


def as_text(text: str) -> str:
    """Safe for a terminal, with its lines and tabs as they were."""
    return text.translate(_TEXT)


def as_line(value: object, *, characters_max: int | None = None) -> str:
    """Safe, and on one line; cut with a mark if it is longer than that."""
    text = str(value)
    if characters_max is not None and len(text) > characters_max:
        text = text[: characters_max - 1] + "…"
    return text.translate(_LINE)


class CannotWrite(MachineError):
    """Our stdout takes nothing more: a full disk, say. That nobody reads it any more is a `BrokenPipeError`."""


def say(text: str = "", *, end: str = "\n") -> None:
    """To stdout, at once: whoever reads us through a pipe sees an event when it comes."""
    # Closed when we were started (`>&-`), it is not there at all.
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
    """To stderr: what a person wants to know, and a program that takes our output does not."""
    # Nobody may be there to hear it, and that is no reason to fail.
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    # ASCII, so that it is the same JSON in every locale, and one line. DEL is ASCII, and yet nothing for a terminal.
    say(json.dumps(value, separators=(",", ":")).replace("\x7f", "\\u007f"))


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as what is in them. On a terminal that is narrower the widest are cut, with a mark; a pipe gets
    everything."""
    # Here, because not every verb has one, and some must start fast.
    from banksman.cli.saying.style import size_of, stdout_style  # noqa: PLC0415
    from banksman.cli.saying.widths import cut, padded, width  # noqa: PLC0415

    cells = [list(head), *([as_line("-" if cell is None or cell == "" else cell) for cell in row] for row in rows)]
    widths = [max(width(row[column]) for row in cells) for column in range(len(head))]
    if stdout_style().is_terminal:
        room = size_of(sys.stdout)[0]
        while sum(widths) + 2 * (len(widths) - 1) > room and max(widths) > COLUMN_WIDTH_MIN:
            widths[widths.index(max(widths))] -= 1
    for row in cells:
        cut_row = (padded(cut(cell, size), size) for cell, size in zip(row, widths, strict=True))
        say("  ".join(cut_row).rstrip())


def speak_any_language() -> None:
    """A letter that the locale does not have is shown as its escape, and does not end the program."""
    for stream in (sys.stdout, sys.stderr):
        # There may be none at all, or one of a test's.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportUnknownMemberType, reportAttributeAccessIssue]


def close_stdout() -> None:
    """What could not be written must not be tried again, and complained of, when the interpreter leaves."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
