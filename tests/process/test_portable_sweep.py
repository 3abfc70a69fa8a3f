"""Sweep without a keeper, by the output of `ps`: times are whole seconds, and a process of doubtful age is kept."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from tests.process.helpers import alive, child
from tests.process.test_sweep_requests import TOOLS, started, swept
from tests.thorough import thorough

from banksman.commands import running_command
from banksman.core.process_facts import SweepEnded
from banksman.process import portable
from banksman.process.portable import PortableProcess

pytestmark = thorough


@pytest.fixture(autouse=True)
def without_keeper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_command, "PROCESS", PortableProcess)


@pytest.mark.parametrize("kind", ["plain", "setsid", "term_proof", "of_three"])
async def test_portable_sweep_ends_a_tool_and_not_the_agent(marker: str, kind: str) -> None:
    async with started(marker) as agent:
        tools = await agent.tools(TOOLS[kind], 3 if kind == "of_three" else 1)
        told = await agent.sweep(time.monotonic() - 10)
        assert alive(marker) == [agent.pid]
        assert swept(told) == tools
        assert told.survivors == ()
        await agent.wait_well()


async def test_portable_sweep_ends_nothing_in_doubt(marker: str) -> None:
    """All of them started in the second of the request, or before."""
    async with started(marker) as agent:
        tools = await agent.tools(TOOLS["plain"])
        assert await agent.sweep(time.monotonic() + 1) == SweepEnded()
        assert set(alive(marker)) == {agent.pid, *tools}


async def test_portable_sweep_that_only_looks_ends_nothing(marker: str) -> None:
    async with started(marker) as agent:
        tools = await agent.tools(TOOLS["setsid"])
        told = await agent.sweep(time.monotonic() - 10, ends=False)
        assert told.swept == ()
        assert {left.pid for left in told.survivors} == tools
        assert set(alive(marker)) == {agent.pid, *tools}


def test_portable_ps_reads_the_second_of_a_birth(marker: str) -> None:
    before = int(time.time())
    process = subprocess.Popen(child("stay()", marker))
    try:
        row = next(row for row in portable._ps() if row[0] == process.pid)  # pyright: ignore[reportPrivateUsage]
        # `ps` counts from the second of the boot, which it rounds.
        assert before - 1 <= portable.born(row) <= time.time() + 1
    finally:
        process.kill()
        process.wait()
    # `ps` may truncate the name.
    assert row[4].partition(" ")[0]
    assert sys.executable.startswith(row[4].partition(" ")[0])
