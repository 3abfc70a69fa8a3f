"""Turns in one tab: streamed, interrupted and preempted ones, and questions."""

from __future__ import annotations

import itertools
import re
from typing import Any

from playwright.sync_api import expect
from tests.server.web.browser.tab import Visits, told, wait_for
from tests.thorough import thorough

# Longer than any test: it is interrupted.
LONG = ["stream 5000 0.02"]
# Records each length of the agent's text until the turn is over.
GROWTH = """() => {
  window.lengths = [];
  const log = document.querySelector('[role="log"]');
  const look = () => {
    const text = [...log.querySelectorAll('[data-item="text"]')].map((item) => item.textContent).join("");
    const isOver = log.querySelector('[data-item="ended"]') !== null;
    if (!isOver && text.length && text.length !== window.lengths.at(-1)) window.lengths.push(text.length);
  };
  new MutationObserver(look).observe(log, { subtree: true, childList: true, characterData: true });
}"""


def test_turn_is_streamed_into_the_page(visits: Visits) -> None:
    session = visits.served.open({"prompt": ["stream 100 0.02 word"]}, name="streamed")
    tab = visits.tab(session)
    tab.page.evaluate(GROWTH)
    tab.send("Say a hundred words.")
    expect(tab.items("prompt")).to_contain_text("Say a hundred words.")
    expect(tab.items("ended")).to_have_count(1)
    # The text was visible before it was complete, in many steps, and never shrank.
    lengths: list[int] = tab.page.evaluate("window.lengths")
    assert len(lengths) >= 5, lengths
    assert lengths == sorted(lengths)
    # All of the text is there, once and in order.
    assert tab.said().split() == [f"word{number}" for number in range(100)]
    expect(tab.page.locator(f'[data-session="{session}"]')).to_have_attribute("data-state", "idle")


@thorough
def test_interrupt_button_stops_the_turn_and_shows_the_receipt(visits: Visits) -> None:
    served = visits.served
    session = served.open({"prompt 1": LONG}, name="stopped")
    tab = visits.tab(session)
    expect(tab.interrupt).to_be_disabled()
    tab.send("Go on for ever.")
    tab.wait_said("tick5 ")
    expect(tab.page.locator(f'[data-session="{session}"]')).to_have_attribute("data-state", "running")
    tab.interrupt.click()
    expect(tab.page.locator("[data-receipt]")).to_be_visible()
    expect(tab.page.locator("[data-receipt]")).to_contain_text(re.compile("stopped|boundary|interrupted", re.I))
    expect(tab.items("ended")).to_contain_text(re.compile("interrupted", re.I))
    expect(tab.interrupt).to_be_disabled()
    turn = tab.items("ended").get_attribute("data-turn")
    assert turn is not None
    assert served.outcome(session, turn)["kind"] == "interrupted"
    # The partial text came again as a whole, and the page shows it once.
    assert tab.said().split() == told(served, session).split()


@thorough
def test_preemption_is_marked_in_the_timeline(visits: Visits) -> None:
    served = visits.served
    session = served.open({"prompt 1": LONG, "prompt 2": ["stream 40 0.02"], "prompt 3": ["stream 40 0.02"]})
    tab = visits.tab(session)
    chore = served.ask(session, "Tidy up.", priority="background", on_preempt="requeue")
    tab.wait_said("tick20 ")
    tab.send("What time is it?", priority="interactive")
    expect(tab.items("ended")).to_have_count(2)
    urgent = next(id for id in _turns(tab.items("prompt").evaluate_all(TURNS)) if id != chore)
    timeline = tab.section("Timeline")
    expect(timeline.locator('[data-mark="preempt"]')).to_have_count(1)
    bars = wait_for(
        lambda: found if len(found := _bars(timeline.evaluate(BARS), "running")) == 3 else None,
        "three bars of what ran",
        page=tab.page,
    )
    # The bar of the background turn is cut, the urgent one is between its halves, and no bars overlap.
    assert [bar["turn"] for bar in bars] == [chore, urgent, chore]
    for before, after in itertools.pairwise(bars):
        assert before["right"] <= after["left"] + 0.5, bars
    assert {bar["turn"]: bar["class"] for bar in bars} == {chore: "background", urgent: "interactive"}
    mark = timeline.locator('[data-mark="preempt"]').bounding_box()
    assert mark is not None
    assert abs(mark["x"] + mark["width"] / 2 - bars[0]["right"]) < 30, (mark, bars)


TURNS = "(nodes) => nodes.map((node) => node.dataset.turn)"
BARS = """(section) => [...section.querySelectorAll("svg [data-turn][data-class]")].map((bar) => {
  const { left, right } = bar.getBoundingClientRect();
  return { turn: bar.dataset.turn, class: bar.dataset.class, phase: bar.dataset.phase, left, right };
})"""


def _turns(found: list[Any]) -> list[str]:
    return [turn for turn in found if turn is not None]


def _bars(found: list[dict[str, Any]], phase: str) -> list[dict[str, Any]]:
    return sorted((bar for bar in found if bar["phase"] == phase), key=lambda bar: bar["left"])


@thorough
def test_question_answered_in_one_tab_closes_in_the_other(visits: Visits) -> None:
    served = visits.served
    session = served.open({"prompt": ['ask Bash {"command": "make test"}', "say All green."]}, name="asking")
    one = visits.tab(session)
    other = visits.another(one.page.context, session)
    one.send("Run the tests.")
    for tab in (one, other):
        expect(tab.questions).to_have_count(1)
        expect(tab.questions).to_contain_text("make test")
        expect(tab.page).to_have_title(re.compile(r"^\(1\) .*Banksman"))
        expect(tab.page.locator(f'[data-session="{session}"]')).to_have_attribute("data-state", "asks")
    visits.chromium.keep("asked")
    other.questions.get_by_role("button", name="Allow", exact=True).click()
    for tab in (one, other):
        expect(tab.questions).to_have_count(0)
        tab.wait_said("All green.")
        # Both show the answer.
        expect(tab.items("question")).to_contain_text(re.compile("allow", re.I))
        expect(tab.page).not_to_have_title(re.compile(r"^\("))
    turn = one.items("ended").get_attribute("data-turn")
    assert served.outcome(session, str(turn))["kind"] == "done"
