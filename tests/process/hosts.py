"""Host in another process that a test kills or ends without closing anything, and its view from outside.

The program gets its order as one line of JSON on stdin, and not in argv, where the marker would count it. It starts the
command and prints the pids of its forked siblings as a line of JSON. Then it waits for one more line, hands the command
over if the order says so, and exits without closing the loop, the host or the command.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypedDict

import banksman
from banksman import Command, Host

LIFE_SECONDS_MAX = 60


class Order(TypedDict):
    argv: list[str]
    grace: float
    linger: float
    is_reading_paused: bool
    has_siblings: bool
    limits: dict[str, int] | None
    user: int | None
    cwd: str
    # How long the keeper holds the command for another host; 0 if the host does not hand it over.
    hold_seconds: float


# -- from outside ----------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sight:
    """A process as /proc showed it. The pair of pid and start time is never reused."""

    pid: int
    name: str
    state: str
    parent: int
    start: int

    @property
    def is_there(self) -> bool:
        now = look(self.pid)
        return now is not None and now.start == self.start and now.state not in "ZX"


def look(pid: int) -> Sight | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    name, _, rest = text.partition(" (")[2].rpartition(") ")
    fields = rest.split()
    return Sight(pid, name, fields[0], int(fields[1]), int(fields[19]))


@contextmanager
def running(order: Order, errors: Path, up_seconds_max: float) -> Generator[tuple[subprocess.Popen[str], list[Sight]]]:
    """Run a host that has started its command and its siblings. All of them end after the block."""
    # The Banksman under test, wherever it was imported from.
    env = {**os.environ, "PYTHONPATH": str(Path(banksman.__file__).parent.parent)}
    argv = [sys.executable, "-S", __file__]
    pipe = subprocess.PIPE
    with (
        errors.open("wb") as stderr,
        subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=stderr, env=env, text=True) as host,
    ):
        assert host.stdin is not None
        assert host.stdout is not None
        try:
            print(json.dumps(order), file=host.stdin, flush=True)
            is_ready, _, _ = select.select([host.stdout], [], [], up_seconds_max)
            assert is_ready, "the host does not start"
            line = host.stdout.readline()
            assert line, f"the host has ended: {errors.read_text()}"
            yield host, [sight for pid in json.loads(line) if (sight := look(pid))]
        finally:
            # The siblings end when their stdin does. Popen closes it on exit.
            host.kill()


def let_end(host: subprocess.Popen[str]) -> None:
    print("end", file=host.stdin, flush=True)


# -- the program -----------------------------------------------------------------------------------------------------
async def main(host: Host, order: Order) -> None:
    grace, linger = order["grace"], order["linger"]
    place: Any = {name: order[name] for name in ("limits", "user", "cwd")}
    command = await host.start(order["argv"], grace=grace, linger=linger, **place)
    assert isinstance(command, Command)
    if order["is_reading_paused"]:
        command.pause_reading()
    siblings: list[int] = []
    if order["has_siblings"]:
        # One sibling from Python's fork, after which Banksman can close its fds. One from a C library's fork, which
        # Python does not see: it holds copies of every lifeline.
        libc = ctypes.PyDLL(None)
        siblings = [_sibling(os.fork), _sibling(libc.fork)]
    print(json.dumps(siblings), flush=True)
    told = asyncio.Event()
    asyncio.get_running_loop().add_reader(0, told.set)
    await told.wait()
    if order["hold_seconds"]:
        await command.hand_over_nowait(order["hold_seconds"], os.urandom(32))


def _sibling(fork: Callable[[], int]) -> int:
    return fork() or _live_on()


def _live_on() -> NoReturn:
    """Live until the other end of stdin is closed."""
    signal.alarm(LIFE_SECONDS_MAX)
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    signal.alarm(LIFE_SECONDS_MAX)
    the_host = Host()
    # Not asyncio.run, which would close the loop, and with it the host. This script closes nothing.
    asyncio.new_event_loop().run_until_complete(main(the_host, json.loads(sys.stdin.readline())))
