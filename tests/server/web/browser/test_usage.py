"""Usage view of the page: the plot of the last days, and the table by session, agent and caller."""

from __future__ import annotations

import re

from playwright.sync_api import expect
from tests.server.web.browser.tab import Visits
from tests.thorough import thorough


@thorough
def test_page_shows_usage_by_day_and_by_caller(visits: Visits) -> None:
    served = visits.served
    session = served.open(name="counted")
    for caller in ("alice", "alice", "bob <b>"):
        turn = served.post(f"/v1/sessions/{session}/turns", {"prompt": "hello", "caller": caller})["turn"]
        assert served.outcome(session, turn)["kind"] == "done"
    tab = visits.tab(session)
    page = tab.page
    page.get_by_role("link", name="Usage").click()
    expect(page).to_have_url(re.compile(r"#/usage$"))
    view = page.get_by_role("region", name="Usage")
    expect(view.get_by_role("heading", name="Usage")).to_be_visible()
    plot = view.get_by_role("img")
    expect(plot.locator("g")).to_have_count(30)
    # All turns ran today, or yesterday if midnight has just passed.
    expect(plot.locator("g:has(.usage-input)")).not_to_have_count(0)
    assert float(plot.locator(".usage-input").last.get_attribute("height") or 0) > 0
    view.get_by_role("button", name="By caller").click()
    expect(view.locator("tbody th")).to_have_text(["alice", "bob <b>"])
    expect(view.locator("tbody tr").first.locator("td").first).to_have_text("2")
    # A long name without a space is wrapped, so that the numbers stay visible.
    long = "a" * 200
    turn = served.post(f"/v1/sessions/{session}/turns", {"prompt": "hello", "caller": long})["turn"]
    assert served.outcome(session, turn)["kind"] == "done"
    view.get_by_role("button", name="By agent").click()
    view.get_by_role("button", name="By caller").click()
    expect(view.locator("tbody th")).to_have_text([long, "alice", "bob <b>"])
    assert view.locator(".usage-table").evaluate("it => it.scrollWidth <= it.clientWidth")
    view.get_by_role("button", name="By session").click()
    expect(view.locator("tbody th")).to_have_text([session])
    # The back button leads to the session again.
    page.go_back()
    expect(tab.log).to_be_visible()
    expect(view).to_have_count(0)
