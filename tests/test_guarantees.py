"""docs/guarantees.md names only files, tests and fixtures that exist."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "guarantees.md").read_text()
NAME = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
NAMED = NAME.findall(PAGE)


def test_guarantees_each_name_a_test() -> None:
    sections = re.findall(r"^## (G\d) (.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    assert [number for number, _ in sections] == [f"G{number}" for number in range(1, 10)]
    assert [number for number, text in sections if not NAME.search(text)] == []


def test_guarantees_page_names_only_existing_tests() -> None:
    missing = [
        f"{path}::{name}"
        for path, name in NAMED
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]
    assert not missing
