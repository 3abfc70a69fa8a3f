"""Overhead from an interrupt to the next prompt, without the time of the agent.

A background turn runs, and a caller makes an urgent ask. Four moments count, on the monotonic clock
of the machine:

1. The caller makes the ask.
2. The agent has read the interrupt.
3. The agent has written the boundary.
4. The agent has read the next prompt.

The agent needs the time from 2 to 3. The rest is the overhead of Banksman.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time

import banksman
from bench.agents import tiny
from bench.measure import goal, p50, p90, span

ROUNDS = 200
OVERHEAD_SECONDS_MAX = 0.002


# The log adds two waits: an ask is accepted when it is durable, and sent when its start is durable.
STORES = ("memory:", "sqlite:{}/store.db", "sqlite:{}/store.db?level=full")


async def overheads(store: str) -> list[float]:
    found: list[float] = []
    fd, times = tempfile.mkstemp()
    try:
        async with banksman.Host(store) as host:
            session = await host.open("claude", command=tiny(times))
            for _ in range(ROUNDS):
                before = session.status().seq
                background = await session.ask("hang", priority=banksman.BACKGROUND)
                async for event in session.follow(before):
                    if event.kind == "update" and b'"init"' in event.data:
                        break
                os.ftruncate(fd, 0)
                began = time.monotonic()
                urgent = await session.ask("now", priority=banksman.INTERACTIVE)
                assert (await urgent.outcome()).kind is banksman.Kind.DONE
                assert (await background.outcome()).kind is banksman.Kind.PREEMPTED
                noted = [line.split() for line in os.pread(fd, 4096, 0).decode().splitlines()]
                at: dict[str, float] = {}
                for what, when in noted:
                    at.setdefault(what, float(when))
                found.append((at["interrupt"] - began) + (at["prompt"] - at["boundary"]))
    finally:
        os.close(fd)
        os.unlink(times)
    return found


def main() -> None:
    print("interrupt to next prompt, without the time of the agent")
    limit = OVERHEAD_SECONDS_MAX
    for store in STORES:
        with tempfile.TemporaryDirectory() as folder:
            found = asyncio.run(overheads(store.format(folder)))
        print(f"  {store.format('…'):32} p50 {span(p50(found))}, p90 {span(p90(found))}")
        if "full" not in store:  # At `full` the disk decides.
            goal(
                f"under {span(limit)}, {store.partition(':')[0]}",
                f"p50 {span(p50(found))}",
                p50(found) < limit,
            )


if __name__ == "__main__":
    main()
