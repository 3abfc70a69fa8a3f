"""Make the pictures of docs/tutorial.md while following it: they show what the reader sees at each step.

`make screenshots` puts them into docs/images. Otherwise they are artefacts of the run, for comparison.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect
from tests.server.web.browser.chromium import ROOT, Chromium, artefacts
from tests.server.web.browser.tab import Tab
from tests.tutorial import PAGE, Picture, follow, steps

pytestmark = pytest.mark.thorough

NAME = "chores"
SIZE = {"width": 1280, "height": 720}


def test_tutorial_pictures_are_made_while_it_is_followed(chromium: Chromium, tmp_path: Path) -> None:
    # The tutorial kills the server at its end, while the page is still open.
    chromium.expect_lost_connections()
    context = chromium.context(viewport=SIZE)
    tabs: list[Tab] = []
    made: list[str] = []

    def take(name: str, address: str) -> None:
        if not tabs:
            url, _, fragment = address.partition("/#")
            chromium.belongs(url)
            tabs.append(Tab(context, url))
            tabs[0].page.goto(f"{url}/#{fragment}")
            tabs[0].wait_live()
        MOMENTS[name](tabs[0])
        tabs[0].page.evaluate("document.activeElement?.blur()")
        _folder().joinpath(name).write_bytes(tabs[0].page.screenshot(animations="disabled"))
        made.append(name)

    follow(tmp_path / "home", take)
    named = [step.name for step in steps(PAGE.read_text(encoding="utf-8")) if isinstance(step, Picture)]
    assert made == named
    # The killed server had another port than the next one, so this page has lost it, and shows that.
    tabs[0].wait_connection("waiting", "connecting", "offline")


def _folder() -> Path:
    wanted = os.environ.get("BANKSMAN_SCREENSHOTS")
    return ROOT / wanted if wanted else artefacts()


def _page(tab: Tab) -> None:
    tab.sessions.first.click()
    tab.wait_said("Are you there?")


def _timeline(tab: Tab) -> None:
    tab.sessions.filter(has_text=NAME).first.click()
    expect(tab.items("ended")).to_have_count(2)
    expect(tab.section("Timeline").locator('[data-mark="preempt"]')).to_have_count(1)


def _question(tab: Tab) -> None:
    expect(tab.questions).to_have_count(1)


def _why(tab: Tab) -> None:
    tab.page.get_by_role("tab", name="Why").click()
    expect(tab.section("Why")).to_contain_text("And then?")


MOMENTS: dict[str, Callable[[Tab], None]] = {
    "page.png": _page,
    "timeline.png": _timeline,
    "question.png": _question,
    "why.png": _why,
}
