"""The fault table: each system call of host, zygote and keeper fails once, at each place where a good run makes it.

The calls are not listed by hand: a good run is recorded through the one seam they all go through, and a second test
reads the source for calls that go round the seam. Whatever fails, the caller sees an error or the truth, no process and
no fd is left, and the next command works.
"""

from __future__ import annotations

import ast
import collections
import errno
import functools
import json
import os
import pathlib
import resource
import subprocess
import sys
import tempfile
import uuid

import pytest

import banksman
from banksman.run import faults

HERE = pathlib.Path(__file__).parent
RUN = HERE.parents[1] / "src" / "banksman" / "run"
SCENARIOS = ("plain", "limits", "tree")
ROLES = ("host", "zygote", "keeper")
# What the kernel says when it has no room, by call; the rest get the one that can always happen.
ERRNO = {"fork": errno.EAGAIN, "posix_spawn": errno.EAGAIN, "pipe": errno.EMFILE, "socketpair": errno.EMFILE}
TRUTH = {
    "plain": {"ended": "exited", "code": 7, "signal": None, "stdout": "said", "survivors": 0},
    "limits": {"ended": "exited", "code": 7, "signal": None, "stdout": "said", "survivors": 0},
    "tree": {"ended": "stopped", "stdout": "up", "survivors": 0},
}


def run_host(scenario: str, plan: str) -> dict[str, object]:
    marker = f"marked-{uuid.uuid4().hex}"
    argv = [sys.executable, str(HERE / "fault_host.py"), scenario, marker, plan]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, f"{plan}: {done.stderr}"
    left = subprocess.run([sys.executable, str(HERE / "count.py"), marker], capture_output=True, text=True, check=True)
    assert left.stdout.split() == [], f"{plan}: processes left behind"
    return json.loads(done.stdout)


@functools.cache
def recorded(scenario: str) -> collections.Counter[tuple[str, str]]:
    """How often each role makes each call in a good run."""
    with tempfile.TemporaryDirectory() as folder:
        record = os.path.join(folder, "calls")
        seen = run_host(scenario, f"::::{record}")
        assert seen["finished"] == seen["finished"] | TRUTH[scenario]
        with open(record) as file:
            return collections.Counter((role, call) for role, call in (line.split() for line in file))


def is_true(scenario: str, finished: dict[str, object]) -> bool:
    """The result is what really happened: nothing invented, nothing survived. How it ended may be unknown."""
    truth = TRUTH[scenario]
    unknown = finished["code"] is None and scenario != "tree"
    return finished["survivors"] == 0 and (unknown or finished == finished | truth)


@pytest.mark.parametrize("call", faults.CALLS)
@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.timeout(300)
def test_a_call_that_fails_is_an_error_or_the_truth_and_never_a_leak(scenario: str, role: str, call: str) -> None:
    times = recorded(scenario)[role, call]
    for nth in sorted({*range(1, min(times, 6) + 1), *([times] if times else [])}):
        plan = f"{role}:{call}:{nth}:{ERRNO.get(call, errno.ENOMEM)}:"
        seen = run_host(scenario, plan)
        assert "error" in seen or is_true(scenario, seen["finished"]), f"{scenario} {plan} {seen}"  # pyright: ignore[reportArgumentType]
        assert seen["has_ended"], f"{scenario} {plan} {seen}"
        assert seen["fds_more"] == 0, f"{scenario} {plan} {seen}"
        assert seen["next"] == 5, f"{scenario} {plan} {seen}"
