"""Time from a hand-over that no host follows to the death of the tree.

The keeper ends the tree when `hold_seconds` are over. Each child exits at the first TERM, so the
rest is the delay of the keeper. The control is a timer of asyncio, set at the same moment.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time

import banksman
from bench.measure import p50, span

HOLD_SECONDS = 1.0
ROUNDS = 20


async def readable(fd: int) -> None:
    """Wait until this fd is readable: the pidfd of a process that has ended."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    loop.add_reader(fd, ended.set_result, None)
    try:
        await ended
    finally:
        loop.remove_reader(fd)


async def delays(host: banksman.Host) -> tuple[float, float]:
    """Return the times from the end of the hold to the death of the child, and to the timer."""
    command = await host.start(["sleep", "60"], stdin="pipe")
    assert command.pid is not None
    pidfd = os.pidfd_open(command.pid)
    await command.hand_over_nowait(HOLD_SECONDS, bytes(range(32)))
    began = time.monotonic()

    async def timer() -> float:
        await asyncio.sleep(HOLD_SECONDS)
        return time.monotonic()

    ringing = asyncio.ensure_future(timer())
    try:
        await readable(pidfd)
        ended = time.monotonic()
    finally:
        os.close(pidfd)
    return ended - began - HOLD_SECONDS, await ringing - began - HOLD_SECONDS


async def main() -> None:
    print(f"death of a tree that no host takes over, after hold_seconds={HOLD_SECONDS:g}")
    with tempfile.TemporaryDirectory() as folder:
        # The folder of the held processes, apart from the one of the user.
        os.environ["XDG_STATE_HOME"] = folder
        async with banksman.Host() as host:
            found = [await delays(host) for _ in range(ROUNDS)]
    for what, values in zip(("tree", "control"), zip(*found, strict=True), strict=True):
        low, high = (f"{value * 1000:+.2f} ms" for value in (min(values), max(values)))
        print(f"  {what:8} {span(p50(list(values))):>8} (p50), {low} to {high}, n={len(values)}")


if __name__ == "__main__":
    asyncio.run(main())
