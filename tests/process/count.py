"""Print the pids of all processes whose argv holds a word: `python count.py WORD`. Knows nothing of Banksman.

Zombies have no argv, so what is printed is alive. Its own process holds the word too, and is left out.
"""

import os
import sys


def marked(word: str) -> list[int]:
    found: list[int] = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            try:
                with open(f"/proc/{entry}/cmdline", "rb") as file:
                    if word.encode() in file.read():
                        found.append(int(entry))
            except OSError:
                continue
    return found


if __name__ == "__main__":
    print(*marked(sys.argv[1]))
