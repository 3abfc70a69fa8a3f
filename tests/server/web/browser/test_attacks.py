"""Attacks on the page: each message is sent once, and typed text stays text."""

from __future__ import annotations

import os
import signal

import pytest
from playwright.sync_api import Route, expect
from tests.server.kit import Served
from tests.server.web.browser.relay import Relay
from tests.server.web.browser.tab import Visits, events, wait_for

pytestmark = pytest.mark.thorough


def _asked(served: Served, session: str) -> list[str]:
    return [event["body"]["prompt"] for event in events(served, session) if event["kind"] == "turn.queued"]


def test_typing_after_a_click_on_send_goes_to_the_message(visits: Visits) -> None:
    served = visits.served
    session = served.open({"prompt 1": ["stream 5000 0.02"]}, name="typed")
    tab = visits.tab(session)
    tab.message.fill("Count.")
    tab.page.get_by_role("button", name="Send", exact=True).click()
    expect(tab.interrupt).to_be_enabled()
    # As shortcuts, the first letter would interrupt and the fourth would answer.
    tab.page.keyboard.type("in addition")
    expect(tab.message).to_have_value("in addition")
    assert not [event for event in events(served, session) if event["kind"] == "turn.interrupted"]


@pytest.mark.parametrize("way", ["another session", "reload"])
def test_message_on_its_way_is_asked_once(visits: Visits, way: str) -> None:
    """The server has the message and cannot answer. The page neither returns it as unsent nor asks again."""
    served = visits.served
    visits.chromium.expect_lost_connections()
    session = served.open(name="slow")
    other = served.open(name="other")
    tab = visits.tab(session)
    # When the page shows this, it has read the session.
    tab.send("The first.")
    expect(tab.items("ended")).to_have_count(1)
    asked = tab.items("prompt").filter(has_text="Only once.")
    os.kill(served.pid, signal.SIGSTOP)
    try:
        tab.send("Only once.")
        expect(asked).to_have_attribute("data-state", "pending")
        if way == "another session":
            tab.page.evaluate(f"location.hash = '#/s/{other}'")
            expect(asked).to_have_count(0)
            tab.page.evaluate(f"location.hash = '#/s/{session}'")
            expect(tab.message).to_have_value("")
        else:
            # Not awaited: the stopped server cannot serve the page.
            tab.page.evaluate("setTimeout(() => location.reload())")
    finally:
        os.kill(served.pid, signal.SIGCONT)
    tab.wait_live()
    expect(asked).to_have_count(1)
    expect(tab.page.locator('[data-state="pending"]')).to_have_count(0)
    expect(tab.message).to_have_value("")
    wait_for(lambda: len(_asked(served, session)) > 1, "it was asked", page=tab.page)
    # Every pending message is sent before this one.
    tab.send("The last.")
    wait_for(lambda: "The last." in _asked(served, session), "the last was asked", page=tab.page)
    assert _asked(served, session) == ["The first.", "Only once.", "The last."]


def test_message_that_never_arrived_is_sent_after_a_reload(visits: Visits) -> None:
    """The message never arrived. The next page sends it, in the order in which it was written."""
    served = visits.served
    visits.chromium.expect_lost_connections()
    session = served.open(name="cut-off")
    with Relay(served.port) as relay:
        tab = visits.tab(session, url=relay.url)
        relay.freeze()
        tab.send("First.")
        tab.send("Second.")
        tab.page.evaluate("setTimeout(() => location.reload())")
        relay.mend()
        tab.wait_live()
        wait_for(lambda: len(_asked(served, session)) == 2, "both were asked", page=tab.page)
        assert _asked(served, session) == ["First.", "Second."]
        expect(tab.page.locator('[data-state="pending"]')).to_have_count(0)
        expect(tab.message).to_have_value("")
        tab.page.close()


def test_address_with_a_session_name_opens_the_session(visits: Visits) -> None:
    session = visits.served.open({"prompt": ["say Here I am."]}, name="by-its-name")
    tab = visits.tab("by-its-name")
    tab.page.wait_for_url(f"**/#/s/{session}")
    tab.send("Are you there?")
    expect(tab.items("text")).to_contain_text("Here I am.")


def test_second_answer_shows_that_the_question_was_answered_elsewhere(visits: Visits) -> None:
    served = visits.served
    session = served.open({"prompt": ['ask Bash {"command": "ls"}']}, name="raced")
    tab = visits.tab(session)
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    tab.page.route("**/questions/*", hold)
    tab.send("Go.")
    tab.questions.first.get_by_role("button", name="Allow", exact=False).first.click()
    question = wait_for(lambda: tab.questions.first.get_attribute("data-question"), "a question", page=tab.page)
    wait_for(lambda: held or None, "an answer on its way", page=tab.page)
    body = {"decision": "deny"}
    assert served.request("POST", f"/v1/sessions/{session}/questions/{question}", body).status == 200
    expect(tab.items("ended")).to_have_count(1)
    held[0].continue_()
    expect(tab.questions.first).to_contain_text("Answered elsewhere: denied")
