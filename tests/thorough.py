"""How much of what could be tried is tried: all of it by `make prove`, which CI runs too; a part of it by `make test`,
which has ten minutes."""

from __future__ import annotations

import os

import pytest

IS_THOROUGH = "BANKSMAN_EXPLORE" in os.environ

# A test that is slow and much like one that stays: `make test` leaves it out, `make prove` does not.
thorough = pytest.mark.thorough
