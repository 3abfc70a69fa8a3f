"""Base of the fake agents that speak JSON-RPC on stdio, one message a line: ACP and Codex.

One loop reads stdin, and each turn is a task of that loop. The agent reads a cancel, an answer or
another prompt while a turn waits.

The process always ends without help. When stdin ends, it exits after its output is written, or
after five seconds. An alarm ends it in every other case.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time

from banksman.testing.fake_process import CutShort, FakeRecord, Wait
from banksman.testing.fake_script import ScriptAgent

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable, Generator, Sequence
    from typing import Any, NoReturn, TypeAlias

    from banksman.testing.fake_process import Act, AgentTask

    Answering: TypeAlias = Generator[Wait, None, dict[str, Any]]
    Running: TypeAlias = Generator[Wait, None, int]

LIFE_SECONDS_MAX = 120
# Time to write the remaining output after stdin has ended; the agent drops the rest.
LEAVE_SECONDS_MAX = 5.0
READ_BYTES_MAX = 65536
EXIT_USAGE = 64

# Process tree of a tool: a shell, a plain child, a child in a separate session, and a child that
# ignores TERM. The shell writes all four pids to the file before it creates the `.ready` file.
TREE = """
echo $$ >> "$1"
sleep 60 & echo $! >> "$1"
setsid sleep 60 & echo $! >> "$1"
(trap '' TERM; exec sleep 60) & echo $! >> "$1"
touch "$1.ready"
wait
"""


class RpcRequest:
    """A request to the client, and the message that answers it."""

    __slots__ = ("answer", "id")

    def __init__(self, id: int | str) -> None:
        self.id = id
        self.answer: dict[str, Any] | None = None


class RpcAgent(ScriptAgent):
    """Process of a fake JSON-RPC agent."""

    def __init__(self, record: FakeRecord, memory: str | None) -> None:
        super().__init__(record)
        self.memory = memory
        self.ignores_eof = False
        self._numbers = itertools.count()
        self._requests: dict[Any, RpcRequest] = {}

    # ── Output ──

    def write(self, message: dict[str, Any]) -> None:
        """Write one message. A dialect may override the encoding."""
        self.out.put(json.dumps(message, separators=(",", ":")).encode() + b"\n")

    def request(self, method: str, params: dict[str, Any], *, prefix: str = "") -> RpcRequest:
        """Send a request to the client.

        Ids count from 0, so they overlap with the ids of the client. `prefix`: turns the ids into
        strings.
        """
        number = next(self._numbers)
        request = RpcRequest(f"{prefix}{number}" if prefix else number)
        self._requests[request.id] = request
        self.write({"method": method, "id": request.id, "params": params})
        return request

    # ── Input ──

    def run(self) -> NoReturn:
        """Serve until stdin ends or stdout has no reader."""
        rest, sources = b"", [0]
        while True:
            self.settle()
            if self.out.is_gone and not self.ignores_eof:
                os._exit(0)
            readable = self.select(sources)
            self.settle(readable)
            if 0 not in readable:
                continue
            data = os.read(0, READ_BYTES_MAX)
            self.record.stdin(data)
            *lines, rest = (rest + data).split(b"\n")
            for line in filter(None, lines):
                self.understand(line)
                self.settle()
            if not data:
                sources = []
                if not self.ignores_eof:
                    self.spawn(self._leave())

    def understand(self, line: bytes) -> None:
        raise NotImplementedError

    def take_answer(self, message: dict[str, Any]) -> None:
        """Accept the answer to a request of this agent; ignore any other answer."""
        id = message.get("id")
        request = self._requests.pop(id, None) if isinstance(id, int | str) else None
        if request is not None:
            request.answer = message

    def _leave(self) -> Act:
        yield Wait(at=time.monotonic() + LEAVE_SECONDS_MAX, when=self.drained().when)
        os._exit(0)


class RpcTurn:
    """A running turn: its task, and the callbacks that run after its end."""

    def __init__(self) -> None:
        self.task: AgentTask | None = None
        self.is_cut = False
        self.after: list[Callable[[], None]] = []

    def cut(self, agent: RpcAgent) -> None:
        """End the turn inside its current wait, at most once.

        Does nothing if the turn is already over.
        """
        if not self.is_cut and self.task is not None and self.task.wait is not None:
            self.is_cut = True
            agent.advance(self.task, CutShort("cancelled"))


def spawn_tree(path: str) -> subprocess.Popen[bytes]:
    """Start a tool with children that write their pids to `path` and run until they are killed."""
    # The module is slow to load, and few turns run a tool.
    import subprocess  # noqa: PLC0415

    command = ["sh", "-c", TREE, "sh", path]
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    )


def shell(command: str) -> Running:
    """Run a command in a shell until it ends, or until the turn is cut; return its exit code."""
    import subprocess  # noqa: PLC0415

    process = subprocess.Popen(
        ["sh", "-c", command], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )
    fd = os.pidfd_open(process.pid)
    try:
        yield Wait(fd=fd)
    finally:
        os.close(fd)
        process.kill()
        code = process.wait()
    return code


def run(
    name: str, argv: Sequence[str], make: Callable[[dict[str, str], FakeRecord], RpcAgent]
) -> NoReturn:
    """Run this process as the fake agent that `argv` describes.

    `make`: receives the `--fake-` flags by name, and the record, and returns the agent.
    """
    signal.alarm(LIFE_SECONDS_MAX)
    words = dict(word.split("=", 1) for word in argv if word.startswith("--fake-"))
    try:
        make(words, FakeRecord(words.get("--fake-evidence"), argv)).run()
    except Exception as exc:
        print(f"{name}: {exc!r}", file=sys.stderr, flush=True)
        os._exit(EXIT_USAGE)
