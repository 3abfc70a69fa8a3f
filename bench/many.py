"""Run 500 background commands: the time to start and to end them, and the memory of Banksman.

The memory is that of the zygote, of the keepers, and the growth of the host process. The commands
do not count. The unit is PSS, because a keeper shares most of its pages with the zygote: PSS
divides each shared page among the processes that map it.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import statistics
import time

import banksman
from bench.measure import goal, marked, processes, table

COMMANDS = 500
ROUNDS = 2
SOFT_NOFILE = 1024
EACH_BYTES_MAX = 1_000_000


def pss_bytes(pid: int) -> int:
    with open(f"/proc/{pid}/smaps_rollup") as file:
        for line in file:
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    raise AssertionError(pid)


def children_of(pid: int) -> list[int]:
    return [child for child, (parent, _words) in processes().items() if parent == pid]


def soft_nofile_of(pid: int) -> int:
    return resource.prlimit(pid, resource.RLIMIT_NOFILE)[0]


class Round:
    """The commands of one contestant: start and end times, and the soft fd limits they have."""

    def __init__(self, mark: str) -> None:
        self.argv = ["sleep", mark]
        # A unique number of seconds. It identifies the remaining processes of this round.
        self.mark = mark
        self.start_seconds = 0.0
        self.end_seconds = 0.0
        self.soft_nofiles: set[int] = set()
        self.left = -1
        self.our_bytes = 0
        self.keepers_bytes: list[int] = []

    async def by_banksman(self) -> None:
        before = pss_bytes(os.getpid())
        host = banksman.Host()
        began = time.perf_counter()
        commands = await asyncio.gather(*(host.start(self.argv) for _ in range(COMMANDS)))
        self.start_seconds = time.perf_counter() - began
        for command in commands:
            assert isinstance(command, banksman.Command)
            assert command.pid is not None
            self.soft_nofiles.add(soft_nofile_of(command.pid))
        self._weigh(before)
        began = time.perf_counter()
        await host.close()
        self.end_seconds = time.perf_counter() - began
        self.left = len(marked(self.mark))

    def _weigh(self, host_before: int) -> None:
        (zygote,) = children_of(os.getpid())
        keepers = children_of(zygote)
        assert len(keepers) >= COMMANDS
        self.keepers_bytes = [pss_bytes(pid) for pid in keepers]
        growth = max(0, pss_bytes(os.getpid()) - host_before)
        self.our_bytes = pss_bytes(zygote) + sum(self.keepers_bytes) + growth
        print(
            f"  zygote {pss_bytes(zygote) >> 10} kB, "
            f"keepers {sum(self.keepers_bytes) >> 10} kB "
            f"(median {statistics.median(self.keepers_bytes) / 1024:.0f} kB), "
            f"growth of the host {growth >> 10} kB"
        )

    async def by_asyncio(self) -> None:
        pipe = asyncio.subprocess.PIPE
        began = time.perf_counter()
        started = [
            asyncio.create_subprocess_exec(*self.argv, stdout=pipe, stderr=pipe)
            for _ in range(COMMANDS)
        ]
        children = await asyncio.gather(*started)
        self.start_seconds = time.perf_counter() - began
        self.soft_nofiles = {soft_nofile_of(child.pid) for child in children}
        began = time.perf_counter()
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
        await asyncio.gather(*(child.wait() for child in children))
        self.end_seconds = time.perf_counter() - began
        self.left = len(marked(self.mark))


async def main() -> None:
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (SOFT_NOFILE, hard))
    raised = banksman.raise_fd_limit()
    # Start the zygote before the first round. A program starts it once, with its first command.
    await banksman.execute(["true"])
    print(f"memory (PSS) with {COMMANDS} commands running")
    ours: list[Round] = []
    theirs: list[Round] = []
    for n in range(ROUNDS):
        a, b = (Round(f"60.{os.getpid()}{n}{which}") for which in (0, 1))
        await a.by_banksman()
        await b.by_asyncio()
        ours.append(a)
        theirs.append(b)
    base = "asyncio.create_subprocess_exec"
    starts = {
        base: [each.start_seconds for each in theirs],
        "Host.start": [each.start_seconds for each in ours],
    }
    table(f"start {COMMANDS} × `sleep`, concurrently", starts, against=base)
    base = "asyncio, terminate() and wait()"
    ends = {
        base: [each.end_seconds for each in theirs],
        "Host.close": [each.end_seconds for each in ours],
    }
    table(f"end all {COMMANDS}", ends, against=base)
    each_bytes = max(each.our_bytes for each in ours) / COMMANDS
    goal(
        "under 1 MB PSS of Banksman per command",
        f"{each_bytes / 1e6:.2f} MB",
        each_bytes < EACH_BYTES_MAX,
    )
    seen = set().union(*(each.soft_nofiles for each in ours))
    others = set().union(*(each.soft_nofiles for each in theirs))
    text = f"children have soft RLIMIT_NOFILE {SOFT_NOFILE}, raised to {raised} in the host"
    goal(text, f"{seen} (with asyncio {others})", seen == {SOFT_NOFILE})
    left = sum(each.left for each in ours)
    goal("no process left after Host.close", f"{left} left", left == 0)


if __name__ == "__main__":
    asyncio.run(main())
