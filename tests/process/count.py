"""Print the pids of all processes whose argv holds a word: `python count.py WORD`.

This program imports nothing of Banksman. A zombie has no argv, so every printed process is alive. The program itself
holds the word too and leaves itself out.
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
