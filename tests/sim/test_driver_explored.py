"""Session and driver, real code, in every order of the world up to two departures from asyncio's own.

Each scenario checks in each schedule what scene.py says: outcomes, frames, events, and that nothing is left.
BANKSMAN_EXPLORE=n raises the budget of every scenario to n schedules: `make prove`, which CI runs, and `make explore`.
Without it a sample is half as large, for `make test` has ten minutes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.register_assert_rewrite("tests.sim.scene", "tests.sim.scenarios")

from tests.sim.scenarios import CASES  # noqa: E402

# With a budget of its own it takes as long as it takes.
IS_LONG = "BANKSMAN_EXPLORE" in os.environ
pytestmark = [pytest.mark.timeout(3600 if IS_LONG else 120), pytest.mark.explored]
SAMPLE = 200


@pytest.fixture(autouse=True)
def is_silent() -> Iterator[None]:
    """A broken log is told by an error line, thousands of times here."""
    log = logging.getLogger("banksman")
    level = log.level
    log.setLevel(logging.CRITICAL)
    yield
    log.setLevel(level)


@pytest.mark.parametrize("name", CASES)
def test_every_schedule_of(name: str) -> None:
    case = CASES[name]
    if not IS_LONG:
        # Those that are to be run to their end have some thousands: the first of them here, and all by `make prove`.
        case = replace(case, schedules=SAMPLE if case.is_complete else case.schedules // 4, is_complete=False)
    case.explore()
