"""Ground of one side of a step of the matrix, for any agent."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path

from tests.agents.agents import RealAgent
from tests.agents.ground import COUNT_AFTER_SECONDS, HERE, Count, Ground, remove

from banksman.testing.fake_model import FakeModel, Request

# Number of processes of the tool: itself and its three children.
TOOL_PROCESSES = 4


@dataclass(frozen=True, slots=True)
class Place(Ground):
    """One side of one step, with a separate folder, model and mark."""

    agent: RealAgent = field(kw_only=True)

    def command(self) -> list[str]:
        return self.agent.command(self.model)

    def env(self) -> dict[str, str]:
        """Return the whole environment of the agent."""
        return {**self.agent.env(self.model, self.folder / "home"), "BANKSMAN_STEP": self.mark}

    def tool(self, name: str = "tool", *, is_background: bool = True) -> str:
        """Return the line of a prompt that makes the agent run the tool."""
        words = [sys.executable, "-I", "-S", str(HERE / "tool.py"), self.mark, str(self.path(name))]
        return self.agent.run(" ".join(words), is_background=is_background)

    def touch(self, name: str) -> str:
        """Return the line of a prompt that creates a file and prints a word that is not in the command."""
        # The file is in the agent's working folder, without a path: some agents ask twice for a file elsewhere.
        return self.agent.run(f"touch {name}; echo made | tr a-z A-Z")

    def is_made(self, name: str) -> bool:
        return (self.work / name).exists()

    def let_time_pass(self) -> None:
        """Make a new conversation look as if it had begun before this minute.

        Gemini CLI 0.61.0 names the file of a conversation by the minute. If it loads a conversation in the minute in
        which that began, it takes the file for a new one, empties it, and finds nothing to resume. Waiting would also
        work, and take a minute.
        """
        for path in self.folder.glob("home/.gemini/tmp/*/chats/session-*.jsonl"):
            # session-<date>T<hour>-<minute>-<start of its id>.jsonl
            path.rename(path.with_name(f"session-2001-01-01T00-00-{path.name.rpartition('-')[2]}"))

    def start_tool_count(self, name: str) -> Count:
        """Start another process that counts the processes of one tool two seconds from now."""
        # The path of the ready file is in the argv of the tool, of its children and of the shell that started it, and
        # of no other process.
        return Count(str(self.path(name)), time.monotonic() + COUNT_AFTER_SECONDS)


Places = Callable[[str, str], Place]


@contextlib.contextmanager
def making_places(folder: Path, real_agent: Callable[[str], RealAgent]) -> Generator[Places]:
    """Yield a function that makes the place of one side, by the names of the side and of its agent.

    At the end of the block their models are closed, and the whole folder is removed.
    """
    made: list[Place] = []

    def give(side: str, agent: str) -> Place:
        place = folder / side
        place.mkdir()
        made.append(make(place, real_agent(agent), FakeModel().__enter__()))
        return made[-1]

    yield give
    for each in made:
        each.clean_up()
        each.model.close()
    remove(folder)


def make(folder: Path, agent: RealAgent, model: FakeModel) -> Place:
    return Place(folder, agent.program()[-1], model, agent=agent)


def said(request: Request) -> str:
    """Return the whole body of a model call as one text to search, because each API has a different shape."""
    return json.dumps(request.body, ensure_ascii=False)
