"""A host in a process of its own, to be killed or to end without closing anything: `python hosts.py`, told what to do
by one line of JSON on stdin (never by argv: what has the marker there is counted).

It starts the command, then says so by a line of JSON: the pids of its forked siblings. Then it waits for one more line
and ends, with the loop, the host and the command as they are.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from typing import TYPE_CHECKING, NoReturn, TypedDict

from banksman import Command, Host

if TYPE_CHECKING:
    from collections.abc import Callable

LIFE_SECONDS_MAX = 60


class Order(TypedDict):
    argv: list[str]
    grace: float
    linger: float
    is_reading_paused: bool
    has_siblings: bool


async def main(host: Host, order: Order) -> None:
    command = await host.start(order["argv"], grace=order["grace"], linger=order["linger"])
    assert isinstance(command, Command)
    if order["is_reading_paused"]:
        command.pause_reading()
    siblings: list[int] = []
    if order["has_siblings"]:
        # One as Python forks, after whose fork Banksman can close its fds; and one as a library in C does, of which
        # Python knows nothing: it holds copies of every lifeline.
        libc = ctypes.PyDLL(None)
        siblings = [_sibling(os.fork), _sibling(libc.fork)]
    print(json.dumps(siblings), flush=True)
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, told.set)
    await told.wait()


def _sibling(fork: Callable[[], int]) -> int:
    return fork() or _live_on()


def _live_on() -> NoReturn:
    """As long as somebody holds the other end of our stdin."""
    signal.alarm(LIFE_SECONDS_MAX)
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    signal.alarm(LIFE_SECONDS_MAX)
    the_host = Host()
    # Not asyncio.run, which would close the loop, and with it the host. This script closes nothing.
    asyncio.new_event_loop().run_until_complete(main(the_host, json.loads(sys.stdin.readline())))
