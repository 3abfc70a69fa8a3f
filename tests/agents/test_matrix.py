"""Every real agent in every step, offline, and the processes that are left two seconds after the close.

Each step runs twice at the same time: on Banksman, which must leave no process, and on plain `subprocess` with
`killpg`, which must leave some. The second is the control, and shows the agent without Banksman. The table at the end
shows both. docs/conformance.md is generated from the same run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest
from tests.agents.agents import AGENTS, RealAgent
from tests.agents.conftest import CELL
from tests.agents.matrix.came import Came
from tests.agents.matrix.place import Place, Places, making_places
from tests.agents.matrix.plain_steps import PLAIN_STEPS, RivalCase
from tests.agents.matrix.steps import STEPS, MatrixCase

from banksman import Host

# Within the deadline of a test. Real agents take a minute and a half to start twice on a machine with half a core free.
STEP_SECONDS_MAX = 250.0


@pytest.fixture
def place(real_agent: Callable[[str], RealAgent], tmp_path: Path) -> Generator[Places]:
    """Return a function that makes the place of one side."""
    with making_places(tmp_path, real_agent) as places:
        yield places


# Ordered by step and not by agent: opencode needs five seconds of a core to start, and two at the same time need ten.
@pytest.mark.parametrize("agent", AGENTS)
@pytest.mark.parametrize("step", STEPS)
def test_agent_step_leaves_no_process(
    agent: str, step: str, place: Places, record_property: Callable[[str, object], None]
) -> None:
    cell: dict[str, Any] = {"agent": agent, "step": step}
    record_property(CELL, cell)
    ours, theirs = place("banksman", agent), place("plain", agent)
    rival = Aside(lambda: on_plain(step, theirs))
    try:
        cell["banksman"] = asyncio.run(on_banksman(step, ours))
    finally:
        cell["plain"] = rival.result()
    assert cell["banksman"]["left"] == 0
    assert not cell["banksman"]["tool_left"]
    assert cell["plain"]["left"], "the control has left nothing, so this cell shows nothing"


async def on_banksman(step: str, place: Place) -> dict[str, Any]:
    """Run the step and close the host; return the seconds, the outcome, and the processes left two seconds later."""
    began = time.monotonic()
    async with asyncio.timeout(STEP_SECONDS_MAX):
        async with Host() as host:
            came = await STEPS[step](MatrixCase(host, place))
    seconds = time.monotonic() - began
    return side(seconds, came, await asyncio.to_thread(place.start_count().result))


def on_plain(step: str, place: Place) -> dict[str, Any]:
    """Run the step and kill the groups; return the seconds, the outcome, and the processes left two seconds later."""
    case = RivalCase(place)
    began = time.monotonic()
    try:
        came = PLAIN_STEPS[step](case)
        case.kill()
        seconds = time.monotonic() - began
        return side(seconds, came, place.start_count().result())
    finally:
        case.kill()
        place.clean_up()
        case.close()


def side(seconds: float, came: Came, left: dict[int, str]) -> dict[str, Any]:
    return {
        "seconds": seconds,
        "outcome": came.outcome,
        "tool_left": came.tool_left,
        "left": len(left),
        "seen": came.seen,
    }


class Aside:
    """A function that runs in a thread."""

    def __init__(self, do: Callable[[], dict[str, Any]]) -> None:
        self._do = do
        self._came: dict[str, Any] | BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._came = self._do()
        except BaseException as exc:
            self._came = exc

    def result(self) -> dict[str, Any]:
        """Wait for the thread and return its result. Each of its waits has a deadline, and so has the test."""
        self._thread.join()
        assert self._came is not None
        if isinstance(self._came, BaseException):
            raise self._came
        return self._came


def test_plain_and_banksman_steps_are_the_same() -> None:
    assert list(PLAIN_STEPS) == list(STEPS)
