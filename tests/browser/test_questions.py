"""Questions of any shape: whoever decides sees all that they decide by, and one that is odd hides no other."""

from __future__ import annotations

import json

import pytest
from playwright.sync_api import expect
from tests.browser.tab import Visits

# Each with a word that must be read before somebody says yes.
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


def test_all_of_an_input_is_shown(visits: Visits) -> None:
    script = {f"prompt {number}": [f"ask Odd {json.dumps(given)}"] for number, given in enumerate(INPUTS, 1)}
    tab = visits.tab(visits.served.open(script, name="odd"))
    for number in range(1, len(INPUTS) + 1):
        tab.send(f"Number {number}.")
        expect(tab.questions.first).to_contain_text(f"hidden-{number}")
        tab.questions.first.get_by_role("button", name="Deny").click()
        expect(tab.questions).to_have_count(0)


@pytest.mark.thorough
def test_one_that_cannot_be_read_can_still_be_denied(visits: Visits) -> None:
    odd = json.dumps({"questions": [None, {"question": {"toString": "x", "valueOf": "y"}, "options": [None]}]})
    tab = visits.tab(visits.served.open({"prompt": [f"ask AskUserQuestion {odd}"]}, name="odd"))
    tab.send("Go.")
    tab.questions.first.get_by_role("button", name="Decline").click()
    expect(tab.items("ended")).to_have_count(1)
