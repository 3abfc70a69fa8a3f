"""The program of a prefix is found by the PATH of the agent, and not by that of the host."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.sessions.test_containment import Scene, answer, scene, wrapped

from banksman import Host
from banksman.errors import ProgramNotFound

__all__ = ["scene"]


def house_box(folder: Path) -> str:
    """Make a prefix in a folder of its own, and return a PATH with it."""
    box = folder / "bin" / "house-box"
    box.parent.mkdir()
    box.write_text('#!/bin/sh\nWRAPPED=box exec "$@"\n')
    box.chmod(0o755)
    return f"{box.parent}:{os.environ['PATH']}"


async def test_program_of_a_prefix_is_found_by_the_path_of_the_agent(scene: Scene) -> None:
    path = house_box(scene.folder)
    async with Host(scene.store) as host:
        session = await scene.open(host, wrap=["house-box"], env={"PATH": path})
        await answer(session)
        assert wrapped(session) == "box"


@pytest.mark.parametrize("how", [{"env": {"PATH": "/usr/bin:/bin"}}, {"scrub": ["PATH"]}, {"inherit_env": False}])
async def test_program_of_a_prefix_is_not_found_by_the_path_of_the_host(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """A program that the agent cannot find is missing at the open, and not at the first ask."""
    monkeypatch.setenv("PATH", house_box(scene.folder))
    async with Host(scene.store) as host:
        with pytest.raises(ProgramNotFound, match="house-box"):
            await scene.open(host, wrap=["house-box"], **how)
        assert host.sessions() == []
        # The control.
        await answer(session := await scene.open(host, wrap=["house-box"]))
        assert wrapped(session) == "box"
