"""What the kernel ends first when the machine runs out of memory: an agent, then its guards and its host."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.process.helpers import parent_of

from banksman import Host, execute
from banksman.testing import fake_agent

# A host whose own score is raised, as that of a service can be.
PROGRAM = """
import asyncio, os, sys
open("/proc/self/oom_score_adj", "w").write(sys.argv[1])
sys.path.insert(0, sys.argv[2])
from tests.process.test_oom_score import scores
print(*asyncio.run(scores()))
"""


def score(pid: int) -> int:
    return int(Path(f"/proc/{pid}/oom_score_adj").read_text())


async def scores() -> tuple[int, int, int, int]:
    """Return the scores of this host, of the zygote and the keeper, and of an agent."""
    async with Host("memory:") as host:
        session = await host.open("claude", command=fake_agent.command())
        await (await session.ask("one")).outcome()
        (pid,) = session.status().pids
        keeper = parent_of(pid)
        return score(os.getpid()), score(parent_of(keeper)), score(keeper), score(pid)


async def test_agent_is_ended_before_its_host_and_its_guards() -> None:
    host, zygote, keeper, agent = await scores()
    assert host == zygote == keeper
    assert agent == min(host + 200, 1000)


@pytest.mark.parametrize(("own", "agents"), [(300, 500), (900, 1000)])
def test_agent_has_a_higher_score_than_a_host_with_any(own: int, agents: int) -> None:
    repository = str(Path(__file__).parents[2])
    argv = [sys.executable, "-c", PROGRAM, str(own), repository]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.split() == [str(own)] * 3 + [str(agents)], done.stderr


def test_command_has_the_score_of_its_host_unless_its_limits_say_otherwise() -> None:
    async def said(**how: object) -> int:
        done = await execute(["cat", "/proc/self/oom_score_adj"], **how)  # pyright: ignore[reportArgumentType]
        return int(done.stdout.text)

    own = score(os.getpid())
    assert asyncio.run(said()) == own
    assert asyncio.run(said(limits={"oom_score_adj": 700})) == 700
