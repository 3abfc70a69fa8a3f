"""Many tabs share one stream: browsers allow six connections per origin, and users open more tabs than that."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import expect
from tests.server.web.browser.tab import Visits, followers, told, wait_for

TABS = 10
# Each tab holds a lock by which the others know that it lives. The leader also holds this one.
HOLDERS = """async () => (await navigator.locks.query()).held
  .filter((lock) => lock.name === "banksman /").map((lock) => lock.clientId)"""


@pytest.mark.thorough
def test_ten_tabs_are_live_and_each_can_post(visits: Visits) -> None:
    served = visits.served
    session = served.open(name="crowded")
    # Tall, so that ten turns are in the document at the same time.
    tabs = [visits.tab(session, viewport={"width": 1280, "height": 2400})]
    tabs += [visits.another(tabs[0].page.context, session) for _ in range(TABS - 1)]
    for number, tab in enumerate(tabs):
        tab.send(f"Hello from tab {number}.")
    # Each tab shows the prompts and answers of all of them.
    for tab in tabs:
        expect(tab.items("ended")).to_have_count(TABS)
        expect(tab.items("text")).to_have_count(TABS)
        expect(tab.items("prompt")).to_have_count(TABS)
        assert sorted(tab.said().split("\n")) == sorted(f"Hello from tab {number}." for number in range(TABS))
    assert followers(served) == 1


@pytest.mark.thorough
def test_closing_the_leading_tab_hands_over_the_stream(visits: Visits) -> None:
    """Close the leading tab in the middle of the stream, each time."""
    served = visits.served
    session = served.open({"prompt": ["stream 200 0.02"]}, name="handed-over")
    tabs = [visits.tab(session)]
    tabs += [visits.another(tabs[0].page.context, session) for _ in range(3)]
    last = tabs[-1]
    last.send("Go on while others leave.")
    leaders: set[Any] = set()
    for number, tab in enumerate(tabs[:-1]):
        last.wait_said(f"tick{10 + number * 10} ")
        leaders.update(wait_for(lambda: last.page.evaluate(HOLDERS), "somebody leads", page=last.page))
        tab.page.close()
    expect(last.items("ended")).to_have_count(1)
    leaders.update(last.page.evaluate(HOLDERS))
    assert len(leaders) > 1, "nobody took over: the leader was never closed"
    assert last.said().split() == told(served, session).split() == [f"tick{number}" for number in range(200)]
    last.wait_live()
    wait_for(lambda: followers(served) == 1, "one stream, and no more", page=last.page)
