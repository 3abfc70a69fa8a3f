"""One tab of the page, by the names that a user or a screen reader knows its parts by."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from playwright.sync_api import BrowserContext, Locator, Page, expect
from tests.server.kit import Served
from tests.server.web.browser.chromium import PATIENCE_MS, Chromium

T = TypeVar("T")

expect.set_options(timeout=PATIENCE_MS)


# Scrolls from the first item to the last, by less than a screen each time: the document holds only the items nearby.
READ = """async (log) => {
  let scroller = log;
  while (!/auto|scroll/.test(getComputedStyle(scroller).overflowY)) scroller = scroller.parentElement;
  const drawn = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  const found = new Map();
  scroller.scrollTop = 0;
  for (let step = 0; step < 500; step += 1) {
    await drawn();
    for (const node of log.querySelectorAll("[data-item]")) {
      const { item, turn, seq } = node.dataset;
      const key = `${item} ${turn} ${seq}`;
      found.set(key, { item, turn, seq: Number(seq), text: node.innerText });
    }
    if (scroller.scrollTop + scroller.clientHeight >= scroller.scrollHeight - 1) break;
    scroller.scrollTop += scroller.clientHeight * 0.8;
  }
  return [...found.values()];
}"""


@dataclass(frozen=True)
class Item:
    """An item of the transcript, as shown."""

    item: str
    turn: str | None
    seq: int
    text: str


class Tab:
    """One tab.

    `url`: the server as the browser sees it.
    """

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.page: Page = context.new_page()
        self.url = url

    # -- navigation --------------------------------------------------------------------------------------------------
    def enter(self, link: str, session: str | None = None) -> Tab:
        """Open a link with a one-time code, as on the first visit."""
        self.page.goto(link)
        self.wait_live()
        if session is not None:
            self.visit(session)
        return self

    def visit(self, session: str) -> Tab:
        """Open the address of a session, like a bookmark. The browser is logged in."""
        self.page.goto(f"{self.url}/#/s/{session}")
        self.wait_live()
        expect(self.log).to_be_visible()
        return self

    def wait_live(self) -> None:
        self.wait_connection("live")

    def wait_connection(self, *states: str) -> None:
        expect(self.connection).to_have_attribute("data-connection", re.compile(f"^({'|'.join(states)})$"))

    # -- parts -------------------------------------------------------------------------------------------------------
    @property
    def connection(self) -> Locator:
        return self.page.locator('[role="status"][data-connection]')

    @property
    def sessions(self) -> Locator:
        return self.page.locator('nav[aria-label="Sessions"] [data-session]')

    @property
    def log(self) -> Locator:
        return self.page.locator('[role="log"][aria-label="Transcript"]')

    def items(self, kind: str | None = None, turn: str | None = None) -> Locator:
        wanted = "[data-item]" if kind is None else f'[data-item="{kind}"]'
        return self.log.locator(wanted + ("" if turn is None else f'[data-turn="{turn}"]'))

    @property
    def message(self) -> Locator:
        return self.page.locator('textarea[aria-label="Message"]')

    @property
    def interrupt(self) -> Locator:
        return self.page.get_by_role("button", name="Interrupt", exact=True)

    @property
    def questions(self) -> Locator:
        return self.page.locator('section[aria-label="Questions"] [data-question]')

    def section(self, name: str) -> Locator:
        return self.page.locator(f'section[aria-label="{name}"]')

    # -- actions -----------------------------------------------------------------------------------------------------
    def send(self, prompt: str, *, priority: str | None = None) -> None:
        if priority is not None:
            self.page.locator('select[aria-label="Priority"]').select_option(priority)
        self.message.fill(prompt)
        self.message.press("Enter")
        expect(self.message).to_have_value("")

    def said(self, turn: str | None = None) -> str:
        """Return the agent's text in the transcript, or in one turn of it, as shown."""
        return "\n".join(self.items("text", turn).all_inner_texts())

    def read(self) -> list[Item]:
        """Scroll through the whole transcript and return its items. The scroll position is at the end afterwards."""
        found: list[dict[str, Any]] = self.log.evaluate(READ)
        return [Item(each["item"], each.get("turn"), each["seq"], each["text"]) for each in found]

    def wait_said(self, text: str, turn: str | None = None) -> None:
        expect(self.items("text", turn).filter(has_text=text).first).to_be_visible()


class Visits:
    """Tabs of one browser at one server."""

    def __init__(self, chromium: Chromium, served: Served) -> None:
        self.chromium = chromium
        self.served = served
        # Browsers that are logged in, with the address: another port is another origin.
        self._logged_in: list[tuple[BrowserContext, str]] = []

    def tab(self, session: str | None = None, *, url: str | None = None, **options: Any) -> Tab:
        """Open the first tab of a new browser context, logged in."""
        return self.another(self.chromium.context(**options), session, url=url)

    def another(self, context: BrowserContext, session: str | None = None, *, url: str | None = None) -> Tab:
        address = url or self.served.url
        self.chromium.belongs(address)
        tab = Tab(context, address)
        if (context, address) in self._logged_in:
            return tab.visit(session) if session is not None else tab
        self._logged_in.append((context, address))
        return tab.enter(self.served.link(address), session)


def wait_for(fact: Callable[[], T | None], what: str, *, page: Page | None = None) -> T:
    """Wait for a fact that has no element in the page. With `page`, the browser's events are handled meanwhile."""
    deadline = time.monotonic() + PATIENCE_MS / 1000
    while True:
        found = fact()
        if found:
            return found
        assert time.monotonic() < deadline, f"this did not come: {what}"
        # No event reports this: poll the server.
        if page is not None:
            page.wait_for_timeout(50)
        else:
            time.sleep(0.05)


def followers(served: Served) -> int:
    """Return the number of open event streams of the server, of any kind."""
    lines = served.request("GET", "/metrics").body.decode().splitlines()
    return sum(int(float(line.split()[1])) for line in lines if line.startswith("banksman_followers{"))


def events(served: Served, session: str) -> list[Any]:
    """Return all events of a session, including partial updates."""
    found: list[Any] = []
    after = ""
    while True:
        page = served.get(f"/v1/sessions/{session}/events?limit=1000&partial=1{after}")
        found += page["events"]
        if not page["events"]:
            return found
        after = f"&after={page['next']}"


def told(served: Served, session: str) -> str:
    """Return the agent's text according to the log, to compare it with the page.

    Partial text counts only if the whole never came, because the agent was stopped or killed before that.
    """
    said = ""
    pieces = ""
    for event in events(served, session):
        if event["kind"] == "turn.ended":
            said, pieces = said + pieces, ""
        if event["kind"] == "update":
            whole = _texts(event["body"]["updates"])
            pieces = "" if whole else pieces + _texts(event["body"].get("partial", []))
            said += whole
    return said + pieces


def _texts(updates: list[Any]) -> str:
    kind = "agent_message_chunk"
    return "".join(update["content"]["text"] for update in updates if update["sessionUpdate"] == kind)
