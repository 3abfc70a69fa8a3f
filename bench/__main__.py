"""Run the benchmarks, each in a separate process, and repeat all goals at the end.

The exit code is 1 if a benchmark fails. A missed goal is a result and no failure: the code stays 0.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import threading
import time

from bench.measure import GOAL

NAMES = (
    *(
        "spawn",
        "capture",
        "close",
        "many",
        "sweep",
        "cli",
        "events",
        "interrupt",
        "sessions",
        "log",
        "history",
    ),
    *("spool", "server", "trickle", "hand_over", "hold", "traces", "cluster", "sdk"),
)
# Each benchmark takes less than a third of this. A slower one hangs: it is killed, and the
# processes that Banksman started for it end with it.
SECONDS_MAX = 180.0
# Above this load of other processes, the raw numbers are unreliable, and a note says so.
BUSY_SHARE_MAX = 0.1


def busy_share(seconds: float = 0.5) -> float:
    """Return the share of the CPUs that other processes use now, from 0 to 1."""
    before = _jiffies()
    time.sleep(seconds)
    idle, total = (after - was for after, was in zip(_jiffies(), before, strict=True))
    return 1 - idle / max(1, total)


def _jiffies() -> tuple[int, int]:
    with open("/proc/stat") as file:
        numbers = [int(word) for word in file.readline().split()[1:9]]
    return numbers[3] + numbers[4], sum(numbers)


def run(name: str) -> tuple[int, list[str]]:
    """Run a benchmark and print its lines. Return its exit code and its goal lines."""
    goals: list[str] = []
    argv = [sys.executable, "-m", f"bench.{name}"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        # The kill closes the pipe that is read below, so the loop ends at the deadline.
        deadline = threading.Timer(SECONDS_MAX, process.kill)
        deadline.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.lstrip().startswith(GOAL):
                goals.append(line.strip())
        code = process.wait()
        deadline.cancel()
    return code, goals


def main(names: list[str]) -> int:
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        print(f"unknown benchmark {unknown[0]!r}; choose among: {' '.join(NAMES)}", file=sys.stderr)
        return 2
    began = time.monotonic()
    print(f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores")
    goals: list[str] = []
    failed: list[str] = []
    for name in names or NAMES:
        print(f"\n== {name} ==", flush=True)
        if (busy := busy_share()) > BUSY_SHARE_MAX:
            print(
                f"note: other processes use {busy:.0%} of the CPUs; trust only the ratios",
                flush=True,
            )
        code, met = run(name)
        goals.extend(f"{name:9} {line}" for line in met)
        if code != 0:
            failed.append(name)
            print(f"{name} failed (exit code {code})")
    print(f"\n== goals == (total time {time.monotonic() - began:.0f} s)")
    print("\n".join(goals))
    if failed:
        print(f"failed: {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
