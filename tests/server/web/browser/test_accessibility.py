"""The page on a phone, by keyboard, with a screen reader and in the dark."""

from __future__ import annotations

import re
from importlib import resources
from typing import Any

import pytest
from playwright.sync_api import Page, expect
from tests.server.web.browser.chromium import Chromium
from tests.server.web.browser.tab import Tab, Visits

pytestmark = pytest.mark.thorough

AXE = (resources.files("axe_playwright_python") / "axe.min.js").read_text(encoding="utf-8")
PHONE = {"width": 390, "height": 844}
SCRIPT = {
    "prompt 1": [
        "think Let me see what there is.",
        'tool_use Bash {"command": "ls -l", "description": "List the files"}',
        "tool_result total 4 README.md",
        'tool_use Edit {"file_path": "/srv/a.py", "old_string": "one", "new_string": "two"}',
        "tool_result ok",
        'tool_use TodoWrite {"todos": [{"content": "Look", "status": "completed", "activeForm": "Looking"}, '
        '{"content": "Change", "status": "in_progress", "activeForm": "Changing"}]}',
        "tool_result ok",
        "say # What I found\n\nThere is **one** file, `README.md`, see [the site](https://example.org/).",
    ],
    "prompt 2": ['ask Bash {"command": "make test"}', "say All green."],
    "prompt 3": ["stream 5000 0.02"],
}


def test_page_works_on_a_phone(visits: Visits) -> None:
    served = visits.served
    session = served.open(SCRIPT, name="in-a-pocket")
    served.open(name="another-one")
    tab = visits.tab(session, viewport=PHONE, has_touch=True, is_mobile=True, device_scale_factor=2)
    page = tab.page
    served.outcome(session, served.ask(session, "Have a look round, and tell me " + "everything " * 20))
    expect(tab.items("ended")).to_have_count(1)
    _fits(page)
    visits.chromium.keep("transcript")
    # The sessions are in a drawer, which closes after a choice.
    page.get_by_role("button", name="Sessions", exact=True).tap()
    expect(page.get_by_role("navigation", name="Sessions")).to_be_in_viewport()
    visits.chromium.keep("sessions")
    _fits(page)
    page.locator('nav[aria-label="Sessions"]').get_by_text("another-one").tap()
    expect(tab.sessions.filter(has_text="another-one")).not_to_be_in_viewport()
    tab.message.tap()
    tab.send("Hello from a phone.")
    tab.wait_said("Hello from a phone.")
    # So is the panel.
    page.get_by_role("button", name="Panel", exact=True).tap()
    page.get_by_role("tab", name="Why").tap()
    expect(tab.section("Why")).to_be_in_viewport()
    _fits(page)
    visits.chromium.keep("why")
    page.keyboard.press("Escape")
    # A question can be answered with a thumb.
    page.goto(f"{tab.url}/#/s/{session}")
    served.ask(session, "Run the tests.")
    allow = tab.questions.get_by_role("button", name="Allow", exact=True)
    expect(allow).to_be_in_viewport()
    box = allow.bounding_box()
    assert box is not None
    assert box["height"] >= 32, "too small for a thumb"
    _fits(page)
    visits.chromium.keep("question")
    allow.tap()
    tab.wait_said("All green.")


def _fits(page: Page) -> None:
    width, wide = page.evaluate("[document.scrollingElement.clientWidth, document.scrollingElement.scrollWidth]")
    assert wide <= width, f"the page is {wide} wide, and the phone {width}"


