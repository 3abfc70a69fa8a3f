"""The guarantees page names real tests: each file, test or fixture that it mentions exists."""

from __future__ import annotations

import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", (ROOT / "docs" / "guarantees.md").read_text())


def test_the_page_names_tests() -> None:
    assert len(NAMED) >= 5


def test_every_test_that_the_page_names_exists() -> None:
    missing = [
        f"{path}::{name}"
        for path, name in NAMED
        if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text())
    ]
    assert not missing
