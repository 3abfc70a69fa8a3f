"""Run generated cases within a time limit: one round in every test run, minutes in `make check-deep`.

The round of a normal test run always uses the same seed, so the run is reproducible. With `BANKSMAN_DEEP` (seconds for
each part) the seed differs each time. A failure carries a note with the seed that repeats it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, strategies
from tests.thorough import IS_THOROUGH

# `make test` runs one round, so that every machine checks the same cases.
SECONDS = float(os.environ.get("BANKSMAN_DEEP", "0")) or (1.0 if IS_THOROUGH else 0.0)
IS_DEEP = "BANKSMAN_DEEP" in os.environ
EXAMPLES = 200 if IS_THOROUGH or IS_DEEP else 50
# The deadline applies between rounds, so a failing round has the time to shrink.
_SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


def for_a_while(check: Callable[[Any], None], cases: strategies.SearchStrategy[Any]) -> int:
    """Check rounds of examples until the time is over, at least one round; return the number of examples."""
    number = int(os.environ.get("BANKSMAN_DEEP_SEED", "0")) or (int.from_bytes(os.urandom(4)) if IS_DEEP else 0)
    deadline = time.monotonic() + SECONDS
    rounds = 0
    while not rounds or time.monotonic() < deadline:
        try:
            hypothesis.seed(number + rounds)(_SETTINGS(hypothesis.given(cases)(check)))()
        except BaseException as exc:
            exc.add_note(f"again: BANKSMAN_DEEP=1 BANKSMAN_DEEP_SEED={number + rounds}")
            raise
        rounds += 1
    return rounds * EXAMPLES
