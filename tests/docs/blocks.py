"""Find the fenced blocks of the pages, and run them as a reader would: in a fresh home, with a scripted agent."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.tutorial import Command, Terminal, steps

from banksman.testing import fake_acp, fake_agent

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# The deadline of one program.
SECONDS_MAX = 60.0
# The only programs of the machine that a block gets. An agent that is installed on it is never started.
TOOLS = (
    "bash",
    "cat",
    "chmod",
    "curl",
    "echo",
    "expr",
    "getconf",
    "grep",
    "make",
    "mkdir",
    "setsid",
    "sh",
    "sleep",
    "sqlite3",
    "stty",
)
# Commands that stay in the foreground. The shell starts them as jobs and waits for this line.
LASTING = {"banksman serve": "Banksman is at …", "uvicorn ": "…Uvicorn running on …"}
# The server's port on the pages. A test takes any free port.
PORT = "4380"


@dataclass(frozen=True)
class Block:
    """`page`: its path in the repository. `language`: all words after the backticks."""

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line} ({self.language}) {self.text.strip().splitlines()[0]}"


def blocks() -> list[Block]:
    """Return every fenced block of the README and the docs, in the order of the pages."""
    return [
        Block(str(path.relative_to(ROOT)), text[: match.start()].count("\n") + 1, match[1], match[2])
        for path in PAGES
        for text in [path.read_text(encoding="utf-8")]
        for match in FENCE.finditer(text)
    ]


class Place:
    """A machine of a reader: an empty home, a work folder, and a `PATH` with Banksman and scripted agents.

    `work` is the current folder of every block. It has the folder `checkout` and a Makefile with the target `test`.
    """

    def __init__(self, home: Path, script: Mapping[str, Sequence[str]] | None = None) -> None:
        self.home, self.bin, self.work = home, home / "bin", home / "work"
        self.state = home / ".local" / "state"
        for folder in (self.bin, self.work / "checkout"):
            folder.mkdir(parents=True)
        (self.work / "Makefile").write_text("test:\n\t@echo tested\n", encoding="utf-8")
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        for name in ("python", "python3"):
            self.program(name, sys.executable)
        self.program("banksman", sys.executable, "-m", "banksman")
        for name in ("uvicorn", "openapi-python-client"):
            self.program(name, str(Path(sys.executable).with_name(name)))
        self.agent("claude", fake_agent.command(script or {}, memory=home / "memory"))
        self.agent("gemini", fake_acp.command(memory=home / "gemini"))
        for name in ("pip", "npm", "npx"):
            self.recorder(name)
        ours = ("BANKSMAN_", "PYTEST_", "PYTHON", "VIRTUAL_ENV", "XDG_", "CI", "MAKE", "MFLAGS")
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith(ours)},
            "PATH": str(self.bin),
            "HOME": str(home),
            "PYTHONPATH": str(ROOT / "src"),
            "TERM": "dumb",
            "NO_COLOR": "1",
            "BANKSMAN_SERVE_PORT": "0",
        }

    def program(self, name: str, *words: str) -> None:
        """Put a program on `PATH` that runs these words with its own arguments."""
        self._script(name, f'exec {shlex.join(words)} "$@"')

    def agent(self, name: str, words: Sequence[str]) -> None:
        """Put an agent on `PATH`. `banksman agents --versions` asks it for its version."""
        self._script(name, f'[ "$1" != --version ] || {{ echo 1.2.3; exit; }}\nexec {shlex.join(words)} "$@"')

    def recorder(self, name: str) -> None:
        """Put a program on `PATH` that only records its arguments."""
        self.program(name, sys.executable, "-c", RECORD, str(self.home / f"{name}.calls"))

    def calls(self, name: str) -> list[list[str]]:
        """Return the arguments of each call of a recorder."""
        path = self.home / f"{name}.calls"
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []

    def python(self, code: str, *, stdin: str = "") -> subprocess.CompletedProcess[str]:
        """Run a program. Every warning is an error."""
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            cwd=self.work,
            env=self.env,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=SECONDS_MAX,
            check=False,
        )

    def _script(self, name: str, text: str) -> None:
        path = self.bin / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        path.chmod(0o755)


RECORD = """\
import json, sys
with open(sys.argv[1], "a") as file:
    print(json.dumps(sys.argv[2:]), file=file)
"""


def coroutine(body: str, *, before: str = "", after: str = "", is_inside_host: bool = False) -> str:
    """Return a program with this body of a coroutine, inside `async with banksman.Host() as host` on request."""
    head = "import asyncio\nimport banksman\n\n\nasync def main() -> None:\n"
    if is_inside_host:
        head += "    async with banksman.Host() as host:\n"
    indented = textwrap.indent(f"{before}\n{body}\n{after}\n", "        " if is_inside_host else "    ")
    return f"{head}{indented}\n\nasyncio.run(main())\n"


def commands(block: Block) -> list[Command]:
    """Return what a reader types. A line of an `sh` block is one command, and any output is right."""
    if block.language == "console":
        return [step for step in steps(f"```console\n{block.text}```") if isinstance(step, Command)]
    lines = [line for line in block.text.splitlines() if line and not line.startswith("#")]
    return [Command(1, line, ["…"], may_fail=line.startswith("banksman doctor")) for line in lines]


class Shell:
    """A terminal with a shell. It types the commands of a block, and ends all jobs when it is closed."""

    def __init__(self, place: Place) -> None:
        self._terminal = Terminal(place.env, place.work)
        self._port = PORT

    def __enter__(self) -> Shell:
        return self

    def __exit__(self, *_: object) -> None:
        self._terminal.close()

    def run(self, command: Command | str) -> str:
        """Type a command and compare the output. Return the output."""
        if isinstance(command, str):
            command = Command(1, command, ["…"])
        typed = command.typed.replace(PORT, self._port)
        for start, line in LASTING.items():
            if typed.startswith(start):
                typed = re.sub(r"\s+(#.*|&)$", "", typed) + " &"
                command = Command(1, typed, ["…", line, "…"])
        printed = self._terminal.perform(Command(1, typed, command.shown, command.may_fail))
        if found := re.search(r"Banksman is at http://[^/]+:(\d+)/", printed):
            self._port = found[1]
        return printed
