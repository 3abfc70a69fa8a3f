"""Tool that every step runs in the agent: `python -I -S tool.py MARK READY [COMMAND …]`.

The tool starts the three children that supervisors usually miss: a plain child, a child in a new session, and a child
that ignores TERM. When all three run, it writes their pids to READY and stays. With a COMMAND, the tool stays in a new
session, as Claude's does, and this process becomes the command. So the fake agent, which runs no tools, has one too.

MARK is in the argv of each process. Every process ends within LIFE_SECONDS_MAX, whatever happens to the test.
"""

from __future__ import annotations

import json
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn

# Longer than any step. A child that ended earlier would count as ended by the step.
LIFE_SECONDS_MAX = 120


def main(mark: str, ready: str, *command: str) -> None:
    assert mark
    if command:
        up, is_up = os.pipe()
        if os.fork():
            os.read(up, 1)
            # This closes the pipe: Python makes its fds not inheritable.
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
    """Fork a child of this kind, and return when it is set up."""
    stands, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(LIFE_SECONDS_MAX)  # A fork does not inherit the alarm.
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
