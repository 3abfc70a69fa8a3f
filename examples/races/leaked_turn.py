"""Failure 2, second half: a cancelled turn leaks into the next one.

The caller gives up on a prompt and sends another. The agent knows nothing of the cancellation: it
finishes the first turn. The next caller reads that result and takes it for its own answer.

    python leaked_turn.py naive       # the second question gets the answer to the first
    python leaked_turn.py banksman    # the first turn is interrupted, the second answer is right
"""

import asyncio
import json
import sys
import tempfile
from pathlib import Path

import banksman
from banksman.testing import fake_agent

FIRST, SECOND = "Tidy up the imports", "Why is CI red?"


def agent_command(go: Path) -> list[str]:
    """Return an agent that does not finish the first turn before `go` exists."""
    first = ["say reading the code", f"wait {go}", "say tidied the imports"]
    return fake_agent.command({f"prompt {FIRST}": first, f"prompt {SECOND}": ["say a test fails"]})


async def ask(agent: asyncio.subprocess.Process, prompt: str) -> str:
    """Send a prompt and read until a result arrives. But whose result is it?"""
    assert agent.stdin is not None
    assert agent.stdout is not None
    message = {"role": "user", "content": prompt}
    agent.stdin.write(json.dumps({"type": "user", "message": message}).encode() + b"\n")
    async for line in agent.stdout:
        frame = json.loads(line)
        if frame["type"] == "result":
            return frame["result"]
    raise EOFError("the agent has exited")


async def naive(go: Path) -> None:
    pipe = asyncio.subprocess.PIPE
    agent = await asyncio.create_subprocess_exec(*agent_command(go), stdin=pipe, stdout=pipe)
    assert agent.stdin is not None
    try:
        await asyncio.wait_for(ask(agent, FIRST), timeout=0.1)
    except TimeoutError:
        print(f"{FIRST}: cancelled")
    go.touch()
    print(f"{SECOND}: {await ask(agent, SECOND)}")
    agent.stdin.close()
    await agent.wait()


async def with_banksman(go: Path) -> None:
    async with banksman.Host("memory:") as host:
        session = await host.open("claude", command=agent_command(go))
        first = await session.ask(FIRST)
        async for _update in first:
            break  # The agent works on the first prompt.
        try:
            await asyncio.wait_for(first.outcome(), timeout=0.1)
        except TimeoutError:
            await first.interrupt()  # Returns when the agent has stopped.
            print(f"{FIRST}: {(await first.outcome()).kind}")
        go.touch()
        second = await session.ask(SECOND)
        print(f"{SECOND}: {(await second.outcome()).text}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run = {"naive": naive, "banksman": with_banksman}[sys.argv[1]]
        asyncio.run(run(Path(folder, "go")))
