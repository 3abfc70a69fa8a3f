"""Output of the command line: terminal control, messages on stderr, and events in words."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TextIO, cast

from banksman.errors import MachineError

# What a stream of ours may be sent: colour, a line that is drawn over, or words and nothing else.
#
# A pipe gets words. So does a terminal whose user says so (`NO_COLOR`) or that can do no better (`TERM=dumb`).

# Where nobody says how wide a terminal is.
COLUMNS, ROWS = 80, 24

# A word of so much is not left alone on the last row.
SHORT_COLUMNS_MAX = 2
_MARKS = ("Mn", "Me", "Cf")
# The later parts of a Korean syllable, which join the first.
_JOINED = range(0x1160, 0x1200)
# C0 but for tab and newline, DEL and C1.
_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f"
# Characters without a shape: the soft hyphen, the combining joiner, fillers, marks and overrides of direction, zero
# widths, separators of lines, annotations, variation selectors and tags. And halves of a pair, which no terminal could
# be sent at all.
_SHAPELESS = (
    r"\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f\u3164"
    r"\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff\ud800-\udfff"
)
# Two of them are spelling. Emoji are built with one joiner (a family) and one selector (a heart in colour); Arabic and
# Indic scripts have joiners between their letters. A second one in a row is never spelling.
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
# A column of a table that is cut to less is not read any more; the terminal may wrap the line then.
COLUMN_WIDTH_MIN = 6
# Whoever waits longer for something is told what for.
PATIENCE_SECONDS = 1.0
# A line is to be read. Whoever wants all of it takes --json, or --raw.
SUMMARY_CHARACTERS_MAX = 500
# Of our own kinds, what is not worth a line's room.
_LONG = ("born", "ref", "usage", "details", "command", "args", "env", "options", "rules", "system_prompt", "schema")
_ON_BUSY = re.compile(r'on_busy="(\w+)"')
# `sessions()` and `after=None`; but not `(ulimit -n)`, `--flag=value` or `VARIABLE=value`, which a shell understands.
_PYTHON = re.compile(r"\w\(|(?<![-\w])[a-z_]+=|\ban int\b")
# What whoever speaks HTTP would do next, and the verb for it. The longer path first.
_VERBS = {"/v1/hosts": "banksman hosts", "/v1/sessions": "banksman ps", "/v1/commands": "banksman ps --all"}
_PATH = re.compile("|".join(map(re.escape, _VERBS)))
_OF_HTTP = re.compile(r",? with the same Idempotency-Key| \((?:GET|POST|PATCH|PUT|DELETE)\)")
_HTTP = re.compile(
    r"/v\d+/|/openapi\.json|\b(?:GET|POST|PATCH|PUT|DELETE|HEAD)\b|[A-Z][a-z]+-(?:Key|Type|Length|After)\b"
)
_STEPS = (
    ("sessions()", "see banksman ps"),
    ("commands()", "see banksman ps --all"),
    ("an int", "interactive, normal, background, or a number"),
    ("after=None", "begin again without --after"),
)


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


# How much room a text takes on a screen: letters are one column wide, many of Asia's and most pictures two, and marks
# that sit on a letter none. Terminals disagree about a few: nothing that must not be torn may rest on this count.


@lru_cache(maxsize=4096)
def _columns(character: str) -> int:
    if unicodedata.category(character) in _MARKS or ord(character) in _JOINED:
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def width(text: str) -> int:
    """In columns. For text that is safe and on one line already."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def cut(text: str, columns: int) -> str:
    """As much of it as there is room for; with a mark, if that is not all."""
    if width(text) <= columns:
        return text
    if columns < 1:
        return ""
    kept = next(rows(text, columns - 1), "")
    # A letter that is wider than all the room there is.
    return f"{kept}…" if width(kept) < columns else "…"


def padded(text: str, columns: int) -> str:
    return text + " " * (columns - width(text))


def rows(text: str, columns: int) -> Iterator[str]:
    """Cut wherever the room ends, as a terminal does it. A letter that is wider than a row has one of its own."""
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
    """Cut between words; a word that is longer than a row, anywhere. What comes after the first row is indented."""
    found: list[str] = []
    line = ""
    words = text.lstrip(" ").split(" ")
    # What it begins with is meant.
    words[0] = text[: len(text) - len(text.lstrip(" "))] + words[0]
    for word in words:
        joined = f"{line} {word}" if line else f"{indent if found else ''}{word}"
        if width(joined) <= columns:
            line = joined
            continue
        if width(word) <= SHORT_COLUMNS_MAX and " " in line.strip():
            # `4 s`: a unit by itself says nothing.
            line, _, before = line.rpartition(" ")
            word = f"{before} {word}"  # noqa: PLW2901
        if line:
            found.append(line)
        *whole, line = list(rows(f"{indent if found else ''}{word}", max(columns, 1))) or [""]
        found += whole
    return [*found, line]


# What is said to a person, or to the program at the other end of a pipe.
#
# What an agent says is not for the terminal to obey: a tool's output, a file's name or a model's words may hold
# sequences that clear the screen, rename the window, or type. In text mode every control character is shown as its
# escape, and so is every character that has no shape: one that turns the direction of the text round, or hides words
# from the reader that a program still sees. In JSON the encoding does that.


