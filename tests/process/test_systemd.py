"""Control groups and scopes under a real systemd, which is the first process of a kernel of its own."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest
from tests import uml

pytestmark = pytest.mark.thorough

SECONDS_MAX = 240.0


@pytest.fixture(scope="module")
def scenes() -> dict[str, Any]:
    """What a service of systemd has seen."""
    if why := uml.why_not(uml.SYSTEMD):
        pytest.skip(why)
    lines = uml.run([sys.executable, "tests/process/systemd_scenes.py"], SECONDS_MAX, is_service=True)
    (seen,) = (line for line in lines if line.startswith("SCENE "))
    print(seen)
    return json.loads(seen.removeprefix("SCENE "))


def test_service_can_limit_in_the_group_that_systemd_has_delegated(scenes: dict[str, Any]) -> None:
    assert scenes["delegation"] == {
        "why_not": None,
        "service": False,
        "scope": "True",
        "delegated scope": "False",
    }
    # The service goes on: systemd does not stop a unit with a delegation because of a group in it.
    assert scenes["command_over_its_memory"] == {"ended": "out_of_memory", "stdout": ""}


def test_agent_in_a_scope_of_systemd_leaves_no_process(scenes: dict[str, Any]) -> None:
    assert scenes["agent_in_a_scope"] == {"close": ["done", ["scope"], 0], "death of the host": ["ready", 0]}


def test_restart_of_a_service_continues_its_turn(scenes: dict[str, Any]) -> None:
    """With the units of `deploy/`."""
    wanted = dict.fromkeys(("is another server", "is the same agent", "is done", "has its group"), True)
    assert scenes["restart_of_the_server"] == {**wanted, "phases": ["running", "running"]}
