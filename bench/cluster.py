"""Cost of a cluster against one machine: the same agent and turns, on SQLite and on NATS.

All nodes run on this machine. So the numbers exclude the delay of a network, but include the load
of the nodes, which share the cores with the host. The nodes sync before they acknowledge. The file
syncs at level `full` and does not sync by default, so `sqlite, full` gives the same guarantee as
the nodes.

- Ask: the time from the call to its acceptance (the log has stored it), and to its outcome. The
  agent answers immediately.
- Live event: the time from the agent's write until a host in another process, which follows the
  session, receives the event.
- CPU in the host, from the pipe to durable storage, and in the nodes: with all events in one
  burst, which packs many events into a message, and at a low rate, with one message per event.
- Appends of 50 events, with one unacknowledged append and with as many as the limit allows, and a
  replay of all events.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import banksman
from banksman.store.log import Log
from bench.agents import done, tiny
from bench.cluster_kit import FILE, THREE, Store, stores
from bench.log import DATA, ENTRY, append_all
from bench.measure import goal, p50, span, table

ASKS, WARM_UP, QUIET_SECONDS = 60, 5, 0.02
TICKS, TICKS_PER_SECOND, TICK_TURNS = 200, 100, 2
FRAMES, FRAME_ROUNDS = 20_000, 3
TRICKLE = 1_000
PACKED, CHUNK, CHUNKS_ALONE = 100_000, 50, 200
ROUNDS = 2
ASK_SECONDS_MAX = 0.010
LIVE_P99_SECONDS_MAX = 0.050
REPLAY_RATE_MIN = 100_000


class Used(NamedTuple):
    """CPU seconds per event, in the host and in all nodes together."""

    host: float
    nodes: float


# -- an ask --------------------------------------------------------------------------------------
async def asks(found: dict[str, Store]) -> None:
    accepted: dict[str, list[float]] = {name: [] for name in found}
    ended: dict[str, list[float]] = {name: [] for name in found}
    async with contextlib.AsyncExitStack() as stack:
        sessions: dict[str, banksman.Session] = {}
        for name, store in found.items():
            host = await stack.enter_async_context(banksman.Host(store.url))
            sessions[name] = await host.open("claude", command=tiny())
            await done(sessions[name], "warm up")

        # In a random order, and after a pause: a turn writes more events after its outcome, and
        # they are synced to the same disk. In a fixed order, the same store would always wait.
        order = random.Random(1)
        for number in range(-WARM_UP, ASKS):
            for name in order.sample(list(found), len(found)):
                await asyncio.sleep(QUIET_SECONDS)
                began = time.perf_counter()
                turn = await sessions[name].ask("hello")
                until_accepted = time.perf_counter() - began
                await turn.outcome()
                if number >= 0:
                    accepted[name].append(until_accepted)
                    ended[name].append(time.perf_counter() - began)
    table("an ask, until it is accepted", accepted, against=FILE)
    table("an ask, until its outcome", ended, against=FILE)
    median = p50(accepted[THREE])
    goal(
        f"accepted within {span(ASK_SECONDS_MAX)} on 3 nodes, p50",
        span(median),
        median < ASK_SECONDS_MAX,
    )


# -- a live event --------------------------------------------------------------------------------
async def tail(store: Store) -> tuple[list[float], float]:
    """Return the age of each event at the follower, and the follower's CPU per event."""
    async with banksman.Host(store.url) as host:
        session = await host.open("claude", command=tiny())
        await done(session, "warm up")
        argv = [sys.executable, "-m", "bench.cluster_tail", store.url, session.id, str(TICK_TURNS)]
        process = await asyncio.create_subprocess_exec(*argv, stdout=subprocess.PIPE, limit=1 << 20)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"live\n"
        ages: list[float] = []
        cpu = 0.0
        for _ in range(TICK_TURNS):
            await done(session, f"ticks {TICKS} {TICKS_PER_SECOND}")
            used, *heard = json.loads(await process.stdout.readline())
            assert len(heard) == TICKS, len(heard)
            ages += heard
            cpu += used
        assert await process.wait() == 0
    return ages, cpu / len(ages)


async def tails(found: dict[str, Store]) -> None:
    taken = {name: await tail(store) for name, store in found.items()}
    print(f"a live event, received in another process; {TICKS_PER_SECOND} a second")
    print(f"  {'':40} {'p50':>10} {'p99':>10} {'max':>10} {'ratio':>8} {'follower CPU':>14}")
    base = p50(taken[FILE][0])
    for name, (ages, cpu) in taken.items():
        print(
            f"  {name:40} {span(p50(ages)):>10} {span(p99(ages)):>10} {span(max(ages)):>10} "
            f"{p50(ages) / base:8.2f} {cpu * 1e6:11.0f} µs"
        )
    worst = p99(taken[THREE][0])
    goal(
        f"p99 under {span(LIVE_P99_SECONDS_MAX)} on 3 nodes",
        span(worst),
        worst < LIVE_P99_SECONDS_MAX,
    )


