"""A session of 1,000,000 events: the time to open it, and the memory to read it.

A separate process writes the session as its owner would, with a snapshot every thousand events.
Then a new host opens it: the store, the snapshot, the tail, the claim. The file is still in the
page cache. At last a reader reads the session from the first event to the last.
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
# Limit of the growth of a reader: some pages of events, independent of the length of the history.
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

        # The last thousand events get no snapshot, so that recovery has a tail to fold.
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
    print(f"  {'opened by a new host':40} {span(opened):>10}   (snapshot and tail: {span(folded)})")
    print(
        f"  {'read from the first event to the last':40} {span(seconds):>10}   "
        f"{count / seconds:,.0f} events/s"
    )
    print(f"  {'memory growth during the read':40} {(most - before) / 1e6:7.1f} MB")
    goal(f"opens in under {span(OPEN_SECONDS_MAX)}", span(opened), opened < OPEN_SECONDS_MAX)
    grown = most - before
    goal(
        f"read within {READ_BYTES_MAX >> 20} MiB",
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
