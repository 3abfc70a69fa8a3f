"""Cost of the log: 100,000 events of 400 bytes, appended as a driver does, then read.

Four logs take turns, and the minimum of three rounds counts: memory, SQLite at `normal`, SQLite at
`full`, and a naive table with one row per event and one commit per chunk. The rows have neither
checksums nor secure deletion, which the log has.

CPU is that of the whole process, including the writer thread. The time is from the first append to
the last acknowledgement, so it excludes the checkpoint at the close.

The output of a busy agent arrives in chunks of several hundred lines. So the events are appended in
chunks of 600, with at most 8 MiB unacknowledged. A second run appends single events, as at a low
rate.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import tempfile
import time
from collections.abc import Awaitable, Callable

from banksman.core.dialects.claude import CLAUDE
from banksman.core.session.event import UPDATE, Entry, Project
from banksman.store.log import Log
from banksman.store.memory import MemoryLog
from banksman.store.sqlite import SqliteLog
from bench.measure import goal

EVENTS = 100_000
CHUNK = 600
TRICKLE = 5_000
ROUNDS = 3
UNCOMMITTED_MAX = 8 << 20
NORMAL_MICROS_MAX = 4.0
READ_RATE_MIN = 300_000

LINE = (
    b'{"type":"stream_event","event":{"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":"%s"}},'
    b'"session_id":"5f1d8f2e-7e44-4d8a-9f0e-0d5f3c1b7a11","parent_tool_use_id":null,'
    b'"uuid":"0d5f3c1b-7a11-4d8a-9f0e-5f1d8f2e7e44"}'
)
DATA = LINE % (b"x" * (400 - len(LINE) + 2))
ENTRY: Entry = ("t-0123456789abcdef", UPDATE, DATA)

Taken = tuple[float, float]  # CPU seconds and wall seconds


async def append_all(log: Log, session: str, events: int, chunk: int) -> Taken:
    epoch = await log.claim(session, agent="claude")
    entries = [ENTRY] * chunk
    unanswered = 0
    room = asyncio.Event()

    def done(error: Exception | None) -> None:
        nonlocal unanswered
        assert error is None, error
        unanswered -= 1
        room.set()

    cpu, began = time.process_time(), time.perf_counter()
    for seq in range(0, events, chunk):
        unanswered += 1
        log.append(session, epoch, seq, 1.0, entries, done)
        while unanswered * chunk * len(DATA) > UNCOMMITTED_MAX:
            room.clear()
            await room.wait()
    while unanswered:
        room.clear()
        await room.wait()
    return time.process_time() - cpu, time.perf_counter() - began


async def with_log(opens: Callable[[], Log], events: int, chunk: int) -> Taken:
    log = opens()
    taken = await append_all(log, "s", events, chunk)
    await log.close()
    return taken


async def rows(path: str, events: int, chunk: int) -> Taken:
    """Append one row per event, in the caller's thread."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=NORMAL")
    connection.execute(
        "CREATE TABLE events (session TEXT, seq INTEGER, turn TEXT, kind TEXT, data BLOB, "
        "PRIMARY KEY (session, seq))"
    )
    cpu, began = time.process_time(), time.perf_counter()
    for first in range(0, events, chunk):
        connection.execute("BEGIN IMMEDIATE")
        for seq in range(first, first + chunk):
            connection.execute("INSERT INTO events VALUES (?, ?, ?, ?, ?)", ("s", seq, *ENTRY))
        connection.execute("COMMIT")
    taken = time.process_time() - cpu, time.perf_counter() - began
    connection.close()
    return taken


async def contest(folder: str, events: int, chunk: int) -> dict[str, Taken]:
    count = 0

    def path() -> str:
        nonlocal count
        count += 1
        return os.path.join(folder, f"{chunk}-{count}.db")

    contestants: dict[str, Callable[[], Awaitable[Taken]]] = {
        "memory": lambda: with_log(MemoryLog, events, chunk),
        "sqlite, normal": lambda: with_log(lambda: SqliteLog(path()), events, chunk),
        "sqlite, full": lambda: with_log(lambda: SqliteLog(path(), level="full"), events, chunk),
        "one row per event": lambda: rows(path(), events, chunk),
    }
    taken: dict[str, list[Taken]] = {name: [] for name in contestants}
    for _ in range(ROUNDS):
        for name, contestant in contestants.items():
            taken[name].append(await contestant())
    return {
        name: (min(cpu for cpu, _ in times), min(wall for _, wall in times))
        for name, times in taken.items()
    }


def show(title: str, taken: dict[str, Taken], events: int) -> dict[str, float]:
    print(f"{title:48} {'CPU':>10} {'time':>10} {'ratio':>8}")
    base = taken["sqlite, normal"][0]
    for name, (cpu, wall) in taken.items():
        print(
            f"  {name:46} {cpu / events * 1e6:7.2f} µs {wall / events * 1e6:7.2f} µs "
            f"{cpu / base:8.2f}"
        )
    return {name: cpu / events * 1e6 for name, (cpu, _) in taken.items()}


async def replay(log: Log) -> tuple[float, float]:
    """Return the events per second of `read`: raw, and with the projection to ACP updates."""
    await append_all(log, "s", EVENTS, CHUNK)
    rates: list[float] = []
    for project in (None, Project(CLAUDE.project)):
        best = 0.0
        for _ in range(ROUNDS):
            began = time.perf_counter()
            after = 0
            while (page := await log.read("s", after, project=project)).events:
                after = page.events[-1].seq
                if project is not None:
                    for event in page.events:
                        _ = event.body
            best = max(best, after / (time.perf_counter() - began))
        rates.append(best)
    await log.close()
    return rates[0], rates[1]


async def main() -> None:
    whole = EVENTS // CHUNK * CHUNK
    with tempfile.TemporaryDirectory() as folder:
        title = f"{whole:,} events of {len(DATA)} bytes, {CHUNK} per chunk"
        micros = show(title, await contest(folder, whole, CHUNK), whole)
        show(f"{TRICKLE:,} events, 1 per chunk", await contest(folder, TRICKLE, 1), TRICKLE)
        raw, projected = await replay(SqliteLog(os.path.join(folder, "replay.db")))
    cost = micros["sqlite, normal"]
    goal(
        f"at most {NORMAL_MICROS_MAX:.0f} µs per event at normal",
        f"{cost:.2f} µs",
        cost <= NORMAL_MICROS_MAX,
    )
    print(f"  replay: {raw:,.0f} raw events/s, {projected:,.0f} projected")
    goal(f"replay of {READ_RATE_MIN:,} raw events/s", f"{raw:,.0f}", raw >= READ_RATE_MIN)


if __name__ == "__main__":
    asyncio.run(main())
