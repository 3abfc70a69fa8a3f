"""A planned restart in the middle of a turn: the text goes on in its place, and the page is not loaded again.

`make screenshots` puts the pictures into docs/images. Otherwise they are artefacts of the run, for comparison.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import expect
from tests.server.kit import Served
from tests.server.ops.test_server_hand_over import end, processes, serving
from tests.server.web.browser.chromium import ROOT, artefacts
from tests.server.web.browser.tab import Tab, Visits, told

pytestmark = pytest.mark.thorough

COUNT = 200
WORDS = [f"word{number}" for number in range(COUNT)]
SIZE = {"width": 1280, "height": 720}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "served") as server:
        yield server


def test_text_goes_on_in_place_when_the_server_restarts(visits: Visits) -> None:
    served = visits.served
    visits.chromium.expect_lost_connections()
    session = served.open({"prompt Write.": [f"stream {COUNT} 0.04 word"]}, name="novel", cwd="/tmp")
    tab = visits.tab(session, viewport=SIZE)
    loads: list[str] = []
    tab.page.on("framenavigated", lambda frame: loads.append(frame.url))
    tab.send("Write.")
    tab.wait_said("word30 ")
    agent = processes(served, session)
    text = tab.items("text").first.element_handle()
    take(tab, "restart-1-before.png")
    end(served)
    tab.wait_connection("waiting", "connecting", "offline", "ending")
    # The text stays readable, and the agent goes on writing.
    tab.wait_said("word30 ")
    take(tab, "restart-2-without-a-server.png")
    served.start()
    tab.wait_live()
    assert processes(served, session) == agent
    take(tab, "restart-3-after.png")
    tab.wait_said(f"{WORDS[-1]} ")
    expect(tab.items("ended")).to_have_count(1)
    assert tab.said().split() == told(served, session).split() == WORDS
    assert text.evaluate("node => node.isConnected"), "the page has made the text anew"
    assert loads == []


def take(tab: Tab, name: str) -> None:
    wanted = os.environ.get("BANKSMAN_SCREENSHOTS")
    folder = ROOT / wanted if wanted else artefacts()
    folder.joinpath(name).write_bytes(tab.page.screenshot(animations="disabled"))
