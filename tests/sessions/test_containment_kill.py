"""No process of a contained agent is left: after a close, after the death of the agent, after the death of its host.

The agent has a tool in a session of its own that ignores TERM. Both are in new namespaces (pid, mount, network), in a
control group, or of another user.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from tests.process import other_user
from tests.process.helpers import NOBODY, alive, wait_until
from tests.sessions.helpers import QUICK
from tests.thorough import one_in, thorough

from banksman import Host, Kind
from banksman.process import cgroups
from banksman.sessions.command_prefix import SANDBOXES
from banksman.testing import fake_agent

NETLESS = ("unshare", "--user", "--map-root-user", "--mount", "--pid", "--net", "--fork", "--mount-proc", "--")
PREFIXES = {
    **SANDBOXES,
    "unshare with net": NETLESS,
    "bwrap with net": ("bwrap", "--unshare-net", *SANDBOXES["bwrap"][1:]),
}
# The tool has a child, which has the marker too: `tail` only complains about a file of this name.
TOOL = """setsid sh -c 'trap "" TERM HUP; tail -f /dev/null "$0" >/dev/null 2>&1; :' "$0" & exec "$@" """
HOST = """
import asyncio, json, sys
from banksman import Host
how = json.loads(sys.argv[1])
async def main():
    async with Host("memory:") as host:
        session = await host.open("claude", **how)
        await (await session.ask("one")).outcome()
        print("ready", flush=True)
        await asyncio.sleep(1000)
asyncio.run(main())
"""


IN_A_GROUP = ["cgroup", "bwrap in a cgroup"]
AS_NOBODY = ["nobody", *(f"{name} of nobody" for name in SANDBOXES)]


@pytest.fixture(
    params=[*one_in(2, PREFIXES), *(pytest.param(name, marks=thorough) for name in (*IN_A_GROUP, *AS_NOBODY))]
)
def how(request: pytest.FixtureRequest, tmp_path: Path, marker: str) -> Generator[dict[str, Any]]:
    """How the agent is opened."""
    name: str = request.param
    wrap = [*PREFIXES.get(name.removesuffix(" of nobody").removesuffix(" in a cgroup"), ())]
    limits = {"cgroup": 1} if name in IN_A_GROUP else {}
    if limits and (why := cgroups.why_not(())):
        pytest.skip(f"NOT TESTED: {why[0]}")
    user = NOBODY if name in AS_NOBODY else None
    if user is not None and other_user.why_not():
        pytest.skip(other_user.why_not())
    # A machine may have the program and forbid the namespaces.
    tried = [*(word.replace("{cwd}", "/tmp") for word in wrap), "true"]
    if shutil.which(tried[0]) is None or subprocess.run(tried, user=user, capture_output=True, check=False).returncode:
        pytest.skip(f"{name} does not work here")
    options: dict[str, Any] = {"options": {**QUICK, "grace": 0.5}, "wrap": wrap, "limits": limits}
    if user is None:
        yield {"command": command(tmp_path, marker), "cwd": str(tmp_path), **options}
        return
    with other_user.folder() as folder:
        argv = other_user.reachable(command(folder, marker), folder)
        yield {"command": argv, "cwd": str(folder), "user": user, **options}


def command(folder: Path, marker: str) -> list[str]:
    return ["sh", "-c", TOOL, marker, *fake_agent.command(evidence=folder / marker)]


@pytest.mark.parametrize("end", ["close", "death"])
async def test_end_of_a_contained_agent_leaves_no_process(how: dict[str, Any], marker: str, end: str) -> None:
    async with Host("memory:") as host:
        session = await host.open("claude", **how)
        outcome = await (await session.ask("one")).outcome()
        assert outcome.kind is Kind.DONE, outcome.error
        # The prefix, the agent, its tool and the child of that.
        wait_until(lambda: len(alive(marker)) >= (4 if how["wrap"] else 3), "the start of the tool")
        its = alive(marker)
        group = session.status().containment
        assert (group is not None and group.cgroup is not None) == bool(how["limits"])
        assert {os.stat(f"/proc/{pid}").st_uid for pid in its} == {how.get("user", os.geteuid())}
        if end == "death":
            os.kill(session.status().pids[0], signal.SIGKILL)
            wait = session.events(0, waits=True)
            async for event in wait:
                if event.kind == "process.swept":
                    break
            assert alive(marker) == []
        await session.close()
        assert alive(marker) == []
        if group is not None and group.cgroup is not None:
            assert not Path(group.cgroup.path).exists()


def test_death_of_the_host_leaves_no_process_of_a_contained_agent(how: dict[str, Any], marker: str) -> None:
    with subprocess.Popen([sys.executable, "-c", HOST, json.dumps(how)], stdout=subprocess.PIPE, text=True) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "ready\n"
        # The host has the marker, too.
        wait_until(lambda: len(alive(marker)) >= (5 if how["wrap"] else 4), "the start of the tool")
        host.kill()
        host.wait()
        wait_until(lambda: not alive(marker), "the end of the agent's tree")
