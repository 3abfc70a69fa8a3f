"""Sweep of tools of another user: a helper with more rights ends them, or the sweep reports them.

The helper is that of `test_attributes_user.py`.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import REPOSITORY, child, program, wait_none
from tests.process.test_attributes_user import as_nobody, folder, helper, left_alive, python, root
from tests.thorough import thorough

from banksman.process.sweep_requests import ANSWER_SECONDS_MAX

pytestmark = thorough

# Fixtures, which pytest finds by their names.
__all__ = ["folder", "helper", "python", "root"]

SWEEPS = """
import json
from tests.process.test_sweep_requests import Agent, TOOLS, after
from banksman.core.process_facts import Started
PYTHON, ENV, HELPER, *TOOL = WORDS

async def main():
    agent = Agent(TOOL[TOOL.index("-X") + 1], helper=[HELPER], python=PYTHON)
    await agent.wait(Started)
    since = after(agent.pid)
    tools = await agent.tools(f"fork() or os.execv({ENV!r}, {[ENV, *TOOL]!r})")
    began = time.monotonic()
    told = await agent.sweep(since)
    seconds = time.monotonic() - began
    await agent.wait_well()
    print(json.dumps({
        "uid": os.getuid(), "agent": agent.pid, "tools": sorted(tools), "seconds": seconds,
        "swept": sorted(swept.pid for swept in told.swept),
        "survivors": [[left.pid, left.why] for left in told.survivors],
    }), flush=True)
    sys.stdin.readline()
    agent.process.stop()
    await agent.wait_until(lambda: type(agent.events[-1]).__name__ == "ProcessGone")

asyncio.run(main())
"""


def sweep_as_nobody(marker: str, python: Path, env: Path, user_helper: Path) -> tuple[dict[str, Any], list[int]]:
    """Return the report of the sweep, and the live processes at that moment."""
    tool = child("os.setresuid(0, 0, 0); be_deaf(); say('tool', os.getpid()); stay()", marker)
    argv = as_nobody(program(SWEEPS, "no-marker", python, env, user_helper, *tool))
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=REPOSITORY, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        try:
            seen = json.loads(process.stdout.readline())
            left = left_alive(marker)
        finally:
            for pid in left_alive(marker):
                os.kill(pid, signal.SIGKILL)
            process.communicate("end\n", timeout=60)
    assert process.returncode == 0
    wait_none(marker)
    return seen, left


def test_sweep_ends_a_tool_of_another_user_by_the_helper(helper: Path, python: Path, marker: str) -> None:
    seen, left = sweep_as_nobody(marker, python, helper, helper)
    assert seen["uid"] != 0
    assert seen["survivors"] == []
    assert seen["swept"] == seen["tools"]
    assert left == [seen["agent"]]


@pytest.mark.thorough
def test_sweep_is_not_held_up_by_a_helper_that_hangs(helper: Path, python: Path, folder: Path, marker: str) -> None:
    slow = folder / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    seen, left = sweep_as_nobody(marker, python, helper, slow)
    assert seen["swept"] == []
    # On a busy machine the killed helper may not be gone yet.
    survivors = [survivor for survivor in seen["survivors"] if survivor[1] != "still dying"]
    assert survivors == [[*seen["tools"], "no permission to signal it"]]
    assert left == sorted([seen["agent"], *seen["tools"]])
    assert seen["seconds"] < ANSWER_SECONDS_MAX
