"""The agent of the fixtures: a program on PATH that starts the fake agent of whichever version runs.

A session's log keeps the command that it was opened with. A name on PATH means the same on every machine.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import MutableMapping
from pathlib import Path

from banksman.testing import fake_agent

NAME = "banksman-fixture-agent"
# Where it works. The folder exists on every machine, and the agent keeps a conversation by its name.
CWD = "/tmp"


def install(folder: Path, environment: MutableMapping[str, str]) -> None:
    """Put the program on PATH. It keeps its conversations in `folder/home`."""
    program = folder / "bin" / NAME
    program.parent.mkdir(parents=True, exist_ok=True)
    words = fake_agent.command(remembers_at_home=True)
    program.write_text(f'#!/bin/sh\nexec {shlex.join(words)} "$@"\n', encoding="utf-8")
    program.chmod(0o755)
    home = folder / "home"
    home.mkdir(exist_ok=True)
    environment["PATH"] = f"{program.parent}{os.pathsep}{environment['PATH']}"
    environment["HOME"] = str(home)
