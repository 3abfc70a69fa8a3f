"""Fixtures of every browser test: a server, and a Chromium that complains about forbidden actions of a page."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.kit import Served
from tests.server.web.browser.chromium import Chromium
from tests.server.web.browser.tab import Visits


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path / "served") as server:
        yield server


@pytest.fixture
def chromium(served: Served, request: pytest.FixtureRequest) -> Iterator[Chromium]:
    """Take a screenshot at the end of the test, also a failed one, close the browser, and check its complaints.

    The browser ends before the server, so the lost server causes no complaint.
    """
    assert served.process is not None
    name = re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
    chromium = Chromium(name)
    try:
        yield chromium
        chromium.keep()
    finally:
        chromium.close()
    assert not chromium.complaints, "\n".join(chromium.complaints)


@pytest.fixture
def visits(chromium: Chromium, served: Served) -> Visits:
    return Visits(chromium, served)
