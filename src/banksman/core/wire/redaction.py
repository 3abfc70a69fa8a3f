r"""Secrets out of what is stored: `Redactor(secrets).redact(line)`.

A secret that was configured is replaced by `[redacted]` wherever it stands in a line: in a string of JSON (a value, or
the name of a member), in a number, or in bytes that are no JSON at all. A line of JSON stays one, and all in it that
is no secret keeps its value; only the strings that held a secret are written anew. Where secrets overlap, all that any
of them covers goes.

A secret is found however its characters are written, each for itself:

    as they are         in UTF-8
    escaped, as JSON    `\"` `\\` `\/` `\n` …, and `\uXXXX` for any; in a string of JSON a second time as well, because
                        agents put JSON into strings: what they give to a tool, what a tool has printed
    percent-encoded     `%XX` for what a URL cannot hold as it is, and `+` for a space

**Limits.** What is cut over two lines is not found here: an agent that streams says a word in pieces, and each piece is
a line of its own. `stream_redaction.py` finds it there. Base64, hex, compression, or a secret told backwards are not
found either; nor one that is made of JSON's own punctuation, between the strings of a line. Text in another Unicode
normal form is another text.

**Cost.** This is on the path of every token, so a line is first searched for what any occurrence must have: a part of
each secret that stands there as it is, unless it was escaped by `\u`. No encoder does that to letters and digits, but
it is looked for all the same. These are `find`s of a few hundred nanoseconds in all; a line in which all fail is
returned as it came. Only a secret without letters and digits makes every line with a `%` pay for a look at its strings.
The beginning of a secret is looked for only at the end of a text, within the length of the longest spelling.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from banksman.core.session import event as events
from banksman.core.session.event import FRAMES, Entry
from banksman.core.session.outcome import By, Kind
from banksman.errors import UsageError

# What the log is read by: the names of its events, and how turns end.
_OUR_WORDS = (*Kind, *By, *(value for name, value in vars(events).items() if name.isupper() and isinstance(value, str)))

REDACTED = "[redacted]"
# Something shorter stands in ordinary text by chance, and replacing it would destroy the log.
SECRET_CHARS_MIN = 6
# A private key with its whole chain of certificates; each character costs a branch of the compiled search.
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
# What is never percent-encoded, and escaped by nothing but `\u00`: the best part of a secret to look for.
_UNRESERVED = re.compile("[A-Za-z0-9_.~-]+")
# Fewer of these are met in too many lines.
_ANCHOR_CHARS_MIN = 4
# What has no other spellings than those with a `\u` or a `%` in them. (A space may be a plus.)
_ESCAPED_BY_CODE = re.compile("[^ " + re.escape("".join(_SHORT_ESCAPES)) + "]+")

_STRING = rb'"(?:[^"\\\x00-\x1f]++|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*+"'
_NUMBER = rb"[-+0-9.eE]++"
_VALUE = re.compile(_STRING + b"|" + _NUMBER)
# What consists of JSON's tokens, in whatever order: where the strings begin and end is then beyond doubt.
_TOKENS = re.compile(rb"(?:[ \t\r\n{}\[\]:,]++|true|false|null|" + _STRING + b"|" + _NUMBER + b")*+")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_UNESCAPED = {escape: char for char, escape in _SHORT_ESCAPES.items()}
# So many of the first characters of a secret are seldom met by chance.
_START_CHARS = 4
# The longest spelling of a character: two `\uXXXX`, or four `%XX`.
_SPELLING_CHARS_MAX = 12
# The end of a text that may be a part of such a spelling. A whole `\uXXXX` or `%XX` may be, too, and so may the first
# half of a surrogate pair.
_CUT = re.compile(r"(?:(?:\\(?:u[0-9a-fA-F]{0,4})?){1,2}|(?:%[0-9a-fA-F]{0,2}){1,4}|[\ud800-\udbff])\Z")
_SURROGATE = re.compile("[\ud800-\udfff]")

_decode: Callable[[bytes], str] = msgspec.json.Decoder(str).decode
_encode = msgspec.json.Encoder().encode


def in_strings(data: bytes, change: Callable[[str], str], is_worth_it: Callable[[bytes], bool] | None = None) -> bytes:
    """A line with `change` made to each of its strings and numbers, if it is JSON; else to all of it, as one text.

    A number that is changed becomes a string. `is_worth_it`: only then is the string that is written so decoded. Where
    nothing is changed the same object is returned.
    """
    if not _is_json(data):
        # Whatever is no UTF-8 comes out again as it went in.
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
    """How one secret is found. `begun`: its first characters at the end of a text, all but the last one at most."""

    whole: re.Pattern[str]
    begun: re.Pattern[str]

    @classmethod
    def of(cls, secret: str) -> _Patterns:
        whole = "".join(map(_any_spelling, secret))
        begun = _any_spelling(secret[0]) + _cut_anywhere(secret[1:-1]) + r"\Z"
        return cls(re.compile(whole), re.compile(begun))


class Redactor:
    """What these secrets are, compiled. It has no state, and shows none of them."""

    __slots__ = ("_escape", "_needles", "_patterns", "_spelled_chars_max", "_starts")

    def __init__(self, secrets: Iterable[str]) -> None:
        kept = sorted({_checked(secret) for secret in _listed(secrets)})
        self._patterns = [_Patterns.of(secret) for secret in kept]
        # The first characters of any secret, as alternatives that begin with a literal: `re` skips to those fast.
        starts = [first + _cut_anywhere(secret[1:_START_CHARS]) for secret in kept for first in _spellings(secret[0])]
        self._starts = re.compile("|".join(starts))
        self._spelled_chars_max = max(map(_spelled_chars_max, kept), default=0)
        anchors = {_anchor(secret) for secret in kept}
        is_plain = all(_UNRESERVED.fullmatch(anchor) for anchor in anchors)
        self._escape = b"\\u00" if is_plain else b"\\u"
        self._needles = [anchor.encode() for anchor in sorted(anchors)] + ([] if is_plain else [b"%"])

    def __repr__(self) -> str:
        return f"<Redactor secrets={len(self._patterns)}>"

    def redact(self, data: bytes) -> bytes:
        """The line without the secrets; the same object if it has none."""
        return in_strings(data, self.redact_text, self._may_hold_one) if self._may_hold_one(data) else data

    def redact_text(self, text: str) -> str:
        """A text without the secrets, in any of their spellings."""
        spans = self.found(text)
        if not spans:
            return text
        pieces: list[str] = []
        kept_from, (start, end) = 0, spans[0]
        for next_start, next_end in spans[1:]:
            # Those that only touch are two, as they would be with something between them.
            if next_start < end:
                end = max(end, next_end)
                continue
            pieces += (text[kept_from:start], REDACTED)
            kept_from, start, end = end, next_start, next_end
        return "".join((*pieces, text[kept_from:start], REDACTED, text[end:]))

    def redact_ends(self, head: str, tail: str) -> tuple[str, str]:
        """The two ends of a text whose middle was left out, without the secrets, nor parts of those that this has cut.

        A part is not recognised, so as many characters go from either side of the cut as a secret may have.
        """
        until, since = len(head) - self._spelled_chars_max, self._spelled_chars_max
        # Nor is a whole one cut here.
        for start, end in reversed(self.found(head)):
            until = start if start < until < end else until
        for start, end in self.found(tail):
            since = end if start < since < end else since
        return self.redact_text(head[: max(0, until)]), self.redact_text(tail[since:])

    def found(self, text: str) -> list[tuple[int, int]]:
        """Where secrets stand in a text, in order. They may overlap."""
        # Without a percent sign each spelling of a secret holds what `_may_hold_one` looks for.
        if "%" not in text and not self._may_hold_one(_as_utf8(text)):
            return []
        return sorted(span for patterns in self._patterns for span in _found(patterns.whole, text))

    def begun(self, text: str) -> list[tuple[int, int]]:
        """Find where the end of a text may be the beginning of a secret: `(start, end of its last whole character)`.

        Of each secret only the first such place is told. The two are the same where only a cut spelling stands.
        """
        cuts = [start for start, _ in _found(_CUT, text, max(0, len(text) - _SPELLING_CHARS_MAX))]
        spans = [(cut, cut) for cut in cuts]
        for end in (len(text), *cuts):
            first = self._starts.search(text, max(0, end - self._spelled_chars_max), end)
            if first is None:
                continue
            for whole, begun in self._patterns:
                for start, _ in _found(begun, text, first.start(), end):
                    # A secret that ends with `%` is whole there, and may also go on: `%25`. It is replaced at once.
                    if whole.match(text, start) is None:
                        spans.append((start, end))
                        break
        return spans

    def entries(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        """Entries without the secrets; the same object if none has any."""
        # One search through many lines at once: no needle holds a newline, so none is found over a border.
        data = entries[0][2] if len(entries) == 1 else b"\n".join([data for _, _, data in entries])
        return self._redacted(entries) if self._may_hold_one(data) else entries

    def _redacted(self, entries: Sequence[Entry]) -> Sequence[Entry]:
        redacted = [
            # Our own kinds are ours to read again: a number in them is no secret, whatever its digits are.
            (
                turn,
                kind,
                self.redact(data) if kind in FRAMES else in_strings(data, self.redact_text, _is_string),
            )
            for turn, kind, data in entries
        ]
        is_same = all(new[2] is old[2] for new, old in zip(redacted, entries, strict=True))
        return entries if is_same else redacted

    def _may_hold_one(self, data: bytes) -> bool:
        # Not `in`: of bytes it first asks whether the needle is a number, and raises and drops an exception for it.
        find = data.find
        for needle in self._needles:
            if find(needle) >= 0:
                return True
        # A single byte is found many times faster than two.
        return find(b"\\") >= 0 and find(self._escape) >= 0


def _is_string(token: bytes) -> bool:
    return token.startswith(b'"')


def _listed(secrets: Iterable[str]) -> list[Any]:
    # A text is an iterable of texts, and surely not meant as that many secrets.
    if isinstance(secrets, str | bytes) or not isinstance(cast(Any, secrets), Iterable):
        raise UsageError(f"secrets cannot be of type {type(secrets).__name__}", hint="a list of texts")
    return list(secrets)


def _checked(secret: Any) -> str:
    """Never with the secret in what is raised: that would be logged."""
    if not isinstance(secret, str):
        raise UsageError(f"a secret cannot be of type {type(secret).__name__}", hint="text")
    if len(secret) < SECRET_CHARS_MIN:
        hint = f"{SECRET_CHARS_MIN} characters or more: a shorter one stands in ordinary text by chance"
        raise UsageError(f"a secret of {len(secret)} characters is too short to be replaced", hint=hint)
    if len(secret) > SECRET_CHARS_MAX:
        hint = f"at most {SECRET_CHARS_MAX} characters; a part of it is enough to make the rest worthless"
        raise UsageError(f"a secret of {len(secret)} characters is too long to be searched for", hint=hint)
    if any(secret in word for word in _OUR_WORDS):
        raise UsageError("a secret is a word that the log itself needs", hint="it is none that anybody could keep")
    if _SURROGATE.search(secret):
        raise UsageError("a secret is no text: it has half of a surrogate pair", hint="decode it with errors='strict'")
    return secret


def _spellings(char: str) -> list[str]:
    """A pattern for each way to write a character. Each begins with a literal, to which `re` skips fast."""
    units = char.encode("utf-16-be")
    escape = "".join(rf"\\u{_hex(units[place : place + 2])}" for place in range(0, len(units), 2))
    percent = "".join(f"%{_hex(bytes([byte]))}" for byte in char.encode())
    spellings = [re.escape(char), escape, percent]
    if char in _SHORT_ESCAPES:
        # Before the plain one: of a backslash that is escaped both are meant.
        spellings.insert(0, rf"\\{re.escape(_SHORT_ESCAPES[char])}")
    if char == " ":
        spellings.append(r"\+")
    if len(units) > 2:
        # Two halves that have come one by one: JavaScript cuts a text between them.
        spellings.append("".join(chr(int.from_bytes(units[place : place + 2])) for place in (0, 2)))
    return spellings


def _spelled_chars_max(secret: str) -> int:
    """How long its longest spelling is: `\\uXXXX` has three characters for a byte of UTF-16, `%XX` for one of UTF-8."""
    return sum(3 * max(len(char.encode("utf-16-le")), len(char.encode())) for char in secret)


def _hex(data: bytes) -> str:
    """A pattern for hexadecimal digits in either case. `(?i:…)` would take `re` longer to compile."""
    return "".join(f"[{digit}{digit.upper()}]" if digit.isalpha() else digit for digit in data.hex())


def _any_spelling(char: str) -> str:
    return f"(?:{'|'.join(_spellings(char))})"


def _cut_anywhere(chars: str) -> str:
    """A pattern for these characters, of which the last ones may be missing where the text ends."""
    # Each missing one matches the end of the text. Optional groups, nested, would be too deep for `re`.
    return "".join(rf"(?:{'|'.join(_spellings(char))}|\Z)" for char in chars)


def _anchor(secret: str) -> str:
    """The longest part of a secret that stands in a line as it is, unless there is an escape by code in it."""
    runs = _UNRESERVED.findall(secret)
    longest = max(runs, key=len, default="")
    if len(longest) >= _ANCHOR_CHARS_MIN:
        return longest
    return max(_ESCAPED_BY_CODE.findall(secret), key=len, default="")


def _found(pattern: re.Pattern[str], text: str, start: int = 0, end: int | None = None) -> Iterable[tuple[int, int]]:
    """Every place, those that overlap included."""
    end = len(text) if end is None else end
    match = pattern.search(text, start, end)
    while match is not None:
        yield match.span()
        match = pattern.search(text, match.start() + 1, end)


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
    """Two halves of a surrogate pair that were made one by one are one character."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "surrogatepass")


def text_of(token: bytes) -> str:
    """What a string or a number of JSON is as text. A string may hold what JSON does not allow."""
    if not token.startswith(b'"'):
        return token.decode()
    try:
        return _decode(token)
    except (msgspec.DecodeError, UnicodeDecodeError):
        # Half of a surrogate pair, which JavaScript writes when it has cut a text, and msgspec does not take.
        return _with_pairs(_ESCAPE.sub(_unescape, token[1:-1].decode(errors="replace")))


def _unescape(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] is not None else _UNESCAPED.get(match[2], match[2])


def token_of(text: str) -> bytes:
    """A JSON string."""
    if _SURROGATE.search(text) is None:
        return _encode(text)
    pieces = [b""]
    kept_from = 0
    for match in _SURROGATE.finditer(text):
        pieces += (_encode(text[kept_from : match.start()])[1:-1], b"\\u%04x" % ord(match[0]))
        kept_from = match.end()
    return b'"' + b"".join(pieces) + _encode(text[kept_from:])[1:-1] + b'"'
