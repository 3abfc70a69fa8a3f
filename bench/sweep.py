"""Sweep 500 descendants, each in a separate session, so that no signal to a group reaches them.

The contestant is a theoretical floor: it kills 500 processes whose pids are known. It does not find
them, report them, or prove that no others exist.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable

import banksman
from bench.measure import goal, marked, table

DESCENDANTS = 500
ROUNDS = 5
# The leader exits when it reads a line.
SCRIPT = "n=0; while [ $n -lt {count} ]; do setsid sleep {mark} & n=$((n+1)); done; read word"


class Sweeps:
    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        # Survivors that a result names although no process is left. A false alarm is an error, too.
        self.survivors: list[banksman.Survivor] = []
        self.seconds: dict[str, list[float]] = {}
        self._n = 0

    async def run(self, name: str, sweep: Callable[[list[str], str], Awaitable[float]]) -> None:
        self._n += 1
        mark = f"60.{os.getpid()}{self._n:03}"
        argv = ["sh", "-c", SCRIPT.format(count=DESCENDANTS, mark=mark)]
        self.seconds.setdefault(name, []).append(await sweep(argv, mark))
        self.left[name] = self.left.get(name, 0) + len(marked(f"sleep {mark}"))

    async def stop_at_once(self, argv: list[str], mark: str) -> float:
        async with banksman.Host() as host:
            command = await host.start(argv, stdin="pipe")
            assert isinstance(command, banksman.Command)
            await wait_for_all(mark)
            began = time.perf_counter()
            finished = await command.stop(at_once=True)
            return self._took(began, finished)

    async def leader_exit(self, argv: list[str], mark: str) -> float:
        async with banksman.Host() as host:
            command = await host.start(argv, stdin="pipe", linger=0.0)
            assert isinstance(command, banksman.Command)
            await wait_for_all(mark)
            began = time.perf_counter()
            await command.write(b"leave\n")
            return self._took(began, await command.wait())

    def _took(self, began: float, finished: banksman.Finished) -> float:
        seconds = time.perf_counter() - began
        assert len(finished.swept) >= DESCENDANTS
        self.survivors.extend(finished.survivors)
        return seconds


async def wait_for_all(mark: str) -> list[int]:
    """Wait until every descendant runs `sleep`, which is after `setsid`. Return the pids."""
    async with asyncio.timeout(10):
        while (
            len(pids := [pid for pid in marked(f"sleep {mark}") if os.getpgid(pid) == pid])
            < DESCENDANTS
        ):
            await asyncio.sleep(0.01)
    return pids


async def floor(argv: list[str], mark: str) -> float:
    """Kill the descendants of a plain child. Their pids are found before the clock starts."""
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as leader:
        pids = await wait_for_all(mark)
        pidfds = [os.pidfd_open(pid) for pid in pids]
        began = time.perf_counter()
        for pidfd in pidfds:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        for pidfd in pidfds:
            poller = select.poll()
            poller.register(pidfd, select.POLLIN)
            assert poller.poll(10_000)
        seconds = time.perf_counter() - began
        for pidfd in pidfds:
            os.close(pidfd)
        leader.kill()
    return seconds


async def main() -> None:
    await banksman.execute(["true"])
    sweeps = Sweeps()
    contestants = {
        "kill of known pids (floor)": floor,
        "Command.stop(at_once=True)": sweeps.stop_at_once,
        "leader exits, linger 0 (TERM to the others)": sweeps.leader_exit,
    }
    for _ in range(ROUNDS):
        for name, sweep in contestants.items():
            await sweeps.run(name, sweep)
    table(
        f"{DESCENDANTS} × `setsid sleep`, until the result",
        sweeps.seconds,
        against="kill of known pids (floor)",
    )
    ours = [left for name, left in sweeps.left.items() if "floor" not in name]
    goal(
        f"no process left of {len(ours) * ROUNDS} × {DESCENDANTS}",
        f"{sum(ours)} left",
        sum(ours) == 0,
    )
    named = len(sweeps.survivors)
    goal(
        "no false survivor reported",
        f"{named} reported {sweeps.survivors[:1] or ''}".strip(),
        named == 0,
    )


if __name__ == "__main__":
    asyncio.run(main())
