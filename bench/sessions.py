"""Many sessions: the memory of an idle session in the host, and a thousand concurrent turns.

The memory is the growth of the PSS of the host process, divided by the number of sessions. Each
session has a running agent process, has taken one turn, and is idle. The agent processes and their
keepers do not count.
"""

from __future__ import annotations

import asyncio
import collections
import gc
import time

import banksman
from bench.agents import tiny
from bench.measure import goal

IDLE = 200
IDLE_BYTES_MAX = 100_000
MANY = 1000
MANY_SECONDS_MAX = 60.0


def pss() -> int:
    gc.collect()
    with open("/proc/self/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


async def turn(host: banksman.Host) -> tuple[banksman.Session, banksman.Outcome, int]:
    session = await host.open("claude", command=tiny())
    outcome = await (await session.ask("hello")).outcome()
    warnings = 0
    async for event in session.events(0, waits=False):
        warnings += event.kind == "clock.warning"
    return session, outcome, warnings


async def idle() -> float:
    async with banksman.Host("memory:") as host:
        for _ in range(20):
            # The first sessions load modules and fill caches, which is no cost of a session.
            await turn(host)
        before = pss()
        for _ in range(IDLE):
            await turn(host)
        return (pss() - before) / IDLE


async def many() -> tuple[float, collections.Counter[str], int]:
    async with banksman.Host("memory:") as host:
        began = time.perf_counter()
        ended = await asyncio.gather(*(turn(host) for _ in range(MANY)))
        seconds = time.perf_counter() - began
    kinds = collections.Counter(str(outcome.kind) for _, outcome, _ in ended)
    return seconds, kinds, sum(warnings for *_, warnings in ended)


def main() -> None:
    banksman.raise_fd_limit()
    each = asyncio.run(idle())
    print(f"memory of an idle session in the host: {each / 1000:.0f} KB (mean of {IDLE})")
    goal(
        f"under {IDLE_BYTES_MAX / 1000:.0f} KB per session",
        f"{each / 1000:.0f} KB",
        each < IDLE_BYTES_MAX,
    )
    seconds, kinds, warnings = asyncio.run(many())
    print(
        f"{MANY} concurrent sessions, one turn each: {seconds:.1f} s, "
        f"outcomes {dict(kinds)}, watchdog warnings {warnings}"
    )
    is_met = seconds < MANY_SECONDS_MAX and kinds == {"done": MANY} and warnings == 0
    text = f"{MANY} turns done within {MANY_SECONDS_MAX:.0f} s, no watchdog warning"
    goal(text, f"{seconds:.1f} s", is_met)


if __name__ == "__main__":
    main()
