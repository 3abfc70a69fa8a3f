"""Rules for all pages: each is in the navigation, each picture is made by a test or a benchmark, lines are short."""

from __future__ import annotations

import ast
import re
from typing import Any

import yaml
from tests.docs.blocks import FENCE, PAGES, ROOT

DOCS = ROOT / "docs"
COLUMNS_MAX = 100
PLOTS = ROOT / "bench" / "plots.py"
BROWSER_TESTS = ROOT / "tests" / "server" / "web" / "browser"
PICTURES = BROWSER_TESTS / "test_tutorial_pictures.py"
RESTART = BROWSER_TESTS / "test_restart.py"


def test_navigation_has_every_page_once() -> None:
    # The file has a tag of Python for a function, which only the site generator resolves.
    text = re.sub(r"!!python/name:", "", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"))

    def pages(node: Any) -> list[str]:
        if isinstance(node, str):
            return [node]
        return [page for each in (node.values() if isinstance(node, dict) else node) for page in pages(each)]  # pyright: ignore[reportUnknownVariableType]

    found = pages(yaml.safe_load(text)["nav"])
    assert sorted(found) == sorted(str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md"))


def test_every_picture_is_made_by_a_test_or_by_a_benchmark() -> None:
    shown = {
        name
        for path in PAGES
        for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", path.read_text(encoding="utf-8"))
        if not name.startswith("http")
    }
    tree = ast.parse(PICTURES.read_text(encoding="utf-8"))
    (made,) = [node.value for node in tree.body if isinstance(node, ast.AnnAssign) and node.value is not None]
    assert isinstance(made, ast.Dict)
    names = {ast.literal_eval(key) for key in made.keys if key is not None}
    names |= set(re.findall(r'take\(tab, "([^"]+)"\)', RESTART.read_text(encoding="utf-8")))
    names |= set(re.findall(r'folder / "([^"]+)"', PLOTS.read_text(encoding="utf-8")))
    assert {name.rpartition("/")[2] for name in shown} == names
    assert {path.name for path in (DOCS / "images").iterdir()} == names


def test_lines_of_prose_fit_into_a_hundred_columns() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in [*PAGES, ROOT / "CHANGELOG.md"]
        for line in FENCE.sub("", path.read_text(encoding="utf-8")).splitlines()
        if len(line) > COLUMNS_MAX and not line.startswith(("|", "!["))
    ]
    assert not long
