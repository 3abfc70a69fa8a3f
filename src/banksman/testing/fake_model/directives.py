"""Parse the `@@` directives of a prompt to the fake model into steps.

Pure functions: text in, steps out. Each directive is one frozen value with its source line. Parsing
expands nothing: a `@@big` of megabytes is one small value, and `play.py` generates its text while
it plays the step. The `@@` lines of the fake agents are another language (`fake_script.py`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

MARK = "@@"
# Scripts are written by hand, so a larger value is a mistake. Each bound keeps a mistake from
# filling the memory or from outliving the test.
DIRECTIVES_MAX = 1_000
SECONDS_MAX = 3_600.0
DELTAS_MAX = 1_000_000
BIG_BYTES_MAX = 64 << 20
TIMES_MAX = 1_000_000
# The longest window of an account is a month.
ACCOUNT_SECONDS_MAX = 31 * 86_400


class BadDirective(ValueError):
    """A line that begins with the mark and is no valid directive. The message names the line."""


@dataclass(frozen=True, slots=True)
class Text:
    line: str
    words: str


@dataclass(frozen=True, slots=True)
class Slow:
    line: str
    count: int
    seconds: float
    words: str | None


@dataclass(frozen=True, slots=True)
class Big:
    line: str
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Think:
    line: str
    words: str


@dataclass(frozen=True, slots=True)
class ToolCall:
    line: str
    name: str
    arguments: dict[str, object]


@dataclass(frozen=True, slots=True)
class Sleep:
    line: str
    seconds: float


@dataclass(frozen=True, slots=True)
class WaitForFile:
    line: str
    path: str


@dataclass(frozen=True, slots=True)
class Hang:
    line: str


@dataclass(frozen=True, slots=True)
class Stall:
    line: str


@dataclass(frozen=True, slots=True)
class Overflow:
    line: str
    times: int | None


@dataclass(frozen=True, slots=True)
class Throttle:
    line: str
    seconds: int
    times: int | None


@dataclass(frozen=True, slots=True)
class AccountLimit:
    line: str
    seconds: int
    times: int | None


@dataclass(frozen=True, slots=True)
class AccountUsed:
    line: str
    percent: int
    seconds: int


@dataclass(frozen=True, slots=True)
class HttpError:
    line: str
    status: int
    times: int | None


@dataclass(frozen=True, slots=True)
class SseError:
    line: str
    kind: str
    times: int | None


@dataclass(frozen=True, slots=True)
class Drop:
    line: str
    times: int | None


Pause = Sleep | WaitForFile | Hang | Stall
Directive = (
    Text
    | Slow
    | Big
    | Think
    | ToolCall
    | Pause
    | Overflow
    | HttpError
    | Throttle
    | AccountLimit
    | AccountUsed
    | SseError
    | Drop
)
Step = tuple[Directive, ...]
# One of these sends the HTTP status, so no other status can follow.
SPOKEN = (Text, Slow, Big, Think, Stall)
# These set the HTTP status or its headers, so they come before any output.
UNSPOKEN = (HttpError, Overflow, Throttle, AccountLimit, AccountUsed)


def has_directive(text: str) -> bool:
    return bool(_lines(text))


def _lines(text: str) -> list[str]:
    # Not splitlines(), which also splits at characters that may be part of the words.
    return [line.removesuffix("\r") for line in text.split("\n") if line.startswith(MARK)]


def parse(text: str) -> tuple[Step, ...]:
    """Return the steps of a prompt in order, without empty steps. Raises BadDirective."""
    steps: list[list[Directive]] = [[]]
    lines = _lines(text)
    if len(lines) > DIRECTIVES_MAX:
        raise BadDirective(f"{len(lines)} directives, and {DIRECTIVES_MAX} are allowed")
    for line in lines:
        step = steps[-1]
        if line.rstrip() == f"{MARK}next":
            if not step:
                raise BadDirective(f"{line!r}: there is nothing before it that it could end")
            steps.append([])
            continue
        directive = _directive(line)
        # The agent must run the tools and call again before the model can send more.
        if step and isinstance(step[-1], ToolCall) and not isinstance(directive, ToolCall):
            steps.append([])
            step = steps[-1]
        if isinstance(directive, UNSPOKEN) and any(isinstance(spoken, SPOKEN) for spoken in step):
            raise BadDirective(
                f"{line!r}: something was said before it, so the status is sent; use {MARK}sseerror"
            )
        step.append(directive)
    return tuple(tuple(step) for step in steps if step)


def _directive(line: str) -> Directive:
    word, _, rest = line.removeprefix(MARK).partition(" ")
    reader = _READERS.get(word)
    if reader is None:
        raise BadDirective(
            f"{line!r}: there is no directive {MARK}{word}; "
            f"there are {', '.join([*_READERS, 'next'])}"
        )
    try:
        return reader(line, rest)
    except ValueError as exc:
        raise BadDirective(f"{line!r}: {exc}") from exc


# ── One parser per directive. Each raises a ValueError without the line; _directive adds it. ──


def _text(line: str, rest: str) -> Text:
    return Text(line, _words(rest))


def _slow(line: str, rest: str) -> Slow:
    count, seconds, words = _fields(rest, 2, 3)
    assert count is not None
    assert seconds is not None
    return Slow(line, _whole(count, 1, DELTAS_MAX), _seconds(seconds), words)


def _big(line: str, rest: str) -> Big:
    (size,) = _fields(rest, 1, 1)
    assert size is not None
    return Big(line, _whole(size, 1, BIG_BYTES_MAX))


def _think(line: str, rest: str) -> Think:
    return Think(line, _words(rest))


def _tool(line: str, rest: str) -> ToolCall:
    name, arguments = _fields(rest, 2, 2)
    assert name is not None
    assert arguments is not None
    try:
        value: object = json.loads(arguments)
    except RecursionError:
        raise ValueError("the arguments are nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("the arguments must be a JSON object")
    return ToolCall(line, name, cast("dict[str, object]", value))


def _sleep(line: str, rest: str) -> Sleep:
    return Sleep(line, _seconds(rest))


def _wait(line: str, rest: str) -> WaitForFile:
    return WaitForFile(line, _words(rest))


def _hang(line: str, rest: str) -> Hang:
    _fields(rest, 0, 0)
    return Hang(line)


def _stall(line: str, rest: str) -> Stall:
    _fields(rest, 0, 0)
    return Stall(line)


def _overflow(line: str, rest: str) -> Overflow:
    (times,) = _fields(rest, 0, 1)
    return Overflow(line, _times(times))


def _error(line: str, rest: str) -> HttpError:
    status, times = _fields(rest, 1, 2)
    assert status is not None
    return HttpError(line, _whole(status, 400, 599), _times(times))


def _throttle(line: str, rest: str) -> Throttle:
    seconds, times = _fields(rest, 1, 2)
    assert seconds is not None
    return Throttle(line, _whole(seconds, 0, ACCOUNT_SECONDS_MAX), _times(times))


def _limit(line: str, rest: str) -> AccountLimit:
    seconds, times = _fields(rest, 1, 2)
    assert seconds is not None
    return AccountLimit(line, _whole(seconds, 0, ACCOUNT_SECONDS_MAX), _times(times))


def _used(line: str, rest: str) -> AccountUsed:
    percent, seconds = _fields(rest, 2, 2)
    assert percent is not None
    assert seconds is not None
    return AccountUsed(line, _whole(percent, 0, 100), _whole(seconds, 0, ACCOUNT_SECONDS_MAX))


def _sseerror(line: str, rest: str) -> SseError:
    kind, times = _fields(rest, 1, 2)
    assert kind is not None
    return SseError(line, kind, _times(times))


def _drop(line: str, rest: str) -> Drop:
    (times,) = _fields(rest, 0, 1)
    return Drop(line, _times(times))


_READERS: dict[str, Callable[[str, str], Directive]] = {
    "text": _text,
    "slow": _slow,
    "big": _big,
    "think": _think,
    "tool": _tool,
    "sleep": _sleep,
    "wait": _wait,
    "hang": _hang,
    "stall": _stall,
    "error": _error,
    "overflow": _overflow,
    "throttle": _throttle,
    "limit": _limit,
    "used": _used,
    "sseerror": _sseerror,
    "drop": _drop,
}


def _fields(rest: str, least: int, most: int) -> Sequence[str | None]:
    """Split into exactly `most` fields; the last takes the rest of the line.

    Fields beyond `least` may be None.
    """
    fields = rest.split(maxsplit=most - 1)  # -1, where no field is allowed, means no limit.
    if not least <= len(fields) <= most:
        raise ValueError(
            f"it takes {least if least == most else f'{least} to {most}'} arguments, "
            f"not {len(fields)}"
        )
    return [*fields, *[None] * (most - len(fields))]


def _words(rest: str) -> str:
    if not rest:
        raise ValueError("it needs words")
    return rest


def _whole(field: str, least: int, most: int) -> int:
    field = field.rstrip()
    # int() alone would also accept "1_0", "+1" and digits of other scripts.
    if not (
        field.isascii() and field.isdigit() and len(field) < 12 and least <= int(field) <= most
    ):
        raise ValueError(f"{field!r} is not a whole number from {least} to {most}")
    return int(field)


def _times(field: str | None) -> int | None:
    return None if field is None else _whole(field, 1, TIMES_MAX)


def _seconds(field: str) -> float:
    try:
        seconds = float(field)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= SECONDS_MAX:  # Also false for NaN.
        raise ValueError(f"{field!r} is not a number of seconds up to {SECONDS_MAX:g}")
    return seconds
