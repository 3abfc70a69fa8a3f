"""Questions of any shape: the card shows the whole input, and an unusual question hides no other."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect
from tests.server.web.browser.tab import Visits
from tests.thorough import thorough

# Each has a word that the user must see before an answer.
INPUTS = [
    {"command": {"x": "hidden-1"}},
    {"file_path": "/a", "path": "hidden-2"},
    {"old_string": "a", "new_string": "b", "content": "hidden-3"},
    {"old_string": "hidden-4"},
    {"questions": ["hidden-5"]},
    {"edits": [{"old_string": "a", "new_string": "b", "replace_all": "hidden-6"}]},
    {"edits": ["hidden-7"]},
    {"command": "ls", "description": {"x": "hidden-8"}},
    {"command": {"toString": "hidden-9", "valueOf": "y"}},
    {"content": "hidden-10"},
    {"command": ["rm", "hidden-11"]},
]


@pytest.mark.thorough
def test_question_shows_its_whole_input(visits: Visits) -> None:
    script = {f"prompt {number}": [f"ask Odd {json.dumps(given)}"] for number, given in enumerate(INPUTS, 1)}
    tab = visits.tab(visits.served.open(script, name="odd"))
    for number in range(1, len(INPUTS) + 1):
        tab.send(f"Number {number}.")
        expect(tab.questions.first).to_contain_text(f"hidden-{number}")
        tab.questions.first.get_by_role("button", name="Deny").click()
        expect(tab.questions).to_have_count(0)


# Sends a key and a click, meant for something else, at the moment in which a card appears in the document.
TRY_AT_ONCE = """() => {
  window.taken = [];
  new MutationObserver(() => {
    for (const card of document.querySelectorAll("[data-question]:not([data-tried])")) {
      card.dataset.tried = "";
      const yes = card.querySelector("button.is-yes");
      document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "a", bubbles: true }));
      yes.click();
      requestAnimationFrame(() => {
        document.body.dispatchEvent(new KeyboardEvent("keydown", { key: "a", bubbles: true }));
        yes.click();
        window.taken.push(yes.disabled);
      });
    }
  }).observe(document.body, { childList: true, subtree: true });
}"""


@thorough
def test_key_or_click_does_not_answer_a_question_that_has_just_appeared(visits: Visits) -> None:
    """Nor does it answer one that is asked right after another."""
    tab = visits.tab(visits.served.open({"prompt": ['ask Bash {"command": "one"}', 'ask Bash {"command": "two"}']}))
    tab.page.evaluate(TRY_AT_ONCE)
    tab.send("Go.")
    for number, command in enumerate(("$ one", "$ two"), 1):
        expect(tab.questions.filter(has_text=command)).to_be_visible()
        tab.page.wait_for_function("number => window.taken.length === number", arg=number)
        assert tab.page.evaluate("window.taken.at(-1)") is False
        # Now the user can read it.
        may_be_answered = tab.questions.filter(has_text=command).locator("button.is-yes:not([aria-disabled])")
        expect(may_be_answered.first).to_be_visible()
        tab.page.evaluate("document.activeElement?.blur()")
        tab.page.keyboard.press("a")
        expect(tab.questions.filter(has_text=command)).to_have_count(0)
    expect(tab.items("ended")).to_have_count(1)


# Two questions wait, and the user has read both. Another client answers the first. In the same moment come the key and
# the click that were meant for it. The script returns the answers of these two, and the final ones.
REPLACES = """async () => {
  const { answerByKey, mountQuestions } = await import("/page/views/questions.js");
  const answered = [];
  const events = ["one", "two"].map((command, index) => ({
    kind: "question.asked",
    seq: index + 1,
    at: 0,
    turn: "t",
    body: { question: command, tool: "Bash", input: { command } },
  }));
  const place = document.body.appendChild(document.createElement("div"));
  let take = null;
  const off = mountQuestions(place, {
    id: "s",
    say: () => {},
    own: { events: { subscribe: (listener) => { take = listener; return () => {}; } } },
    actions: { answer: async (_, question) => { answered.push(question); return { first: true }; } },
  });
  take(events);
  const second = place.querySelector("[data-question=two] button.is-yes");
  const read = async () => {
    while (second.hasAttribute("aria-disabled")) await new Promise(requestAnimationFrame);
  };
  await read();
  take([...events, { kind: "question.answered", seq: 3, body: { question: "one", answer: "deny", by: "rule" } }]);
  answerByKey("a");
  second.click();
  const atOnce = [...answered];
  await read();
  answerByKey("a");
  off();
  place.remove();
  return [atOnce, answered];
}"""


@thorough
def test_key_or_click_does_not_answer_a_question_that_has_just_moved_up(visits: Visits) -> None:
    tab = visits.tab(visits.served.open())
    assert tab.page.evaluate(REPLACES) == [[], ["two"]]


@thorough
def test_question_shows_the_command_before_the_agents_description(visits: Visits) -> None:
    asks = [
        'ask Bash {"description": "Print the date", "command": "rm -rf /"}',
        'ask mcp__py__run {"description": "Print the date", "code": "shutil.rmtree(home)"}',
    ]
    tab = visits.tab(visits.served.open({"prompt": asks}))
    tab.send("Go.")
    for runs in ("rm -rf /", "shutil.rmtree(home)"):
        card = tab.questions.filter(has_text=runs)
        expect(card.locator(".question-said")).to_have_text("The agent says: Print the date")
        text = card.inner_text()
        assert text.count("Print the date") == 1
        assert text.index(runs) < text.index("The agent says:")
        card.get_by_role("button", name="Deny").click()
        expect(card).to_have_count(0)


@pytest.mark.thorough
def test_question_that_is_unreadable_can_be_denied(visits: Visits) -> None:
    odd = json.dumps({"questions": [None, {"question": {"toString": "x", "valueOf": "y"}, "options": [None]}]})
    tab = visits.tab(visits.served.open({"prompt": [f"ask AskUserQuestion {odd}"]}, name="odd"))
    tab.send("Go.")
    tab.questions.first.get_by_role("button", name="Decline").click()
    expect(tab.items("ended")).to_have_count(1)
