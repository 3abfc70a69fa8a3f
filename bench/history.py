"""A session of 1,000,000 events: how long it takes to open, and what memory it takes to read.

It is written as its owner writes it, with a snapshot every thousand events, in a process of its own. It is opened by a
host that has never seen it, from a file that the kernel still has in memory: the store, the snapshot, the tail, the
claim. Then it is read from the first event to the
last, as a reader does who comes late.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time

import banksman
from banksman.core.dialects.claude import CLAUDE
from banksman.core.session import history as pasts
from banksman.core.session.event import SESSION_OPENED, entry
from banksman.core.session.session_config import Config
from banksman.sessions.recovery import load
from banksman.store.sqlite import SqliteLog
from bench.agents import tiny
from bench.log import ENTRY
from bench.measure import goal, span

EVENTS = 1_000_000
CHUNK = 1000
OPEN_SECONDS_MAX = 0.5
# What a reader may grow by: some pages of events, whatever the length of the history.
READ_BYTES_MAX = 64 << 20


async def write(path: str) -> None:
    log = SqliteLog(path)
    epoch = await log.claim("s", name="long", agent="claude")
    past = pasts.beginning(Config(dialect=CLAUDE))
    first = entry(None, SESSION_OPENED, resume=None, fork=False)
    for seq in range(0, EVENTS, CHUNK):
        entries = [first if not seq and not n else ENTRY for n in range(CHUNK)]
        past = pasts.fold(past, entries)
        answered: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(error: Exception | None, answered: asyncio.Future[None] = answered) -> None:
            assert error is None, error
            answered.set_result(None)

        # One thousand behind, so that there is a tail to fold.
        snapshot = pasts.encode(past) if seq < EVENTS - CHUNK else None
        log.append("s", epoch, seq, 1.0, entries, done, snapshot)
        await answered
    log.release("s", epoch)
    await log.close()


def resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


async def read(path: str) -> None:
    began = time.perf_counter()
    async with banksman.Host(f"sqlite:{path}") as host:
        session = await host.open("claude", name="long", command=tiny())
        opened = time.perf_counter() - began
        assert session.status().seq > EVENTS
        store = host._own_sessions().store
        again = time.perf_counter()
        await load(store, session.id, Config(dialect=CLAUDE))
        folded = time.perf_counter() - again
        before, most = resident(), 0
        began = time.perf_counter()
        count = 0
        async for event in session.events():
            count += 1
            if not count % 10_000:
                most = max(most, resident())
            assert event.seq == count
        seconds = time.perf_counter() - began
    print(
        f"  {'opened by a new host':40} {span(opened):>10}   (of this, snapshot and tail: {span(folded)})"
    )
    print(
        f"  {'read from the first event to the last':40} {span(seconds):>10}   {count / seconds:,.0f} events/s"
    )
    print(f"  {'memory while it was read':40} {(most - before) / 1e6:7.1f} MB more")
    goal(f"opens in under {span(OPEN_SECONDS_MAX)}", span(opened), opened < OPEN_SECONDS_MAX)
    grown = most - before
    goal(
        f"is read in {READ_BYTES_MAX >> 20} MiB",
        f"{grown / (1 << 20):.1f} MiB",
        grown <= READ_BYTES_MAX,
    )


def main() -> None:
    print(f"a session of {EVENTS:,} events")
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "store.db")
        for what in ("write", "read"):
            subprocess.run(
                [sys.executable, "-m", "bench.history", what, path], check=True, timeout=110
            )


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["write", path]:
            asyncio.run(write(path))
        case ["read", path]:
            asyncio.run(read(path))
        case _:
            main()