def test_page_works_by_keyboard_alone(visits: Visits) -> None:
    served = visits.served
    served.open(name="another-one")
    session = served.open(SCRIPT, name="typed")
    tab = visits.tab()
    page, press = tab.page, tab.page.keyboard.press
    expect(tab.sessions).to_have_count(2)
    # To the session: find it by its name.
    press("/")
    expect(page.get_by_label("Find a session")).to_be_focused()
    page.keyboard.type("typed")
    expect(tab.sessions).to_have_count(1)
    press("Enter")
    expect(page).to_have_url(re.compile(re.escape(session)))
    press("Escape")
    # A turn.
    press("c")
    expect(tab.message).to_be_focused()
    page.keyboard.type("Have a look")
    press("Shift+Enter")
    page.keyboard.type("round.")
    expect(tab.message).to_have_value("Have a look\nround.")
    press("Enter")
    expect(tab.items("ended")).to_have_count(1)
    # A question.
    page.keyboard.type("Run the tests.")
    press("Enter")
    expect(tab.questions).to_have_count(1)
    # Typed into the message it is a letter, and no answer.
    page.keyboard.type("ad")
    expect(tab.message).to_have_value("ad")
    expect(tab.questions).to_have_count(1)
    press("Backspace")
    press("Backspace")
    press("Escape")
    # A key does not answer a question that has just appeared.
    expect(tab.questions.locator("button.is-yes:not([aria-disabled])").first).to_be_visible()
    press("a")
    tab.wait_said("All green.")
    expect(tab.items("ended")).to_have_count(2)
    # An interrupt.
    press("c")
    page.keyboard.type("Go on for ever.")
    press("Enter")
    tab.wait_said("tick3 ")
    press("Escape")
    press("i")
    expect(page.locator("[data-receipt]")).to_be_visible()
    expect(tab.items("ended")).to_have_count(3)
    # The help lists the keys.
    press("?")
    expect(page.get_by_role("dialog")).to_be_visible()
    visits.chromium.keep("help")
    press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    press("w")
    expect(tab.section("Why")).to_be_visible()
    press("q")
    expect(tab.section("Queue")).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_has_no_serious_accessibility_violation(visits: Visits, chromium: Chromium, scheme: str) -> None:
    """axe finds no serious and no critical violation in any state of the page.

    The dark scheme repeats only the states whose colours differ.
    """
    is_whole = scheme == "light"
    served = visits.served
    tab = visits.tab(color_scheme=scheme)
    expect(tab.page.locator("[data-empty]")).to_be_visible()
    if is_whole:
        _look(tab, chromium, "empty")
    session = served.open(SCRIPT, name="looked-at")
    tab.visit(session)
    tab.send("Have a look round.")
    expect(tab.items("ended")).to_have_count(1)
    _look(tab, chromium, "transcript")
    tab.send("Run the tests.")
    expect(tab.questions).to_have_count(1)
    served.ask(session, "Later.", priority="background")
    _look(tab, chromium, "question")
    for name in ("Queue", "Why"):
        tab.page.get_by_role("tab", name=name).click()
        expect(tab.section(name)).to_be_visible()
        _look(tab, chromium, name.lower())
    if not is_whole:
        return
    tab.message.focus()
    tab.page.keyboard.press("Escape")
    tab.page.keyboard.press("?")
    expect(tab.page.get_by_role("dialog")).to_be_visible()
    _look(tab, chromium, "help")
    tab.page.keyboard.press("Escape")


def test_theme_choice_survives_a_reload(visits: Visits) -> None:
    """The theme follows the machine until the user chooses one, and the choice persists."""
    tab = visits.tab(visits.served.open(name="at-night"))
    ground = "getComputedStyle(document.body).backgroundColor"
    light = tab.page.evaluate(ground)
    toggle = tab.page.get_by_role("button", name=re.compile("^theme", re.I))
    for _ in range(3):
        if tab.page.evaluate("document.documentElement.dataset.theme") == "dark":
            break
        toggle.click()
    assert tab.page.evaluate(ground) != light
    dark = tab.page.evaluate(ground)
    tab.page.reload()
    tab.wait_live()
    assert tab.page.evaluate(ground) == dark


def _look(tab: Tab, chromium: Chromium, moment: str) -> None:
    chromium.keep(moment)
    tab.page.evaluate(AXE)
    found: dict[str, Any] = tab.page.evaluate("axe.run()")
    serious = [each for each in found["violations"] if each["impact"] in ("serious", "critical")]
    told = [
        f"{each['id']} ({each['impact']}): {each['help']}: {[node['html'][:200] for node in each['nodes'][:5]]}"
        for each in serious
    ]
    assert not told, f"{moment}:\n" + "\n".join(told)
