"""Failure 2, first half: two callers share one stdin, and their frames interleave.

Each caller writes its frame in pieces and waits for the pipe after each piece, as a careful writer
does. While the first caller waits, the second one writes. The agent reads a line that is no JSON,
and exits. Both prompts are lost.

    python interleaved_stdin.py naive       # the agent exits with code 1
    python interleaved_stdin.py banksman    # both callers get their answers
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import banksman
from banksman.testing import fake_agent

LARGE = "x" * 1_000_000  # More than a pipe and asyncio's buffer hold, like a prompt with an image.
SMALL = "Why is CI red?"


def agent_command(go: Path) -> list[str]:
    """Return an agent that repeats each prompt, and that reads nothing until `go` exists."""
    return fake_agent.command([f"stop_reading {go}"])


async def send(stdin: asyncio.StreamWriter, prompt: str) -> None:
    message = {"role": "user", "content": prompt}
    frame = json.dumps({"type": "user", "message": message}).encode() + b"\n"
    for start in range(0, len(frame), 65536):
        stdin.write(frame[start : start + 65536])
        await stdin.drain()  # The other caller runs here.


async def naive(go: Path) -> None:
    pipe, nowhere = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
    agent = await asyncio.create_subprocess_exec(
        *agent_command(go), stdin=pipe, stdout=nowhere, stderr=pipe
    )
    assert agent.stdin is not None
    assert agent.stderr is not None
    callers = [asyncio.create_task(send(agent.stdin, prompt)) for prompt in (LARGE, SMALL)]
    await asyncio.sleep(0)  # Both callers have run, and the first one waits for the pipe.
    go.touch()
    error = (await agent.stderr.read()).decode()
    await asyncio.gather(*callers, return_exceptions=True)  # The pipe broke under the first one.
    print(f"the agent exited with code {await agent.wait()}: {error.split(': ')[1]}")


async def with_banksman(go: Path) -> None:
    async with banksman.Host("memory:") as host:
        session = await host.open("claude", command=agent_command(go))
        turns = await asyncio.gather(session.ask(LARGE), session.ask(SMALL))
        go.touch()
        for turn, prompt in zip(turns, (LARGE, SMALL), strict=True):
            outcome = await turn.outcome()
            print(f"{outcome.kind}, the answer is its own: {outcome.text == prompt}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run = {"naive": naive, "banksman": with_banksman}[sys.argv[1]]
        asyncio.run(run(Path(folder, "go")))
