"""Measure several contestants in turns, and print the results and the goals."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

Contestant = Callable[[], Awaitable[object]]
# Prefix of a goal line. The runner collects these lines.
GOAL = "goal:"


async def take_turns(
    contestants: Mapping[str, Contestant], *, rounds: int, warm_up: int = 0
) -> dict[str, list[float]]:
    """Return the seconds of each call.

    Every round calls each contestant once, because the speed of a machine changes within seconds.
    The order rotates from round to round: a contestant may leave work behind (pages, zombies), and
    a fixed order would always charge it to the same next contestant.
    """
    names = list(contestants)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for n in range(-warm_up, rounds):
        first = n % len(names)
        for name in (*names[first:], *names[:first]):
            began = time.perf_counter()
            await contestants[name]()
            if n >= 0:
                seconds[name].append(time.perf_counter() - began)
    return seconds


def p50(seconds: Sequence[float]) -> float:
    return statistics.median(seconds)


def p90(seconds: Sequence[float]) -> float:
    return sorted(seconds)[int(0.9 * (len(seconds) - 1) + 0.5)]


def span(seconds: float) -> str:
    """Format a time in milliseconds or seconds."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.2f} ms"
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.2f} s"


def table(title: str, seconds: Mapping[str, Sequence[float]], *, against: str) -> None:
    """Print the numbers of each contestant, and the ratio of its p50 to that of `against`."""
    print(f"{title:54} {'p50':>10} {'p90':>10} {'n':>5} {'ratio':>8}")
    base = p50(seconds[against])
    for name, taken in seconds.items():
        ratio = p50(taken) / base
        shown = f"{ratio:.2f}" if ratio >= 0.1 else f"1/{1 / ratio:.0f}"
        print(
            f"  {name:52} {span(p50(taken)):>10} {span(p90(taken)):>10} {len(taken):5} {shown:>8}"
        )


def goal(text: str, result: str, is_met: bool) -> None:
    print(f"  {GOAL} {text}: {result} · {'met' if is_met else 'NOT MET'}", flush=True)


def processes() -> dict[int, tuple[int, str]]:
    """Return the parent and the command line of every process that is no zombie."""
    found: dict[int, tuple[int, str]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    words = file.read().replace(b"\0", b" ").decode("utf-8", "replace")
            except OSError:
                continue  # The process ended in the meantime.
            if state not in (b"Z", b"X"):
                found[int(entry)] = (int(parent), words)
    return found


def marked(word: str) -> list[int]:
    """Return the live processes whose command line contains `word`."""
    return [pid for pid, (_parent, words) in processes().items() if word in words]


async def wait_gone(pidfd: int) -> float:
    """Wait until the process of `pidfd` has ended and return that time.

    This does not depend on when the parent reaps the process.
    """
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[float] = loop.create_future()

    def on_gone() -> None:
        loop.remove_reader(pidfd)
        gone.set_result(time.perf_counter())

    loop.add_reader(pidfd, on_gone)
    return await gone
