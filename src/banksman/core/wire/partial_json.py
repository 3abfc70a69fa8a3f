"""The members of a JSON object that cannot be decoded as a whole: cut off, too deep, or with one bad value in it.

A decoder answers for all of a line or for nothing. That is wrong for the one frame that matters: if a boundary cannot
be read because of an emoji cut in half, or because only its first bytes were kept, the turn never ends. So this looks
at a line as far as it goes, and hands out each top-level member as the bytes it stands for; the caller decodes the few
it wants. It knows strings, brackets and commas, and believes everything else. It never recurses and never looks at a
byte twice, so no nesting is too deep and no line quadratic.

It costs a step of Python a token, and is meant for heads and accidents, never for the ordinary frame.
"""

from __future__ import annotations

import re
from typing import Any, cast

import msgspec

# What a decoder may raise over bytes from outside; nothing else is caught.
UNDECODABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

# Possessive throughout: what was matched is never given back, which keeps each of them linear.
_STRING = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_OPENING = re.compile(rb"\s*+\{")
_KEY = re.compile(rb"\s*+(" + _STRING + rb")\s*+:\s*+", re.DOTALL)
_WHOLE_STRING = re.compile(_STRING, re.DOTALL)
# A number or a literal, with what ends it: at the end of the bytes it may be half of one.
_WORD = re.compile(rb'[^",:{}\[\]\s]++(?=[,}\s])')
_CLOSED = re.compile(rb"\s*+\}")
# All that can be left of a member whose value has not begun.
_CUT_KEY = re.compile(rb'\s*+(?:"[^"\\]*+(?:\\.[^"\\]*+)*+(?:\\|"\s*+)?)?', re.DOTALL)
_AFTER = re.compile(rb"\s*+([,}])")
# The next string, or run of brackets, inside an array or an object.
_NESTED = re.compile(rb'[^"\[\]{}]*+(?:' + _STRING + rb"|([\[{]++)|([\]}]++))", re.DOTALL)
# Any escape, so that an escaped backslash is not taken for the start of one; those without a number many at a time, as
# they may be millions. The group is a surrogate without its pair.
_ESCAPE = re.compile(
    rb"(?:\\[^u][^\\]*+)++|\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|u)"
)


class Members(msgspec.Struct, frozen=True):
    """Top-level members as bytes, the last of two with one name. `cut`: the one whose end is missing.

    `is_object` False: this is no object, whatever may follow. `is_whole`: it was closed, and nothing came after.
    """

    found: dict[str, bytes]
    cut: tuple[str, bytes] | None = None
    is_object: bool = True
    is_whole: bool = False

    def get(self, name: str) -> Any:
        """The decoded member; None if it is not there or cannot be decoded."""
        raw = self.found.get(name)
        return None if raw is None else decoded(raw)

    def within(self, name: str) -> Members:
        """The members of a member, be it whole or cut."""
        if self.cut is not None and self.cut[0] == name:
            return split(self.cut[1])
        return split(self.found.get(name, b""))


def split(data: bytes) -> Members:
    opening = _OPENING.match(data)
    if opening is None:
        # Nothing but blanks so far: an object may still come.
        return Members({}, is_object=not data.strip())
    found: dict[str, bytes] = {}
    at = opening.end()
    if closing := _CLOSED.match(data, at):
        return Members(found, is_whole=not data[closing.end() :].strip())
    while key := _KEY.match(data, at):
        name = decoded(key[1])
        # A name that is no text is none of those that anybody asks for.
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
            # A run of closing brackets may go on past our own.
            if len(token[2]) >= depth:
                return token.start(2) + depth
            depth -= len(token[2])
    return None


def decoded(data: bytes) -> Any:
    """The value, mended if need be; None if it is beyond that."""
    try:
        return msgspec.json.decode(data)
    except UNDECODABLE:
        # Only now: to look for what is no text costs as much as to decode, and nearly every line is well.
        better = mended(data)
    try:
        return None if better is None else msgspec.json.decode(better)
    except UNDECODABLE:
        return None


def mended(data: bytes) -> bytes | None:
    r"""The same with U+FFFD for what is no text: bytes that are not UTF-8, half a surrogate pair. None: all was well.

    Both are seen. JavaScript writes a string that was cut inside an emoji as a lone `\ud83d`, and a tool's output that
    is cut by bytes ends in half a character.
    """
    better = data
    if not data.isascii():
        better = data.decode(errors="replace").encode()
    if b"\\ud" in better or b"\\uD" in better:
        better = _ESCAPE.sub(_mended_escape, better)
    return None if better == data else better


def _mended_escape(escape: re.Match[bytes]) -> bytes:
    return rb"\ufffd" if escape[1] else escape[0]


# Values of JSON from outside, believed as far as they have the right type, and else as if they were not there.


def text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def texts(value: Any) -> tuple[str, ...]:
    """Those items of a list that are text."""
    return tuple(item for item in items(value) if isinstance(item, str))


def items(value: Any) -> list[Any]:
    return cast(list[Any], value) if isinstance(value, list) else []


def mapping(value: Any) -> dict[str, Any]:
    return cast(dict[str, Any], value) if isinstance(value, dict) else {}


def mappings(value: Any) -> list[dict[str, Any]]:
    """Those items of a list that are objects."""
    return [cast(dict[str, Any], item) for item in items(value) if isinstance(item, dict)]
