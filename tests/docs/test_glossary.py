"""docs/glossary.md defines each class name that several packages share, and no other."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src" / "banksman"


def shared_names() -> set[str]:
    """Return the class names that are defined in more than one package of `banksman`."""
    homes = defaultdict[str, set[str]](set)
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(file.relative_to(SOURCE).parts[0])
    return {name for name, packages in homes.items() if len(packages) > 1}


def test_glossary_lists_class_names_of_several_packages() -> None:
    _, section = (ROOT / "docs" / "glossary.md").read_text().split("## Class names in several packages")
    listed = re.findall(r"^\| ([A-Z]\w+) \| ", section, re.MULTILINE)
    assert listed == sorted(shared_names())
