"""Explore the real session and driver in every order of events, up to two departures from asyncio's order.

Each scenario checks in each schedule the invariants of scene.py: outcomes, frames, events, and that nothing is left.
BANKSMAN_EXPLORE=n raises the budget of every scenario to n schedules: `make prove`, which CI runs, and `make explore`.
Without it, every second scenario runs a part of its schedules, because `make test` has five minutes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.register_assert_rewrite("tests.simulation.scene", "tests.simulation.scenarios")

from tests.simulation.scenarios import CASES  # noqa: E402
from tests.thorough import IS_THOROUGH, one_in  # noqa: E402

pytestmark = pytest.mark.explored
SAMPLE = 80


@pytest.fixture(autouse=True)
def is_silent() -> Iterator[None]:
    """Suppress the error lines about a broken log, which would come thousands of times."""
    log = logging.getLogger("banksman")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@pytest.mark.parametrize("name", one_in(2, CASES))
def test_driver_holds_in_every_schedule(name: str) -> None:
    case = CASES[name]
    if not IS_THOROUGH:
        # A complete scenario has some thousand schedules: the first of them run here, and all in `make prove`.
        case = replace(case, schedules=SAMPLE if case.is_complete else case.schedules // 12, is_complete=False)
    case.explore()
