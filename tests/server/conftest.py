"""Fixtures with two servers: one for all tests of a module, and one for a single test.

A test takes the second if it ends the server, or counts or reads everything that the server has.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.kit import Served, shared


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Shared server. It has what other tests of the module made there, in any order."""
    with shared(tmp_path_factory.mktemp("server")) as served:
        yield served


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Served]:
    """Empty server for one test."""
    with Served(tmp_path / "server") as served:
        yield served
