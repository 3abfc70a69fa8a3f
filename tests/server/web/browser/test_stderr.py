"""The why panel shows the end of the agent's stderr as text, and follows it."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from tests.server.web.browser.tab import Visits


@pytest.mark.thorough
def test_why_panel_shows_the_stderr_of_the_agent(visits: Visits) -> None:
    served = visits.served
    session = served.open(name="noisy")
    tab = visits.tab(session)
    tab.page.get_by_role("tab", name="Why").click()
    panel = tab.section("Why")
    shown = panel.get_by_label("stderr of the agent")
    expect(panel).to_contain_text("noisy")
    # No process, no stderr.
    expect(shown).to_be_hidden()
    served.outcome(session, served.ask(session, "@@stderr warning: <img src=x onerror=alert(1)>"))
    expect(shown).to_have_text("warning: <img src=x onerror=alert(1)>")
    expect(panel.locator("img")).to_have_count(0)
    for _ in range(20):
        served.outcome(session, served.ask(session, "@@stderr " + "x" * 1000))
    served.outcome(session, served.ask(session, "@@stderr the last line"))
    expect(shown).to_contain_text("the last line")
    # The page shows the end of it.
    expect(shown).to_contain_text("[…]")
    assert len(shown.text_content() or "") <= 16384 + 4
    panel.get_by_text("stderr of the agent").click()
    expect(shown).to_be_hidden()
