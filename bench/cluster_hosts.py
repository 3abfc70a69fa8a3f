"""Cost of many hosts: heartbeats, and the take-over of the sessions of a dead host.

- `beats`: leases without sessions, in a few processes. It measures the traffic of the node, and the
  CPU of the node and of each host. The lease is long, so that this machine can have as many hosts
  as a real cluster. The traffic is proportional to 1 / lease.
- `takeover`: a host is killed, and another host takes its sessions over. It measures the time from
  the kill to the last session.

Both start helper processes:

    python -m bench.cluster_hosts leases STORE COUNT
    python -m bench.cluster_hosts member STORE SESSIONS
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncGenerator

import banksman
from banksman.cluster import store_address
from banksman.cluster.host import Member
from banksman.cluster.log.host_leases import HostLeases
from banksman.cluster.log.streams import NatsStreams
from banksman.cluster.nats import Nats
from bench.agents import tiny
from bench.cluster_kit import Store, nodes
from bench.measure import span

HOSTS = (25, 50, 100, 200)
PROCESSES = 2
BEATS_LEASE = 60
BEATS_SECONDS = 12.0
TAKEN = (50, 500)
TAKEN_LEASE = 5
TAKEN_SECONDS_MAX = 120.0


# -- heartbeats ----------------------------------------------------------------------------------
async def leases(url: str, count: int) -> None:
    """Hold `count` leases until stdin ends.

    The answer to each line on stdin is the CPU time so far and the number of hosts that the first
    lease sees.
    """
    where = store_address.parse(url)
    made: list[HostLeases] = []
    for _ in range(count):
        nats = Nats(where, name="bench")
        await nats.connect()
        streams = NatsStreams(nats, where)
        await streams.ensure_all()
        made.append(HostLeases(nats, streams.names, where.lease, streams.ensure_anew))
        await made[-1].start()
    print("up", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps([time.process_time(), len(made[0].all())]), flush=True)
    os._exit(0)  # Like a kill: the benchmark needs no clean end of the leases.


@contextlib.asynccontextmanager
async def running(*words: str) -> AsyncGenerator[asyncio.subprocess.Process]:
    pipe = asyncio.subprocess.PIPE
    argv = [sys.executable, "-m", "bench.cluster_hosts", *words]
    process = await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def answer(process: asyncio.subprocess.Process, line: bytes = b"") -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    if line:
        process.stdin.write(line)
    said = await process.stdout.readline()
    assert said, "the process has ended"
    return said


async def beats(_: Store) -> None:
    print(f"idle hosts, lease {BEATS_LEASE} s")
    for count in HOSTS:
        with nodes(1, lease=BEATS_LEASE) as store:
            async with contextlib.AsyncExitStack() as stack:
                each = str(count // PROCESSES)
                processes = [
                    await stack.enter_async_context(running("leases", store.url, each))
                    for _ in range(PROCESSES)
                ]
                for process in processes:
                    assert await answer(process) == b"up\n"
                await asyncio.sleep(3.0)
                before = await _look(store, processes)
                await asyncio.sleep(BEATS_SECONDS)
                after = await _look(store, processes)
            seconds, cpu, node, heard, said, size = (
                b - a for a, b in zip(before, after, strict=True)
            )
            print(
                f"  {count:4}: {heard / seconds:6.0f} messages/s to the node, "
                f"{said / seconds:7,.0f} from the node "
                f"({size / seconds / 1e3:6.0f} KB/s); CPU of the node {node / seconds:.1%}, "
                f"of each host {cpu / seconds / count:.2%}",
                flush=True,
            )


async def _look(store: Store, processes: list[asyncio.subprocess.Process]) -> tuple[float, ...]:
    assert store.servers is not None
    cpu = 0.0
    for process in processes:
        used, _ = json.loads(await answer(process, b"?\n"))
        cpu += used
    found = store.servers.look(0, "/varz")
    assert found is not None
    node = store.servers_cpu_seconds()
    return time.monotonic(), cpu, node, found["in_msgs"], found["out_msgs"], found["out_bytes"]


# -- take-over -----------------------------------------------------------------------------------
async def nothing(data: bytes) -> bytes:
    return data


async def member(url: str, sessions: int) -> None:
    """Run a host with this many sessions, without agent processes, until it is killed."""
    async with banksman.Host(url) as host:
        await host.ready()
        cluster = host.cluster
        assert cluster is not None
        async with Member(host, cluster, name="old", application=nothing):
            for begin in range(0, sessions, 16):
                count = min(16, sessions - begin)
                await asyncio.gather(
                    *(host.open("claude", command=tiny(), cwd="/") for _ in range(count))
                )
            print("up", flush=True)
            await asyncio.to_thread(sys.stdin.readline)
    os._exit(0)


async def takeover(_: Store) -> None:
    print(f"a host is killed, and another takes its sessions over; lease {TAKEN_LEASE} s")
    for count in TAKEN:
        with nodes(1, lease=TAKEN_LEASE) as store:
            async with (
                running("member", store.url, str(count)) as old,
                banksman.Host(store.url) as host,
            ):
                await host.ready()
                cluster = host.cluster
                assert cluster is not None
                gone: asyncio.Future[float] = asyncio.get_running_loop().create_future()

                def on_gone(_: str, gone: asyncio.Future[float] = gone) -> None:
                    if not gone.done():
                        gone.set_result(time.monotonic())

                cluster.hosts.on_gone(on_gone)
                async with Member(
                    host, cluster, name="new", room=count, application=nothing
                ) as new:
                    assert await answer(old) == b"up\n"
                    old.kill()
                    began = time.monotonic()
                    known = await gone
                    cpu, node = time.process_time(), store.servers_cpu_seconds()
                    async with asyncio.timeout(TAKEN_SECONDS_MAX):
                        while new.used < count:
                            await asyncio.sleep(0.01)  # No event reports the count, so poll it.
                    ended = time.monotonic()
                    cpu, node = time.process_time() - cpu, store.servers_cpu_seconds() - node
        print(
            f"  {count:4} sessions: loss detected after {span(known - began)}, "
            f"all taken over {span(ended - known)} later ({count / (ended - known):,.0f}/s; "
            f"CPU per session {cpu / count * 1e3:.1f} ms in the host, "
            f"{node / count * 1e3:.1f} ms in the node)",
            flush=True,
        )


PARTS = {"beats": beats, "takeover": takeover}

if __name__ == "__main__":
    _, what, where, number = sys.argv
    asyncio.run(leases(where, int(number)) if what == "leases" else member(where, int(number)))
