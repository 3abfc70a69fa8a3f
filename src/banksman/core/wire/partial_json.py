"""Read a JSON object that no decoder accepts as a whole, member by member; repair its text.

The object may be cut off, nested too deep, or contain one bad value. `split` reads its top-level
members, `mended` replaces invalid text, and `decoded` decodes a value and mends it if that fails.
The accessors at the end (`text`, `number`, `mapping`) treat a value of the wrong type as missing,
and also a number out of bounds.

A decoder returns either the whole line or nothing. That is wrong for the one frame that matters:
the boundary. If it cannot be read because of an emoji cut in half, or because only its first bytes
were kept, the turn never ends. So `split` reads a line as far as possible and returns each
top-level member as raw bytes. The caller decodes the few members that it needs. `split` knows
strings, brackets and commas, and does not check anything else. It never recurses and never examines
a byte twice, so no nesting is too deep and no line takes quadratic time.

It costs a step of Python per token. It is meant for heads and damaged lines, never for ordinary
frames.
"""

from __future__ import annotations

import re
from typing import Any, cast

import msgspec

# Errors that a decoder may raise over bytes from an agent; nothing else is caught.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Every integer up to this one is exact as a float, and the sum of thousands fits into 64 bits.
NUMBER_MAX = 10**15

# All quantifiers are possessive: a match never backtracks, so each pattern takes linear time.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OPENING = re.compile(rb"\s*+\{")
_KEY = re.compile(rb"\s*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
_WHOLE_STRING = re.compile(_STRING, re.DOTALL)
# A number or a literal that is followed by a delimiter: at the end of the bytes it may be
# incomplete.
_WORD = re.compile(rb'[^",:{}\[\]\s]++(?=[,}\s])')
_CLOSED = re.compile(rb"\s*+\}")
# Every possible remainder of a member whose value has not begun.
_CUT_KEY = re.compile(rb'\s*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+(?:\\|"\s*+)?)?', re.DOTALL)
_AFTER = re.compile(rb"\s*+([,}])")
# The next string, or run of brackets, inside an array or an object.
_NESTED = re.compile(rb'[^"\[\]{}]*+(?:' + _STRING + rb"|([\[{]++)|([\]}]++))", re.DOTALL)
# Any escape, so that an escaped backslash does not look like the start of another escape. Escapes
# without a number match many at a time, because a line may hold millions. The group matches a
# surrogate without its pair.
_ESCAPE = re.compile(
    rb"(?:\\[^u][^\\]*+)++|\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|u)"
)


class Members(msgspec.Struct, frozen=True):
    """Top-level members as raw bytes; if two have the same name, the last one counts.

    `cut`: the member whose end is missing. `is_object` False: the bytes are no object, whatever may
    follow. `is_whole`: the object was closed, and nothing came after it.
    """

    found: dict[str, bytes]
    cut: tuple[str, bytes] | None = None
    is_object: bool = True
    is_whole: bool = False

    def get(self, name: str) -> Any:
        """Return the decoded member; None if it is missing or cannot be decoded."""
        raw = self.found.get(name)
        return None if raw is None else decoded(raw)

    def within(self, name: str) -> Members:
        """Return the members of a nested object, whole or cut."""
        if self.cut is not None and self.cut[0] == name:
            return split(self.cut[1])
        return split(self.found.get(name, b""))


def split(data: bytes) -> Members:
    """Split an object into its top-level members, as far as the bytes are intact."""
    opening = _OPENING.match(data)
    if opening is None:
        # Only blanks so far: an object may still follow.
        return Members({}, is_object=not data.strip())
    found: dict[str, bytes] = {}
    at = opening.end()
    if closing := _CLOSED.match(data, at):
        return Members(found, is_whole=not data[closing.end() :].strip())
    while key := _KEY.match(data, at):
        name = decoded(key[1])
        # No caller looks up a name that is not valid text, so an empty name stands for it.
        name = name if isinstance(name, str) else ""
        start = key.end()
        end = _value_end(data, start)
        if end is None:
            return Members(found, cut=(name, data[start:]))
        found[name] = data[start:end]
        after = _AFTER.match(data, end)
        if after is None:
            return Members(found, is_object=not data[end:].strip())
        at = after.end()
        if after[1] == b"}":
            rest = data[at:].strip()
            return Members(found, is_object=not rest, is_whole=not rest)
    return Members(found, is_object=_CUT_KEY.fullmatch(data, at) is not None)


def _value_end(data: bytes, start: int) -> int | None:
    first = data[start : start + 1]
    if first == b'"':
        string = _WHOLE_STRING.match(data, start)
        return string.end() if string else None
    if first not in (b"{", b"["):
        word = _WORD.match(data, start)
        return word.end() if word else None
    depth = 0
    at = start
    while token := _NESTED.match(data, at):
        at = token.end()
        if token[1]:
            depth += len(token[1])
        elif token[2]:
            # A run of closing brackets may continue past the end of this value.
            if len(token[2]) >= depth:
                return token.start(2) + depth
            depth -= len(token[2])
    return None


def decoded(data: bytes) -> Any:
    """Decode a value, after repairing its text if necessary; None if it cannot be decoded."""
    try:
        return msgspec.json.decode(data)
    except UNDECODABLE:
        # Repair only after a failure: the search for invalid text costs as much as decoding, and
        # nearly every line is valid.
        better = mended(data)
    try:
        return None if better is None else msgspec.json.decode(better)
    except UNDECODABLE:
        return None


def mended(data: bytes) -> bytes | None:
    r"""Replace bytes that are not UTF-8, and lone surrogates, by U+FFFD. None: no change.

    Both occur in practice. JavaScript writes a string that was cut inside an emoji as a lone
    `\ud83d`. The output of a tool that is cut by bytes ends in half a character.
    """
    better = data
    if not data.isascii():
        better = data.decode(errors="replace").encode()
    if b"\\ud" in better or b"\\uD" in better:
        better = _ESCAPE.sub(_mended_escape, better)
    return None if better == data else better


def _mended_escape(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape[1] else escape[0]


# Accessors for JSON values from an agent. A value of the wrong type counts as missing.


def text(value: Any) -> str | None:
    """Return the value if it is a string; else None."""
    return value if isinstance(value, str) else None


def texts(value: Any) -> tuple[str, ...]:
    """Return the items of a list that are strings."""
    return tuple(item for item in items(value) if isinstance(item, str))


def number(value: Any) -> float | None:
    """Return the value if it is an amount (a cost, a time, a count): from 0 to `NUMBER_MAX`.

    JSON has integers beyond every float. A larger or a negative amount is a mistake of the agent.
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value <= NUMBER_MAX else None


def count(value: Any) -> int | None:
    """Return the value if it is an amount without a fraction; else None."""
    return value if isinstance(value, int) and number(value) is not None else None


def items(value: Any) -> list[Any]:
    """Return the value if it is a list; else an empty list."""
    return cast(list[Any], value) if isinstance(value, list) else []


def mapping(value: Any) -> dict[str, Any]:
    """Return the value if it is an object; else an empty dict."""
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """Return the items of a list that are objects."""
    return [cast(dict[str, Any], item) for item in items(value) if isinstance(item, dict)]
