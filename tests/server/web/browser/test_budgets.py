"""Budgets, as the page shows them."""

from __future__ import annotations

from playwright.sync_api import expect
from tests.server.web.browser.tab import Visits
from tests.thorough import thorough

pytestmark = thorough


def test_session_over_budget_says_so_until_person_raises_it(visits: Visits) -> None:
    served = visits.served
    session = served.open(name="budgeted", budget={"tokens": 1000}, on_budget="ask")
    served.outcome(session, served.ask(session, "@@used 1200 0"))
    tab = visits.tab(session)
    for number in range(2):
        served.ask(session, f"later {number}")
    words = "over budget: 1,200 of 1,000 tokens; 2 asks wait"
    expect(tab.page.locator(".over-budget")).to_have_text(words)
    row = tab.page.locator(f'[data-session="{session}"]')
    expect(row).to_contain_text(words)
    expect(tab.page.locator('[data-item="note"]', has_text="Over budget: 1,200 of 1,000 tokens.")).to_have_count(1)
    card = tab.page.locator(".question")
    expect(card).to_contain_text("over budget: 1,200 of 1,000 tokens")
    card.get_by_role("button", name="Raise the budget").click()
    expect(tab.page.locator(".over-budget")).to_have_count(0)
    expect(tab.items("ended")).to_have_count(3)
