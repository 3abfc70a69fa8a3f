"""How much of what could be tried is tried: all of it by `make prove`, which CI runs too; a part of it by `make test`,
which has five minutes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest
from _pytest.mark import ParameterSet

IS_THOROUGH = "BANKSMAN_EXPLORE" in os.environ
# `make test-pythons` runs one in so many on each other Python: see tools/pythons.py.
ONE_IN = int(os.environ.get("BANKSMAN_TEST_ONE_IN", "1"))

# A test that is slow and much like one that stays: `make test` leaves it out, `make prove` does not.
thorough = pytest.mark.thorough


def sample(number: int) -> int:
    """So many made-up cases for `make prove`, and an eighth of them for `make test`."""
    return number if IS_THOROUGH else max(1, number // 8)


def one_in(share: int, values: Iterable[Any]) -> list[ParameterSet]:
    """Parameters of a family that differs only in data: the first of each `share` of them for `make test`, the others
    for `make prove`. A tuple is the parameters of one case."""
    cases: list[tuple[Any, ...]] = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*case, marks=[] if number % share == 0 else thorough) for number, case in enumerate(cases)]
