"""Ground of one side of a step: folder, model, agent, the tool that must not be left behind, and the count.

Both sides have equal grounds and share nothing. So a process that one side leaves cannot count for the other.
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
# Limit for every single wait. An agent starts in half a second, and in six if eight start at the same time on two
# cores.
WAIT_SECONDS_MAX = 90.0
# A process that is only slow to exit is gone by then. A process that is left two seconds after the close stays.
COUNT_AFTER_SECONDS = 2.0
COUNT_SECONDS_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Ground:
    """One side of one step.

    `folder`: belongs to this side and holds the agent's home, its temporary files and its work.
    """

    folder: Path
    claude: str
    model: FakeModel
    # Set in the environment of the agent, and so of every process that it starts.
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
        """Return the whole environment of the agent, without any key, address or setting of this machine."""
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        return {**self.model.env(home), "BANKSMAN_STEP": self.mark}

    def fake_agent(self) -> list[str]:
        """Return the command of the stand-in agent, with the tool beside it from its start."""
        return [*self._tool("tool"), *fake_agent.command()]

    # -- the tool ----------------------------------------------------------------------------------------------------
    def tool(self, name: str = "tool", *, is_background: bool = True) -> str:
        """Return the line of a prompt that makes the agent run the tool."""
        command = " ".join(self._tool(name))
        return bash(command, run_in_background=is_background)

    def _tool(self, name: str) -> list[str]:
        return [sys.executable, "-I", "-S", str(HERE / "tool.py"), self.mark, str(self.path(name))]

    def is_tool_up(self, name: str = "tool") -> bool:
        return self.path(name).exists()

    @contextlib.contextmanager
    def gate(self) -> Generator[Gate]:
        """Yield a foreground Bash command that ends when the test opens the gate."""
        fifo = self.path("gate")
        os.mkfifo(fifo)
        # Open for reading too: then neither this open nor the tool's blocks.
        fd = os.open(fifo, os.O_RDWR)
        try:
            reached = self.path("gate-reached")
            yield Gate(bash(f"touch {reached}; read line < {fifo}"), reached, fd)
        finally:
            os.close(fd)

    def check_tool(self, name: str = "tool") -> None:
        """Check that the tool and its three children live. Without them a step would prove nothing."""
        pids: dict[str, int] = json.loads(self.path(name).read_text())
        assert set(pids) == {"tool", "plain", "setsid", "term_proof"}
        gone = {kind: pid for kind, pid in pids.items() if pid not in count.marked(self.mark)}
        assert not gone, f"of the tool's processes {gone} are gone in the middle of the step"

    # -- the model ---------------------------------------------------------------------------------------------------
    def plays(self) -> list[Request]:
        """Return the model calls of turns, in order. Side calls play nothing and are left out."""
        return [request for request in self.model.requests if request.play is not None]

    def wait_play(self, number: int) -> Request:
        """Block until the model has received `number` calls, and return that call."""
        return self.model.wait_request(number, WAIT_SECONDS_MAX)

    # -- the count ---------------------------------------------------------------------------------------------------
    def start_count(self, *, after_seconds: float = COUNT_AFTER_SECONDS) -> Count:
        """Start another process that counts the processes of this side after `after_seconds`."""
        return Count(self.mark, time.monotonic() + after_seconds)

    def clean_up(self) -> None:
        """Kill the remaining processes one by one, each only while it has the mark."""
        end = time.monotonic() + COUNT_SECONDS_MAX
        while (left := count.marked(self.mark)) and time.monotonic() < end:
            for pid in left:
                kill_marked(pid, self.mark)
            time.sleep(0.01)  # They are not children of this process, so it cannot wait for them.
        assert not left, f"cannot be ended: {left}"


@dataclass(frozen=True, slots=True)
class Gate:
    """A command that blocks in the agent's tool.

    `line`: the line of a prompt that runs it. The command makes the file `reached` and then waits for `open`.
    """

    line: str
    reached: Path
    _fd: int

    def open(self) -> None:
        os.write(self._fd, b"go\n")


class Count:
    """Count of the processes of one side, taken by a process that imports nothing of Banksman."""

    def __init__(self, mark: str, at: float) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(HERE / "count.py"), mark, str(at)], stdout=subprocess.PIPE, text=True
        )

    def result(self) -> dict[int, str]:
        """Return the pids that were left, and the start of each command line."""
        said, _ = self._process.communicate(timeout=COUNT_SECONDS_MAX)
        assert self._process.returncode == 0
        lines = (line.partition(" ") for line in said.splitlines())
        return {int(pid): words for pid, _, words in lines}


def kill_marked(pid: int, mark: str) -> None:
    """Kill a process by a pidfd.

    The mark is checked while the pidfd is open, so the signal can reach only that process.
    """
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        if pid in count.marked(mark):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    except ProcessLookupError:
        pass  # It exited on its way.
    finally:
        os.close(fd)


def bash(command: str, **more: Any) -> str:
    """Return the line of a prompt that makes the agent call its Bash tool."""
    return "@@tool Bash " + json.dumps({"command": command, "description": "A step of a test", **more})


def messages(request: Request) -> str:
    """Return the conversation of a model call as one text to search."""
    return json.dumps(request.body["messages"])


def wait(find: Callable[[], T | None], what: str) -> T:
    """Block until `find` returns a result, such as a file or a line whose writer sends no event."""
    end = time.monotonic() + WAIT_SECONDS_MAX
    while not (found := find()):
        assert time.monotonic() < end, f"waited {WAIT_SECONDS_MAX:g} s for {what}"
        time.sleep(0.005)
    return found


def remove(folder: Path) -> None:
    """Remove the folder: each home of an agent holds some megabytes."""
    shutil.rmtree(folder, ignore_errors=True)
