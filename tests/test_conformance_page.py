"""docs/conformance.md matches the present agents, steps and profiles.

The tests do not check the measured values, which were true for one run.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from tests.agents.agents import AGENTS
from tests.agents.matrix import page, table
from tests.agents.matrix.abilities import NAMES
from tests.agents.matrix.steps import STEPS

PAGE = Path(__file__).resolve().parent.parent / "docs" / "conformance.md"


def rows(heading: str) -> list[list[str]]:
    """Return the cells of the only table under a heading, without its header."""
    (section,) = [part for part in PAGE.read_text().split("\n## ") if part.startswith(f"{heading}\n")]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_conformance_page_has_every_agent_in_every_step() -> None:
    *cells, total = rows("Full results")
    assert [(row[0].strip("`"), row[1]) for row in cells] == [(agent, step) for agent in AGENTS for step in STEPS]
    assert [row[0] for row in rows("Results by agent")] == [*STEPS, "total left"]
    # Both the interrupted tools and the totals: no process is left with Banksman, and some are left without it.
    ours, theirs = total[4:6], total[8:10]
    assert ours == ["0", "0"]
    assert all(int(count) > 0 for count in theirs)


@pytest.mark.parametrize("agent", AGENTS)
def test_conformance_page_is_of_the_pinned_agents(agent: str) -> None:
    from tools import agents as tool

    pinned = next(iter(json.loads(tool.PINS.read_text())[agent].values()))
    versions = {row[0].strip("`"): row[1] for row in rows("Reported by the agents")}
    assert versions[agent] == tool.Pin(agent, **pinned).version


@pytest.mark.parametrize("agent", AGENTS)
def test_conformance_page_lists_repairs_of_the_profiles(agent: str) -> None:
    repaired = {row[0].strip("`"): row[-1] for row in rows("Repairs")}
    assert repaired[agent] == page.repairs(agent)


def test_conformance_page_quotes_the_profiles() -> None:
    text = PAGE.read_text()
    assert page.asked_for() in text
    assert page.truths() in text


def test_conformance_page_is_independent_of_the_run_order() -> None:
    cells = made_up()
    text, lines = page.text(cells), table.lines(cells)
    random.Random(7).shuffle(cells)
    assert page.text(cells) == text
    assert table.lines(cells) == lines


def test_conformance_page_marks_uncounted_cells() -> None:
    cells = made_up()
    assert table.is_whole(cells)
    assert not table.is_whole(cells[1:])
    del cells[3]["banksman"]
    assert not table.is_whole(cells)
    total = table.lines(cells)[-1 - len(table.NOTE)]
    assert [text.strip() for text in total.split("|")][4:6] == ["0?", "0?"]
    assert "| failed to run | ? | ? |" in page.text(cells)


def made_up() -> list[dict[str, Any]]:
    """Return the cells of a run without errors."""
    abilities = {"abilities": {name: f"some {name}" for name in NAMES}}
    return [
        {
            "agent": agent,
            "step": step,
            "banksman": {"seconds": 1.0, "outcome": "done", "tool_left": 0, "left": 0, "seen": {}},
            "plain": {"seconds": 0.5, "outcome": "ended", "tool_left": None, "left": 4, "seen": abilities},
        }
        for agent in AGENTS
        for step in STEPS
    ]
