"""Cost of the parts of a cluster as their number grows: sessions, events, followers.

    python -m bench.cluster_growth [part …]

docs/scaling.md shows the results. `cluster_hosts.py` measures hosts. `make bench` does not run this
module: it takes five minutes and most of the CPU of a small machine.

One node, the hosts and the clients run on this machine. Counts (messages, bytes, reads) are exact.
Times depend on the load of the machine.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import random
import sys
import time
from pathlib import Path

from banksman.cluster import store_address
from banksman.cluster.log import ClusterLog, message_codec
from banksman.cluster.log.session_record import SessionRecord, encode
from banksman.cluster.log.streams import StreamNames
from banksman.cluster.nats import Nats
from banksman.core.session.event import UPDATE
from banksman.store.log import Log
from bench import cluster_hosts
from bench.cluster_kit import Store, memory_bytes, nodes
from bench.measure import p50, span

KNOWN = (1_000, 10_000)
AT_ONCE = 64
CLAIMS = 400
READS = 100
FOLLOWERS = (1, 10, 50)
FOLLOWED_EVENTS = 100
IDLE_FOLLOWED = (100, 500)
IDLE_SECONDS = 10.0
DISK_EVENTS, DISK_ALONE = 20_000, 4_000
WRITERS, WRITTEN = 64, 80


def at(store: Store) -> store_address.StoreAddress:
    return store_address.parse(store.url)


def opened(store: Store) -> ClusterLog:
    where = at(store)
    assert where.journal is not None
    return ClusterLog(where, Path(where.journal))


def node_memory(store: Store) -> int:
    assert store.servers is not None
    pid = store.servers.pid(0)
    assert pid is not None
    return memory_bytes(pid)


def own_memory() -> int:
    gc.collect()
    return memory_bytes()


# -- known sessions ------------------------------------------------------------------------------
async def write_records(store: Store, first: int, end: int) -> float:
    """Write sessions as a claim and a release leave them: a record, and a message of one event.

    Return the number of sessions per second.
    """
    where = at(store)
    nats, names = Nats(where, name="bench"), StreamNames(where.prefix)
    await nats.connect()
    waiting = iter(range(first, end))
    body = message_codec.encode(
        message_codec.MessageBody([message_codec.MessagePart(1.0, (("t", UPDATE, b"x" * 400),))])
    )

    async def write() -> None:
        for number in waiting:
            id = f"s-{number:016x}"
            record = SessionRecord(
                id=id,
                agent="claude",
                created=1.0 + number,
                epoch=1,
                tenure=1,
                seq=1,
                changed=1.0,
                born=1,
            )
            await nats.publish(names.record("session", id), encode(record), expected=0)
            header = message_codec.header(
                epoch=1, first=1, held=1, snapshot=0, at=1.0, blob=message_codec.NO_BLOB
            )
            await nats.publish(
                names.event(id), body, expected=0, headers={message_codec.HEADER: header}
            )

    began = time.perf_counter()
    await asyncio.gather(*(write() for _ in range(AT_ONCE)))
    await nats.close()
    return (end - first) / (time.perf_counter() - began)


async def load(store: Store) -> None:
    """Measure how long a new log handle takes to load all sessions, and its memory after that.

    Runs in a separate process.
    """
    before, cpu, began = own_memory(), time.process_time(), time.perf_counter()
    log = opened(store)
    await log.ready()
    seconds, used = time.perf_counter() - began, time.process_time() - cpu
    known = log.sessions()
    held = own_memory() - before
    began = time.perf_counter()
    for _ in range(10):
        log.sessions(limit=100)
    listed = (time.perf_counter() - began) / 10
    chosen = random.Random(1).sample(known, READS)
    reads: list[float] = []
    for one in chosen:
        began = time.perf_counter()
        page = await log.read(one.id, 0)
        reads.append(time.perf_counter() - began)
        assert page.events
    await log.close()
    print(json.dumps([len(known), seconds, used, held, listed, p50(reads)]))


async def known(store: Store) -> None:
    print("sessions that a front end knows (no host owns them)")
    async with asyncio.timeout(120):
        log = opened(store)
        await log.ready()  # Creates the streams.
        await log.close()
    before, first = node_memory(store), 0
    for count in KNOWN:
        rate = await write_records(store, first, count)
        argv = [sys.executable, "-m", "bench.cluster_growth", "load", store.url]
        process = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
        said, _ = await process.communicate()
        found, seconds, used, held, listed, read = json.loads(said)
        assert found == count, found
        node = node_memory(store) - before
        print(
            f"  {count:6,}: loaded in {span(seconds)} (CPU {span(used)}); "
            f"{held / count:,.0f} bytes per session in the front end, "
            f"{node / count:,.0f} in the node; "
            f"list page {span(listed)}; cold read p50 {span(read)}; written at {rate:,.0f}/s",
            flush=True,
        )
        first = count


# -- open sessions -------------------------------------------------------------------------------
async def claims(store: Store) -> None:
    """Claim the sessions of one host, without agents.

    The cost is that of the log, and of a subject for requests to the owner of each session.
    """

    async def answer(data: bytes) -> bytes:
        return data

    log = opened(store)
    await log.ready()
    await log.claim("first", agent="claude")
    before, node = own_memory(), node_memory(store)
    began = time.perf_counter()
    for number in range(CLAIMS // 4):
        await log.claim(f"alone-{number}", agent="claude")
    alone = CLAIMS // 4 / (time.perf_counter() - began)
    waiting = iter(range(CLAIMS))

    async def claim() -> None:
        for number in waiting:
            await log.claim(f"s-{number}", agent="claude")
            await log.bus.answer_for(f"s-{number}", answer)

    began, cpu, nodes_cpu = time.perf_counter(), time.process_time(), store.servers_cpu_seconds()
    await asyncio.gather(*(claim() for _ in range(16)))
    wall = time.perf_counter() - began
    used, nodes_used = time.process_time() - cpu, store.servers_cpu_seconds() - nodes_cpu
    count = CLAIMS + CLAIMS // 4
    print(
        f"claims: {alone:,.0f}/s one by one, {CLAIMS / wall:,.0f}/s with 16 at a time "
        f"(CPU per claim {used / CLAIMS * 1e3:.1f} ms in the host, "
        f"{nodes_used / CLAIMS * 1e3:.1f} ms in the node)"
    )
    print(
        f"  per open session: {(own_memory() - before) / count:,.0f} bytes in its host's log, "
        f"{(node_memory(store) - node) / count:,.0f} in the node"
    )
    cpu, nodes_cpu = time.process_time(), store.servers_cpu_seconds()
    await asyncio.sleep(IDLE_SECONDS)
    print(
        f"  {count} idle open sessions: "
        f"CPU {(time.process_time() - cpu) / IDLE_SECONDS:.2%} in the host, "
        f"{(store.servers_cpu_seconds() - nodes_cpu) / IDLE_SECONDS:.2%} in the node",
        flush=True,
    )
    await log.close()


# -- followers -----------------------------------------------------------------------------------
async def append_one(log: Log, session: str, epoch: int, seq: int) -> None:
    stored: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    log.append(session, epoch, seq, time.time(), [("t", UPDATE, b"x" * 400)], stored.set_result)
    assert await stored is None


async def followers(store: Store) -> None:
    """Measure the cost of an event of one session with several followers at one front end."""
    owner, front = opened(store), opened(store)
    await owner.ready()
    await front.ready()
    epoch = await owner.claim("followed", agent="claude")
    seq = 0
    print("followers of one session at one front end, one event at a time")
    for count in FOLLOWERS:
        end = seq + FOLLOWED_EVENTS
        heard = [asyncio.Event() for _ in range(count)]

        async def follow(mine: asyncio.Event, at: int, end: int = end) -> None:
            while at < end:
                await front.wait_past("followed", at)
                at = (await front.read("followed", at)).events[-1].seq
                mine.set()

        tasks = [asyncio.ensure_future(follow(mine, seq)) for mine in heard]
        # The followers wait by then. If not, only the first event takes longer.
        await asyncio.sleep(0.5)
        asked, cpu, nodes_cpu = (
            _messages_in(store),
            time.process_time(),
            store.servers_cpu_seconds(),
        )
        while seq < end:
            for mine in heard:
                mine.clear()
            await append_one(owner, "followed", epoch, seq)
            seq += 1
            await asyncio.gather(*(mine.wait() for mine in heard))
        await asyncio.gather(*tasks)
        used, nodes_used = time.process_time() - cpu, store.servers_cpu_seconds() - nodes_cpu
        print(
            f"  {count:4}: per event "
            f"{(_messages_in(store) - asked) / FOLLOWED_EVENTS:5.1f} messages to the node, "
            f"CPU {used / FOLLOWED_EVENTS * 1e3:.2f} ms (owner and front end), "
            f"{nodes_used / FOLLOWED_EVENTS * 1e3:.2f} ms in the node",
            flush=True,
        )
    await owner.close()
    await front.close()


async def all_followers(store: Store) -> None:
    """Measure the cost of a follower of all sessions: the same load with it and without it."""
    owner, front = opened(store), opened(store)
    await owner.ready()
    await front.ready()
    epochs = [await owner.claim(f"s-{number}", agent="claude") for number in range(WRITERS)]
    heard = 0

    async def follow() -> None:
        nonlocal heard
        page = await front.read_many(None)
        while page.events:
            page = await front.read_many(page.position)
        position = page.position
        while True:
            await front.wait_past_position(position)
            page = await front.read_many(position)
            position = page.position
            heard += len(page.events)

    async def write(number: int, first: int) -> None:
        for seq in range(first, first + WRITTEN // 2):
            await append_one(owner, f"s-{number}", epochs[number], seq)
            await asyncio.sleep(0.1)

    used: list[tuple[float, float, int]] = []
    for is_followed in (False, True):
        task = asyncio.ensure_future(follow() if is_followed else asyncio.sleep(0))
        # The follower has read the existing events by then, and waits.
        await asyncio.sleep(2.0)
        cpu, nodes_cpu, asked = (
            time.process_time(),
            store.servers_cpu_seconds(),
            _messages_in(store),
        )
        await asyncio.gather(
            *(write(number, is_followed * (WRITTEN // 2)) for number in range(WRITERS))
        )
        used.append(
            (
                time.process_time() - cpu,
                store.servers_cpu_seconds() - nodes_cpu,
                _messages_in(store) - asked,
            )
        )
        if is_followed:
            assert not task.done(), task
        task.cancel()
        await asyncio.wait((task,))
    messages = WRITERS * WRITTEN // 2
    mine, nodes_more, asked_more = ((b - a) / messages for a, b in zip(*used, strict=True))
    print(
        f"follower of all {WRITERS} sessions, {messages:,} messages, {heard:,} received: "
        f"CPU per message {mine * 1e6:.0f} µs in the front end, "
        f"{nodes_more * 1e6:.0f} µs in the node; {asked_more:.2f} requests per message",
        flush=True,
    )
    await owner.close()
    await front.close()


async def idle_followers(store: Store) -> None:
    """Measure idle followers: each follows another session, in which nothing happens."""
    front = opened(store)
    await front.ready()
    await write_records(store, 100_000, 100_000 + max(IDLE_FOLLOWED))
    print("idle followers, each of another session")
    base = own_memory()
    for count in IDLE_FOLLOWED:
        tasks = [
            asyncio.ensure_future(front.wait_past(f"s-{100_000 + number:016x}", 1))
            for number in range(count)
        ]
        await asyncio.sleep(3.0)
        asked, cpu, nodes_cpu = (
            _messages_in(store),
            time.process_time(),
            store.servers_cpu_seconds(),
        )
        began = time.perf_counter()
        await asyncio.sleep(IDLE_SECONDS)
        wall = time.perf_counter() - began
        print(
            f"  {count:4}: {(_messages_in(store) - asked) / wall:6.1f} messages/s to the node, "
            f"CPU {(time.process_time() - cpu) / wall:.1%} in the front end, "
            f"{(store.servers_cpu_seconds() - nodes_cpu) / wall:.1%} in the node, "
            f"{(own_memory() - base) / count:,.0f} bytes each",
            flush=True,
        )
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    await front.close()


def _messages_in(store: Store) -> int:
    assert store.servers is not None
    found = store.servers.look(0, "/varz")
    assert found is not None
    return found["in_msgs"]


# -- events --------------------------------------------------------------------------------------
async def rate(_: Store) -> None:
    """Measure how many messages one stream accepts. Many sessions append one event at a time."""
    print(f"{WRITERS} sessions append one event at a time, each after the last acknowledgement")
    for count in (1, 3):
        with nodes(count) as store:
            log = opened(store)
            await log.ready()
            epochs = [await log.claim(f"s-{number}", agent="claude") for number in range(WRITERS)]

            async def write(number: int, log: Log = log, epochs: list[int] = epochs) -> None:
                for seq in range(WRITTEN):
                    await append_one(log, f"s-{number}", epochs[number], seq)

            began, cpu, nodes_cpu = (
                time.perf_counter(),
                time.process_time(),
                store.servers_cpu_seconds(),
            )
            await asyncio.gather(*(write(number) for number in range(WRITERS)))
            wall, messages = time.perf_counter() - began, WRITERS * WRITTEN
            used, nodes_used = time.process_time() - cpu, store.servers_cpu_seconds() - nodes_cpu
            print(
                f"  {store.name}: {messages / wall:,.0f} messages/s; "
                f"CPU per message {used / messages * 1e6:.0f} µs in the host, "
                f"{nodes_used / messages * 1e6:.0f} µs in the nodes; "
                f"load {used / wall:.0%} and {nodes_used / wall:.0%}",
                flush=True,
            )
            await log.close()


async def disk(store: Store) -> None:
    """Measure the disk space per event. Half of the text compresses well, and half badly."""
    log = opened(store)
    await log.ready()
    text = random.Random(2)
    for chunk, count, how in ((50, DISK_EVENTS, "50 per append"), (1, DISK_ALONE, "1 per append")):
        session = f"s-{chunk}"
        epoch = await log.claim(session, agent="claude")
        held = _disk_bytes(store)
        for seq in range(0, count, chunk):
            entries = [
                ("t-0123456789abcdef", UPDATE, b"x" * 200 + text.randbytes(100).hex().encode())
                for _ in range(chunk)
            ]
            stored: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
            log.append(session, epoch, seq, time.time(), entries, stored.set_result)
            assert await stored is None
        taken = (_disk_bytes(store) - held) / count
        print(f"disk of a node: {taken:,.0f} bytes per event of 400 bytes, {how}", flush=True)
    await log.close()


def _disk_bytes(store: Store) -> int:
    assert store.servers is not None
    total = 0
    for folder, _, names in os.walk(store.servers.folder / "n0"):
        for name in names:
            total += os.stat(os.path.join(folder, name)).st_blocks * 512
    return total


PARTS = {
    **{
        "known": known,
        "claims": claims,
        "followers": followers,
        "all": all_followers,
        "idle": idle_followers,
        "rate": rate,
        "disk": disk,
    },
    **cluster_hosts.PARTS,
}


def main(names: list[str]) -> None:
    for name in names or PARTS:
        with nodes(1, lease=60 if name in ("known", "idle") else 15) as store:
            asyncio.run(PARTS[name](store))


if __name__ == "__main__":
    if sys.argv[1:2] == ["load"]:
        asyncio.run(load(Store("", sys.argv[2])))
    else:
        main(sys.argv[1:])
