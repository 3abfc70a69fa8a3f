"""Each agent of these tests has the pinned version and runs without the settings of this machine. So has `acpx`."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.agents import acpx
from tests.agents.agents import AGENTS, RealAgent
from tools.agents import pins

from banksman.testing.fake_model import FakeModel

START_SECONDS_MAX = 60


@pytest.mark.parametrize("name", [name for name, agent in AGENTS.items() if agent.tells_version])
def test_agent_is_the_pinned_version(name: str, real_agent: Callable[[str], RealAgent], tmp_path: Path) -> None:
    agent = real_agent(name)
    with FakeModel() as model:
        said = subprocess.run(
            [*agent.program(), "--version"],
            env=agent.env(model, tmp_path / "home"),
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS_MAX,
            check=True,
        )
    assert pins()[name].version in said.stdout.split()


def test_acpx_and_its_node_are_the_pinned_versions(tmp_path: Path) -> None:
    node, _ = acpx.program()
    for name, command in ((acpx.NODE, [node]), (acpx.PROGRAM, acpx.program())):
        said = subprocess.run(
            [*command, "--version"],
            env={"HOME": str(tmp_path)},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=START_SECONDS_MAX,
            check=True,
        )
        assert said.stdout.strip().removeprefix("v") == pins()[name].version


def test_pins_name_known_agents_and_clients_only() -> None:
    assert set(pins()) <= set(AGENTS) | acpx.PINS
