"""Control for the server benchmarks: an asyncio server that writes timestamps to all clients.

    python bare_server.py SHAPE RATE BYTES CLIENTS

The server waits for CLIENTS connections. Then it writes BYTES bytes with the current time in them,
RATE times a second. SHAPE `one`: all clients get each write at the same time, like followers of one
session. SHAPE `each`: each client gets its writes at other times, like followers of many sessions.

    python bare_server.py READER RATE COUNT CLIENTS AGENTS

The server starts AGENTS agents, and passes on each line that an agent writes to its part of the
clients. An agent writes COUNT lines, RATE of them a second. This is the work that no server of
agents can avoid: it reads pipes and writes sockets, and stores nothing. READER `pipes`: reads the
file descriptors. READER `asyncio`: `asyncio.subprocess` and its StreamReader. READER `sdk`: a
client of claude-agent-sdk for each agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import cast

# An agent ends when this process does, by the end of its stdin.
AGENT = Path(__file__).with_name("tiny_agent.py")

HEAD = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
    b"event: stream.live\n\n"
)


class Client(asyncio.Protocol):
    """Connection of a client. Any request is answered, and `come` gets the transport."""

    def __init__(self, come: Callable[[asyncio.Transport], None]) -> None:
        self._come = come
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(HEAD)
        self._come(self._transport)


async def tick(transports: list[asyncio.Transport], rate: float, size: int, phase: float) -> None:
    loop = asyncio.get_running_loop()
    at = loop.time() + phase
    while True:
        at += 1 / rate
        await asyncio.sleep(at - loop.time())
        event = b"\nid: 1\ndata: tick=%020d " % time.monotonic_ns()
        body = event.ljust(size - 2, b"x") + b"\n\n"
        chunk = b"%x\r\n%b\r\n" % (len(body), body)
        for transport in transports:
            transport.write(chunk)


def pass_on(lines: Iterable[bytes], clients: list[asyncio.Transport]) -> None:
    """Write lines to the clients of their agent, as one chunk."""
    body = b"".join(b"\nid: 1\ndata: %b\n\n" % line for line in lines)
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    for client in clients:
        client.write(chunk)


async def by_pipes(prompt: str, clients: list[asyncio.Transport]) -> None:
    pipe = subprocess.PIPE
    agent = subprocess.Popen([sys.executable, "-I", "-S", str(AGENT)], stdin=pipe, stdout=pipe)
    assert agent.stdin is not None
    assert agent.stdout is not None
    fd = agent.stdout.fileno()
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def on_readable() -> None:
        lines = os.read(fd, 1 << 16).splitlines()  # An agent writes whole lines.
        if lines:
            pass_on(lines, clients)
        else:
            loop.remove_reader(fd)
            ended.set_result(None)

    loop.add_reader(fd, on_readable)
    agent.stdin.write(b'{"uuid":"u","content":"%b"}\n' % prompt.encode())
    agent.stdin.flush()
    await ended


async def by_asyncio(prompt: str, clients: list[asyncio.Transport]) -> None:
    pipe = asyncio.subprocess.PIPE
    words = (sys.executable, "-I", "-S", str(AGENT))
    agent = await asyncio.create_subprocess_exec(*words, stdin=pipe, stdout=pipe)
    assert agent.stdin is not None
    assert agent.stdout is not None
    agent.stdin.write(b'{"uuid":"u","content":"%b"}\n' % prompt.encode())
    async for line in agent.stdout:
        pass_on([line.rstrip(b"\n")], clients)


async def by_sdk(prompt: str, clients: list[asyncio.Transport]) -> None:
    from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient

    # The SDK accepts only a path as the program, so a script starts the interpreter.
    with tempfile.NamedTemporaryFile("w", suffix=".sh", delete=False) as script:
        script.write(f'#!/bin/sh\nexec {sys.executable} -I -S {AGENT} "$@"\n')
    os.chmod(script.name, 0o700)
    try:
        async with ClaudeSDKClient(options=ClaudeAgentOptions(cli_path=script.name)) as client:
            os.unlink(script.name)
            await client.query(prompt)
            async for message in client.receive_response():
                pass_on([json.dumps(dataclasses.asdict(message)).encode()], clients)
            await asyncio.Event().wait()
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(script.name)


READERS = {"pipes": by_pipes, "asyncio": by_asyncio, "sdk": by_sdk}


async def main() -> None:
    shape, rate, size, count = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    loop = asyncio.get_running_loop()
    clients: list[asyncio.Transport] = []
    all_here: asyncio.Future[None] = loop.create_future()

    def come(transport: asyncio.Transport) -> None:
        clients.append(transport)
        if len(clients) == count:
            all_here.set_result(None)

    server = await loop.create_server(lambda: Client(come), "127.0.0.1", 0, backlog=1024)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await all_here
    if shape in READERS:
        agents = int(sys.argv[5])
        prompt = f"ticks {size} {rate:.0f}"
        parts = [clients[number::agents] for number in range(agents)]
        await asyncio.gather(*(READERS[shape](prompt, part) for part in parts))
    groups = [clients] if shape == "one" else [[client] for client in clients]
    await asyncio.gather(
        *(tick(each, rate, size, n / len(groups) / rate) for n, each in enumerate(groups))
    )


asyncio.run(main())
