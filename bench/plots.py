"""Measure how lone events and sessions cost more when there are more, and draw docs/images/*.svg.

    python -m bench.plots [FOLDER]

It takes about ten minutes. `docs/performance.md` shows the plots. The numbers belong to one
machine; the ratios to the control, which runs in turns with Banksman, carry over to others.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path

from bench import growth, trickle
from bench.growth import Size
from bench.plot import Chart, Points, write_svg
from bench.serving import served
from bench.trickle import Result, control, ours

SESSIONS = (1, 10, 30, 100, 200)
LINES = {"Banksman": "", "bare pipes": "pipes", "asyncio.subprocess": "asyncio", "sdk": "sdk"}


def measured(reader: str, sessions: int) -> Result:
    if reader:
        return control(sessions, sessions, reader)
    with served() as server:
        return ours(server, [server.open() for _ in range(sessions)], sessions)


def machine() -> str:
    return f"Python {platform.python_version()}, {os.cpu_count()} cores"


def streams(path: Path) -> None:
    """Draw throughput, latency and CPU against the number of streaming sessions."""
    found: dict[str, dict[int, Result]] = {name: {} for name in LINES}
    for sessions in SESSIONS:
        for name, reader in LINES.items():
            result = found[name][sessions] = measured(reader, sessions)
            trickle.show(f"{name}, {sessions}", result)

    def lines(of: str) -> dict[str, Points]:
        return {
            name: [(count, _value(of, result)) for count, result in results.items()]
            for name, results in found.items()
        }

    x = f"sessions, each {trickle.RATE} events/s to one client"
    charts = [
        Chart("events per second that arrive", x, lines("events"), is_log=True),
        Chart("CPU per event, µs", x, lines("cpu"), is_log=True),
        Chart("age of an event at the client, p50, ms", x, lines("p50"), is_log=True),
        Chart("age of an event at the client, p99, ms", x, lines("p99"), is_log=True),
    ]
    write_svg(path, f"Lone events ({machine()})", charts)


def _value(of: str, result: Result) -> float:
    match of:
        case "events":
            return result.events_per_second
        case "cpu":
            return result.cpu_seconds_each * 1e6
        case "p50":
            return result.heard.p50 * 1e3
        case _:
            return result.heard.p99 * 1e3


def sizes(path: Path) -> None:
    """Draw memory, file descriptors and idle CPU against the number of sessions."""
    found: dict[str, list[Size]] = {"idle, with a process": growth.idle(), "stored": growth.kept()}
    for name, some in found.items():
        growth.show(name, some)
    x = "sessions of one server"
    charts = [
        Chart(
            "memory of the server (PSS), MB",
            x,
            {n: [(s.sessions, s.memory_bytes / 1e6) for s in some] for n, some in found.items()},
            is_log=True,
        ),
        Chart(
            "open file descriptors",
            x,
            {n: [(s.sessions, s.fds) for s in some] for n, some in found.items()},
            is_log=True,
        ),
        Chart(
            "CPU while nothing happens, % of a core",
            x,
            {n: [(s.sessions, s.cpu_share * 100) for s in some] for n, some in found.items()},
        ),
        Chart(
            "time to list 100 sessions, ms",
            x,
            {n: [(s.sessions, s.list_seconds * 1e3) for s in some] for n, some in found.items()},
            is_log=True,
        ),
    ]
    write_svg(path, f"Sessions on one server ({machine()})", charts)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/images")
    streams(folder / "lone-events.svg")
    sizes(folder / "sessions.svg")


if __name__ == "__main__":
    main()
