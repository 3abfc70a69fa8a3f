"""First visit by the link that the server prints, which works once."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from playwright.sync_api import expect
from tests.server.kit import TOKEN
from tests.server.web.browser.tab import Tab, Visits
from tests.thorough import thorough


@thorough
def test_link_logs_this_browser_in_once(visits: Visits) -> None:
    link = visits.served.link()
    visits.chromium.belongs(visits.served.url)
    tab = Tab(visits.chromium.context(), visits.served.url).enter(link)
    page = tab.page
    # The code is used, and gone from the address and from the browser's history. No cookie is set, and the storage
    # holds a token for this browser.
    assert "code" not in page.url
    assert page.context.cookies() == []
    kept = page.evaluate("JSON.stringify({...localStorage, ...sessionStorage})")
    assert "bmp_" in kept
    assert TOKEN not in kept + page.evaluate("document.documentElement.outerHTML")
    # There is no session yet, and the page says what to do.
    expect(tab.sessions).to_have_count(0)
    expect(page.locator("[data-empty]")).to_be_visible()
    assert "Banksman" in page.title()
    # This browser needs no link now, in another tab either. The link admits no other browser.
    page.goto(f"{tab.url}/")
    tab.wait_live()
    another = Tab(page.context, tab.url)
    another.page.goto(f"{tab.url}/")
    another.wait_live()
    visits.chromium.expect(r"status of 401")
    stranger = Tab(visits.chromium.context(), tab.url)
    stranger.page.goto(link)
    stranger.wait_connection("refused")


@thorough
def test_page_without_a_link_takes_the_pasted_token(visits: Visits) -> None:
    visits.chromium.expect(r"status of 401")
    visits.chromium.belongs(visits.served.url)
    context = visits.chromium.context()
    tab = Tab(context, visits.served.url)
    tab.page.goto(f"{tab.url}/")
    tab.wait_connection("refused")
    other = Tab(context, visits.served.url)
    other.page.goto(f"{tab.url}/")
    other.wait_connection("refused")
    expect(tab.page.get_by_text("banksman page", exact=True)).to_be_visible()
    box = tab.page.get_by_label("The server's token")
    box.fill("not-it")
    box.press("Enter")
    expect(tab.page.get_by_text("cannot log in: the token is wrong")).to_be_visible()
    box.fill(TOKEN)
    box.press("Enter")
    tab.wait_live()
    # All tabs of this browser are logged in with it.
    other.wait_live()


@thorough
def test_browser_sends_no_credentials_to_another_port(visits: Visits) -> None:
    """An agent has started a program at another port, which the user opens in the same browser."""
    heard: list[str] = []

    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append(str(self.headers))
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            # The page has an inline icon. A request for one might come after the server is gone, and the browser would
            # complain.
            self.wfile.write(b'<!doctype html><link rel="icon" href="data:,">')

        def log_message(self, format: str, *args: object) -> None: ...  # noqa: A002

    with HTTPServer(("127.0.0.1", 0), Other) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            tab = visits.tab()
            url = f"http://127.0.0.1:{other.server_port}"
            visits.chromium.belongs(url)
            tab.page.goto(url)
        finally:
            other.shutdown()
            thread.join()
    assert heard
    assert not [each for each in heard if "bmp_" in each or "cookie" in each.lower() or "authorization" in each.lower()]
