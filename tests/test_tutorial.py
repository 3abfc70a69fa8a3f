"""Every command of docs/tutorial.md runs, and its output equals the output on the page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.thorough import thorough
from tests.tutorial import PAGE, Command, Picture, follow, own_text, steps

TEXT = PAGE.read_text(encoding="utf-8")
OPERATION = PAGE.parent / "operation.md"
PICTURE_BYTES_MAX = 150_000


@thorough
def test_tutorial_commands_print_what_the_page_shows(tmp_path: Path) -> None:
    done = follow(tmp_path / "home")
    assert done == [step.typed for step in steps(own_text()) if isinstance(step, Command)]


def test_tutorial_shell_blocks_are_all_run() -> None:
    """The page would show a block with another name, but no test would run it."""
    assert TEXT.count("```") == 2 * (TEXT.count("```console\n") + TEXT.count("```console second\n"))


def test_tutorial_pictures_exist_and_are_small() -> None:
    named = {step.name for step in steps(TEXT) if isinstance(step, Picture)}
    # Another browser test makes the pictures of a restart.
    named |= set(re.findall(r"\(images/(restart-[a-z0-9-]+\.png)\)", OPERATION.read_text(encoding="utf-8")))
    folder = PAGE.parent / "images"
    assert named == {path.name for path in folder.glob("*.png")}, "`make screenshots` makes them"
    for name in named:
        data = (folder / name).read_bytes()
        assert data.startswith(b"\x89PNG"), name
        assert len(data) < PICTURE_BYTES_MAX, f"{name} is too large: {len(data)} bytes"


@pytest.mark.parametrize(
    ("shown", "printed", "is_shown"),
    [
        (["one"], "one\n", True),
        (["one"], "one\ntwo\n", False),
        (["one", "two"], "one\n", False),
        (["o…e"], "one\n", True),
        (["o…e"], "o\ne\n", False),
        (["…", "two"], "one\none\ntwo\n", True),
        (["…"], "", True),
        ([], "", True),
        ([], "one\n", False),
        (["a.c"], "abc\n", False),
    ],
)
def test_tutorial_pattern_matches_its_notation(shown: list[str], printed: str, is_shown: bool) -> None:
    assert (Command(1, "x", shown).pattern.fullmatch(printed) is not None) is is_shown
