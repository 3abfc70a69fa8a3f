#!/usr/bin/env python3
"""Print the measurements of docs/decisions/0013-the-layout.md for the present source.

    python3 tools/layout.py

Numbers are printed with the names that they count. Import circles are not counted here:
tests/test_layers.py allows none.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent / "src" / "banksman"
# The dialects share file names on purpose.
SHARED_STEMS = "core/dialects"
FILE_LINES_MAX = 500
SMALL_LINES_MAX = 120


class Module:
    """One file of the package."""

    def __init__(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8")
        self.path = file.relative_to(SOURCE)
        self.tree = ast.parse(text)
        self.lines = len(text.splitlines())
        parts = ("banksman", *self.path.with_suffix("").parts)
        self.name = ".".join(parts).removesuffix(".__init__")

    @property
    def is_named(self) -> bool:
        """Whether the stem is a name, unlike `__init__`."""
        return not self.path.stem.startswith("__")

    def imported(self, names: Iterable[str]) -> set[str]:
        """Return those of these modules that this one imports."""
        found: set[str] = set()
        for node in ast.walk(self.tree):
            match node:
                case ast.Import(names=aliases):
                    found |= {alias.name for alias in aliases}
                case ast.ImportFrom(module=str(module), names=aliases):
                    found |= {module} | {f"{module}.{alias.name}" for alias in aliases}
                case _:
                    pass
        return found & set(names)


def repeated_stems(modules: Iterable[Module]) -> list[str]:
    """Return the stems that more than two modules have."""
    homes = defaultdict[str, list[str]](list)
    for module in modules:
        if module.is_named and not module.path.as_posix().startswith(SHARED_STEMS):
            homes[module.path.stem].append(str(module.path))
    return [stem for stem, paths in homes.items() if len(paths) > 2]


def shared_classes(modules: Iterable[Module]) -> list[str]:
    """Return the class names that several packages define."""
    homes = defaultdict[str, set[str]](set)
    for module in modules:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(module.path.parts[0])
    return sorted(name for name, packages in homes.items() if len(packages) > 1)


def small_modules(modules: Iterable[Module]) -> list[str]:
    """Return the small modules that only one module imports, which is in the same folder."""
    by_name = {module.name: module for module in modules}
    importers = defaultdict[str, list[Module]](list)
    for module in by_name.values():
        for name in module.imported(by_name):
            importers[name].append(module)
    return [
        str(module.path)
        for module in by_name.values()
        if module.is_named and module.lines < SMALL_LINES_MAX
        if [other.path.parent for other in importers[module.name]] == [module.path.parent]
    ]


def main() -> None:
    modules = [Module(file) for file in sorted(SOURCE.rglob("*.py"))]
    print(f"{len(modules):8,} files")
    print(f"{sum(module.lines for module in modules):8,} lines")
    for what, names in (
        ("modules ending in -ing", [str(m.path) for m in modules if m.path.stem.endswith("ing")]),
        ("stems used more than twice, outside the dialects", repeated_stems(modules)),
        ("class names in several packages", shared_classes(modules)),
        ("small modules with one importer beside it", small_modules(modules)),
        ("files over 500 lines", [str(m.path) for m in modules if m.lines > FILE_LINES_MAX]),
    ):
        print(f"{len(names):8,} {what}: {', '.join(names)}")


if __name__ == "__main__":
    main()
