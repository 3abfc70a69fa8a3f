"""Page of a front end: the host of a session, and the room of each host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect
from tests.cluster.fleet import Fleet, fleet
from tests.cluster.shared import shared, some_prefix
from tests.server.kit import Served
from tests.server.web.browser.tab import Visits
from tests.thorough import thorough

from banksman.testing.nats_servers import Servers


@pytest.fixture(scope="session")
def nats_one() -> Iterator[Servers]:
    yield from shared(1)


@pytest.fixture
def many(tmp_path: Path, nats_one: Servers) -> Iterator[Fleet]:
    with fleet(tmp_path, nats_one, some_prefix()) as found:
        found.host("build-1", room=3)
        yield found


@pytest.fixture
def served(many: Fleet) -> Served:
    return many.front("front")


@thorough
def test_page_shows_hosts_and_which_has_a_session(visits: Visits) -> None:
    session = visits.served.open({"prompt": ["stream 20 0.01 word"]}, name="there")
    tab = visits.tab(session)
    expect(tab.page.locator(".header .host")).to_have_text("on build-1")
    row = tab.page.locator(f'[data-session="{session}"]')
    expect(row).to_contain_text("on build-1")
    expect(row).to_have_attribute("data-state", "idle")
    hosts = tab.page.locator(".hosts")
    expect(hosts.locator("summary")).to_have_text("1 host, 1 of 3 places taken")
    expect(hosts.locator("li").first).to_be_hidden()
    hosts.locator("summary").click()
    expect(hosts.locator("li")).to_have_text([re.compile(r"build-1\s*1 of 3"), re.compile(r"front\s*front end")])
    # The host answers the ask, and the page streams it from the log.
    tab.send("Say twenty words.")
    expect(tab.items("ended")).to_have_count(1)
    assert tab.said().split() == [f"word{number}" for number in range(20)]
