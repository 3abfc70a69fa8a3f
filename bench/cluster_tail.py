"""Who follows a session from another process: says when it is live, and at the end of a turn how old events were.

    python -m bench.cluster_tail STORE SESSION TURNS

It has a host of its own on the same store, which owns nothing. An event's age is from the agent's own write of it.
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
        # All that is there by now, and after it the live ones.
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
