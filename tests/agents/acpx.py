"""The ACP client `acpx` from npm, run as its users do: one command for each prompt.

The first prompt starts the *queue owner*, a background process in a new session. It starts the agent and keeps it
between the commands. It is part of the client: a command only sends its prompt to the owner and prints the messages.

The pins of this client, and of the Node.js that it needs, are in requirements/agents.json beside those of the agents.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.acp_client import Order, Reply
from tests.agents.ground import WAIT_SECONDS_MAX

# Names of the pins. The client needs Node.js 22.13, and machines that run the agents may have version 20.
PROGRAM, NODE = "acpx", "node"
PINS = frozenset({PROGRAM, NODE})


def program() -> list[str]:
    """Return the start of the command line. Skip the test if there is no client for this machine."""
    links = Path(os.environ["BANKSMAN_AGENTS"])
    words = [str(links / NODE), str(links / PROGRAM)]
    # tools/agents.py has reported this already, and fails in CI.
    if not all(os.access(path, os.X_OK) for path in words):
        pytest.skip("acpx is not for this machine")
    return words


@dataclass(frozen=True, slots=True)
class Owner:
    """The queue owner of a session."""

    pid: int
    socket: Path


@dataclass(frozen=True, slots=True)
class Session:
    """A session of the client with the agent of an order."""

    order: Order

    @contextlib.contextmanager
    def command(self, *words: str) -> Generator[subprocess.Popen[str]]:
        """Run a command of the client, and kill it at the end if it still lives."""
        agent = ["--agent", shlex.join(self.order["command"]), "--cwd", self.order["cwd"]]
        with subprocess.Popen(
            [*program(), *agent, "--approve-all", "--format", "json", *words],
            cwd=self.order["cwd"],
            env=self.order["env"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def run(self, *words: str) -> list[dict[str, Any]]:
        """Run a command to its end, and return the messages that it printed."""
        with self.command(*words) as process:
            said, _ = process.communicate(timeout=WAIT_SECONDS_MAX)
        assert process.returncode == 0, said
        return [json.loads(line) for line in said.splitlines()]

    def ask(self, prompt: str) -> Reply:
        messages = self.run("prompt", prompt)
        updates = [message["params"]["update"] for message in messages if message.get("method") == "session/update"]
        chunks = [update for update in updates if update["sessionUpdate"] == "agent_message_chunk"]
        return Reply(
            stop_reason=messages[-1]["result"]["stopReason"],
            text="".join(chunk["content"]["text"] for chunk in chunks),
        )

    def owner(self) -> Owner | None:
        """Return the queue owner, by the file in which it says that it owns the session."""
        for path in Path(self.order["env"]["HOME"]).glob(".acpx/queues/*.lock"):
            lease = json.loads(path.read_text())
            return Owner(lease["pid"], Path(lease["socketPath"]))
        return None


@contextlib.contextmanager
def session(order: Order) -> Generator[Session]:
    """Open a session. Remove the folder of its socket at the end, which a killed owner leaves in /tmp."""
    opened = Session(order)
    opened.run("sessions", "new")
    try:
        yield opened
    finally:
        if (owner := opened.owner()) is not None:
            shutil.rmtree(owner.socket.parent, ignore_errors=True)
