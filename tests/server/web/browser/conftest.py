"""What every browser test gets: a server of its own, and a Chromium that complains of what no page of ours may do."""

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
    """Its pages are drawn at the end of the test, however it ended, and then it is asked for complaints. It goes before
    the server does: that pages then miss it is no complaint."""
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
