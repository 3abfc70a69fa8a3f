"""Read the evidence of fake agent processes; find verbs of the Claude fake that no test uses.

Evidence is a folder with the input, arguments and performed steps of each process. `FakeRecord` in
`fake_process.py` writes it, for all fake agents.
"""

from __future__ import annotations

import ast
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from banksman.testing.fake_agent.claude_turn import Script
from banksman.testing.fake_agent.verbs import VERBS
from banksman.testing.fake_script import ScriptError, ScriptStep

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


@dataclass(frozen=True, slots=True)
class ProcessEvidence:
    """Input and performed steps of one agent process."""

    pid: int
    stem: Path

    @property
    def stdin(self) -> bytes:
        """Every byte that the process read, unchanged."""
        return self._file("stdin").read_bytes()

    @property
    def frames(self) -> list[dict[str, Any]]:
        """The frames that the process read.

        Each line must be complete JSON, except for an unterminated last line, which is left out.
        """
        *lines, _cut = self.stdin.split(b"\n")
        return [json.loads(line) for line in lines if line.strip()]

    @property
    def argv(self) -> list[str]:
        return json.loads(self._file("argv").read_text())

    @property
    def env(self) -> list[str]:
        """The names of the environment variables."""
        return json.loads(self._file("env").read_text())

    @property
    def steps(self) -> list[tuple[str, str, str]]:
        """Each step that the process reached: its place in the script, its verb, its text."""
        lines = self._file("steps").read_text().splitlines()
        return [(where, verb, text) for where, verb, text in map(json.loads, lines)]

    @property
    def holders(self) -> list[int]:
        """Pids of the children that hold the stdout of the process open."""
        file = self._file("holder")
        return [int(line) for line in file.read_text().split()] if file.exists() else []

    def _file(self, kind: str) -> Path:
        return self.stem.with_name(f"{self.stem.name}.{kind}")


class Evidence:
    """An evidence folder: the processes that wrote to it, in the order of their starts."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @property
    def processes(self) -> list[ProcessEvidence]:
        stems = sorted(file.with_suffix("") for file in self.folder.glob("*.argv"))
        return [ProcessEvidence(int(stem.name.rpartition("-")[2]), stem) for stem in stems]

    def unused(self, script: Mapping[str, Sequence[str]] | Sequence[str]) -> list[ScriptStep]:
        """Return the steps of a script that no process reached."""
        reached = {where for process in self.processes for where, _verb, _text in process.steps}
        return [step for step in Script(script).steps() if step.where not in reached]

    def __repr__(self) -> str:
        return f"Evidence({str(self.folder)!r}, {len(self.processes)} processes)"


def unused_verbs(sources: Iterable[Path]) -> set[str]:
    """Return the verbs, and the choices of verbs with choices, that no step in these files uses.

    `sources`: Python files. A step is a string literal, or a line of one, that parses as a step.
    Docstrings do not count.
    """
    wanted = {name for name, verb in VERBS.items() if not verb.choices}
    wanted |= {f"{name} {choice}" for name, verb in VERBS.items() for choice in verb.choices}
    for source in sources:
        for text in _strings(ast.parse(source.read_text())):
            wanted -= set(_uses(text))
    return wanted


def _uses(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        try:
            step = VERBS.parse(line.strip().removeprefix("@@"))
        except ScriptError:
            continue
        for used in (step, *step.nested):
            yield f"{used.verb.name} {used.word(0)}" if used.verb.choices else used.verb.name


def _strings(tree: ast.AST) -> Iterator[str]:
    """Yield every string literal except docstrings; each value in an f-string becomes one word."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant() as constant):
                skipped.add(id(constant))
            case ast.JoinedStr(values=values):
                skipped.update(id(value) for value in values)
                yield "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "1" for part in values
                )
            case ast.Constant(value=str() as text) if id(node) not in skipped:
                yield text
            case _:
                pass
