"""Failure 4: a stale clean-up clobbers a new stream.

A chat server keeps the stream of each chat's running turn, from which browsers read. The clean-up
of a turn waits until its agent has exited, and then removes the stream. If the next turn starts
during that wait, the clean-up removes the new stream. The new turn runs on, and a browser that
reconnects is told that nothing runs.

    python stale_cleanup.py naive       # the second turn runs, and its stream is gone
    python stale_cleanup.py banksman    # a late clean-up of the first turn does nothing
"""

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncGenerator
from pathlib import Path

import banksman
from banksman.testing import fake_agent

FIRST, SECOND = "Tidy up the imports", "Why is CI red?"


def agent_command(saved: Path, go: Path) -> list[str]:
    """Return an agent that exits when `saved` exists, and ends its second turn when `go` does."""
    second = ["say reading the log", f"wait {go}", "say a test fails"]
    script = {f"prompt {FIRST}": ["say tidied the imports"], f"prompt {SECOND}": second}
    return fake_agent.command({"process": [f"at eof wait {saved}"], **script})


streams: dict[str, asyncio.Queue[str]] = {}  # Of the naive server: the running turn of each chat.


async def take_turn(command: list[str], prompt: str, stream: asyncio.Queue[str]) -> None:
    pipe = asyncio.subprocess.PIPE
    agent = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    assert agent.stdin is not None
    assert agent.stdout is not None
    message = {"role": "user", "content": prompt}
    agent.stdin.write(json.dumps({"type": "user", "message": message}).encode() + b"\n")
    async for line in agent.stdout:
        frame = json.loads(line)
        if frame["type"] == "assistant":
            stream.put_nowait(frame["message"]["content"][0]["text"])
        elif frame["type"] == "result":
            break
    agent.stdin.close()
    await agent.wait()
    streams.pop("chat", None)  # Clean up. But it may be the stream of the next turn.


def start(command: list[str], prompt: str) -> asyncio.Task[None]:
    streams["chat"] = asyncio.Queue()
    return asyncio.create_task(take_turn(command, prompt, streams["chat"]))


async def naive(saved: Path, go: Path) -> None:
    command = agent_command(saved, go)
    first = start(command, FIRST)
    print(f"{FIRST}: {await streams['chat'].get()}")
    # The user has the answer and sends the next prompt. The first agent has not exited yet.
    second = start(command, SECOND)
    print(f"{SECOND}: {await streams['chat'].get()}")
    saved.touch()
    await first  # The first agent has exited, and the clean-up of the first turn has run.
    print(f"second turn running: {not second.done()}, its stream is known: {'chat' in streams}")
    go.touch()
    await second


async def texts(turn: banksman.Turn) -> AsyncGenerator[str]:
    """Read a turn from its start, as a browser that reconnects does."""
    async for update in turn:
        if update["sessionUpdate"] == "agent_message_chunk":
            yield update["content"]["text"]


async def with_banksman(saved: Path, go: Path) -> None:
    async with banksman.Host("memory:") as host:
        session = await host.open("claude", command=agent_command(saved, go))
        first = await session.ask(FIRST)
        print(f"{FIRST}: {(await first.outcome()).text}")
        second = await session.ask(SECOND)
        async for text in texts(second):
            print(f"{SECOND}: {text}")
            break
        receipt = await first.interrupt()  # The late clean-up names its turn, which is over.
        print(f"late clean-up: {receipt.by}")
        print(f"second turn running: {session.status().holder == second.id}")
        go.touch()
        saved.touch()
        async for text in texts(await session.turn(second.id)):
            print(f"new browser: {text}")


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        run = {"naive": naive, "banksman": with_banksman}[sys.argv[1]]
        asyncio.run(run(Path(folder, "saved"), Path(folder, "go")))
