"""Control groups whose system calls fail midway: a clear error, or a harmless result, and no group is left."""

from __future__ import annotations

import asyncio
import collections
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import REPOSITORY
from tests.process.test_cgroups import base, groups
from tests.thorough import IS_THOROUGH

from banksman import Host, Kind, UsageError
from banksman.process import cgroups, fault_plan
from banksman.process.zygote_client import spawner

__all__ = ["base"]

ERRORS = (errno.EACCES, errno.ENOSPC, errno.EBUSY, errno.ENOENT)
# What the keeper does with a group.
CALLS = ("mkdir", "rmdir", "open_fd", "write", "listdir")

# Runs a command in a group for each plan. Then the same program runs one without a fault.
HOST = """
import asyncio, json, os, sys
import banksman
from banksman.process import cgroups, fault_plan
from banksman.process.zygote_client import spawner
base, *plans = sys.argv[1:]

async def run(plan):
    spawner.plan_text = plan
    cgroups.prune_again()
    try:
        done = await banksman.execute(["sh", "-c", "exit 7"], limits={"cgroup": 1}, grace=0.1, linger=0.05)
        seen = {"code": done.code, "survivors": len(done.survivors)}
    except banksman.BanksmanError as exc:
        seen = {"error": type(exc).__name__, "text": exc.args[0], "hint": exc.hint}
    spawner.plan_text = ""
    spawner.shutdown()
    seen["groups"] = [name for name in os.listdir(base) if name.startswith("banksman-tree-")]
    return seen

async def main():
    for plan in plans:
        print(json.dumps({"plan": plan, **await run(plan), "next": await run("")}), flush=True)

asyncio.run(main())
"""


def run(base: Path, plans: list[str]) -> list[dict[str, Any]]:
    argv = [sys.executable, "-c", HOST, str(base), *plans]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def calls(base: Path, tmp_path: Path) -> collections.Counter[str]:
    """How often a keeper makes each call for a command in a group."""
    record = tmp_path / "calls"
    (seen,) = run(base, [f"::::{record}"])
    assert (seen["code"], seen["groups"]) == (7, [])
    found = (line.split() for line in record.read_text().splitlines())
    return collections.Counter(call for role, call in found if role == "keeper" and call in CALLS)


def test_failed_call_of_a_keeper_is_an_error_or_harmless_and_leaves_no_group(
    base: Path, calls: collections.Counter[str]
) -> None:
    assert set(calls) >= {"mkdir", "rmdir", "open_fd", "write"}
    cells = [(call, nth) for call, times in sorted(calls.items()) for nth in range(1, min(times, 8) + 1)]
    plans = [
        f"keeper:{call}:{nth}:{number}:"
        for place, (call, nth) in enumerate(cells)
        for number in (ERRORS if IS_THOROUGH or call in ("mkdir", "rmdir") else [ERRORS[place % len(ERRORS)]])
    ]
    table = run(base, plans)
    assert [seen["plan"] for seen in table] == plans
    wrong = [seen for seen in table if not is_right(seen)]
    assert not wrong, f"{len(wrong)} of {len(plans)} cells:\n" + "\n".join(map(str, wrong))
    assert groups(base) == []


def is_right(seen: dict[str, Any]) -> bool:
    _role, call, _nth, number, _record = seen["plan"].split(":")
    is_told = bool(seen["hint"]) if "error" in seen else seen["code"] in (7, None) and not seen["survivors"]
    # The kernel would say so of a group that is gone. The group of a dead keeper is removed by the next start.
    may_stay = (call, int(number)) == ("rmdir", errno.ENOENT) or "its keeper died" in seen.get("text", "")
    is_left = seen["groups"] != [] and not may_stay
    return is_told and not is_left and seen["next"] == {"code": 7, "survivors": 0, "groups": []}


