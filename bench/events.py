"""CPU per event, from the agent's pipe to a subscriber: three readers of the same stream.

Each reader reads 100,000 stream events of about 400 bytes, five times. The result is the minimum of
the CPU time (user and system) of the reading process, so other load on the machine matters little.
Each reader runs in a separate process.

- bare: `add_reader`, reads of 256 KiB, `split`, and a msgspec decode of `type` and `subtype`. It
  stores nothing.
- banksman: a session with its log in memory, and a subscriber. The clock stops when the subscriber
  has received every event.
- claude-agent-sdk: its client, which receives all messages, also partial ones.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

from bench.agents import TINY, done, tiny
from bench.measure import goal

EVENTS = 100_000
ROUNDS = 5
SDK_RATIO_MIN = 10.0
BARE_RATIO_MAX = 2.0


async def bare() -> list[float]:
    import msgspec

    class Frame(msgspec.Struct):
        type: str = ""
        subtype: str = ""

    decode = msgspec.json.Decoder(Frame).decode
    process = subprocess.Popen(tiny(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdin is not None
    assert process.stdout is not None
    fd = process.stdout.fileno()
    os.set_blocking(fd, False)
    loop = asyncio.get_running_loop()
    rest = b""
    over: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        nonlocal rest
        lines = (rest + os.read(fd, 1 << 18)).split(b"\n")
        rest = lines.pop()
        for line in lines:
            if decode(line).type == "result":
                over.set_result(None)

    loop.add_reader(fd, on_readable)
    seconds: list[float] = []
    for _ in range(ROUNDS):
        over = loop.create_future()
        began = time.process_time()
        process.stdin.write(
            b'{"type":"user","message":{"content":"frames %d"},"uuid":"u"}\n' % EVENTS
        )
        process.stdin.flush()
        await over
        seconds.append(time.process_time() - began)
    loop.remove_reader(fd)
    process.stdin.close()
    process.wait()
    return seconds


async def ours() -> list[float]:
    import banksman

    seconds: list[float] = []
    async with banksman.Host("memory:") as host:
        session = await host.open("claude", command=tiny())
        await done(session, "warm up")
        seen = session.status().seq
        for _ in range(ROUNDS):
            began = time.process_time()
            turn = await session.ask(f"frames {EVENTS}")
            async for event in session.follow(seen):
                seen = event.seq
                if event.kind == "turn.ended":
                    break
            seconds.append(time.process_time() - began)
            assert (await turn.outcome()).text == "ok"
    return seconds


async def sdk() -> list[float]:
    from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient

    # The SDK accepts only a path as the program, so a script starts the interpreter.
    script = f"/tmp/banksman-bench-{os.getpid()}.sh"
    with open(script, "w") as file:
        file.write(f'#!/bin/sh\nexec {sys.executable} -I -S {TINY} "$@"\n')
    os.chmod(script, 0o700)
    seconds: list[float] = []
    try:
        options = ClaudeAgentOptions(cli_path=script, include_partial_messages=True)
        async with ClaudeSDKClient(options=options) as client:
            for _ in range(ROUNDS):
                began = time.process_time()
                await client.query(f"frames {EVENTS}")
                async for _message in client.receive_response():
                    pass
                seconds.append(time.process_time() - began)
    finally:
        os.unlink(script)
    return seconds


READERS: dict[str, Callable[[], Coroutine[Any, Any, list[float]]]] = {
    "bare add_reader and split": bare,
    "banksman, to a subscriber": ours,
    "claude-agent-sdk": sdk,
}


def measure(name: str) -> float:
    """Return the minimal CPU per event in microseconds, measured in a separate process."""
    argv = [sys.executable, "-m", "bench.events", name]
    result = subprocess.run(argv, stdout=subprocess.PIPE, text=True, timeout=110, check=True)
    return min(float(word) for word in result.stdout.split()) / EVENTS * 1e6


def main() -> None:
    print(f"CPU per event, {EVENTS:,} stream events of about 400 bytes; minimum of {ROUNDS}")
    taken = {name: measure(name) for name in READERS}
    base = taken["bare add_reader and split"]
    for name, micros in taken.items():
        print(f"  {name:40} {micros:8.2f} µs {micros / base:8.2f} × bare")
    mine = taken["banksman, to a subscriber"]
    times = taken["claude-agent-sdk"] / mine
    goal(
        f"{SDK_RATIO_MIN:.0f} times less CPU than claude-agent-sdk",
        f"{times:.1f} times",
        times >= SDK_RATIO_MIN,
    )
    goal(
        f"at most {BARE_RATIO_MAX:.0f} times the CPU of the bare loop",
        f"{mine / base:.2f}",
        mine / base <= BARE_RATIO_MAX,
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*asyncio.run(READERS[sys.argv[1]]()))
    else:
        main()
