"""What more sessions on one host cost: idle ones, streaming ones, and ones that are only stored.

Idle sessions each have a live agent that waits for a prompt. Stored sessions have no process: the
server was restarted, and they are in the store. Memory is the PSS of the server, without agents and
keepers. CPU is the share of one core.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
from typing import NamedTuple

import banksman
from bench.agents import tiny
from bench.measure import span
from bench.serving import Server, served

IDLE = (10, 100, 300, 1_000)
STORED = (100, 1_000, 10_000)
QUIET_SECONDS = 3.0
SETTLE_SECONDS = 3.0


class Size(NamedTuple):
    """Costs of a server with `sessions` sessions. `list_seconds`: a page of its sessions."""

    sessions: int
    memory_bytes: int
    fds: int
    cpu_share: float
    list_seconds: float


def size(server: Server, sessions: int) -> Size:
    time.sleep(SETTLE_SECONDS)
    cpu, began = server.cpu_seconds(), time.monotonic()
    time.sleep(QUIET_SECONDS)
    share = (server.cpu_seconds() - cpu) / (time.monotonic() - began)
    began = time.monotonic()
    server.request("GET", "/v1/sessions?limit=100")
    seconds = time.monotonic() - began
    fds = len(os.listdir(f"/proc/{server.process.pid}/fd"))
    return Size(sessions, server.memory_bytes(), fds, share, seconds)


def idle() -> list[Size]:
    """Open more and more sessions on one server, each with a process that waits."""
    found: list[Size] = []
    count = 0
    with served() as server:
        for goal in IDLE:
            while count < goal:
                server.open()
                count += 1
            found.append(size(server, count))
    return found


def kept() -> list[Size]:
    """Start a server on stores with more and more sessions that ended before."""
    found: list[Size] = []
    with tempfile.TemporaryDirectory() as folder:
        store = f"sqlite:{folder}/store.db"
        count = 0
        for goal in STORED:
            asyncio.run(_store(store, goal - count))
            count = goal
            with served(store=store) as server:
                found.append(size(server, count))
    return found


async def _store(store: str, count: int) -> None:
    async with banksman.Host(store) as host:
        for _ in range(count):
            await (await host.open("claude", command=tiny())).close()


def show(title: str, sizes: list[Size]) -> None:
    print(
        f"{title:>10} {'PSS':>10} {'per session':>12} {'fds':>7} {'CPU':>7} {'a list of 100':>15}"
    )
    for one in sizes:
        each = (one.memory_bytes - sizes[0].memory_bytes) / max(1, one.sessions - sizes[0].sessions)
        print(
            f"{one.sessions:10,} {one.memory_bytes / 1e6:7.1f} MB {each / 1e3:9.1f} kB "
            f"{one.fds:7,} {one.cpu_share:7.2%} {span(one.list_seconds):>15}",
            flush=True,
        )


def main() -> None:
    show("idle", idle())
    show("stored", kept())


if __name__ == "__main__":
    main()
