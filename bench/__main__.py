"""Run the benchmarks, each in a process of its own, and repeat every goal at the end.

The exit code is 1 if a benchmark could not be run. A missed goal is a finding, not a failure, and leaves it 0.
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
    *("server", "latency", "cluster"),
)
# None takes a third of this. One that does is broken, and what it left running ends with it.
SECONDS_MAX = 180.0
# Above this the numbers are those of the machine's other work as much as ours. Said, not hidden.
BUSY_SHARE_MAX = 0.1


def busy_share(seconds: float = 0.5) -> float:
    """How much of the machine is in use by others just now, from 0 to 1."""
    before = _jiffies()
    time.sleep(seconds)
    idle, total = (after - was for after, was in zip(_jiffies(), before, strict=True))
    return 1 - idle / max(1, total)


def _jiffies() -> tuple[int, int]:
    with open("/proc/stat") as file:
        numbers = [int(word) for word in file.readline().split()[1:9]]
    return numbers[3] + numbers[4], sum(numbers)


def run(name: str) -> tuple[int, list[str]]:
    """Run one, passing its lines on as they come; its exit code, and the lines that state a goal."""
    goals: list[str] = []
    argv = [sys.executable, "-m", f"bench.{name}"]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        # Killing it closes the pipe that is read below, so the deadline needs nothing else.
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
        print(
            f"there is no benchmark {unknown[0]!r}; there are: {' '.join(NAMES)}", file=sys.stderr
        )
        return 2
    began = time.monotonic()
    print(f"Python {platform.python_version()}, Linux {platform.release()}, {os.cpu_count()} cores")
    goals: list[str] = []
    failed: list[str] = []
    for name in names or NAMES:
        print(f"\n== {name} ==", flush=True)
        if (busy := busy_share()) > BUSY_SHARE_MAX:
            print(
                f"note: others use {busy:.0%} of this machine; ratios are what is left to read",
                flush=True,
            )
        code, met = run(name)
        goals.extend(f"{name:8} {line}" for line in met)
        if code != 0:
            failed.append(name)
            print(f"{name} could not be measured (exit code {code})")
    print(f"\n== goals == ({time.monotonic() - began:.0f} s in all)")
    print("\n".join(goals))
    if failed:
        print(f"could not be measured: {' '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
