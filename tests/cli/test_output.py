"""Output to a terminal: only letters, and no control sequences."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banksman.cli.output import as_line, as_text, say_json, table

# Every possible string, including lone surrogates.
ANY = st.text(st.characters(exclude_categories=[]), max_size=50)


@given(ANY)
def test_output_contains_no_control_or_bidi_characters(text: str) -> None:
    for character in as_text(text):
        assert character in "\n\t" or unicodedata.category(character) not in ("Cc", "Cs", "Zl", "Zp")
        assert unicodedata.bidirectional(character) not in (
            "LRE",
            "RLE",
            "LRO",
            "RLO",
            "PDF",
            "LRI",
            "RLI",
            "FSI",
            "PDI",
        )
    assert "\n" not in as_line(text)
    assert "\t" not in as_line(text)
    as_text(text).encode()


# Default-ignorable code points: a terminal shows nothing for them, and a program still reads them.
SHAPELESS = (
    "\u00ad\u034f\u061c\u115f\u1160\u17b4\u180e\u200b\u200c\u200d\u200e\u202e\u2060\u2064\u206f\u3164\ufe00\ufe0f\ufeff"
    "\uffa0\ufff9\U0001bca0\U0001d173\U000e0001\U000e0041\U000e007f\U000e0100\U000e01ef"
)


@pytest.mark.parametrize("character", SHAPELESS, ids=[f"{ord(each):x}" for each in SHAPELESS])
def test_output_escapes_invisible_characters(character: str) -> None:
    assert character not in as_text(f"rm{character} -rf")
    assert f"{ord(character):x}" in as_line(f"rm{character} -rf")


@pytest.mark.parametrize(
    "text", ["👨\u200d👩\u200d👧", "❤\ufe0f", "👩🏽\u200d💻", "🏳\ufe0f\u200d🌈", "1\ufe0f\u20e3", "می\u200cکنم"]
)
def test_output_keeps_joiners_and_selectors_of_words_and_emoji(text: str) -> None:
    assert as_line(text) == text


def test_output_escapes_repeated_joiners_and_selectors() -> None:
    assert as_line("❤\ufe0f\ufe0f\ufe0e") == "❤\ufe0f\\ufe0f\\ufe0e"
    assert as_line("👨\u200d\u200d👩") == "👨\\u200d\\u200d👩"


def test_output_keeps_harmless_text() -> None:
    text = "ñ … 🙂 \\x1b é\n\tindented"
    assert as_text(text) == text


def test_output_marks_a_truncated_line() -> None:
    assert as_line("abcdef", characters_max=4) == "abc…"
    assert as_line("abcd", characters_max=4) == "abcd"


def test_output_json_is_one_line_of_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    say_json({"text": "a\nb\x1b\x7f\u2028é\ud800"})
    said = capsys.readouterr().out
    assert said == '{"text":"a\\nb\\u001b\\u007f\\u2028\\u00e9\\ud800"}\n'


def test_output_table_aligns_columns_without_trailing_blanks(capsys: pytest.CaptureFixture[str]) -> None:
    table(("A", "BBB", "C"), [("x", None, ""), ("long", 3, "y\n")])
    assert capsys.readouterr().out == "A     BBB  C\nx     -    -\nlong  3    y\\n\n"
