"""The first visit: by the address that the server prints, once."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from tests.browser.tab import Tab, Visits
from tests.serve.kit import TOKEN


def test_the_first_visit(visits: Visits) -> None:
    tab = visits.tab()
    page = tab.page
    # The token was used and is gone: not in the address, not in the way back, not where a script could read it.
    assert "token" not in page.url
    assert TOKEN not in page.evaluate(
        "document.documentElement.outerHTML + JSON.stringify({...localStorage, ...sessionStorage})"
    )
    (cookie,) = page.context.cookies()
    assert cookie.get("httpOnly") is True
    assert cookie.get("sameSite") == "Strict"
    assert cookie.get("value") != TOKEN
    # Nothing is there yet, and it says what to do about it.
    expect(tab.sessions).to_have_count(0)
    expect(page.locator("[data-empty]")).to_be_visible()
    assert "Banksman" in page.title()
    # Whoever comes again needs no token.
    page.goto(f"{tab.url}/")
    tab.wait_live()


@pytest.mark.thorough
def test_without_a_token_it_says_so(visits: Visits) -> None:
    visits.chromium.expect(r"status of 401")
    visits.chromium.belongs(visits.served.url)
    tab = Tab(visits.chromium.context(), visits.served.url)
    tab.page.goto(f"{tab.url}/")
    tab.wait_connection("refused")
    expect(tab.page.get_by_text("Open the address that the server printed").first).to_be_visible()