@pytest.mark.parametrize("number", ERRORS)
def test_group_that_cannot_be_made_is_a_clear_error(base: Path, number: int) -> None:
    (seen,) = run(base, [f"keeper:mkdir:1:{number}:"])
    assert seen["error"] == "UsageError"
    assert seen["text"] == f"cannot make the control group: {os.strerror(number)}"
    assert seen["hint"] == "run `banksman doctor`, which checks the control groups"


def test_turn_fails_with_the_reason_if_the_group_of_its_agent_cannot_be_made(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> Any:
        async with Host("memory:") as host:
            session = await host.open("claude", command=["touch", "ran"], cwd=tmp_path, limits={"cgroup": 1})
            return await (await session.ask("one")).outcome()

    spawner.shutdown()
    monkeypatch.setattr(spawner, "plan_text", f"keeper:mkdir:1:{errno.ENOSPC}:")
    try:
        outcome = asyncio.run(main())
    finally:
        spawner.shutdown()
    assert outcome.kind is Kind.FAILED
    assert "cannot make the control group: No space left on device" in str(outcome.error)
    assert not (tmp_path / "ran").exists()
    assert groups(base) == []


# -- the host: controllers -------------------------------------------------------------------------------------------
class Fake:
    """A folder with the files of a group that has controllers, which are not enabled."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder / "base"
        self.folder.mkdir()
        files = {"controllers": "cpu memory pids", "subtree_control": "", "procs": "", "type": "domain"}
        for name, text in files.items():
            (self.folder / f"cgroup.{name}").write_text(text)
        self.control = self.folder / "cgroup.subtree_control"
        monkeypatch.setattr(cgroups, "_host_base", self.found)

    def found(self, _mount: str, _root: str) -> str:
        return str(self.folder)


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    if cgroups.why_not(()) == ("cgroup v2 is not mounted", "mount it: mount -t cgroup2 none /sys/fs/cgroup"):
        pytest.skip("cgroup v2 is not mounted")
    return Fake(tmp_path, monkeypatch)


@pytest.mark.parametrize("call", ["open_fd", "write"])
@pytest.mark.parametrize("number", ERRORS)
def test_controller_that_cannot_be_enabled_is_an_error(fake: Fake, number: int, call: str) -> None:
    nth = {"write": 1, "open_fd": reads(fake) + 1}[call]
    fault_plan.FaultPlan(f"host:{call}:{nth}:{number}:").follow("host")
    try:
        with pytest.raises(UsageError, match=r"cannot set the limits memory_bytes: cannot enable memory in ") as caught:
            cgroups.order({"memory_bytes": 1 << 28})
    finally:
        fault_plan.follow_no_plan()
    assert f": {os.strerror(number)}" in str(caught.value)
    assert "`banksman doctor` shows the state" in str(caught.value)


def reads(fake: Fake) -> int:
    """How many files are read before a controller is enabled."""
    record = fake.folder / "calls"
    fault_plan.FaultPlan(f"::::{record}").follow("host")
    try:
        assert cgroups.why_not(["memory"]) is None
    finally:
        fault_plan.follow_no_plan()
    return record.read_text().splitlines().count("host open_fd")


async def test_open_is_refused_if_a_controller_cannot_be_enabled(fake: Fake, tmp_path: Path) -> None:
    fake.control.unlink()
    fake.control.mkdir()
    async with Host("memory:") as host:
        with pytest.raises(UsageError, match=r"cannot enable memory in .*: Is a directory"):
            await host.open("claude", command=["touch", "ran"], cwd=tmp_path, limits={"memory_bytes": 1 << 28})
        assert host.sessions() == []
    assert not [path for path in fake.folder.iterdir() if not path.name.startswith("cgroup.")]
    # A controller that no limit needs is not an error.
    assert cgroups.order({"cgroup": 1}) == (str(fake.folder), ())


def test_controllers_are_enabled_for_a_limit(fake: Fake) -> None:
    """The control of the tests above."""
    assert cgroups.order({"memory_bytes": 1 << 28}) is not None
    assert fake.control.read_text()
