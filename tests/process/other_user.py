"""Folders, Python and programs that every user can reach. Those of the tests may be where only root can look."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.process.helpers import NOBODY, REPOSITORY

PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")


def why_not() -> str:
    """Return why no test can be another user; empty if one can."""
    if os.geteuid() != 0:
        return "needs root, to become another user"
    return "" if PYTHON else "there is no Python that every user can run"


@contextmanager
def folder() -> Generator[Path]:
    """Make a folder of `nobody` that every user can enter, unlike pytest's."""
    made = Path(tempfile.mkdtemp(prefix="banksman-user-"))
    try:
        os.chown(made, NOBODY, NOBODY)
        made.chmod(0o755)
        yield made
    finally:
        shutil.rmtree(made)


def reachable(argv: Sequence[str], place: Path) -> list[str]:
    """Return a command line with the Python that every user can run, and with copies of the files of this repository.

    The Python must need nothing but the standard library.
    """
    return [_reachable(word, place) for word in argv]


def _reachable(word: str, place: Path) -> str:
    if word == sys.executable:
        assert PYTHON is not None
        return PYTHON
    if not word.startswith(f"{REPOSITORY}/"):
        return word
    copy = place / "copy" / Path(word).relative_to(REPOSITORY)
    if not copy.exists():
        # The whole package, because the file imports from it.
        top = next((each for each in Path(word).parents if each.name == "src"), None)
        if top is None:
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(word, copy)
        else:
            shutil.copytree(top, place / "copy" / "src", ignore=shutil.ignore_patterns("__pycache__"))
    return str(copy)
