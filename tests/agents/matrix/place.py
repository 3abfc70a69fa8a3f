"""What one side of a step of the matrix stands on: a ground as the other tests have it, but for whichever agent."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.agents.agents import RealAgent
from tests.agents.ground import COUNT_AFTER_SECONDS, HERE, Count, Ground

from banksman.testing.fake_model import FakeModel, Request

# How many processes the tool is: itself, and its three children.
TOOL_PROCESSES = 4


@dataclass(frozen=True, slots=True)
class Place(Ground):
    """One side of one step, with its own folder, model and mark."""

    agent: RealAgent = field(kw_only=True)

    def command(self) -> list[str]:
        return self.agent.command(self.model)

    def env(self) -> dict[str, str]:
        """All that the agent gets."""
        return {**self.agent.env(self.model, self.folder / "home"), "BANKSMAN_STEP": self.mark}

    def tool(self, name: str = "tool", *, is_background: bool = True) -> str:
        """The line of a prompt that makes the agent run the tool."""
        words = [sys.executable, "-I", "-S", str(HERE / "tool.py"), self.mark, str(self.path(name))]
        return self.agent.run(" ".join(words), is_background=is_background)

    def touch(self, name: str) -> str:
        """The line of a prompt that makes the agent make a file, and say a word that is nowhere in the command."""
        # Of its own folder, by a name alone: for a file of another one some agents ask twice.
        return self.agent.run(f"touch {name}; echo made | tr a-z A-Z")

    def is_made(self, name: str) -> bool:
        return (self.work / name).exists()

    def let_time_pass(self) -> None:
        """Make a conversation that was just begun look as if it had begun before this minute.

        Gemini CLI 0.61.0 names the file of a conversation by the minute. When one is loaded in the minute in which it
        was begun, it takes that file for a new one, empties it, and finds nothing to be gone on with. Waiting would do
        as well, and take a minute.
        """
        for path in self.folder.glob("home/.gemini/tmp/*/chats/session-*.jsonl"):
            # session-<date>T<hour>-<minute>-<the beginning of its id>.jsonl
            path.rename(path.with_name(f"session-2001-01-01T00-00-{path.name.rpartition('-')[2]}"))

    def start_tool_count(self, name: str) -> Count:
        """Let another process look what is left of one tool, two seconds from now."""
        # The file that it makes is in the argv of the tool, of its children and of the shell that has started it, and
        # in nobody else's.
        return Count(str(self.path(name)), time.monotonic() + COUNT_AFTER_SECONDS)


def make(folder: Path, agent: RealAgent, model: FakeModel) -> Place:
    return Place(folder, agent.program()[-1], model, agent=agent)


def said(request: Request) -> str:
    """All that a model call carries, as one text to look into: each API has its own shape."""
    return json.dumps(request.body, ensure_ascii=False)
