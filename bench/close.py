"""Close children that are hard to close: Banksman against the transport of claude-agent-sdk.

Both start the same script with the same pipes. The close begins when the script reports that it is
in the wanted state. Two times are measured: until the process is gone (by a pidfd), and until the
call returns.

The steps of both ladders:

- The transport closes stdin, waits 5 s, sends TERM, waits 5 s, sends KILL. These times are fixed.
- `Command.stop` sends TERM, waits `grace` (5 s here, too), sends KILL. It keeps reading the output,
  so that a blocked child can continue.
- A polite close of a command is measured as well. It begins with the end of stdin, like the close
  of the transport.

The closes of the transport mostly wait, so all of them run at the same time. The closes of Banksman
run one after the other beside them.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import banksman
from bench.measure import goal, p50, table, wait_gone

GRACE_SECONDS = 5.0
TRANSPORT_ROUNDS = 4
BLOCKED_ROUNDS = 30
DEAF_ROUNDS = 4
TIMES_FASTER_MIN = 100


@dataclass(frozen=True, slots=True)
class Closed:
    """Seconds from the call until the process was gone, and until the call returned."""

    gone: float
    returned: float


class Script:
    """Executable file that starts the child, and the socket on which the child reports its state.

    The transport accepts only the path of a single file as its command.
    """

    def __init__(self, folder: Path, kind: str) -> None:
        self.path = folder / kind
        self._address = folder / f"{kind}.ready"
        child = Path(__file__).with_name("close_child.py")
        # The transport appends arguments to the command. The script drops them.
        self.path.write_text(
            f"#!/bin/sh\nexec '{sys.executable}' -I -S '{child}' {kind} '{self._address}'\n"
        )
        self.path.chmod(0o700)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._address))
        self._socket.setblocking(False)
        # Only one child starts at a time, so the next reported pid belongs to that child.
        self._starting = asyncio.Lock()

    async def close_timed(
        self, start: Callable[[], Awaitable[object]], close: Callable[[], Awaitable[object]]
    ) -> Closed:
        async with self._starting:
            await start()
            async with asyncio.timeout(10):
                pid = int(await asyncio.get_running_loop().sock_recv(self._socket, 64))
            # The parent has not reaped the child yet, so the pid cannot belong to another process.
            pidfd = os.pidfd_open(pid)
        try:
            began = time.perf_counter()
            gone, _ = await asyncio.gather(wait_gone(pidfd), close())
            return Closed(gone - began, time.perf_counter() - began)
        finally:
            os.close(pidfd)

    def shut(self) -> None:
        self._socket.close()


async def by_transport(script: Script) -> Closed:
    from claude_agent_sdk import ClaudeAgentOptions
    from claude_agent_sdk._internal.transport.subprocess_cli import SubprocessCLITransport

    transport = SubprocessCLITransport(prompt="", options=ClaudeAgentOptions(cli_path=script.path))
    process: Any = None

    async def connect() -> None:
        nonlocal process
        await transport.connect()
        process = transport._process

    # No task iterates the messages. This blocks the child, as a caller that stops reading does.
    closed = await script.close_timed(connect, transport.close)
    # The SDK leaves asyncio's transport open. If it is collected after the loop is closed, asyncio
    # prints a warning.
    process._process._transport.close()
    return closed


class Ours:
    """A command of Banksman in the same situation: stdin is a pipe, and the output is not read."""

    def __init__(self, host: banksman.Host, script: Script, *, is_polite: bool = False) -> None:
        self._host = host
        self._script = script
        self._is_polite = is_polite
        self._command: banksman.Command | None = None

    async def start(self) -> None:
        command = await self._host.start([self._script.path], stdin="pipe", grace=GRACE_SECONDS)
        assert isinstance(command, banksman.Command)
        command.pause_reading()
        self._command = command

    async def close(self) -> None:
        assert self._command is not None
        if self._is_polite:
            await self._command.close_stdin()
            self._command.resume_reading()
            finished = await self._command.wait()
            assert finished.code == 0
        else:
            finished = await self._command.stop()
        assert not finished.survivors

    async def timed(self) -> Closed:
        return await self._script.close_timed(self.start, self.close)


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="banksman-bench-") as name:
        blocked, deaf = Script(Path(name), "blocked"), Script(Path(name), "deaf")
        try:
            await measure(blocked, deaf)
        finally:
            blocked.shut()
            deaf.shut()


async def measure(blocked: Script, deaf: Script) -> None:
    stopped: list[Closed] = []
    polite: list[Closed] = []
    async with banksman.Host() as host, asyncio.TaskGroup() as tasks:
        theirs_blocked = [tasks.create_task(by_transport(blocked)) for _ in range(TRANSPORT_ROUNDS)]
        theirs_deaf = [tasks.create_task(by_transport(deaf)) for _ in range(TRANSPORT_ROUNDS)]
        ours_deaf = [tasks.create_task(Ours(host, deaf).timed()) for _ in range(DEAF_ROUNDS)]
        for _ in range(BLOCKED_ROUNDS):
            stopped.append(await Ours(host, blocked).timed())
            polite.append(await Ours(host, blocked, is_polite=True).timed())
    print("ladders: transport EOF, 5 s, TERM, 5 s, KILL (fixed) · Banksman TERM, grace 5 s, KILL")
    outcomes = {
        "transport.close()": [task.result() for task in theirs_blocked],
        "Command.stop()": stopped,
        "Command.close_stdin(), resume_reading(), wait()": polite,
    }
    theirs, ours = show("(a) blocked in a write of 1 MiB, exits on EOF", outcomes)
    times = theirs / ours
    goal(
        f"(a) gone {TIMES_FASTER_MIN} times faster", f"{times:.0f} times", times >= TIMES_FASTER_MIN
    )
    outcomes = {
        "transport.close()": [task.result() for task in theirs_deaf],
        "Command.stop()": [task.result() for task in ours_deaf],
    }
    theirs, ours = show("(b) ignores TERM and EOF", outcomes)
    print(
        f"  without the waits of the ladders: transport {(theirs - 10) * 1000:.1f} ms, "
        f"Banksman {(ours - 5) * 1000:.1f} ms"
    )


def show(title: str, outcomes: dict[str, list[Closed]]) -> tuple[float, float]:
    """Print both times of each contestant.

    Return the p50 until the process is gone, of the transport and of `stop`.
    """
    gone = {name: [closed.gone for closed in closes] for name, closes in outcomes.items()}
    returned = {name: [closed.returned for closed in closes] for name, closes in outcomes.items()}
    table(f"{title}: until gone", gone, against="transport.close()")
    table(f"{title}: until returned", returned, against="transport.close()")
    return p50(gone["transport.close()"]), p50(gone["Command.stop()"])


if __name__ == "__main__":
    asyncio.run(main())
