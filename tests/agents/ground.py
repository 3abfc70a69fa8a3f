"""What one side of a step stands on: a folder, a model, the agent, the tool that must not be left behind, the count.

Both sides have the same ground, and neither shares its own with the other: what the one leaves cannot be taken for the
other's.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from tests.agents import count

from banksman.testing import fake_agent
from banksman.testing.fake_model import FakeModel, Request

T = TypeVar("T")

HERE = Path(__file__).parent
# For every single wait. An agent starts in half a second, and in six if eight are started at once on two cores.
WAIT_SECONDS_MAX = 90.0
# What was only slow to go has gone by then: what is left two seconds after the close, is left.
COUNT_AFTER_SECONDS = 2.0
COUNT_SECONDS_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Ground:
    """One side of one step. `folder` is its own, and holds the agent's home, its temporary files and its work."""

    folder: Path
    claude: str
    model: FakeModel
    # In the environment of the agent, and so of all that it starts.
    mark: str = field(default_factory=lambda: f"step-{uuid.uuid4().hex}")

    @property
    def work(self) -> Path:
        made = self.folder / "work"
        made.mkdir(exist_ok=True)
        return made

    def path(self, name: str) -> Path:
        return self.folder / name

    # -- the agent ---------------------------------------------------------------------------------------------------
    def env(self) -> dict[str, str]:
        """All that the agent gets. Nothing of this machine's own: no key, no address, no setting."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        return {**self.model.env(home), "BANKSMAN_STEP": self.mark}

    def fake_agent(self) -> list[str]:
        """The command of the stand-in, with the tool beside it from its start."""
        return [*self._tool("tool"), *fake_agent.command()]

    # -- the tool ----------------------------------------------------------------------------------------------------
    def tool(self, name: str = "tool", *, is_background: bool = True) -> str:
        """The line of a prompt that makes the agent run the tool."""
        command = " ".join(self._tool(name))
        return bash(command, run_in_background=is_background)

    def _tool(self, name: str) -> list[str]:
        return [sys.executable, "-I", "-S", str(HERE / "tool.py"), self.mark, str(self.path(name))]

    def is_tool_up(self, name: str = "tool") -> bool:
        return self.path(name).exists()

    @contextlib.contextmanager
    def gate(self) -> Generator[Gate]:
        """A Bash tool in the foreground that ends when it is told to."""
        fifo = self.path("gate")
        os.mkfifo(fifo)
        # For reading too: then neither our open nor the tool's waits for the other.
        fd = os.open(fifo, os.O_RDWR)
        try:
            reached = self.path("gate-reached")
            yield Gate(bash(f"touch {reached}; read line < {fifo}"), reached, fd)
        finally:
            os.close(fd)

    def check_tool(self, name: str = "tool") -> None:
        """The tool stands, with its three children: a step without it would show nothing."""
        pids: dict[str, int] = json.loads(self.path(name).read_text())
        assert set(pids) == {"tool", "plain", "setsid", "term_proof"}
        gone = {kind: pid for kind, pid in pids.items() if pid not in count.marked(self.mark)}
        assert not gone, f"of the tool's processes {gone} are gone in the middle of the step"

    # -- the model ---------------------------------------------------------------------------------------------------
    def plays(self) -> list[Request]:
        """The model calls of turns, in order. Side calls play nothing, and are not among them."""
        return [request for request in self.model.requests if request.play is not None]

    def wait_play(self, number: int) -> Request:
        """Block until the model has been called so often, and give that call."""
        return self.model.wait_request(number, WAIT_SECONDS_MAX)

    # -- the count ---------------------------------------------------------------------------------------------------
    def start_count(self, *, after_seconds: float = COUNT_AFTER_SECONDS) -> Count:
        """Let another process look what is left of this side, so long from now."""
        return Count(self.mark, time.monotonic() + after_seconds)

    def clean_up(self) -> None:
        """End what is left, one by one, each only while it has the mark."""
        end = time.monotonic() + COUNT_SECONDS_MAX
        while (left := count.marked(self.mark)) and time.monotonic() < end:
            for pid in left:
                kill_marked(pid, self.mark)
            time.sleep(0.01)  # They are nobody's children that could be waited for.
        assert not left, f"cannot be ended: {left}"


@dataclass(frozen=True, slots=True)
class Gate:
    """`line` of a prompt runs the tool, which makes the file `reached` and then waits for `open`."""

    line: str
    reached: Path
    _fd: int

    def open(self) -> None:
        os.write(self._fd, b"go\n")


class Count:
    """A look at what is left of one side, taken by a process that knows nothing of Banksman."""

    def __init__(self, mark: str, at: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "count.py"), mark, str(at)], stdout=subprocess.PIPE, text=True
        )

    def result(self) -> dict[int, str]:
        """What was left then: pids, and the beginnings of their command lines."""
        said, _ = self._process.communicate(timeout=COUNT_SECONDS_MAX)
        assert self._process.returncode == 0
        lines = (line.partition(" ") for line in said.splitlines())
        return {int(pid): words for pid, _, words in lines}


def kill_marked(pid: int, mark: str) -> None:
    """KILL, by a pidfd: what has the mark while we hold the fd is what the signal reaches."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if pid in count.marked(mark):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        pass  # It went by itself.
    finally:
        os.close(fd)


def bash(command: str, **more: Any) -> str:
    """The line of a prompt that makes the agent call its Bash tool."""
    return "@@tool Bash " + json.dumps({"command": command, "description": "A step of a test", **more})


def messages(request: Request) -> str:
    """The conversation that a model call carries, as one text to look into."""
    return json.dumps(request.body["messages"])


def wait(find: Callable[[], T | None], what: str) -> T:
    """Block until something can be found whose maker tells nobody: a file, a line in a list."""
    end = time.monotonic() + WAIT_SECONDS_MAX
    while not (found := find()):
        assert time.monotonic() < end, f"waited {WAIT_SECONDS_MAX:g} s for {what}"
        time.sleep(0.005)
    return found


def remove(folder: Path) -> None:
    """Each home of an agent holds some megabytes."""
    shutil.rmtree(folder, ignore_errors=True)
