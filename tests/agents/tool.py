"""What an agent's Bash tool runs in every step: `python -I -S tool.py MARK READY [COMMAND …]`.

It leaves the three children that are usually forgotten: a plain one, one in a session of its own, and one that does not
hear TERM. When all stand, READY is made, with their pids in it; then the tool stays. With a COMMAND it does not: the
tool goes on in a session of its own, as Claude's does, and the process becomes the command. So the fake agent, which
runs no tools, has one too.

MARK is in the argv of each. Whatever becomes of the test, every process here ends by itself within LIFE_SECONDS_MAX.
"""

from __future__ import annotations

import json
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# Longer than any step takes: what ends sooner would be counted as ended by somebody.
LIFE_SECONDS_MAX = 120


def main(mark: str, ready: str, *command: str) -> None:
    assert mark
    if command:
        up, is_up = os.pipe()
        if os.fork():
            os.read(up, 1)
            # The pipe is closed by this: no fd of Python's is inherited.
            os.execv(command[0], list(command))
        os.setsid()
        stay(ready, is_up)
    stay(ready, None)


def stay(ready: str, is_up: int | None) -> NoReturn:
    signal.alarm(LIFE_SECONDS_MAX)
    pids = {"tool": os.getpid(), **{kind: child(kind) for kind in ("plain", "setsid", "term_proof")}}
    with open(f"{ready}.new", "w") as file:
        json.dump(pids, file)
    os.rename(f"{ready}.new", ready)
    if is_up is not None:
        os.write(is_up, b"!")
    while True:
        signal.pause()


def child(kind: str) -> int:
    """A child of this kind, once it is what it shall be."""
    stands, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIFE_SECONDS_MAX)  # A fork does not inherit it.
        if kind == "setsid":
            os.setsid()
        if kind == "term_proof":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.write(says, b"!")
        while True:
            signal.pause()
    os.close(says)
    assert os.read(stands, 1) == b"!"
    os.close(stands)
    return pid


if __name__ == "__main__":
    main(*sys.argv[1:])
