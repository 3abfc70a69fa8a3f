"""Print the live processes of a step at a given time: `python -I -S count.py MARK AT`.

This program imports nothing of Banksman. Every process of the step has MARK in its argv or in its environment: the
agent and its shells in the environment, its tools in both. AT is a time of the machine's monotonic clock, which is the
same in every process. The program looks only after that time. Each line is a pid, a space and the start of a command
line. A zombie has neither argv nor environment, so every printed process is alive.
"""

from __future__ import annotations

import os
import sys
import time

SHOWN_CHARACTERS = 120


def marked(mark: str) -> dict[int, str]:
    """Return the live processes of a step, without this process, and the start of each command line."""
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                argv, environment = read(entry, "cmdline"), read(entry, "environ")
            except OSError:
                continue  # The process exited during the look.
            if mark.encode() in argv + b"\0" + environment:
                words = argv.replace(b"\0", b" ").decode(errors="replace").split()
                found[int(entry)] = " ".join(words)[:SHOWN_CHARACTERS]
    return found


def read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def main(mark: str, at: str) -> None:
    # The one sleep of these tests: they measure this time after the close.
    time.sleep(max(0.0, float(at) - time.monotonic()))
    for pid, words in sorted(marked(mark).items()):
        print(pid, words)


if __name__ == "__main__":
    main(*sys.argv[1:])
