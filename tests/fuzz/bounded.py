"""Made-up cases for as long as there is time: a moment in every run of the tests, minutes in `make check-deep`.

A moment is always the same one, so that a run of the tests is not a lottery. With `BANKSMAN_DEEP` (seconds for each
part) it begins elsewhere each time; what fails is told with the number that begins it there again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, strategies
from tests.thorough import IS_THOROUGH

# One round in `make test`, so that it is the same one on every machine.
SECONDS = float(os.environ.get("BANKSMAN_DEEP", "0")) or (1.0 if IS_THOROUGH else 0.0)
IS_DEEP = "BANKSMAN_DEEP" in os.environ
EXAMPLES = 200 if IS_THOROUGH or IS_DEEP else 50
# As many as are told if one fails: a round is shrunk by itself.
_SETTINGS = hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    phases=(Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)


def for_a_while(check: Callable[[Any], None], cases: strategies.SearchStrategy[Any]) -> int:
    """How many were checked. At least one round, whatever the time."""
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
