"""The end of a claude-agent-sdk session: the SDK alone, and the SDK with the drop-in.

Both sides run the same program with the same scripted CLI (sdk_cli.py), each in a separate process.
The cases:

- disconnect, and nobody reads the messages that the CLI writes without end
- disconnect while a tool of the CLI runs in a session of its own
- a raw `task.cancel()` inside `disconnect()`
- the CLI exits, and its tool holds stdout: the messages must end
- SIGKILL for the program

For each case: the seconds until the call returned or the messages ended, and the number of
processes that are left two seconds later, while the program lives on. This process counts them by a
mark in their command line.

The sessions of the SDK alone mostly wait, so they run at the same time, and the others one by one.

    python -m bench.sdk                     compare
    python -m bench.sdk CASE SIDE CLI       one case (internal)
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from bench.measure import goal, marked

CASES = {
    "disconnect, stdout unread": "flood",
    "disconnect, tool in own session": "session",
    "raw cancel inside disconnect": "session",
    "CLI exits, tool holds stdout": "holder",
    "program SIGKILLed": "session",
}
SIDES = ("SDK alone", "drop-in")
# A side that has not ended by then never will: the tool holds the pipe for two minutes.
SECONDS_MAX = 12.0
LEFT_AFTER_SECONDS = 2.0
FASTER_MIN = 5.0


# -- the program that uses the SDK ---------------------------------------------------------------
async def connect(cli: str) -> Any:
    """Return a client whose CLI has taken a prompt."""
    from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient

    client = ClaudeSDKClient(ClaudeAgentOptions(cli_path=cli))
    await client.connect()
    await client.query("go")
    await anext(client.receive_messages())
    return client


async def disconnect(client: Any) -> None:
    await client.disconnect()


async def cancel_disconnect(client: Any) -> None:
    closing = asyncio.create_task(client.disconnect())
    # The SDK waits for its reader first. One pass later it waits for the CLI.
    for _ in range(5):
        await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])


async def read_to_end(client: Any) -> None:
    async for _message in client.receive_messages():
        pass


async def be_killed(client: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


STEPS: dict[str, Callable[[Any], Any]] = {
    "disconnect, stdout unread": disconnect,
    "disconnect, tool in own session": disconnect,
    "raw cancel inside disconnect": cancel_disconnect,
    "CLI exits, tool holds stdout": read_to_end,
    "program SIGKILLed": be_killed,
}


async def run_case(case: str, side: str, cli: str) -> None:
    """Run one case, print the seconds, and live on: the end of a program ends its children too."""
    if side == "drop-in":
        import banksman.claude_sdk

        banksman.claude_sdk.install()
    client = await connect(cli)
    if case == "disconnect, stdout unread":
        await asyncio.sleep(0.5)  # The queue of the SDK and the pipe fill.
    began = time.perf_counter()
    print("begin", flush=True)
    await STEPS[case](client)
    print(f"end {time.perf_counter() - began}", flush=True)
    await asyncio.sleep(60)


# -- the comparison ------------------------------------------------------------------------------
def compare_one(case: str, side: str, folder: Path) -> tuple[float | None, int]:
    """Return the seconds (None: not over in time) and the number of processes left."""
    mark = f"bench-sdk-{uuid.uuid4().hex}"
    cli = folder / mark
    script = Path(__file__).with_name("sdk_cli.py")
    cli.write_text(f"#!/bin/sh\nexec '{sys.executable}' -I -S '{script}' {CASES[case]} {mark}\n")
    cli.chmod(0o700)
    argv = [sys.executable, "-W", "ignore", "-m", "bench.sdk", case, side, str(cli)]
    environment = {**os.environ, "CLAUDE_AGENT_SDK_SKIP_VERSION_CHECK": "1"}
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as program:
        try:
            assert program.stdout is not None
            assert program.stdout.readline() == "begin\n"
            began = time.perf_counter()
            os.set_blocking(program.stdout.fileno(), False)
            said = ""
            while time.perf_counter() - began < SECONDS_MAX and program.poll() is None and not said:
                said = program.stdout.readline()
                time.sleep(0.005)
            time.sleep(LEFT_AFTER_SECONDS)
            # The program itself has the mark in its command line, too.
            left = [pid for pid in marked(mark) if pid != program.pid]
            seconds = float(said.split()[1]) if said else None
            return (0.0 if program.poll() is not None else seconds), len(left)
        finally:
            program.kill()
            for pid in marked(mark):
                os.kill(pid, signal.SIGKILL)


def shown(case: str, result: tuple[float | None, int]) -> str:
    seconds, left = result
    time_shown = "never" if seconds is None else f"{seconds:.2f} s"
    return f"{'' if case == 'program SIGKILLed' else time_shown:>8} {left:5} left"


def main() -> None:
    results: dict[tuple[str, str], tuple[float | None, int]] = {}
    print(f"{'end of a session':34} {SIDES[0]:>19} {SIDES[1]:>19}")
    with tempfile.TemporaryDirectory(prefix="banksman-bench-") as name:
        with ThreadPoolExecutor(len(CASES)) as pool:
            alone = pool.map(lambda case: compare_one(case, "SDK alone", Path(name)), CASES)
            results |= {
                (case, "SDK alone"): result for case, result in zip(CASES, alone, strict=True)
            }
        for case in CASES:
            results[case, "drop-in"] = compare_one(case, "drop-in", Path(name))
            row = " ".join(f"{shown(case, results[case, side]):>19}" for side in SIDES)
            print(f"  {case:32} {row}", flush=True)
    left = {side: sum(results[case, side][1] for case in CASES) for side in SIDES}
    goal("processes left by the drop-in", str(left["drop-in"]), left["drop-in"] == 0)
    unread = {side: results["disconnect, stdout unread", side][0] for side in SIDES}
    ratio = (unread["SDK alone"] or SECONDS_MAX) / (unread["drop-in"] or SECONDS_MAX)
    text = f"disconnect with stdout unread {FASTER_MIN:.0f} times faster"
    goal(text, f"{ratio:.1f}", ratio >= FASTER_MIN)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        asyncio.run(run_case(*sys.argv[1:]))
    else:
        main()
