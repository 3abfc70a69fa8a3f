"""The view of a question shows the user everything that is to be approved."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banksman.cli.output import as_line, width
from banksman.cli.tui.question_view import block_rows, subject_of, title_of

WORDS = st.text(st.sampled_from("ab\n\t ;\u200b\x1b日'"), max_size=40)
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | WORDS,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(WORDS, inside, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(["command", "code", "description", "file_path", "content", "title", "x"])


def asked(tool: str = "Bash", **members: Any) -> dict[str, Any]:
    return {"wants": "permission", "tool": tool, "input": members, "details": {}}


def letters(value: Any) -> str:
    """Return the visible letters of every string in the value."""
    match value:
        case str():
            return re.sub(r"\s|\\\\.", "", as_line(value))
        case dict():
            return "".join(letters(each) for pair in value.items() for each in pair)  # pyright: ignore[reportUnknownVariableType]
        case list():
            return "".join(map(letters, value))  # pyright: ignore[reportUnknownArgumentType]
        case _:
            return ""


@settings(max_examples=40)
@given(st.dictionaries(NAMES, VALUES, max_size=4), st.integers(8, 60))
def test_question_view_shows_every_letter_of_the_input(members: dict[str, Any], columns: int) -> None:
    question = asked(**members)
    rows = list(block_rows(subject_of(question), columns))
    assert all(width(row) <= columns for row in rows)
    shown = title_of(question) + "".join(rows)
    for value in members.values():
        for letter in "ab;日":
            assert shown.count(letter) >= letters(value).count(letter)


def test_question_view_puts_one_short_member_in_the_title() -> None:
    assert title_of(asked(command="make test")) == "Bash: make test"
    assert subject_of(asked(command="make test")) == ()
    assert title_of(asked("Think", depth=3)) == "Think: depth: 3"
    assert title_of(asked("Nothing")) == "Nothing"


def test_question_view_shows_code_first_and_the_agents_words_last() -> None:
    question = asked("mcp__py__run", description="print the date", timeout=5, code="x\ny")
    assert subject_of(question) == ("code:", "  x", "  y", "timeout: 5", "the agent says: print the date")
    assert title_of(question) == "mcp__py__run (5 lines above)"


def test_question_view_counts_blanks_that_push_text_out_of_sight() -> None:
    question = asked(command=f"ls{' ' * 500}; a{chr(10) * 90}b{chr(0x3000) * 70}c{chr(0x2800) * 70}d")
    assert subject_of(question) == (
        "command:",
        "  ls [500 blanks] ; a",
        "  [89 empty lines]",
        "  b [70 blanks] c [70 blanks] d",
    )


def test_question_view_shows_edits_lists_and_diffs_whole() -> None:
    edits = [{"old_string": "a", "new_string": "b\nc"}]
    assert subject_of(asked("MultiEdit", file_path="f", edits=edits)) == (
        "file_path: f",
        "edits:",
        "  edits[0]:",
        "    old_string: a",
        "    new_string:",
        "      b",
        "      c",
    )
    assert title_of(asked("execute", command=["sh", "-c", "a b"])) == "execute: sh -c 'a b'"
    diff = {"type": "diff", "path": "/f", "oldText": None, "newText": "evil"}
    question = {"tool": "edit", "input": {}, "details": {"content": [diff], "toolCallId": "c", "options": []}}
    assert "    newText: evil" in subject_of(question)
    assert not any("toolCallId" in line for line in subject_of(question))


@pytest.mark.parametrize("columns", [9, 20, 80])
def test_question_view_marks_rows_of_a_block(columns: int) -> None:
    question = asked(command="x\nBash: ls — allow? [a]llow", content="ok\r\x1b[2J" * 40)
    rows = list(block_rows(subject_of(question), columns))
    assert all(row.startswith(("│ ", "┊ ")) for row in rows)
    assert not any("\x1b" in row or "\r" in row for row in rows)
