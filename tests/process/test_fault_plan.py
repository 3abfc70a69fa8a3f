"""Fault table: each system call of host, zygote and keeper fails once, at each place where a good run makes it.

The calls are not listed by hand: a good run is recorded through the one module that makes them all. A second test reads
the source for calls that bypass that module. Whatever fails, the caller gets an error or the truth, no process and no
fd is left, and the next command works.
"""

from __future__ import annotations

import ast
import collections
import errno
import functools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tests.thorough import IS_THOROUGH

pytestmark = pytest.mark.thorough

HERE = pathlib.Path(__file__).parent
RUN = HERE.parents[1] / "src" / "banksman" / "process"
# A failed call is mostly waited for: the hosts of one cell run at the same time, each with a part of the plans.
HOSTS = 4
SCENARIOS = ("plain", "limits", "tree", "hand_over", "survive")
ROLES = ("host", "zygote", "keeper")
# The errno that the kernel gives for a lack of resources, by call. The rest get the one that can always happen.
ERRNO = {"fork": errno.EAGAIN, "posix_spawn": errno.EAGAIN, "pipe": errno.EMFILE, "socketpair": errno.EMFILE}
TRUTH: dict[str, dict[str, Any]] = {
    "plain": {"ended": "exited", "code": 7, "signal": None, "stdout": "said", "survivors": []},
    "limits": {"ended": "exited", "code": 7, "signal": None, "stdout": "said", "survivors": []},
    "tree": {"ended": "stopped", "stdout": "up", "survivors": []},
    "hand_over": {"ended": "stopped", "stdout": "", "survivors": []},
    "survive": {"ended": "stopped", "stdout": "up", "survivors": []},
}


def run_host(scenario: str, *plans: str) -> list[dict[str, Any]]:
    marker = f"marked-{uuid.uuid4().hex}"
    argv = [sys.executable, str(HERE / "fault_host.py"), scenario, marker, *plans]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, f"{done.stdout[-300:]} {done.stderr}"
    left = subprocess.run([sys.executable, str(HERE / "count.py"), marker], capture_output=True, text=True, check=True)
    assert left.stdout.split() == [], "processes left behind"
    return [json.loads(line) for line in done.stdout.splitlines()]


def run_hosts(scenario: str, plans: list[str]) -> list[dict[str, Any]]:
    parts = [plans[first::HOSTS] for first in range(HOSTS)]
    with ThreadPoolExecutor(HOSTS) as pool:
        tables = [pool.submit(run_host, scenario, *part) for part in parts]
        return [seen for table in tables for seen in table.result()]


@functools.cache
def recorded(scenario: str) -> collections.Counter[tuple[str, str]]:
    """Return how often each role makes each call in a good run."""
    with tempfile.TemporaryDirectory() as folder:
        record = os.path.join(folder, "calls")
        (seen,) = run_host(scenario, f"::::{record}")
        assert seen["finished"] == {**seen["finished"], **TRUTH[scenario]}
        with open(record) as file:
            return collections.Counter((role, call) for role, call in (line.split() for line in file))


def is_true(scenario: str, finished: dict[str, Any]) -> bool:
    """Check that the result is what happened: nothing invented, and no survivor. The end may be unknown."""
    if finished["survivors"]:
        return False
    if scenario in ("tree", "hand_over", "survive"):
        # A keeper that dies early takes the tree with it, perhaps before the tree was up or the stop came.
        return finished["code"] is None and finished["stdout"] in ("", "up")
    return finished["code"] is None or finished == TRUTH[scenario]


