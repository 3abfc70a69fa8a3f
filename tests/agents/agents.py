"""Real agents as data: how each is started, and how a script of the fake model makes it run a command.

`FakeModel.env` and `.args` hold the variables, files and words that an agent needs to use the fake model.
requirements/agents.json holds the versions. This module adds the needs of the tests:
- the agent asks before it runs a command;
- nothing stands between the command and the kernel, since a sandbox would end the tool's children with the tool and the
  test would prove nothing;
- the names of the agent's tools.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banksman.testing.fake_model import FakeModel

# Longer than any step: the agent does not give up a foreground command and return to the model.
FOREGROUND_MILLISECONDS = 100_000
# A command that still runs after this time is in the background, and the turn continues.
BACKGROUND_MILLISECONDS = 250


@dataclass(frozen=True, slots=True)
class RealAgent:
    """A real agent.

    `name`: the name of its profile and of its installed program.
    """

    name: str
    # The API by which it calls the model, as in `Request.api`.
    api: str
    # Words of its command line, after the program and before the words for the model.
    words: tuple[str, ...]
    # Name of the tool that runs a command, and its input. `tool_input` takes the command line and whether the command
    # keeps running after the turn.
    tool: str
    tool_input: Callable[[str, bool], dict[str, Any]]
    # Permission mode in which the agent asks before it runs a command, unless that is its default.
    permission_mode: str | None = None
    # The program is a script for Node.js.
    is_script: bool = False
    # The program can print its version.
    tells_version: bool = True
    # Commands that its tools refuse to run, as a note for authors of tests.
    note: str = ""

    def is_installed(self) -> bool:
        return os.access(self._path(), os.X_OK) and (not self.is_script or shutil.which("node") is not None)

    def program(self) -> list[str]:
        node = shutil.which("node") if self.is_script else None
        return [*([node] if node else []), str(self._path())]

    def command(self, model: FakeModel) -> list[str]:
        """Return the command line with which the agent uses this model."""
        return [*self.program(), *self.words, *model.args(self.name)]

    def env(self, model: FakeModel, home: Path) -> dict[str, str]:
        """Return the whole environment of the agent, without any key, address or setting of this machine."""
        home.mkdir(parents=True, exist_ok=True)
        return model.env(home, self.name)

    def run(self, command: str, *, is_background: bool = False) -> str:
        """Return the line of a prompt that makes the agent run a command."""
        return f"@@tool {self.tool} {json.dumps(self.tool_input(command, is_background))}"

    def _path(self) -> Path:
        return Path(os.environ["BANKSMAN_AGENTS"]) / self.name


def _claude(command: str, is_background: bool) -> dict[str, Any]:
    return {"command": command, "description": "A step of a test", "run_in_background": is_background}


def _codex(command: str, is_background: bool) -> dict[str, Any]:
    # The tool has no background mode: a command that has not ended by then keeps running.
    wait = BACKGROUND_MILLISECONDS if is_background else FOREGROUND_MILLISECONDS
    return {"cmd": command, "yield_time_ms": wait}


def _gemini(command: str, is_background: bool) -> dict[str, Any]:
    return {"command": command, "description": "A step of a test", "is_background": is_background}


def _opencode(command: str, is_background: bool) -> dict[str, Any]:
    # The shell's `&`, with the output redirected: otherwise the tool waits for the end of the output.
    return {"command": f"{command} >/dev/null 2>&1 </dev/null &" if is_background else command}


UNSANDBOXED = ("-c", 'sandbox_mode="danger-full-access"')

AGENTS = {
    agent.name: agent
    for agent in (
        RealAgent("claude", "anthropic", (), "Bash", _claude, note="no command that begins with `sleep`"),
        RealAgent(
            "codex",
            "responses",
            # Without plugins: Codex would search the network for some, and not exit until the search ends.
            ("app-server", "--disable", "plugins", *UNSANDBOXED),
            "exec_command",
            _codex,
            # As a word of the thread. This version refuses it as a setting.
            permission_mode="untrusted",
        ),
        RealAgent(
            "codex-acp",
            "responses",
            (*UNSANDBOXED, "-c", 'approval_policy="untrusted"'),
            "exec_command",
            _codex,
            tells_version=False,
        ),
        RealAgent(
            "gemini",
            "gemini",
            ("--acp",),
            "run_shell_command",
            _gemini,
            is_script=True,
            note="no `$(…)`, no `$((…))`, no backticks",
        ),
        RealAgent("opencode", "chat", ("acp",), "bash", _opencode),
    )
}
