"""A session of 100,000 events opens and scrolls to both ends, and the document never holds more than a window of it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect
from tests.server.kit import Served
from tests.server.web.browser import history
from tests.server.web.browser.tab import Tab, Visits

from banksman.testing import fake_agent

EVENTS = 100_000
# A window of items with their contents, and the rest of the page.
NODES_MAX = 6000
# The bound does not test speed, but that the time is not proportional to the history: reading all of it takes minutes.
OPEN_SECONDS_MAX = 20.0
SESSION = "s-00000000000long0"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    """Another server than that of the other tests: it starts with a history."""
    served = Served(tmp_path / "served")
    history.write(
        served.folder / "store.db", SESSION, name="long", events=EVENTS, command=fake_agent.command({"prompt": []})
    )
    with served:
        yield served


@pytest.mark.thorough
def test_session_of_100000_events_opens_with_a_bounded_document(visits: Visits) -> None:
    served = visits.served
    tab = visits.tab()
    began = time.monotonic()
    tab.visit(SESSION)
    last = served.get(f"/v1/sessions/{SESSION}/events?before=999999999&limit=1")["events"][-1]
    expect(tab.items("ended").last).to_be_in_viewport()
    opened = time.monotonic() - began
    print(f"\n100,000 events: the newest is seen after {opened:.2f} s")
    assert opened < OPEN_SECONDS_MAX
    assert tab.items("ended").last.get_attribute("data-turn") == last["turn"]
    _is_bounded(tab)
    # Scroll up by hand: items outside the window leave the document, and new ones appear.
    began = time.monotonic()
    for _ in range(40):
        tab.log.evaluate("(log) => { log.scrollTop = 0; log.dispatchEvent(new Event('scroll')); }")
        tab.page.wait_for_timeout(25)
    _is_bounded(tab)
    print(f"scrolled up in forty steps in {time.monotonic() - began:.2f} s")
    # To the first item, and back to the last, by key, without scrolling through all of it.
    tab.log.focus()
    tab.page.keyboard.press("g")
    first = tab.items("prompt").filter(has_text="Prompt 0").first
    expect(first).to_be_in_viewport()
    _is_bounded(tab)
    tab.page.keyboard.press("Shift+G")
    expect(tab.items("ended").last).to_be_in_viewport()
    assert tab.items("ended").last.get_attribute("data-turn") == last["turn"]
    # The session still works.
    tab.send("Are you there?")
    tab.wait_said("Are you there?")
    _is_bounded(tab)


def _is_bounded(tab: Tab) -> None:
    nodes = tab.page.evaluate("document.querySelectorAll('*').length")
    assert nodes <= NODES_MAX, f"{nodes} nodes are in the page"
