"""The complaints catch every kind of page fault. Otherwise no browser test would prove anything."""

from __future__ import annotations

import pytest
from playwright.sync_api import expect
from tests.server.kit import Served
from tests.server.web.browser.chromium import Chromium
from tests.server.web.browser.tab import wait_for

DEEDS = {
    "console.error('oh no')": "console error: oh no",
    "setTimeout(() => { throw new Error('not caught'); })": "not caught",
    "Promise.reject(new Error('nor this'))": "nor this",
    "fetch('http://elsewhere.invalid/').catch(() => {})": "policy: connect-src http://elsewhere.invalid/",
    "new Image().src = 'http://other.invalid/spy.png'": "http://other.invalid/spy.png",
    "open('http://127.0.0.1:9/elsewhere')": "a request to elsewhere: http://127.0.0.1:9/elsewhere",
    "try { document.body.setAttribute('onclick', '1') } catch {}": "trusted-types-sink Element onclick",
    "document.body.append(Object.assign(document.createElement('style'), {textContent: 'a{}'}))": "policy: style-src",
    "try { document.body.innerHTML = '<p>' } catch {}": "trusted-types-sink Element innerHTML",
}


@pytest.mark.thorough
def test_complaints_catch_every_page_fault(chromium: Chromium, served: Served) -> None:
    chromium.belongs(served.url)
    page = chromium.context().new_page()
    page.goto(f"{served.url}/")
    expect(page.locator("body")).to_be_attached()
    for deed, complaint in DEEDS.items():
        assert not any(complaint in said for said in chromium.complaints)
        page.evaluate(f"() => {{ {deed} }}")
        wait_for(lambda: any(complaint in said for said in chromium.complaints), f"a complaint of {deed}", page=page)  # noqa: B023
    chromium.expect("")
