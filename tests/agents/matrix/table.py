"""Final table of the tests with every agent: a line per agent and step with both sides, and a total."""

from __future__ import annotations

from typing import Any

from tests.agents.agents import AGENTS
from tests.agents.matrix.steps import STEPS

Cell = dict[str, Any]
SIDES = ("banksman", "plain")
HEADS = ("agent", "step", *("banksman: s", "outcome", "tool", "left"), *("plain: s", "outcome", "tool", "left"))
# Columns of words. The others hold numbers and are aligned to the right.
WORDS = (0, 1, 3, 7)
NOTE = (
    "tool: processes of the interrupted tool that live 2 s after the interrupt; left: all processes 2 s after close.",
    "plain: subprocess.Popen(start_new_session=True), killpg(SIGKILL). Both at once, beside other tests.",
)


def ordered(cells: list[Cell]) -> list[Cell]:
    """Return the cells by agent and step, in the order of the code."""
    agents, steps = list(AGENTS), list(STEPS)
    return sorted(cells, key=lambda cell: (agents.index(cell["agent"]), steps.index(cell["step"])))


def is_whole(cells: list[Cell]) -> bool:
    """Return whether every agent took every step on both sides."""
    told = {(cell["agent"], cell["step"]) for cell in cells if all(side in cell for side in SIDES)}
    return told == {(agent, step) for agent in AGENTS for step in STEPS}


def lines(cells: list[Cell]) -> list[str]:
    rows = [tuple(_of(cell)) for cell in ordered(cells)]
    totals = [
        text for side in SIDES for text in ("", "", *(in_all(cells, side, what) for what in ("tool_left", "left")))
    ]
    table = [HEADS, *rows, ("in all", "", *totals)]
    widths = [max(len(row[column]) for row in table) for column in range(len(HEADS))]
    rule = "-+-".join("-" * width for width in widths)
    shown = [" | ".join(_pad(text, widths[column], column) for column, text in enumerate(row)) for row in table]
    return [shown[0], rule, *shown[1:-1], rule, shown[-1], *NOTE]


def in_all(cells: list[Cell], side: str, what: str) -> str:
    known = [cell[side][what] or 0 for cell in cells if side in cell]
    # A cell that failed before the count may have left processes.
    return f"{sum(known)}{'?' * (len(known) < len(cells))}"


def _of(cell: Cell) -> list[str]:
    texts: list[str] = [cell["agent"], cell["step"]]
    for side in SIDES:
        told = cell.get(side)
        if told is None:
            # A failed side reports no values. Its test gives the reason.
            texts += ["", "FAILED", "?", "?"]
        else:
            tool = "" if told["tool_left"] is None else str(told["tool_left"])
            texts += [f"{told['seconds']:.1f}", told["outcome"], tool, str(told["left"])]
    return texts


def _pad(text: str, width: int, column: int) -> str:
    return text.ljust(width) if column in WORDS else text.rjust(width)
