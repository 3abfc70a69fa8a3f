"""Regular expressions of a schema: same results as Python's `re`, and bounded time where `re` backtracks forever."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.thorough import sample

from banksman.core import json_schema
from banksman.core.json_schema import regex
from banksman.core.json_schema.regex import BadPattern, MatchTooCostly, compiled
from banksman.errors import UsageError

ATOMS = [
    *(
        "a",
        "b",
        "_",
        "\\.",
        ".",
        "\\d",
        "\\w",
        "\\s",
        "\\D",
        "\\W",
        "\\S",
        "[ab]",
        "[^a]",
        "[a-c1]",
        "[^\\d_]",
        "[\\w-]",
    ),
    *("^", "$", "\\A", "\\Z", "\\b", "\\B", "(?:)", "ä"),
]
REPEATS = ["", "", "*", "+", "?", "*?", "+?", "{2}", "{1,2}", "{0,1}", "{2,}"]


def optional(both: tuple[str, str]) -> str:
    return f"(?:{both[0]}){both[1]}"


def grown(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return (
        st.lists(inner, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({'|'.join(parts)})")
        | st.tuples(inner, st.sampled_from(["?", "{1,2}", "{0,2}"])).map(optional)
    )


repeated = st.tuples(st.sampled_from(ATOMS[:16]), st.sampled_from(REPEATS)).map("".join)
patterns = st.recursive(repeated | st.sampled_from(ATOMS), grown, max_leaves=6)


@settings(max_examples=sample(600), deadline=None)
@given(st.sampled_from(["", "", "(?i)", "(?m)", "(?s)", "(?is)"]), patterns, st.text("abAB_1 \n.äZ", max_size=8))
def test_regex_finds_what_python_finds(flags: str, text: str, subject: str) -> None:
    # In a schema, `$` matches only at the end of the text. No atom has a `$` in a class or after a backslash, so the
    # plain replacement is correct.
    text = f"{flags}{text}"
    try:
        wanted = re.compile(text.replace("$", "\\Z"), re.ASCII)
    except re.error:
        return
    assert compiled(text).search(subject) is bool(wanted.search(subject)), (text, subject)


@pytest.mark.parametrize("text", ["^(a+)+$", "^(a|a)*$", "(a*)*b", "^(([a-z])+.)+[A-Z]([a-z])+$", "(x+x+)+y"])
def test_regex_answers_where_python_backtracks_forever(text: str) -> None:
    assert compiled(text).search("a" * 5000 + "!") is False


def test_regex_that_takes_too_long_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regex, "STEPS_MAX", 100)
    with pytest.raises(MatchTooCostly):
        compiled("b").search("a" * 1000)
    assert "takes too long" in str(json_schema.fault("a" * 1000, {"pattern": "b"}))
    assert "takes too long" in str(json_schema.fault("a" * 1000, {"not": {"pattern": "b"}}))


@pytest.mark.parametrize(
    "text",
    [
        "(a)\\1",
        "(?=a)",
        "(?!a)",
        "(?<=a)b",
        "(?i:a)",
        "(?>a)",
        "a++",
        "(",
        "a{3000}",
        "(?:){5000}",
        "(a)(?(1)b|c)",
        "(?u)a",
        "(?L)a",
    ],
)
def test_regex_refuses_unsupported_pattern(text: str) -> None:
    with pytest.raises(BadPattern):
        compiled(text)


def test_regex_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regex, "REMEMBERED_MAX", 8)
    assert not compiled("x[abc]{3}y").search("".join(map(chr, range(0x4E00, 0x4E80))))


class _OtherTree:
    """A parser as a later Python could have it: its tree has one more value for each repeat, and an unknown node."""

    def __init__(self, parse: Callable[..., Any]) -> None:
        self._parse = parse

    def parse(self, text: str, flags: int) -> Any:
        tree = self._parse(text, flags)
        tree.data = [
            (operation, (*argument, 0)) if str(operation) == "MAX_REPEAT" else ("NEW", argument)
            for operation, argument in tree.data
        ]
        return tree


@pytest.mark.parametrize("parser", [None, _OtherTree(getattr(re, "_parser").parse)], ids=["missing", "changed"])  # noqa: B009
def test_regex_refuses_patterns_without_private_parser(parser: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(re, "_parser", parser)
    for text in ("^unseen$", "unseen+"):
        with pytest.raises(BadPattern):
            compiled.__wrapped__(text)
        with pytest.raises(UsageError, match="#/pattern: 'unseen"):
            json_schema.check({"pattern": f"unseen{text}"})
    json_schema.check({"type": "string", "minLength": 1})
    assert json_schema.fault("", {"minLength": 1}) is not None
