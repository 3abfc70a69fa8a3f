"""Rewrite the assertions of the helpers, so that a failure shows both values."""

from __future__ import annotations

import pytest

pytest.register_assert_rewrite("tests.docs.blocks", "tests.docs.handlers")
