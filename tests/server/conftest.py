"""Two servers: one for all tests of a module, and one for a test that ends it, or counts or reads all that it has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.kit import Served, shared


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Has what other tests of the module made there, in any order."""
    with shared(tmp_path_factory.mktemp("server")) as served:
        yield served


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Served]:
    """Has nothing, and belongs to one test."""
    with Served(tmp_path / "server") as served:
        yield served
