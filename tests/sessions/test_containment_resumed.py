"""Sessions whose containment or profile an earlier version accepted, and this one refuses for a new session."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from tests.sessions.test_containment import Scene, answer, scene

from banksman import Host, UsageError
from banksman.process import cgroups
from banksman.sessions import containment, known_agents

__all__ = ["scene"]

NO_EFFECT = "limits have no effect (memory_bytes): systemd-run moves the agent"
MEMORY = {"memory_bytes": 1 << 30}

Earlier = Callable[[], AbstractContextManager[None]]


@pytest.fixture
def scope(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> str:
    """A program with the name of systemd-run. Limits need no control group."""
    program = scene.folder / "systemd-run"
    program.write_text('#!/bin/sh\nexec "$@"\n')
    program.chmod(0o755)

    def no_order(_: Mapping[str, Any] | None) -> None:
        return None

    monkeypatch.setattr(cgroups, "order", no_order)
    return str(program)


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> Earlier:
    """An earlier version, without these two checks."""

    @contextmanager
    def patched() -> Generator[None]:
        with monkeypatch.context() as patch:
            patch.setattr(containment, "_MOVER", "none")
            patch.setattr(containment, "_NO_NAME", re.compile("^$"))
            yield

    return patched


async def test_limits_behind_systemd_run_are_accepted_if_they_are_recorded(
    scene: Scene, scope: str, earlier: Earlier, caplog: pytest.LogCaptureFixture
) -> None:
    async with Host(scene.store) as host:
        with earlier():
            session = await scene.open(host, fallback=["codex"], wrap=[scope], limits=MEMORY)
            assert await answer(session) == "one"
        # What is the same as in the log is not stated anew.
        same: list[dict[str, Any]] = [{}, {"limits": MEMORY}]
        for stated in same:
            again = await scene.open(host, **stated)
            assert again.id == session.id
            assert await answer(again) == "one"
            assert NO_EFFECT in caplog.text
            caplog.clear()
    async with Host(scene.store) as host:
        assert await answer(await host.take_over(session.id)) == "one"
        assert caplog.text.count(NO_EFFECT) == 1


@pytest.mark.parametrize("is_open_here", [True, False])
async def test_limits_behind_systemd_run_are_refused_if_a_part_is_stated_anew(
    scene: Scene, scope: str, earlier: Earlier, is_open_here: bool
) -> None:
    async with Host(scene.store) as host:
        with earlier():
            session = await scene.open(host, wrap=[scope], limits=MEMORY)
        if not is_open_here:
            await session.close()
        anew: list[dict[str, Any]] = [{"limits": {"memory_bytes": 1 << 31}}, {"wrap": ["nice", scope]}]
        anew += [{"limits": MEMORY, "wrap": [scope]}]
        for stated in anew:
            with pytest.raises(UsageError, match="cannot set the limits memory_bytes: systemd-run moves"):
                await scene.open(host, **stated)


@pytest.mark.parametrize("part", ["scrub", "keep", "containment"])
async def test_session_of_a_profile_that_is_refused_now_can_be_resumed(
    scene: Scene, scope: str, earlier: Earlier, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    text = f'[env]\n{part} = ["AWS_*", "HOUSE_PASSWORD"]'
    if part == "containment":
        text = f"[containment]\nwrap = {json.dumps([scope])}\nlimits = {{ memory_bytes = {1 << 30} }}"
    scene.profile("house", f'extends = "claude"\ncommand = ["sh"]\n{text}')
    async with Host(scene.store) as host:
        with earlier():
            session = await scene.open(host, "house")
            assert await answer(session) == "one"
    async with Host(scene.store) as host:
        with pytest.raises(UsageError, match=r"house\.toml: "):
            await scene.open(host, "house", command=["true"], name="new")
        assert await answer(await host.take_over(session.id)) == "one"
        found = NO_EFFECT if part == "containment" else f"house.toml: env.{part} cannot hold 'AWS_*'"
        assert caplog.text.count(found) == 1
    # The rest of the profile holds, also where a session is only read or placed.
    if part != "containment":
        assert getattr(known_agents.load("house", is_recorded=True), part) == ("HOUSE_PASSWORD",)
    assert known_agents.load_or_plain("house").source is not None
    assert "house" in known_agents.startable()


def test_profile_that_is_wrong_for_every_version_is_refused_for_a_recorded_session(scene: Scene) -> None:
    scene.profile("house", 'extends = "claude"\ncolour = 1')
    with pytest.raises(UsageError, match="there is no key colour"):
        known_agents.load("house", is_recorded=True)
    assert "house" not in known_agents.startable()
