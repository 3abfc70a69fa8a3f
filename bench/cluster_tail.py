"""Follower of a session in another process. It prints the age of the events of each turn.

    python -m bench.cluster_tail STORE SESSION TURNS

The process has a host on the same store that owns no session. It prints `live` when it follows, and
a line of JSON at the end of each turn. The age of an event counts from the agent's write.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
import time

import banksman

TICK = re.compile(rb"tick=(\d+) ")


async def main(url: str, id: str, turns: int) -> None:
    async with banksman.Host(url) as host:
        await host.ready()
        session = host.session(id)
        ages: list[float] = []
        # First the existing events, then the live ones.
        seq = [event.seq async for event in session.events()][-1]
        print("live", flush=True)
        cpu = time.process_time()
        async for event in session.follow(seq):
            if found := TICK.search(event.data):
                ages.append((time.monotonic_ns() - int(found[1])) / 1e9)
            elif event.kind == "turn.ended":
                print(json.dumps([time.process_time() - cpu, *ages]), flush=True)
                cpu, ages, turns = time.process_time(), [], turns - 1
                if not turns:
                    return


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], int(sys.argv[3])))
