"""A server for the terminals of a module, and the environment of their programs."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from tests.server.kit import TOKEN, Served, shared


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with shared(tmp_path_factory.mktemp("served")) as served:
        yield served


@pytest.fixture
def env(served: Served) -> dict[str, str]:
    """Environment of a program that finds the server, without the variables of the test run."""
    return variables(served)


def variables(served: Served) -> dict[str, str]:
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH", "XDG_CONFIG_HOME") if name in os.environ}
    return {**kept, "XDG_STATE_HOME": str(served.folder / "state"), "BANKSMAN_TOKEN": TOKEN, "BANKSMAN_URL": served.url}
