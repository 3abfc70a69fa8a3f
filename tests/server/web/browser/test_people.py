"""Several people at one server, each in a separate browser: what each may do, and what the page says of the others."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Route, expect
from tests.server.access import tokens
from tests.server.kit import Served
from tests.server.web.browser.chromium import Chromium
from tests.server.web.browser.tab import Tab, Visits

from banksman.server.access.roles import Role


def login(chromium: Chromium, served: Served, name: str, role: Role, session: str) -> Tab:
    """Log a new browser in, by the form, with a named token."""
    token = tokens.create(served, name, role)
    chromium.belongs(served.url)
    # A page without a token is refused before the login.
    chromium.expect(r"the server responded with a status of 401")
    tab = Tab(chromium.context(), served.url)
    tab.page.goto(served.url)
    field = tab.page.get_by_label("The server's token")
    field.fill(token)
    field.press("Enter")
    tab.wait_live()
    expect(tab.page.get_by_text(f"Logged in as {name}, {role}")).to_be_visible()
    return tab.visit(session)


def test_one_asks_another_approves_and_a_third_only_looks(chromium: Chromium, served: Served) -> None:
    script = {"prompt 1": ['ask Bash {"command": "make"}', "say built", "hang"]}
    session = tokens.opened_by(served, "ann", "team", script)
    served.request("PUT", f"/v1/sessions/{session}/shared", {"shared": ["ben", "vera"]})
    ann = login(chromium, served, "ann", Role.ASKER, session)
    ben = login(chromium, served, "ben", Role.APPROVER, session)
    vera = login(chromium, served, "vera", Role.VIEWER, session)

    ann.send("Build it.")
    for tab in (ann, ben, vera):
        expect(tab.items("prompt").filter(has_text="Build it.")).to_contain_text("ann")
        expect(tab.questions).to_contain_text("make")
    # Only the approver has the buttons, and only the asker can write.
    for tab in (ann, vera):
        expect(tab.questions.get_by_role("button", name=re.compile("Allow|Deny"))).to_have_count(0)
        tab.page.keyboard.press("a")
        tab.page.keyboard.press("d")
    for tab in (ben, vera):
        expect(tab.message).to_have_count(0)
        expect(tab.interrupt).to_have_count(0)
        expect(tab.page.get_by_role("button", name="New session")).to_have_count(0)
        expect(tab.page.get_by_role("button", name="Close this session")).to_have_count(0)
    expect(ann.message).to_have_count(1)
    ben.questions.get_by_role("button", name=re.compile("^Allow")).first.click()
    for tab in (ann, ben, vera):
        expect(tab.items("question")).to_contain_text("Allowed by ben")
        tab.wait_said("built")

    ann.interrupt.click()
    for tab in (ann, ben, vera):
        expect(tab.items("ended")).to_contain_text("Interrupted, by ann")
    mark = vera.page.locator('section[aria-label="Timeline"]')
    expect(mark).to_contain_text("by ann")

    # What the page hides, the server refuses.
    vera_token = vera.page.evaluate("localStorage.getItem(Object.keys(localStorage).find((k) => /token/.test(k)))")
    path = f"/v1/sessions/{session}"
    for method, url, body in (
        ("POST", f"{path}/turns", {"prompt": "x"}),
        ("POST", f"{path}/questions/q-1.1", {"decision": "allow"}),
        ("POST", f"{path}/interrupt", None),
        ("PATCH", path, {"name": "x"}),
        ("DELETE", path, None),
        ("POST", "/v1/sessions", {}),
        ("GET", "/v1/hosts", None),
    ):
        assert tokens.request(served, vera_token, method, url, body).status == 403, (method, url)


@pytest.mark.thorough
def test_asker_of_a_shared_session_has_no_buttons_of_its_owner(chromium: Chromium, served: Served) -> None:
    session = tokens.opened_by(served, "una", "owned")
    served.request("PUT", f"/v1/sessions/{session}/shared", {"shared": ["udo"]})
    una = login(chromium, served, "una", Role.ASKER, session)
    udo = login(chromium, served, "udo", Role.ASKER, session)
    for tab, count in ((una, 1), (udo, 0)):
        expect(tab.message).to_be_visible()
        expect(tab.page.get_by_role("button", name="Close this session")).to_have_count(count)
        expect(tab.page.get_by_title("Change the name")).to_have_count(count)


@pytest.mark.thorough
def test_asker_of_a_shared_session_cannot_stop_the_ask_of_another(chromium: Chromium, served: Served) -> None:
    session = tokens.opened_by(served, "ann", "both", {"prompt 1": ["say at work", "hang"]})
    served.request("PUT", f"/v1/sessions/{session}/shared", {"shared": ["kim"]})
    ann = login(chromium, served, "ann", Role.ASKER, session)
    kim = login(chromium, served, "kim", Role.ASKER, session)
    ann.send("Work.")
    kim.wait_said("at work")
    expect(ann.interrupt).to_be_enabled()
    kim.send("And then this.")
    expect(kim.interrupt).to_be_disabled()


@pytest.mark.thorough
def test_next_person_at_a_browser_logs_in_and_sees_nothing_of_the_one_before(
    chromium: Chromium, served: Served
) -> None:
    session = tokens.opened_by(served, "ida", "of-ida", {"prompt": ["say the answer for ida"]})
    tab = login(chromium, served, "ida", Role.ASKER, session)
    tab.send("words of ida")
    tab.wait_said("the answer for ida")
    tab.message.fill("a draft of ida")
    token = tokens.create(served, "jon", Role.VIEWER)
    # The stream is cut, and the page asks without a token that is valid. Then jon asks for ida's session.
    chromium.expect(r"ERR_INCOMPLETE_CHUNKED_ENCODING")
    chromium.expect(r"the server responded with a status of 401")
    chromium.expect(r"the server responded with a status of 404")
    tokens.revoke(served, "ida")
    # The login is in the place of the session that is open.
    field = tab.page.get_by_label("The server's token")
    expect(field).to_be_visible()
    expect(tab.page.get_by_text("the answer for ida")).to_have_count(0)
    field.fill(token)
    field.press("Enter")
    expect(tab.page.get_by_text("Logged in as jon, viewer")).to_be_visible()
    expect(tab.page.get_by_text(re.compile("there is no session"))).to_be_visible()
    expect(tab.sessions).to_have_count(0)
    expect(tab.page.get_by_text("of-ida")).to_have_count(0)
    assert "ida" not in tab.page.evaluate("JSON.stringify({ ...sessionStorage })")


@pytest.mark.thorough
def test_unanswered_ask_is_not_sent_with_the_token_of_the_next_person(chromium: Chromium, served: Served) -> None:
    session = tokens.opened_by(served, "lea", "of-lea")
    served.request("PUT", f"/v1/sessions/{session}/shared", {"shared": ["max"]})
    tab = login(chromium, served, "lea", Role.ASKER, session)
    token = tokens.create(served, "max", Role.ASKER)
    senders: list[str] = []

    def lose(route: Route) -> None:
        senders.append(route.request.headers["authorization"])
        route.abort()

    chromium.expect(r"ERR_FAILED|ERR_INCOMPLETE_CHUNKED_ENCODING")
    chromium.expect(r"the server responded with a status of 401")
    tab.page.route("**/turns", lose)
    tab.send("words of lea")
    expect(tab.items("prompt")).to_contain_text("words of lea")
    asked: list[Route] = []

    def hold(route: Route) -> None:
        asked.append(route)

    tab.page.route("**/v1/caller", hold)
    tokens.revoke(served, "lea")
    field = tab.page.get_by_label("The server's token")
    field.fill(token)
    field.press("Enter")
    # The page is there before it knows its caller.
    expect(tab.message).to_be_visible()
    tab.page.unroute("**/v1/caller")
    for route in asked:
        route.continue_()
    expect(tab.page.get_by_text("Logged in as max, asker")).to_be_visible()
    expect(tab.message).to_be_visible()
    expect(tab.items("prompt")).to_have_count(0)
    assert len(set(senders)) == 1, "only lea"


@pytest.mark.thorough
def test_person_logs_out_in_all_tabs_of_the_browser(chromium: Chromium, served: Served) -> None:
    session = tokens.opened_by(served, "eve", "of-eve")
    tab = login(chromium, served, "eve", Role.ASKER, session)
    other = Tab(tab.page.context, served.url)
    other.page.goto(f"{served.url}/#/s/{session}")
    expect(other.page.get_by_text("Logged in as eve, asker")).to_be_visible()
    chromium.expect(r"the server responded with a status of 401")
    other.page.get_by_role("button", name="Log out").click()
    for each in (other, tab):
        expect(each.page.get_by_label("The server's token")).to_be_visible()
        expect(each.page.get_by_text("Logged in as")).to_have_count(0)
        expect(each.page.get_by_text("of-eve")).to_have_count(0)
        assert "banksman-token" not in each.page.evaluate("Object.keys(localStorage).join()")


@pytest.mark.thorough
def test_login_in_one_tab_replaces_the_person_in_a_live_tab(chromium: Chromium, served: Served) -> None:
    tab = login(chromium, served, "ned", Role.ASKER, tokens.opened_by(served, "ned", "of-ned"))
    token = tokens.create(served, "ola", Role.VIEWER)
    other = Tab(tab.page.context, served.url)
    other.page.goto(served.url)
    expect(other.page.get_by_text("Logged in as ned, asker")).to_be_visible()
    # The session of ned is not ola's.
    chromium.expect(r"the server responded with a status of 404")
    other.page.evaluate(
        "token => localStorage.setItem(Object.keys(localStorage).find((k) => /token/.test(k)), token)", token
    )
    expect(tab.page.get_by_text("Logged in as ola, viewer")).to_be_visible()
    expect(tab.page.get_by_text("of-ned")).to_have_count(0)


@pytest.mark.thorough
def test_person_without_a_login_opens_the_address_of_a_session(chromium: Chromium, served: Served) -> None:
    session = tokens.opened_by(served, "kai", "of-kai")
    token = tokens.create(served, "kai", Role.ASKER)
    chromium.belongs(served.url)
    chromium.expect(r"the server responded with a status of 401")
    tab = Tab(chromium.context(), served.url)
    tab.page.goto(f"{served.url}/#/s/{session}")
    field = tab.page.get_by_label("The server's token")
    field.fill(token)
    field.press("Enter")
    tab.wait_live()
    expect(tab.message).to_be_visible()
    expect(tab.page.get_by_role("heading", name="of-kai")).to_be_visible()


@pytest.mark.thorough
def test_admin_sees_its_role_and_everything(visits: Visits) -> None:
    tab = visits.tab(visits.served.open(name="mine"))
    expect(tab.page.get_by_text("Logged in as admin")).to_be_visible()
    expect(tab.message).to_be_visible()
    expect(tab.page.get_by_role("button", name="New session")).to_be_visible()