def is_right(scenario: str, seen: dict[str, Any]) -> bool:
    is_told = "error" in seen or ("finished" in seen and is_true(scenario, seen["finished"]))
    return is_told and seen["has_ended"] and seen["fds_more"] == 0 and seen["next"] == 5


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_failing_syscall_is_an_error_or_the_truth_and_never_a_leak(scenario: str, role: str) -> None:
    # The first few calls and the last: the seventh call of a loop behaves like the sixth.
    plans = [
        f"{role}:{call}:{nth}:{ERRNO.get(call, errno.ENOMEM)}:"
        for (who, call), times in sorted(recorded(scenario).items())
        for nth in sorted({*range(1, min(times, 4 if IS_THOROUGH else 1) + 1), times})
        if who == role
    ]
    assert len(plans) > 10
    table = run_hosts(scenario, plans)
    assert sorted(seen["plan"] for seen in table) == sorted(plans)
    wrong = [seen for seen in table if not is_right(scenario, seen)]
    assert not wrong, f"{len(wrong)} of {len(plans)} cells:\n" + "\n".join(map(str, wrong))


def test_start_out_of_fds_is_an_error_with_a_hint_and_never_a_leak() -> None:
    """With EMFILE from the kernel, at each number of fds that a start takes, one after another."""
    done = subprocess.run([sys.executable, "-c", OUT_OF_FDS], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["errors"] >= 5
    assert set(seen["hints"]) == {"this process has too many open files: close some, or raise its limit (ulimit -n)"}
    assert seen["leaked"] == 0
    assert seen["succeeded"] >= 1


OUT_OF_FDS = """
import asyncio, json, os, resource
import banksman

async def main():
    await banksman.execute(["true"])                    # the zygote and the loop have their fds
    before = len(os.listdir("/proc/self/fd"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    seen = {"errors": 0, "hints": [], "succeeded": 0}
    for limit in range(3, 40):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            assert (await banksman.execute(["sh", "-c", "exit 3"], stdin=b"x")).code == 3
            seen["succeeded"] += 1
        except banksman.MachineError as exc:
            seen["errors"] += 1
            seen["hints"].append(exc.hint)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    seen["leaked"] = len(os.listdir("/proc/self/fd")) - before
    print(json.dumps(seen))

asyncio.run(main())
"""

# Names of `os` that these files may use directly: calls that do not fail for lack of resources, or that report by a
# value.
HARMLESS = {
    *("getpid", "getppid", "fsencode", "fsdecode", "strerror", "path", "environ", "environb", "PathLike", "defpath"),
    *("_exit", "waitstatus_to_exitcode", "fstat", "stat", "access", "lseek", "register_at_fork", "chdir"),
    *(
        "geteuid",
        "getresuid",
        "getresgid",
        "getgroups",
        "getpriority",
        "setpriority",
        "sched_getscheduler",
        "readlink",
        "umask",
        "urandom",
    ),
}
# After its fork, the child of a command with limits reports every failure through its pipe.
CHILD_ONLY = {"spawn.py": {"dup", "dup2", "open", "write", "close"}}
# The user is looked up before the start. A failure there is an error of the caller.
BEFORE_START = {"attributes.py": {"geteuid", "getgrouplist", "getuid"}}
FILES = (
    "process.py",
    "kept_process.py",
    "tree_hand_over.py",
    "adoption.py",
    "zygote_client.py",
    "pipes.py",
    "launch.py",
    "attributes.py",
    "cgroups.py",
    "stdio.py",
    "spool.py",
    "input_mark.py",
    *(f"keeper/{path.name}" for path in (RUN / "keeper").glob("*.py")),
)


@pytest.mark.parametrize("name", FILES)
def test_syscalls_all_go_through_the_seam(name: str) -> None:
    tree = ast.parse((RUN / name).read_text())
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("os", "_socket")
    }
    calls = {attribute for attribute in used if not attribute.isupper() and not attribute.startswith(("P_", "CLD_"))}
    file = pathlib.Path(name).name
    beside = calls - HARMLESS - CHILD_ONLY.get(file, set()) - BEFORE_START.get(file, set()) - {"socket"}
    assert not beside, f"{name} calls {sorted(beside)} and not through banksman.process.syscalls"
