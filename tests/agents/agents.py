"""The real agents as data: how each is started, and how a script of the fake model makes it run a command.

What each needs to use that model at all, variables, files and words, is `FakeModel.env` and `.args`; the versions are
in requirements/agents.json. Here is what a test wants beside: that the agent asks before it runs a command, that
nothing is put between the command and the kernel (a sandbox would end the tool's children with the tool, and prove
nothing), and the names of its tools.
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

# Longer than any step: a command that is not to return is not given back to the model either.
FOREGROUND_MILLISECONDS = 100_000
# So soon after its start a command in the background is one, and the turn goes on.
BACKGROUND_MILLISECONDS = 250


@dataclass(frozen=True, slots=True)
class RealAgent:
    """One agent. `name` is that of its profile, and of its program among the installed ones."""

    name: str
    # The one by which it calls the model, as `Request.api` has it.
    api: str
    # Of its command line, after the program and before the words for the model.
    words: tuple[str, ...]
    # The name of the tool that runs a command, and its input: for a command line, and whether it is to run on while the
    # turn ends.
    tool: str
    tool_input: Callable[[str, bool], dict[str, Any]]
    # The permission mode in which it asks before it runs a command, where that is not how it starts.
    permission_mode: str | None = None
    # It is a script, and Node.js is its program.
    is_script: bool = False
    # It prints its version when it is asked.
    tells_version: bool = True
    # What its tools refuse to run, in words, for whoever writes a command.
    note: str = ""

    def is_installed(self) -> bool:
        return os.access(self._path(), os.X_OK) and (not self.is_script or shutil.which("node") is not None)

    def program(self) -> list[str]:
        node = shutil.which("node") if self.is_script else None
        return [*([node] if node else []), str(self._path())]

    def command(self, model: FakeModel) -> list[str]:
        """The command line with which it uses this model."""
        return [*self.program(), *self.words, *model.args(self.name)]

    def env(self, model: FakeModel, home: Path) -> dict[str, str]:
        """All that it gets. Nothing of this machine's own: no key, no address, no setting."""
        home.mkdir(parents=True, exist_ok=True)
        return model.env(home, self.name)

    def run(self, command: str, *, is_background: bool = False) -> str:
        """The line of a prompt that makes it run a command."""
        return f"@@tool {self.tool} {json.dumps(self.tool_input(command, is_background))}"

    def _path(self) -> Path:
        return Path(os.environ["BANKSMAN_AGENTS"]) / self.name


def _claude(command: str, is_background: bool) -> dict[str, Any]:
    return {"command": command, "description": "A step of a test", "run_in_background": is_background}


def _codex(command: str, is_background: bool) -> dict[str, Any]:
    # It has no background of its own: what has not ended by then runs on.
    wait = BACKGROUND_MILLISECONDS if is_background else FOREGROUND_MILLISECONDS
    return {"cmd": command, "yield_time_ms": wait}


def _gemini(command: str, is_background: bool) -> dict[str, Any]:
    return {"command": command, "description": "A step of a test", "is_background": is_background}


def _opencode(command: str, is_background: bool) -> dict[str, Any]:
    # The shell's own background. Without its output: the tool would wait for the end of that.
    return {"command": f"{command} >/dev/null 2>&1 </dev/null &" if is_background else command}


UNSANDBOXED = ("-c", 'sandbox_mode="danger-full-access"')

AGENTS = {
    agent.name: agent
    for agent in (
        RealAgent("claude", "anthropic", (), "Bash", _claude, note="no command that begins with `sleep`"),
        RealAgent(
            "codex",
            "responses",
            # Without plugins: it would look for some in the network, and for as long not end.
            ("app-server", "--disable", "plugins", *UNSANDBOXED),
            "exec_command",
            _codex,
            # In the word for a thread. As a setting this version refuses it.
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