def p99(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.99 * (len(seconds) - 1) + 0.5)]


# -- CPU per event -------------------------------------------------------------------------------
async def cpu(store: Store) -> tuple[Used, Used]:
    """Return the CPU per event in a burst (the minimum of several rounds), and at a low rate."""
    rounds: list[Used] = []
    async with banksman.Host(store.url) as host:
        session = await host.open("claude", command=tiny())
        await done(session, "warm up")
        while len(rounds) < FRAME_ROUNDS:
            rounds.append(await _used(store, session, f"frames {FRAMES}", FRAMES))
        trickled = await _used(store, session, f"ticks {TRICKLE} 200", TRICKLE)
    return min(rounds), trickled


async def _used(store: Store, session: banksman.Session, prompt: str, events: int) -> Used:
    host, nodes = time.process_time(), store.servers_cpu_seconds()
    await done(session, prompt)
    return Used(
        (time.process_time() - host) / events, (store.servers_cpu_seconds() - nodes) / events
    )


async def cpus(found: dict[str, Store]) -> None:
    taken = {name: await cpu(store) for name, store in found.items()}
    for number, title in enumerate(
        (f"CPU per event, {FRAMES:,} in a burst", "CPU per event, 200 a second")
    ):
        print(f"{title:42} {'host':>10} {'nodes':>12} {'host, ratio':>13}")
        base = taken[FILE][number].host
        for name, used in taken.items():
            host, nodes = used[number]
            print(f"  {name:40} {host * 1e6:7.1f} µs {nodes * 1e6:9.1f} µs {host / base:13.2f}")


# -- the log alone -------------------------------------------------------------------------------
async def alone(log: Log, session: str) -> float:
    """Return the events per second with one unacknowledged append at a time."""
    epoch = await log.claim(session, agent="claude")
    loop = asyncio.get_running_loop()
    began = time.perf_counter()
    for number in range(CHUNKS_ALONE):
        stored: asyncio.Future[Exception | None] = loop.create_future()
        log.append(session, epoch, number * CHUNK, 1.0, [ENTRY] * CHUNK, stored.set_result)
        error = await stored
        assert error is None, error
    return CHUNKS_ALONE * CHUNK / (time.perf_counter() - began)


async def replay(log: Log, session: str) -> float:
    began, after = time.perf_counter(), 0
    while (page := await log.read(session, after)).events:
        after = page.events[-1].seq
    assert after == PACKED
    return after / (time.perf_counter() - began)


async def logs(found: dict[str, Store]) -> None:
    """Print the best rates of several rounds. Each round measures every store once."""
    best: dict[str, tuple[float, ...]] = dict.fromkeys(found, (0.0, 0.0, 0.0))
    for number in range(ROUNDS):
        for name, store in found.items():
            log = store.open()
            await log.ready()
            one = await alone(log, f"alone-{number}")
            _, wall = await append_all(log, f"packed-{number}", PACKED, CHUNK)
            rates = (one, PACKED / wall, await replay(log, f"packed-{number}"))
            best[name] = tuple(map(max, best[name], rates))
            await log.close()
    title = f"events/s of {len(DATA)} bytes, {CHUNK} per append"
    print(f"{title:42} {'one by one':>12} {'packed':>12} {'replay':>12}   ratios")
    for name, rates in best.items():
        shown = " ".join(f"{rate:12,.0f}" for rate in rates)
        ratios = " · ".join(
            f"{rate / base:.2f}" for rate, base in zip(rates, best[FILE], strict=True)
        )
        print(f"  {name:40} {shown}   {ratios}")
    rate = best[THREE][2]
    goal(
        f"replay of {REPLAY_RATE_MIN:,} events/s from 3 nodes",
        f"{rate:,.0f}",
        rate >= REPLAY_RATE_MIN,
    )


PARTS = {"asks": asks, "tails": tails, "cpus": cpus, "logs": logs}


def main(names: list[str]) -> None:
    for name in names or PARTS:
        # Each part gets new nodes, so it does not read the events of another part.
        with stores() as found:
            asyncio.run(PARTS[name](found))


if __name__ == "__main__":
    main(sys.argv[1:])
