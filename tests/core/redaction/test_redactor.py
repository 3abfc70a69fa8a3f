"""Redact secrets from lines: find every spelling of a secret, and keep a JSON line valid JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banksman.core.redaction import redactor as module
from banksman.core.redaction.redactor import SECRET_CHARS_MAX, SECRET_CHARS_MIN, Redactor, in_strings
from banksman.core.session.event import UPDATE, Entry
from banksman.core.wire.elided_text import CUT, REDACTED, cut
from banksman.errors import UsageError

SECRET = "sk-live-0123456789"

# A small alphabet, so that secrets meet, overlap and touch escapes. It includes every character with a special
# spelling.
letters = st.sampled_from('abntu0"\\/\n %+é😀<')
texts = st.text(letters, max_size=12)
secrets = st.lists(st.text(letters, min_size=SECRET_CHARS_MIN, max_size=8), min_size=1, max_size=3)


def escaped(text: str) -> str:
    """Spell a text as an encoder that writes every character as a `\\u` escape."""
    units = text.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))


def covered(text: str, found: list[str]) -> str:
    """Reference implementation: replace these secrets in a text by a search at every place, and merge overlaps."""
    spans = sorted(
        (place, place + len(secret)) for secret in found for place in range(len(text)) if text.startswith(secret, place)
    )
    out, kept_from = "", 0
    while spans:
        start, end = spans.pop(0)
        while spans and spans[0][0] < end:
            end = max(end, spans.pop(0)[1])
        out += text[kept_from:start] + REDACTED
        kept_from = end
    return out + text[kept_from:]


def everywhere(value: Any, found: list[str]) -> Any:
    match value:
        case str():
            return covered(value, found)
        case list():
            return [everywhere(item, found) for item in value]  # pyright: ignore[reportUnknownVariableType]
        case dict():
            return {covered(name, found): everywhere(item, found) for name, item in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case _:
            return value


# -- places and spellings --------------------------------------------------------------------------------------------
WRITTEN: dict[str, Callable[[str], bytes]] = {
    "as it is": lambda secret: secret.encode(),
    "JSON in ASCII": lambda secret: json.dumps([secret]).encode(),
    "JSON in UTF-8": lambda secret: json.dumps([secret], ensure_ascii=False).encode(),
    "JSON with escaped slashes": lambda secret: json.dumps([secret]).replace("/", "\\/").encode(),
    "JSON, all by code": lambda secret: f'["{escaped(secret)}"]'.encode(),
    "JSON, codes in capitals": lambda secret: f'["{escaped(secret).upper().replace("U", "u")}"]'.encode(),
    "JSON in JSON": lambda secret: json.dumps(json.dumps({"key": secret})).encode(),
    "JSON in no JSON": lambda secret: f"x {json.dumps(secret)[1:-1]} {{".encode(),
    "percent-encoded": lambda secret: quote(secret, safe="").encode(),
    "as a form has it": lambda secret: quote_plus(secret).encode(),
    "percent-encoded in lower case": lambda secret: quote_plus(secret).lower().encode(),
    "percent-encoded in JSON": lambda secret: json.dumps({"url": f"?key={quote(secret)}"}).encode(),
    "between bytes that are no text": lambda secret: b"\xff\xfe" + secret.encode() + b"\x00\xff",
}
SECRETS = (
    SECRET,
    "pass/word+plus=",
    'quo"te back\\slash',
    "pässwörd",
    "пароль",
    "tab\tnew\nline",
    "key😀key",
    "%41%42",
    "//////",
)


@pytest.mark.parametrize("secret", SECRETS)
def test_redactor_finds_secret_in_every_spelling(secret: str) -> None:
    redactor = Redactor([secret, "another-secret"])
    spellings = (secret, json.dumps(secret)[1:-1], escaped(secret), quote(secret, safe=""), quote_plus(secret))
    for way, written in WRITTEN.items():
        redacted = redactor.redact(written(secret))
        assert REDACTED.encode() in redacted, way
        assert not [spelling for spelling in spellings if spelling.encode() in redacted], way


@pytest.mark.parametrize("secret", SECRETS)
def test_redactor_finds_secret_at_every_place_of_a_window(secret: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_WINDOW_CHARS", 8)
    redactor = Redactor([secret])
    for spelled in (secret, escaped(secret), quote(secret, safe=""), quote_plus(secret)):
        for before in range(17):
            text = f"{'-' * before}{spelled}{'-' * 20}"
            assert redactor.redact_text(text) == text.replace(spelled, REDACTED)


def test_redactor_keeps_rest_of_line_byte_for_byte() -> None:
    line = b'{ "a" : 1.50, "b\\/c":"\\u0041", "d":"x %b y", "e":1e400 ,"f":[true,null]}\r\n' % SECRET.encode()
    expected = b'{ "a" : 1.50, "b\\/c":"\\u0041", "d":"x [redacted] y", "e":1e400 ,"f":[true,null]}\r\n'
    assert Redactor([SECRET]).redact(line) == expected


def test_redactor_returns_same_object_without_secret() -> None:
    redactor = Redactor([SECRET, "пароль"])
    for line in (b"", b'{"a":"100%, \\u00e9"}', b"no JSON, 100% \\u00", b'"' + SECRET[:-1].encode() + b'"'):
        assert redactor.redact(line) is line


def test_redactor_never_cuts_an_escape() -> None:
    """The line has `\\t` followed by `oken-1`, not `token-1`. A replacement there would leave a lone backslash."""
    line = b'{"a":"\\token-1","b":"\\\\token-1"}'
    assert Redactor(["token-1"]).redact(line) == b'{"a":"\\token-1","b":"\\\\[redacted]"}'
    coded = b'{"a":"\\u12345678"}'
    assert Redactor(["345678"]).redact(coded) is coded


def test_redactor_covers_member_names_and_numbers() -> None:
    line = b'{"id-12345678":[12345678,-0.12345678e5,1234567]}'
    expected = b'{"id-[redacted]":["[redacted]","-0.[redacted]e5",1234567]}'
    assert Redactor(["12345678"]).redact(line) == expected


def test_redactor_removes_overlapping_secrets() -> None:
    redactor = Redactor(["secret", "secret-and-more", "more-of-it"])
    assert redactor.redact(b"<secret-and-more>") == b"<[redacted]>"
    assert redactor.redact(b"<secret-and-more-of-it>") == b"<[redacted]>"
    assert redactor.redact(b"<secretsecret>") == b"<[redacted][redacted]>"
    assert Redactor(["aaaaaa"]).redact(b"<aaaaaaaa>") == b"<[redacted]>"


def test_redactor_keeps_lone_surrogates_beside_secret() -> None:
    """JavaScript cuts strings between surrogates, and writes the remaining half as an escape."""
    line = b'{"a":"\\ud83d ' + SECRET.encode() + b' \\ude00","b":"\\ud800"}'
    assert json.loads(Redactor([SECRET]).redact(line)) == {"a": "\ud83d [redacted] \ude00", "b": "\ud800"}
    paired = b'{"a":"\\ud800 key\\ud83d\\ude00key"}'
    assert json.loads(Redactor(["key😀key"]).redact(paired)) == {"a": "\ud800 [redacted]"}


def test_redactor_reads_plus_as_space_without_other_encoding() -> None:
    assert Redactor(["é è é è"]).redact("é+è+é+è".encode()) == b"[redacted]"


def test_redactor_treats_cut_line_as_text() -> None:
    line = b'{"a":"x","b":"' + SECRET.encode() + b" and"
    assert Redactor([SECRET]).redact(line) == b'{"a":"x","b":"[redacted] and'


# -- properties ------------------------------------------------------------------------------------------------------
values = st.recursive(
    st.none() | st.booleans() | texts,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=8,
)


@given(st.data(), secrets)
def test_redactor_changes_only_strings_with_secret(data: st.DataObject, found: list[str]) -> None:
    # The redactor also finds secrets that are escaped twice or percent-encoded. This property covers only texts in
    # which a secret is spelled plainly.
    spelled = {"\\", "%", "+"}
    found = [secret for secret in found if not spelled & {*secret}] or ["ab/\n é"]
    clean = st.text(letters.filter(lambda letter: letter not in spelled), max_size=4)
    text = st.lists(clean | st.sampled_from(found), max_size=5).map("".join)
    value = data.draw(
        st.recursive(
            st.none() | text,
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
            max_leaves=8,
        )
    )
    line = json.dumps(value, ensure_ascii=data.draw(st.booleans())).encode()
    if data.draw(st.booleans()):
        line = line.replace(b"/", b"\\/")
    redacted = Redactor(found).redact(line)
    assert json.loads(redacted) == everywhere(value, found)


@given(values, secrets, st.booleans())
def test_redactor_keeps_json_valid_for_any_secrets(value: Any, found: list[str], is_ascii: bool) -> None:
    redactor = Redactor(found)
    line = json.dumps(value, ensure_ascii=is_ascii).encode()
    redacted = redactor.redact(line)
    text = json.dumps(json.loads(redacted), ensure_ascii=False)
    for secret in found:
        # Only strings are checked: JSON's own punctuation is not secret.
        assert json.dumps(secret, ensure_ascii=False)[1:-1] not in text.replace(REDACTED, "\0")
    assert redactor.redact(redacted) == redacted or any(secret in REDACTED for secret in found)


@given(st.binary(max_size=30), st.binary(max_size=30), secrets)
def test_redactor_keeps_bytes_that_are_no_text(before: bytes, after: bytes, found: list[str]) -> None:
    alone = ["zyxwvuts"]
    assert Redactor(alone).redact(before + b"zyxwvuts" + after) == before + b"[redacted]" + after
    Redactor(found).redact(before + after)


# -- entries ---------------------------------------------------------------------------------------------------------
def test_redactor_returns_same_entries_without_secret() -> None:
    redactor = Redactor([SECRET])
    for entries in (
        [],
        [("t", UPDATE, b"{}")],
        [("t", UPDATE, b'{"a":"\\u0041 100%"}'), (None, UPDATE, b"\xff")],
        [("t", UPDATE, SECRET[:9].encode()), ("t", UPDATE, SECRET[9:].encode())],
    ):
        assert redactor.entries(entries) is entries


@pytest.mark.parametrize("others", [0, 1, 40])
def test_redactor_replaces_entries_with_secret_and_spares_originals(others: int) -> None:
    other: Entry = ("t", UPDATE, b'{"a":"\\u0041"}')
    prompted: Entry = (None, "turn.queued", b'{"prompt":"' + SECRET.encode() + b'"}')
    entries = [*[other] * others, prompted]
    redacted = Redactor([SECRET]).entries(entries)
    assert list(redacted) == [*[other] * others, (None, "turn.queued", b'{"prompt":"[redacted]"}')]
    assert SECRET.encode() in entries[-1][2]


# -- arguments -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "secret", ["", "a" * (SECRET_CHARS_MIN - 1), "a" * (SECRET_CHARS_MAX + 1), b"0123456789", None, 7, "\ud800-secret"]
)
def test_redactor_refuses_invalid_secret_without_showing_it(secret: Any) -> None:
    with pytest.raises(UsageError) as refused:
        Redactor([SECRET, secret])
    assert refused.value.hint
    shown = str(refused.value)
    assert SECRET not in shown
    assert not secret or str(secret) not in shown


@pytest.mark.parametrize("given", [SECRET, b"0123456", None, 7])
def test_redactor_refuses_single_text_as_list(given: Any) -> None:
    with pytest.raises(UsageError):
        Redactor(given)


@pytest.mark.thorough
def test_redactor_finds_longest_and_shortest_secrets() -> None:
    for secret in ("q" * SECRET_CHARS_MIN, "qx" * (SECRET_CHARS_MAX // 2)):
        assert Redactor([secret]).redact(secret.encode()) == b"[redacted]"


def test_redactor_repr_shows_no_secret() -> None:
    assert repr(Redactor([SECRET, "пароль"])) == "<Redactor secrets=2>"


def test_redactor_without_secrets_changes_nothing() -> None:
    line = b"100% \\u0041"
    assert Redactor([]).redact(line) is line


def test_in_strings_changes_strings_of_line_only() -> None:
    assert in_strings(b'{"a":["b",1]}', str.upper) == b'{"A":["B",1]}'
    assert in_strings(b"a \xff b", str.upper) == b"A \xff B"


@pytest.mark.parametrize(
    "spelled", ["hunter2/é😀-key", "hunter2\\/\\u00e9\\ud83d\\ude00-key", "hunter2%2F%C3%A9%F0%9F%98%80-key"]
)
def test_redact_ends_leaves_no_part_of_cut_secret(spelled: str) -> None:
    """The omitted middle may begin and end at any byte, inside a secret or between two."""
    redactor = Redactor(["hunter2/é😀-key"])
    text = f"<{'x' * 400}{spelled * 3}{'x' * 400}>".encode()
    first = text.index(b"hunter")
    for until in range(first, first + len(spelled.encode()) + 1):
        for since in range(until, first + 3 * len(spelled.encode()) + 1):
            ends = (part.decode(errors="replace") for part in (text[:until], text[since:]))
            head, tail = redactor.redact_ends(*ends)
            assert set(head.replace(REDACTED, "")) <= set("<x"), (until, since, head)
            assert set(tail.replace(REDACTED, "")) <= set("x>"), (until, since, tail)
            assert head.startswith("<x")
            assert tail.endswith("x>")


@pytest.mark.parametrize(
    "spelled", ["hunter2/é😀-key", "hunter2\\/\\u00e9\\ud83d\\ude00-key", "hunter2%2F%C3%A9%F0%9F%98%80-key"]
)
def test_redactor_leaves_no_part_of_secret_in_front_of_cut(spelled: str) -> None:
    redactor = Redactor(["hunter2/é😀-key", "key-in-key"])
    for length in range(1, len(spelled) + 3):
        text = cut(f"{'x' * 20}{spelled}{'x' * 20}", 20 + length + len(CUT))
        redacted = redactor.redact_text(text)
        assert redacted.endswith(CUT)
        assert set(redacted.removesuffix(CUT).replace(REDACTED, "")) == {"x"}, (length, redacted)
        line = json.dumps({"told": text, "rest": "hunt"}).encode()
        assert json.loads(redactor.redact(line)) == {"told": redacted, "rest": "hunt"}


def test_redactor_finds_every_cut_of_a_text() -> None:
    assert Redactor(["hunter2"]).redact_text(f"a hun{CUT} and hunt{CUT}, hun") == f"a {CUT} and {CUT}, hun"


def test_cut_keeps_text_at_limit() -> None:
    assert cut("x" * 10, 10) == "x" * 10
    assert cut("x" * 11, 10) == f"xxx{CUT}"


def test_redact_ends_drops_ends_shorter_than_secret() -> None:
    assert Redactor(["hunter2"]).redact_ends("a hun", "ter2 b") == ("", "")
