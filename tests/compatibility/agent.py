"""Agent of the fixtures: a program on PATH that starts the fake agent of the running version.

The log of a session keeps the command that opened the session. A name on PATH means the same on every machine.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import MutableMapping
from pathlib import Path

from banksman.testing import fake_agent

NAME = "banksman-fixture-agent"
# Working folder of the agent. It exists on every machine, and the agent files a conversation under its name.
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