def _escape(found: re.Match[str]) -> str:
    character = found[0]
    if _SPELLING.match(found.string, found.start()):
        return character
    code = ord(character)
    long = f"\\U{code:08x}" if code > 0xFFFF else f"\\u{code:04x}"
    return _SHORT.get(character) or (f"\\x{code:02x}" if code < 0x100 else long)


def as_text(text: str) -> str:
    """Safe for a terminal, with its lines and tabs as they were."""
    return _IN_TEXT.sub(_escape, text)


def as_line(value: object, *, characters_max: int | None = None) -> str:
    """Safe, and on one line; cut with a mark if it is longer than that."""
    text = str(value)
    if characters_max is not None and len(text) > characters_max:
        text = text[: characters_max - 1] + "…"
    return _IN_LINE.sub(_escape, text)


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


class ProgressMessage:
    """Says what is being done, if it takes long. Only in the main thread: a verb that has the whole screen waits for
    nothing there, and says what it waits for in its own way."""

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
    if has_person():
        say_aside(f"banksman: {doing} …")


def has_person() -> bool:
    """A program that reads stderr has asked for nothing of the kind."""
    return sys.stderr is not None and sys.stderr.isatty()


Event = dict[str, Any]


def line_of(event: Event) -> str | None:
    """None: a frame that only the dialect cares for."""
    kind = event["kind"]
    if kind == "stream.gap":
        return f"{'':>8}  {'':8}  events {event['first']} to {event['last']} are no longer kept"
    said = " | ".join(summary for update in _updates(event) if (summary := _update(update)))
    if kind in ("update", "sent"):
        if not said:
            return None
    else:
        said = _own(event["body"])
    at = time.strftime("%H:%M:%S", time.localtime(event["at"]))
    place = f"{as_line(event['cursor']):>8}  {at}  {as_line(kind)}"
    turn = f" {as_line(event['turn'])}" if event["turn"] else ""
    return f"{place}{turn}  {as_line(said, characters_max=SUMMARY_CHARACTERS_MAX)}".rstrip()


def prompt_of(prompt: Any) -> str:
    """What was asked, in words: a prompt is text, or blocks of which some are."""
    if isinstance(prompt, str):
        return prompt
    blocks = cast("list[Any]", prompt) if isinstance(prompt, list) else []
    return " ".join(_block(cast("dict[str, Any]", each)) for each in blocks if isinstance(each, dict))


def _block(block: dict[str, Any]) -> str:
    return str(block["text"]) if isinstance(block.get("text"), str) else f"[{block.get('type')}]"


def tokens_of(usage: Any) -> str:
    """What was read and written; empty: the agent does not say."""
    if not isinstance(usage, dict):
        return ""
    used = cast("dict[str, Any]", usage)
    # One agent counts what it had in its cache beside the rest, the others within it.
    beside = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    read = [count for name in (*beside, "inputTokens") if isinstance(count := used.get(name), int)]
    written = [count for name in ("output_tokens", "outputTokens") if isinstance(count := used.get(name), int)]
    return f"{sum(read)} tokens in, {sum(written)} out" if read and written else ""


def how_to_answer(session: str, question: str) -> str:
    """The command, to be copied: whatever the session is called, a shell takes it for one word."""
    return f"banksman answer {shlex.quote(session)} {shlex.quote(question)} allow|deny"


def hint_of(said: str) -> str:
    """A hint of the server's for whoever sits at a shell. It was written for whoever calls Python or speaks HTTP: where
    it names a call, an argument or a path, our own next step is said instead, or nothing, if there is none that helps
    for sure."""
    hint = _ON_BUSY.sub(r"--on-busy \1", said)
    hint = _PATH.sub(lambda found: _VERBS[found[0]], _OF_HTTP.sub("", hint))
    if not _PYTHON.search(hint):
        return "" if _HTTP.search(hint) else hint
    return next((step for named, step in _STEPS if named in hint), "")


def _updates(event: Event) -> list[Event]:
    return event["body"].get("updates", []) if event["kind"] == "update" else []


def _content(update: Event) -> str:
    content = update.get("content")
    # Of ACP's kinds of content only one is words.
    return str(content.get("text", "")) if isinstance(content, dict) else ""  # pyright: ignore[reportUnknownMemberType, reportUnknownArgumentType]


def _update(update: Event) -> str:
    match update.get("sessionUpdate"):
        case "agent_message_chunk":
            return f"says {_content(update)}"
        case "agent_thought_chunk":
            return f"thinks {_content(update)}"
        case "tool_call":
            return f"calls {update.get('title')}"
        case "tool_call_update":
            return f"tool {update.get('status')}"
        case "usage_update":
            return ""
        case kind:
            return str(kind)


def _own(body: Event) -> str:
    shown = {name: value for name, value in body.items() if name not in _LONG and value not in (None, [], {}, "")}
    return " ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
        for name, value in shown.items()
    )
