"""A reload, a lost network or a restarted server loses and repeats nothing, and the page shows the connection state."""

from __future__ import annotations

from itertools import zip_longest

import pytest
from playwright.sync_api import expect
from tests.server.kit import Served
from tests.server.web.browser.relay import Relay
from tests.server.web.browser.tab import Tab, Visits, events, told, wait_for

from banksman.testing import fake_agent

pytestmark = pytest.mark.thorough

COUNT = 150
STREAMED = {"prompt 1": [f"stream {COUNT} 0.02"]}
WORDS = [f"tick{number}" for number in range(COUNT)]


def test_reload_in_the_middle_of_a_turn_loses_nothing(visits: Visits) -> None:
    served = visits.served
    session = served.open(STREAMED, name="reloaded")
    tab = visits.tab(session)
    tab.send("Count.")
    tab.wait_said("tick10 ")
    for number in (50, 90):
        tab.page.reload()
        tab.wait_live()
        # The text before the reload is there, and the stream continues.
        tab.wait_said("tick0 ")
        tab.wait_said(f"tick{number} ")
    expect(tab.items("ended")).to_have_count(1)
    _compare(tab, served, session)
    assert tab.said().split() == WORDS
    assert told(served, session).split() == WORDS


@pytest.mark.parametrize("way", ["kill", "stop"])
def test_server_restart_in_the_middle_of_a_turn_loses_nothing(visits: Visits, way: str) -> None:
    """By SIGKILL, or by TERM without patience, then a start at the same address with the same store."""
    served = visits.served
    visits.chromium.expect_lost_connections()
    # With a memory, so that the agent resumes its conversation and adds no text in between.
    command = fake_agent.command({"prompt Count.": ["stream 5000 0.02"]}, memory=served.folder / "memory")
    session = served.post("/v1/sessions", {"command": command, "name": "restarted"})["id"]
    tab = visits.tab(session)
    tab.send("Count.")
    tab.wait_said("tick10 ")
    served.kill() if way == "kill" else served.stop()
    tab.wait_connection("waiting", "connecting", "offline", "ending")
    # The earlier text stays readable, and a message written now is not lost.
    tab.wait_said("tick10 ")
    visits.chromium.keep("without-a-server")
    served.start()
    tab.wait_live()
    tab.send("Are you there?")
    tab.wait_said("Are you there?")
    expect(tab.items("ended").last).to_be_visible()
    wait_for(lambda: served.get(f"/v1/sessions/{session}")["phase"] == "idle", "the session is idle", page=tab.page)
    _compare(tab, served, session)


@pytest.mark.parametrize("way", ["cut", "freeze", "offline"])
def test_network_loss_in_the_middle_of_a_turn_loses_nothing(visits: Visits, way: str) -> None:
    served = visits.served
    visits.chromium.expect_lost_connections()
    session = served.open(STREAMED, name="unreachable")
    with Relay(served.port) as relay:
        tab = visits.tab(session, url=relay.url)
        tab.send("Count.")
        tab.wait_said("tick10 ")
        match way:
            case "cut":
                relay.cut()
            case "freeze":
                relay.freeze()
            case _:
                tab.page.context.set_offline(True)
        (turn,) = (event["turn"] for event in events(served, session) if event["kind"] == "turn.started")
        # The turn ends while the page is disconnected.
        served.outcome(session, turn)
        if way != "freeze":
            tab.wait_connection("waiting", "connecting", "offline")
            expect(tab.items("ended")).to_have_count(0)
        relay.mend()
        tab.page.context.set_offline(False)
        tab.wait_live()
        expect(tab.items("ended")).to_have_count(1)
        _compare(tab, served, session)
        assert tab.said().split() == WORDS
        tab.send("Are you there?")
        tab.wait_said("Are you there?")
        tab.page.close()


def _compare(tab: Tab, served: Served, session: str) -> None:
    """Check that the transcript shows the contents of the log once, in order."""
    log = events(served, session)
    asked = [event["body"]["prompt"] for event in log if event["kind"] == "turn.queued"]
    ended = [event["turn"] for event in log if event["kind"] == "turn.ended"]
    words = told(served, session).split()

    def differences() -> list[str]:
        items = tab.read()
        prompts = [item.text for item in items if item.item == "prompt"]
        missed = [prompt for prompt, shown in zip_longest(asked, prompts) if (prompt or "\0") not in (shown or "")]
        over = [item.turn for item in items if item.item == "ended"]
        said = " ".join(item.text for item in items if item.item == "text").split()
        return [
            *([f"prompts: {missed}"] if missed else []),
            *([f"ended: {over} instead of {ended}"] if over != ended else []),
            *([f"said: {said} instead of {words}"] if said != words else []),
        ]

    last: list[str] = []

    def is_same() -> bool:
        last[:] = differences()
        return not last

    try:
        wait_for(is_same, "the page shows what the log has", page=tab.page)
    except AssertionError as error:
        raise AssertionError("\n".join([str(error), *last])) from error
