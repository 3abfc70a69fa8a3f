"""Fixtures for clusters of one and of three real NATS nodes.

tests/testing/conftest.py shows how other folders use them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.cluster.shared import shared, some_prefix

from banksman.cluster import nats
from banksman.testing.nats_servers import Servers


@pytest.fixture(scope="session")
def nats_one() -> Iterator[Servers]:
    yield from shared(1)


@pytest.fixture(scope="session")
def nats_three() -> Iterator[Servers]:
    """Three shared nodes.

    A test that kills or stops a node restarts it and waits until it is ready for the next test.
    """
    yield from shared(3)


@pytest.fixture
def prefix() -> str:
    return some_prefix()


@pytest.fixture(autouse=True)
def patient(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait long for the shared single node: it always answers, however busy the machine is.

    A node of three may be dead.
    """
    if "nats_one" in request.fixturenames:
        monkeypatch.setattr(nats, "ANSWER_SECONDS_MAX", 30.0)
