"""Capture 1 GiB of output: the time until the result, and the peak memory.

`subprocess` keeps all of the output in memory. `execute` keeps the head and the tail in memory and
the first 64 MiB in a file. Each capture runs in a separate process, because the peak of a process
cannot be reset. The time excludes the start of the interpreter.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
import time

import banksman
from bench.measure import goal, p50, table

TOTAL_BYTES = 1 << 30
ROUNDS = 4
ARGV = ["head", "-c", str(TOTAL_BYTES), "/dev/zero"]
# Room for the head, the tail, the pieces in transit, and the growth of the interpreter.
GROWTH_BYTES_MAX = 32 << 20


def by_subprocess() -> int:
    return len(subprocess.run(ARGV, capture_output=True, check=True).stdout)


def by_banksman() -> int:
    return asyncio.run(banksman.execute(ARGV)).stdout.total


CONTESTANTS = {"subprocess.run": by_subprocess, "banksman.execute": by_banksman}


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def capture(name: str) -> None:
    """Capture once and print the seconds and the peak before and after, in a fresh process."""
    before = peak_bytes()
    began = time.perf_counter()
    total = CONTESTANTS[name]()
    seconds = time.perf_counter() - began
    assert total == TOTAL_BYTES
    print(json.dumps((seconds, before, peak_bytes())))


def main() -> None:
    seconds: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    peaks: dict[str, list[tuple[int, int]]] = {name: [] for name in CONTESTANTS}
    for n in range(ROUNDS):
        for name in sorted(CONTESTANTS, reverse=n % 2 == 1):
            argv = [sys.executable, "-m", "bench.capture", name]
            said = subprocess.run(argv, stdout=subprocess.PIPE, check=True, timeout=30).stdout
            taken, before, after = json.loads(said)
            seconds[name].append(taken)
            peaks[name].append((before, after))
    table("1 GiB from `head -c`, to the result", seconds, against="subprocess.run")
    growth: dict[str, int] = {}
    for name, pairs in peaks.items():
        before, after = max(pairs, key=lambda pair: pair[1])
        growth[name] = after - before
        print(f"  {name:52} peak RSS {after >> 20:5} MiB, {before >> 20} MiB before the call")
    ratio = p50(seconds["banksman.execute"]) / p50(seconds["subprocess.run"])
    goal("at least as fast as subprocess.run", f"{1 / ratio:.1f} times as fast", ratio <= 1)
    grown = growth["banksman.execute"]
    goal(
        "memory bounded", f"{grown / (1 << 20):.1f} MiB more at the peak", grown <= GROWTH_BYTES_MAX
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        capture(sys.argv[1])
    else:
        main()
