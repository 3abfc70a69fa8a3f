"""Fixtures of the tests with real agents, and the tables that the run prints at its end.

pytest collects these tests only in the place that `tools/agents.py run` makes (`make test-agents`): a network namespace
with only the loopback interface. Elsewhere a started agent could reach the network.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.agents.agents import AGENTS, RealAgent

IS_PLACE_MADE = "BANKSMAN_AGENTS" in os.environ
# So `make test` and a plain pytest ignore this folder.
collect_ignore_glob = [] if IS_PLACE_MADE else ["test_*.py"]

# Rewrite the asserts of these helpers, so that they show their values as those of a test do.
pytest.register_assert_rewrite(
    *(f"tests.agents.{name}" for name in ("acpx", "case", "ground", "matrix", "plain", "steps"))
)

# Name of the property under which a test reports its row. The report travels from a worker to the process that prints.
ROW = "row of the table"
# The same for the table of all agents.
CELL = "cell of the matrix"
# Variable with the path of the page that is generated from the matrix, if it is set.
PAGE = "BANKSMAN_CONFORMANCE"


@pytest.fixture(scope="session")
def real_agent() -> Callable[[str], RealAgent]:
    """Return a function that gives a real agent by its name, only without a network."""
    # Import here: pytest reads this file in every collection, and the tools exist only in a checkout.
    from tools.agents import interfaces_up

    assert interfaces_up() == {"lo"}, "a real agent is started only in a network namespace that holds loopback alone"

    def give(name: str) -> RealAgent:
        agent = AGENTS[name]
        # tools/agents.py has reported this already, and fails in CI.
        if not agent.is_installed():
            pytest.skip(f"{name} is not for this machine")
        return agent

    return give


@pytest.fixture(scope="session")
def claude(real_agent: Callable[[str], RealAgent]) -> str:
    """Path of the agent that these tests use."""
    (path,) = real_agent("claude").program()
    return path


def pytest_report_header() -> str | None:
    """Explain the missing tests to a user who names this folder by hand."""
    return None if IS_PLACE_MADE else "the tests with a real agent are run by `make test-agents`, and only by that"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    # Import here: these modules hold assertions, and pytest rewrites only modules that are not yet imported.
    from tests.agents.matrix import page
    from tests.agents.matrix import table as matrix

    rows, cells = reported(terminalreporter, ROW), reported(terminalreporter, CELL)
    if rows:
        terminalreporter.section("Claude Code: what is left 2 s after close")
        for line in table(sorted(rows, key=lambda row: row["number"])):
            terminalreporter.write_line(line)
    if cells:
        terminalreporter.section("every agent: what is left 2 s after the interrupt of a tool, and 2 s after close")
        for line in matrix.lines(cells):
            terminalreporter.write_line(line)
    if cells and PAGE in os.environ:
        path = Path(os.environ[PAGE])
        # A page with holes would look complete.
        if matrix.is_whole(cells):
            path.write_text(page.text(cells), encoding="utf-8")
            terminalreporter.write_line(f"{path} is written from this run")
        else:
            terminalreporter.write_line(f"{path} is left as it was: not every cell of the table has both its sides")


def reported(terminalreporter: pytest.TerminalReporter, wanted: str) -> list[dict[str, Any]]:
    """Return the values that the tests reported under a name."""
    return [
        value
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == wanted and report.when == "call"
    ]


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return one line per step: the results on Banksman, and on plain subprocess with killpg."""
    heads = ("step", "banksman: s", "outcome", "left", "plain: s", "outcome", "left")
    cells = [heads, *(cells_of(row) for row in rows)]
    cells.append(("left in all", "", "", left_in_all(rows, "banksman"), "", "", left_in_all(rows, "plain")))
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    rule = "-+-".join("-" * width for width in widths)
    lines = [
        " | ".join(pad(text, width, column) for column, (text, width) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    ]
    return [
        lines[0],
        rule,
        *lines[1:-1],
        rule,
        lines[-1],
        "plain: subprocess.Popen(start_new_session=True), killpg(SIGKILL)",
    ]


def left_in_all(rows: list[dict[str, Any]], side: str) -> str:
    known = [row[side]["left"] for row in rows if side in row]
    # A step that failed before the count may have left processes.
    return f"{sum(known)}{'?' * (len(known) < len(rows))}"


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    cells: list[str] = [row["step"]]
    for side in ("banksman", "plain"):
        # A failed side reports no values. Its test gives the reason.
        told = row.get(side)
        cells += [f"{told['seconds']:.1f}", told["outcome"], str(told["left"])] if told else ["", "FAILED", "?"]
    return tuple(cells)


def pad(text: str, width: int, column: int) -> str:
    """Align numbers to the right."""
    return text.rjust(width) if column in (1, 3, 4, 6) else text.ljust(width)
