"""Print what is alive of a step, at a time: `python -I -S count.py MARK AT`. Knows nothing of Banksman.

Whatever has MARK in its argv or in its environment was started in that step: the agent and its shells have it in the
one, its tools in both. AT is a moment of the machine's monotonic clock, which is the same in every process; before it
nothing is looked at. Each line is a pid, a space, and the beginning of a command line. Zombies have neither, so what is
printed is alive.
"""

from __future__ import annotations

import os
import sys
import time

SHOWN_CHARACTERS = 120


def marked(mark: str) -> dict[int, str]:
    """The living processes of a step, but for the one that asks, and the beginnings of their command lines."""
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                argv, environment = read(entry, "cmdline"), read(entry, "environ")
            except OSError:
                continue  # It went while we looked.
            if mark.encode() in argv + b"\0" + environment:
                words = argv.replace(b"\0", b" ").decode(errors="replace").split()
                found[int(entry)] = " ".join(words)[:SHOWN_CHARACTERS]
    return found


def read(pid: str, name: str) -> bytes:
    with open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()


def main(mark: str, at: str) -> None:
    # The one sleep of these tests: "so long after the close" is what is measured.
    time.sleep(max(0.0, float(at) - time.monotonic()))
    for pid, words in sorted(marked(mark).items()):
        print(pid, words)


if __name__ == "__main__":
    main(*sys.argv[1:])
