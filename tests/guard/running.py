"""Start a guard as a user does: a subprocess with the streams that the test chooses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import banksman

CALLER = str(Path(__file__).with_name("caller.py"))
# Folder with the Banksman under test, for PYTHONPATH.
SOURCE = str(Path(banksman.__file__).parent.parent)
SECONDS_MAX = 60.0


def guard(*words: str) -> list[str]:
    """Return the command line of a guard."""
    return [sys.executable, "-S", "-m", "banksman", "guard", *words]


def environment(**more: str) -> dict[str, str]:
    """Return an environment in which the Banksman under test is found."""
    return {**os.environ, "PYTHONPATH": SOURCE, **more}


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run a guard to its end."""
    options = {"stdin": subprocess.DEVNULL, "capture_output": True, "env": environment(), **options}
    return subprocess.run(guard(*words), check=False, text=True, timeout=SECONDS_MAX, **options)


@contextmanager
def started(argv: list[str], **options: Any) -> Generator[subprocess.Popen[bytes]]:
    """Run a process in the block. It is killed after the block if the test has failed."""
    options.setdefault("env", environment())
    with subprocess.Popen[bytes](argv, **options) as process:
        try:
            yield process
        finally:
            process.kill()
