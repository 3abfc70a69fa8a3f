"""Choose how many test cases a run covers.

`make prove`, which CI runs too, covers all of them. `make test` has five minutes and covers a part.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

IS_THOROUGH = "BANKSMAN_EXPLORE" in os.environ
# `make test-pythons` runs one test of this many on each other Python version: see tools/pythons.py.
ONE_IN = int(os.environ.get("BANKSMAN_TEST_ONE_IN", "1"))

# Mark of a slow test that resembles a test of the normal run. `make test` skips it, `make prove` runs it.
thorough = pytest.mark.thorough


def sample(number: int) -> int:
    """Return the number of generated cases: all for `make prove`, an eighth for `make test`."""
    return number if IS_THOROUGH else max(1, number // 8)


def one_in(share: int, values: Iterable[Any]) -> list[ParameterSet]:
    """Return the parameters of a family of cases that differ only in data.

    `make test` runs the first case of each `share` cases. `make prove` runs the others too. A tuple holds the
    parameters of one case.
    """
    cases: list[tuple[Any, ...]] = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*case, marks=[] if number % share == 0 else thorough) for number, case in enumerate(cases)]
