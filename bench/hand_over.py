"""Gap in the events of sessions when their server restarts with a hand-over.

Agents write an event every 50 ms. The server is upgraded to itself: it hands all sessions over,
becomes a new program, and takes them over. The gap of a session is the time from its last event
before that to its first one after it, as the log has them. So it includes one pause of the agent.

The control is the time of a program that only imports the server. A server takes over before it
imports its HTTP application, so the gap of one session may be shorter.

The CPU time of the two halves is measured in one process, by two hosts. A busy machine changes it
less than the gap.
"""

from __future__ import annotations

import asyncio
import compileall
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import banksman
from bench.agents import tiny
from bench.measure import goal, p50, span
from bench.serving import SECONDS_MAX, Server, served

SESSIONS = (1, 50)
ROUNDS = 3
RATE = 20
# Longer than all rounds, also on a busy machine.
TICKS = RATE * 120
GAP_SECONDS_MAX = 1.0
PAGE = 10_000
# All modules of a server, as it imports them before and after the take-over.
IMPORT = (sys.executable, "-c", "import banksman.server.main, banksman.server.http_service")

Event = dict[str, Any]


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1) + 0.5)]


def import_seconds() -> float:
    began = time.perf_counter()
    subprocess.run(IMPORT, check=True)
    return time.perf_counter() - began


def events_of(server: Server, session: str, after: int) -> list[Event]:
    page = server.request("GET", f"/v1/sessions/{session}/events?after={after}&limit={PAGE}")
    return page["events"]


def wait_ticks(server: Server, after: dict[str, int]) -> None:
    """Wait until each session has an event of its agent."""
    waiting = set(after)
    while waiting:
        waiting -= {each for each in waiting if ats(events_of(server, each, after[each]), "update")}
        time.sleep(1 / RATE)


def ats(events: list[Event], kind: str) -> list[float]:
    return [event["at"] for event in events if event["kind"] == kind]


class Restart:
    """The times of one restart, in seconds."""

    def __init__(self, server: Server, sessions: list[str]) -> None:
        after = {session: server.seq(session) for session in sessions}
        wait_ticks(server, after)
        server.request("POST", "/v1/upgrade", {"command": [sys.executable, "-m", "banksman"]})
        server.line()
        heads = {session: server.seq(session) for session in sessions}
        wait_ticks(server, heads)
        logs = [events_of(server, session, after[session]) for session in sessions]
        handed = [ats(events, "session.handed_over")[-1] for events in logs]
        adopted = [ats(events, "process.adopted")[-1] for events in logs]
        self.gaps = [gap(events) for events in logs]
        # From the first session to the last one. In between, no session has a host.
        self.parts = (max(handed) - min(handed), min(adopted) - max(handed), spread(adopted))


def spread(values: list[float]) -> float:
    return max(values) - min(values)


def gap(events: list[Event]) -> float:
    (cut,) = [n for n, event in enumerate(events) if event["kind"] == "session.handed_over"]
    before, after = ats(events[:cut], "update"), ats(events[cut:], "update")
    return after[0] - before[-1]


def measure(count: int) -> list[float]:
    with served(drain_seconds=SECONDS_MAX) as server:
        sessions = [
            server.request("POST", "/v1/sessions", {"command": tiny()})["id"] for _ in range(count)
        ]
        for session in sessions:
            server.ask(session, f"ticks {TICKS} {RATE}")
        restarts = [Restart(server, sessions) for _ in range(ROUNDS)]
        for session in sessions:
            server.request("DELETE", f"/v1/sessions/{session}")
    gaps = [gap for restart in restarts for gap in restart.gaps]
    hand_over, start, take_over = (p50([r.parts[n] for r in restarts]) for n in range(3))
    print(
        f"  {count:3} sessions: gap {span(p50(gaps)):>8} / {span(p99(gaps)):>8} (p50 / p99), "
        f"n={len(gaps)}: hand-over {span(hand_over)}, start {span(start)}, "
        f"take-over {span(take_over)}"
    )
    return gaps


async def cpu(count: int) -> None:
    """Measure the CPU time of a host that hands its sessions over, and of the next host."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder
        store = f"sqlite:{folder}/store.db"
        async with banksman.Host(store) as host:
            sessions = [await host.open("claude", command=tiny()) for _ in range(count)]
            for session in sessions:
                await wait_started(session, await session.ask(f"ticks {TICKS} 1"))
            began = time.process_time()
            await host.drain(hand_over=True, hold_seconds=60)
            given = time.process_time() - began
        async with banksman.Host(store) as host:
            began = time.process_time()
            await host.take_up_held()
            taken = time.process_time() - began
            taken_over = [host.session(session.id) for session in sessions]
            for session in taken_over:
                kinds = [event.kind async for event in session.events()]
                assert kinds.count("process.adopted") == 1, kinds[-5:]
                await session.close()
    print(
        f"  {count:3} sessions, CPU for each: hand-over {span(given / count)}, "
        f"take-over {span(taken / count)}"
    )


async def wait_started(session: banksman.Session, turn: banksman.Turn) -> None:
    """Wait for an event of the agent in this turn."""
    async for event in session.events(waits=True):
        if event.turn == turn.id and event.kind == "update":
            return


def main() -> None:
    print("gap in the events of a session at a restart of its server")
    # As an installation does. Otherwise each start would compile the modules anew, if the
    # environment has PYTHONDONTWRITEBYTECODE.
    compileall.compile_dir(Path(banksman.__file__).parent, quiet=1)
    imports = p50([import_seconds() for _ in range(ROUNDS)])
    print(f"  control, a program that imports the server: {span(imports)}")
    gaps: list[float] = []
    for count in SESSIONS:
        gaps = measure(count)
        asyncio.run(cpu(count))
    worst = p99(gaps)
    text = f"gap of {SESSIONS[-1]} sessions under {span(GAP_SECONDS_MAX)} (p99)"
    goal(text, f"{span(worst)}, {worst / imports:.1f} × the control", worst < GAP_SECONDS_MAX)


if __name__ == "__main__":
    main()
