"""Claude Code in every difficult situation, offline, and the processes that are left two seconds after the close.

Each step runs twice: on Banksman, which must leave no process, and on plain `subprocess` with `killpg`, which must
leave some. The second is the control: it fails if the tool's children exit without a signal, or if the count sees
nothing. The table at the end shows both.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.agents.case import Case
from tests.agents.conftest import ROW
from tests.agents.ground import Ground, remove, wait
from tests.agents.plain_steps import PLAIN_STEPS, ClaudeCase
from tests.agents.steps import STEPS
from tools.agents import pins

from banksman import Host
from banksman.testing.fake_model import FakeModel

# Both sides fit into the deadline of a test.
STEP_SECONDS_MAX = 120.0


@pytest.fixture
def ground(claude: str, tmp_path: Path) -> Generator[Callable[[str], Ground]]:
    """Return a function that makes the ground of one side. The fixture closes its model and removes its folder."""
    made: list[Ground] = []

    def make(name: str) -> Ground:
        folder = tmp_path / name
        folder.mkdir()
        made.append(Ground(folder, claude, FakeModel().__enter__()))
        return made[-1]

    yield make
    for ground in made:
        ground.clean_up()
        ground.model.close()
    remove(tmp_path)


@pytest.mark.parametrize("step", STEPS)
def test_agent_step_leaves_no_process(
    step: str, ground: Callable[[str], Ground], record_property: Callable[[str, object], None]
) -> None:
    row: dict[str, Any] = {"step": step, "number": list(STEPS).index(step)}
    record_property(ROW, row)
    ours = ground("banksman")
    seconds, outcome = asyncio.run(on_banksman(step, ours))
    # Another process counts while the rival runs.
    counting = ours.start_count()
    try:
        rival = on_plain(step, ground("plain"))
    finally:
        left = counting.result()
        row["banksman"] = side(seconds, outcome, left)
    row["plain"] = side(*rival)
    assert not left
    assert row["plain"]["left"], "the control has left nothing, so this step shows nothing"


def side(seconds: float, outcome: str, left: Mapping[int, str]) -> dict[str, Any]:
    return {"seconds": seconds, "outcome": outcome, "left": len(left)}


async def on_banksman(step: str, ground: Ground) -> tuple[float, str]:
    """Run the step and close the host; return the seconds and the outcome."""
    began = time.monotonic()
    async with asyncio.timeout(STEP_SECONDS_MAX):
        async with Host() as host:
            outcome = await STEPS[step](Case(host, ground))
    return time.monotonic() - began, outcome


def on_plain(step: str, ground: Ground) -> tuple[float, str, dict[int, str]]:
    """Run the step and kill the groups; return the seconds, the outcome, and the processes left two seconds later."""
    case = ClaudeCase(ground)
    began = time.monotonic()
    try:
        outcome = PLAIN_STEPS[step](case)
        case.kill()
        seconds = time.monotonic() - began
        left = ground.start_count().result()
    finally:
        case.kill()
        ground.clean_up()
        case.close()
    return seconds, outcome, left


def test_plain_and_banksman_steps_are_the_same() -> None:
    assert list(PLAIN_STEPS) == list(STEPS)


def test_count_sees_living_processes(ground: Callable[[str], Ground]) -> None:
    """Also a process that has the mark only in its environment."""
    place = ground("counted")
    assert place.start_count(after_seconds=0).result() == {}
    tool = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={"ANY": place.mark})
    try:
        wait(lambda: place.start_count(after_seconds=0).result(), "the count to see it")
    finally:
        tool.kill()
        tool.wait()
    assert place.start_count(after_seconds=0).result() == {}


def test_claude_is_the_pinned_version(ground: Callable[[str], Ground]) -> None:
    place = ground("version")
    said = subprocess.run(
        [place.claude, "--version"],
        env=place.env(),
        cwd=place.work,
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert said.stdout.split()[0] == pins()["claude"].version
