r"""Replace configured secrets by `[redacted]` in lines, texts and log entries: `Redactor`.

`Redactor(secrets)` checks the secrets. It redacts log entries, agents' stderr, previews, imports
and bundles. A secret is found in UTF-8, escaped as in JSON, or percent-encoded, and in no other
encoding. A secret that is streamed in pieces is left to `stream_redactor.py`.

A secret is replaced wherever it stands in a line: in a JSON string, in a number, or in bytes that
are no JSON. In an entry of Banksman's own kinds, only strings are redacted. A string may be a value
or the name of a member. A line of JSON remains JSON, and every other value in it is unchanged: only
strings that held a secret are rewritten. Where secrets overlap, the union of their characters is
replaced.

Each character of a secret may have a different spelling:

    plain               in UTF-8
    escaped, as JSON    `\"` `\\` `\/` `\n` …, and `\uXXXX` for any character; in a JSON string
                        also escaped twice, because agents put JSON into strings (the input of a
                        tool, the output of a tool)
    percent-encoded     `%XX` for characters that a URL cannot hold, and `+` for a space

A secret that Banksman itself cuts at the end of a text is found by the mark of the cut. See
`elided_text.py`.

**Limits.** A secret that is cut over two lines is not found here. An agent that streams sends a
word in pieces, and each piece is a separate line; `stream_redactor.py` finds a secret there.
Base64, hex, compression and reversed secrets are not found either. Nor is a secret found that
consists of JSON punctuation between the strings of a line. Text in another Unicode normal form is
another text.

**Cost.** Every token passes through here. So a line is first searched for an anchor, which each
occurrence must contain. The anchor is a part of the secret with only one spelling, apart from a
`\u` escape. No encoder escapes letters and digits by `\u`, but the search covers that case too.
These are `find`s of a few hundred nanoseconds in all. A line in which all of them fail is returned
unchanged. Only a secret without letters and digits makes every line with a `%` pay for a search of
its strings. The beginning of a secret is searched only at the end of a text, within the length of
the longest spelling.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from banksman.core.session import event as events
from banksman.core.session.event import FRAMES, Entry
from banksman.core.session.outcome import By, Kind
from banksman.core.wire.elided_text import CUT, REDACTED
from banksman.errors import UsageError

# Words that a reader of the log depends on: the names of events, and the outcomes of turns.
_OUR_WORDS = (
    *Kind,
    *By,
    *(value for name, value in vars(events).items() if name.isupper() and isinstance(value, str)),
)

# A shorter secret occurs in ordinary text by chance, and replacing it would destroy the log.
SECRET_CHARS_MIN = 6
# A private key with its whole chain of certificates. Each character costs a branch of the compiled
# pattern.
SECRET_CHARS_MAX = 16384

_SHORT_ESCAPES = {
    '"': '"',
    "\\": "\\",
    "/": "/",
    "\b": "b",
    "\f": "f",
    "\n": "n",
    "\r": "r",
    "\t": "t",
}
# Characters that are never percent-encoded, and escaped only by `\u00`: the best anchor.
_UNRESERVED = re.compile("[A-Za-z0-9_.~-]+")
# A shorter anchor occurs in too many lines.
_ANCHOR_CHARS_MIN = 4
# Characters whose other spellings all contain a `\u` or a `%`. (A space may be a plus.)
_ESCAPED_BY_CODE = re.compile("[^ " + re.escape("".join(_SHORT_ESCAPES)) + "]+")

_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_NUMBER = rb"[-+0-9.eE]++"
_VALUE = re.compile(_STRING + b"|" + _NUMBER)
# A sequence of JSON tokens in any order. It is enough to know where the strings begin and end.
_TOKENS = re.compile(
    rb"(?:[ \t\r\n{}\[\]:,]++|true|false|null|" + _STRING + b"|" + _NUMBER + b")*+"
)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_UNESCAPED = {escape: char for char, escape in _SHORT_ESCAPES.items()}
# The part of the mark that no encoder escapes.
_CUT_NEEDLE = b"[cut]"
# This many first characters of a secret seldom occur by chance.
_START_CHARS = 4
# The longest spelling of a character: two `\uXXXX`, or four `%XX`.
_SPELLING_CHARS_MAX = 12
# The end of a text that may be a part of a spelling. A whole `\uXXXX` or `%XX` may also be a part,
# and so may the first half of a surrogate pair.
_CUT = re.compile(
    r"(?:(?:\\(?:u[0-9a-fA-F]{0,4})?){1,2}|(?:%[0-9a-fA-F]{0,2}){1,4}|[\ud800-\udbff])\Z"
)
_SURROGATE = re.compile("[\ud800-\udfff]")
# Characters that one call searches for a secret.
_WINDOW_CHARS = 64 << 10

_decode: Callable[[bytes], str] = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


def in_strings(
    data: bytes, change: Callable[[str], str], is_worth_it: Callable[[bytes], bool] | None = None
) -> bytes:
    """Apply `change` to each string and number of a JSON line, or to all of any other line.

    A changed number becomes a string. `is_worth_it`: a filter on the encoded token; a token that
    fails it is not decoded. Returns the same object if nothing changes.
    """
    if not _is_json(data):
        # Bytes that are not UTF-8 come out exactly as they went in.
        text = data.decode("utf-8", "surrogateescape")
        changed = change(text)
        return data if changed == text else changed.encode("utf-8", "surrogateescape")

    def replace(match: re.Match[bytes]) -> bytes:
        token = match[0]
        if is_worth_it is not None and not is_worth_it(token):
            return token
        text = text_of(token)
        changed = change(text)
        return token if changed == text else token_of(changed)

    changed = _VALUE.sub(replace, data)
    return data if changed == data else changed


class _Patterns(NamedTuple):
    """Compiled patterns of one secret.

    `begun`: the first characters of the secret at the end of a text, without at least its last one.
    """

    whole: re.Pattern[str]
    begun: re.Pattern[str]

    @classmethod
    def of(cls, secret: str) -> _Patterns:
        whole = "".join(map(_any_spelling, secret))
        begun = _any_spelling(secret[0]) + _cut_anywhere(secret[1:-1]) + r"\Z"
        return cls(re.compile(whole), re.compile(begun))


class Redactor:
    """Compiled form of a list of secrets. It has no mutable state, and its repr shows no secret."""

    __slots__ = ("_escape", "_needles", "_patterns", "_spelled_chars_max", "_starts")

    def __init__(self, secrets: Iterable[str]) -> None:
        kept = sorted({_checked(secret) for secret in _listed(secrets)})
        self._patterns = [_Patterns.of(secret) for secret in kept]
        # The first characters of any secret, as alternatives that begin with a literal: `re` skips
        # to a literal fast.
        starts = [
            first + _cut_anywhere(secret[1:_START_CHARS])
            for secret in kept
            for first in _spellings(secret[0])
        ]
        self._starts = re.compile("|".join(starts))
        self._spelled_chars_max = max(map(_spelled_chars_max, kept), default=0)
        anchors = {_anchor(secret) for secret in kept}
        is_plain = all(_UNRESERVED.fullmatch(anchor) for anchor in anchors)
        self._escape = b"\\u00" if is_plain else b"\\u"
        self._needles = [anchor.encode() for anchor in sorted(anchors)] + (
            [_CUT_NEEDLE] if is_plain else [_CUT_NEEDLE, b"%"]
        )

    def __repr__(self) -> str:
        return f"<Redactor secrets={len(self._patterns)}>"

    def redact(self, data: bytes) -> bytes:
        """Return the line without the secrets; the same object if it has none."""
        return (
            in_strings(data, self.redact_text, self._may_hold_one)
            if self._may_hold_one(data)
            else data
        )

    def redact_text(self, text: str) -> str:
        """Return a text without the secrets, in any of their spellings.

        Where the text is cut (see `elided_text.py`), the beginning of a secret is removed too.
        """
        if CUT in text:
            *pieces, last = text.split(CUT)
            text = "".join((*(f"{self.without_begun(piece)}{CUT}" for piece in pieces), last))
        spans = self.found(text)
        if not spans:
            return text
        pieces: list[str] = []
        kept_from, (start, end) = 0, spans[0]
        for next_start, next_end in spans[1:]:
            # Two secrets that only touch give two replacements, as they would with text between
            # them.
            if next_start < end:
                end = max(end, next_end)
                continue
            pieces += (text[kept_from:start], REDACTED)
            kept_from, start, end = end, next_start, next_end
        return "".join((*pieces, text[kept_from:start], REDACTED, text[end:]))

    def without_begun(self, text: str) -> str:
        """Return a text that is cut at its end, without the beginning of a secret there."""
        until = min((start for start, _ in self.begun(text)), default=len(text))
        # The removal itself must not divide a whole secret.
        for start, end in reversed(self.found(text)):
            until = start if start < until < end else until
        return text[:until]

    def redact_ends(self, head: str, tail: str) -> tuple[str, str]:
        """Redact both ends of a text whose middle was left out, also a secret that the cut divides.

        A part of a secret is not recognised. So both sides of the cut lose as many characters as
        the longest secret may have.
        """
        until, since = len(head) - self._spelled_chars_max, self._spelled_chars_max
        # The removal itself must not divide a whole secret.
        for start, end in reversed(self.found(head)):
            until = start if start < until < end else until
        for start, end in self.found(tail):
            since = end if start < since < end else since
        return self.redact_text(head[: max(0, until)]), self.redact_text(tail[since:])

    def found(self, text: str) -> list[tuple[int, int]]:
        """Return the spans of secrets in a text, in order. They may overlap."""
        # Without a percent sign, each spelling of a secret contains an anchor or a `\u` escape,
        # which `_may_hold_one` searches for.
        if "%" not in text and not self._may_hold_one(_as_utf8(text)):
            return []
        reach = self._spelled_chars_max
        return sorted(
            span for patterns in self._patterns for span in _in_windows(patterns.whole, text, reach)
        )

    def begun(self, text: str) -> list[tuple[int, int]]:
        """Find where the end of a text may be the beginning of a secret.

        Each span is `(start, end of the last whole character)`. Only the first span of each secret
        is returned. Start and end are equal where the text ends with only a cut spelling.
        """
        cuts = [start for start, _ in _found(_CUT, text, max(0, len(text) - _SPELLING_CHARS_MAX))]
        spans = [(cut, cut) for cut in cuts]
        for end in (len(text), *cuts):
            first = self._starts.search(text, max(0, end - self._spelled_chars_max), end)
            if first is None:
                continue
            for whole, begun in self._patterns:
                for start, _ in _found(begun, text, first.start(), end):
                    # A secret that ends with `%` is complete here, although the text may continue
                    # it to `%25`. It is replaced without waiting.
                    if whole.match(text, start) is None:
                        spans.append((start, end))
                        break
        return spans

    def entries(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Return the entries without the secrets; the same object if none has any."""
        # Search all lines together: no needle holds a newline, so no match crosses a border.
        data = entries[0][2] if len(entries) == 1 else b"\n".join([data for _, _, data in entries])
        return self._redacted(entries) if self._may_hold_one(data) else entries

    def _redacted(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        redacted = [
            # Banksman parses its own event kinds again, and expects numbers there. A number in them
            # is no secret, whatever its digits are. So only strings are redacted.
            (
                turn,
                kind,
                self.redact(data)
                if kind in FRAMES
                else in_strings(data, self.redact_text, _is_string),
            )
            for turn, kind, data in entries
        ]
        is_same = all(new[2] is old[2] for new, old in zip(redacted, entries, strict=True))
        return entries if is_same else redacted

    def _may_hold_one(self, data: bytes) -> bool:
        # Not `in`: for bytes it first checks whether the needle is a number, and raises and drops
        # an exception for that.
        find = data.find
        for needle in self._needles:
            if find(needle) >= 0:
                return True
        # The search for a single byte is many times faster than that for two.
        return find(b"\\") >= 0 and find(self._escape) >= 0


def _is_string(token: bytes) -> bool:
    return token.startswith(b'"')


def _listed(secrets: Iterable[str]) -> list[Any]:
    # A string is an iterable of strings, and surely not meant as that many secrets.
    if isinstance(secrets, str | bytes) or not isinstance(cast(Any, secrets), Iterable):
        message = f"secrets cannot be of type {type(secrets).__name__}"
        raise UsageError(message, hint="use a list of texts")
    return list(secrets)


def _checked(secret: Any) -> str:
    """Check a secret. The error never contains the secret, because errors are logged."""
    if not isinstance(secret, str):
        raise UsageError(f"a secret cannot be of type {type(secret).__name__}", hint="use text")
    if len(secret) < SECRET_CHARS_MIN:
        hint = f"use {SECRET_CHARS_MIN} characters or more: shorter ones occur by chance"
        raise UsageError(
            f"a secret of {len(secret)} characters is too short to be replaced", hint=hint
        )
    if len(secret) > SECRET_CHARS_MAX:
        hint = f"use at most {SECRET_CHARS_MAX} characters: a part of the secret is enough"
        raise UsageError(
            f"a secret of {len(secret)} characters is too long to be searched for", hint=hint
        )
    if any(secret in word for word in _OUR_WORDS):
        message = "a secret cannot be a word that the log itself needs"
        raise UsageError(message, hint="choose another secret")
    if _SURROGATE.search(secret):
        message = "a secret is not text: it has a lone surrogate"
        raise UsageError(message, hint="decode it with errors='strict'")
    return secret


def _spellings(char: str) -> list[str]:
    """Return a pattern for each spelling of a character.

    Each pattern begins with a literal, to which `re` skips fast.
    """
    units = char.encode("utf-16-be")
    escape = "".join(rf"\\u{_hex(units[place : place + 2])}" for place in range(0, len(units), 2))
    percent = "".join(f"%{_hex(bytes([byte]))}" for byte in char.encode())
    spellings = [re.escape(char), escape, percent]
    if char in _SHORT_ESCAPES:
        # The escape stands before the plain character: an escaped backslash is two characters, and
        # both belong to the match.
        spellings.insert(0, rf"\\{re.escape(_SHORT_ESCAPES[char])}")
    if char == " ":
        spellings.append(r"\+")
    if len(units) > 2:
        # Two separate surrogates: JavaScript cuts a text between them.
        spellings.append("".join(chr(int.from_bytes(units[place : place + 2])) for place in (0, 2)))
    return spellings


def _spelled_chars_max(secret: str) -> int:
    """Return the length of the longest spelling of a secret.

    `\\uXXXX` has three characters per byte of UTF-16, and `%XX` has three per byte of UTF-8.
    """
    return sum(3 * max(len(char.encode("utf-16-le")), len(char.encode())) for char in secret)


def _hex(data: bytes) -> str:
    """Return a pattern for hexadecimal digits in either case.

    `(?i:…)` would take `re` longer to compile.
    """
    return "".join(
        f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in data.hex()
    )


def _any_spelling(char: str) -> str:
    return f"(?:{'|'.join(_spellings(char))})"


def _cut_anywhere(chars: str) -> str:
    """Return a pattern for these characters; the last ones may be missing at the end of a text."""
    # Each missing character matches the end of the text. Nested optional groups would be too deep
    # for `re`.
    return "".join(rf"(?:{'|'.join(_spellings(char))}|\Z)" for char in chars)


def _anchor(secret: str) -> str:
    """Return the longest part of a secret with only one spelling, apart from escapes by code."""
    runs = _UNRESERVED.findall(secret)
    longest = max(runs, key=len, default="")
    if len(longest) >= _ANCHOR_CHARS_MIN:
        return longest
    return max(_ESCAPED_BY_CODE.findall(secret), key=len, default="")


def _found(
    pattern: re.Pattern[str], text: str, start: int = 0, end: int | None = None
) -> Iterable[tuple[int, int]]:
    """Yield the span of every match, including overlapping ones."""
    end = len(text) if end is None else end
    match = pattern.search(text, start, end)
    while match is not None:
        yield match.span()
        match = pattern.search(text, match.start() + 1, end)


def _in_windows(pattern: re.Pattern[str], text: str, reach: int) -> Iterable[tuple[int, int]]:
    """Yield what `_found` yields. No match is longer than `reach`."""
    # One call of `re` keeps the GIL: a long text would stop all other threads for a second.
    start = 0
    while start < len(text):
        until = start + _WINDOW_CHARS
        match = pattern.search(text, start, until + reach)
        if match is None or match.start() >= until:
            start = until
        else:
            yield match.span()
            start = match.start() + 1


def _is_json(data: bytes) -> bool:
    if _TOKENS.fullmatch(data) is None:
        return False
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _as_utf8(text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        return _with_pairs(text).encode("utf-8", "surrogatepass")


def _with_pairs(text: str) -> str:
    """Join the separate halves of surrogate pairs to characters."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def text_of(token: bytes) -> str:
    """Decode a JSON string or number to text. The string may hold lone surrogates."""
    if not token.startswith(b'"'):
        return token.decode()
    try:
        return _decode(token)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # A lone surrogate. JavaScript writes one when it cuts a text, and msgspec rejects it.
        return _with_pairs(_ESCAPE.sub(_unescape, token[1:-1].decode(errors="replace")))


def _unescape(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] is not None else _UNESCAPED.get(match[2], match[2])


def token_of(text: str) -> bytes:
    """Encode a text as a JSON string."""
    if _SURROGATE.search(text) is None:
        return _encode(text)
    pieces = [b""]
    kept_from = 0
    for match in _SURROGATE.finditer(text):
        pieces += (_encode(text[kept_from : match.start()])[1:-1], b"\\u%04x" % ord(match[0]))
        kept_from = match.end()
    return b'"' + b"".join(pieces) + _encode(text[kept_from:])[1:-1] + b'"'
