"""Closing children that make it hard, against the transport of claude-agent-sdk.

Both start the same script with the same pipes and are asked to close when the script says that it is in its state. The
time is until the process is gone, by a pidfd, and until the call returns.

The terms. The transport closes stdin, waits 5 s, TERM, waits 5 s, KILL; these numbers are fixed in it. Banksman's stop
is TERM, `grace` (here the same 5 s), KILL; and it reads on meanwhile, so that a blocked child can move. A polite close,
which like the transport's begins with the end of stdin, is measured as well. The transport's closes mostly wait, so all
of them run at the same time, and Banksman's take their turns beside them.
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
    """The child's script as one executable file, as the transport wants it, and the socket on which it says "ready"."""

    def __init__(self, folder: Path, kind: str) -> None:
        self.path = folder / kind
        self._address = folder / f"{kind}.ready"
        child = Path(__file__).with_name("close_child.py")
        # The transport adds arguments of its own to the command; the script drops them.
        self.path.write_text(
            f"#!/bin/sh\nexec '{sys.executable}' -I -S '{child}' {kind} '{self._address}'\n"
        )
        self.path.chmod(0o700)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(self._address))
        self._socket.setblocking(False)
        # One start at a time, so that each gets the pid that is its own.
        self._starting = asyncio.Lock()

    async def close_timed(
        self, start: Callable[[], Awaitable[object]], close: Callable[[], Awaitable[object]]
    ) -> Closed:
        async with self._starting:
            await start()
            async with asyncio.timeout(10):
                pid = int(await asyncio.get_running_loop().sock_recv(self._socket, 64))
            # Its parent has not reaped it, so the number is still its own.
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

    # Nobody iterates its messages: that is what leaves a child blocked when the caller has stopped listening.
    closed = await script.close_timed(connect, transport.close)
    # It leaves asyncio's transport open, which complains when it is collected after the loop is closed.
    process._process._transport.close()
    return closed


class Ours:
    """One command of ours in the same situation: a pipe to its stdin, its output unread."""

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
    print(
        "terms: transport EOF, 5 s, TERM, 5 s, KILL (fixed in it) · Banksman TERM, grace 5 s, KILL"
    )
    outcomes = {
        "transport.close()": [task.result() for task in theirs_blocked],
        "Command.stop()": stopped,
        "Command.close_stdin(), resume_reading(), wait()": polite,
    }
    theirs, ours = show("(a) blocked writing 1 MiB, leaves on EOF", outcomes)
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
        f"  beyond the waits of the terms: transport {(theirs - 10) * 1000:.1f} ms, Banksman {(ours - 5) * 1000:.1f} ms"
    )


def show(title: str, outcomes: dict[str, list[Closed]]) -> tuple[float, float]:
    """Print both times of all; return the p50 until gone of the transport and of `stop`."""
    gone = {name: [closed.gone for closed in closes] for name, closes in outcomes.items()}
    returned = {name: [closed.returned for closed in closes] for name, closes in outcomes.items()}
    table(f"{title}: until gone", gone, against="transport.close()")
    table(f"{title}: until returned", returned, against="transport.close()")
    return p50(gone["transport.close()"]), p50(gone["Command.stop()"])


if __name__ == "__main__":
    asyncio.run(main())
