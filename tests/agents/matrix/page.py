"""Generate docs/conformance.md from one run of the matrix: each agent's behaviour, and the repairs of Banksman.

The layout and every unmeasured text come from the code. So two runs differ only in their times, unless an agent or
Banksman has changed.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from tests.agents.agents import AGENTS
from tests.agents.matrix.abilities import NAMES
from tests.agents.matrix.steps import STEPS
from tests.agents.matrix.table import SIDES, Cell, in_all, ordered

from banksman.sessions import known_agents
from banksman.sessions.profile import CAPABILITIES, Profile

HEAD = """\
# Conformance

This page shows how each real agent behaves under Banksman, and which defects Banksman repairs.
`make conformance` generates it from one run. Do not edit it. Example: after an interrupt in a tool,
no process of the tool is left (row "interrupt in a tool").

Each agent runs against a fake model on loopback, in a network namespace without any other network.
The same code drives each agent through the public API: `Host.open`, `ask`, `interrupt`, `close`.
From the first turn on, every step has a tool in the background with three children: a plain one,
one in a separate session, and one that ignores TERM. A process independent of Banksman counts the
leftover processes in `/proc`: those of an interrupted tool two seconds after the interrupt, and all
processes two seconds after the close.

The control runs the same agent at the same time with `subprocess.Popen(start_new_session=True)`, a
small client of the agent's protocol, and `killpg(SIGKILL)` at the end. It shows the agent's
behaviour without Banksman.
"""

STEPS_NOTE = """\
- *start*: from the start of the process to the end of the first turn. *tool*: a command in the
  foreground; the model receives its output. *permission*: two requests, the first allowed, the
  second denied.
- *interrupt in a stream*: the agent also cancels the model call. The next answer contains no text
  of the interrupted one.
- *interrupt in a tool*: the tool has the three children too. Processes that an earlier turn started
  keep running.
- *model error*: the model answers HTTP 400. The turn fails with the model's message. The next ask
  is answered.
- *SIGKILL, then resumed*: the agent is killed while it runs a tool. The turn fails. The next ask
  goes to another process, and the model receives the earlier conversation.
- *close*: closes a session while a tool runs.
"""

SAID_NOTE = """\
The agents' answers to `initialize` and `session/new`. Claude Code and Codex report less. The words
under `history` are those of ACP: `load` resumes a conversation and replays its history, `resume`
resumes it without a replay.
"""

REPAIRS_NOTE = """\
*Still running*: processes of the interrupted tool two seconds after the agent reported the end of
the turn. The number differs between runs; with Banksman it is 0. *Left*: processes that
`killpg(SIGKILL)` left in all steps; with Banksman 0. *Repaired*: the agent's defects according to
its profile, and the repairs. Some defects do not occur in these steps ([agents.md](agents.md)).
"""

RUN_NOTE = """\
Seconds from the start to the end of the close. Both sides ran at the same time and beside other
tests, so the numbers only compare the two. Most of Banksman's time is the grace before KILL for the
child that ignores TERM.
"""

# Defects of an agent that cannot be repaired, beside the notes of its profile.
TRUTHS = {
    "codex-acp": (
        "It has no way to deny a command and continue. A denial ends the turn with `cancelled`, so the turn fails.",
    ),
    "gemini": (
        "It reports that a command has ended, but not its output. A permission request has the command as its title "
        "and no input.",
        "It forgets a conversation that is loaded in the same minute in which it began. The history file is named by "
        "the minute, so it looks like a new one. Banksman reports `session.context_lost`. The step makes the file "
        "look older.",
    ),
    "opencode": (
        "A denial ends the turn, and the agent reports success. The model learns of the denial with the next prompt.",
    ),
}


def text(cells: list[Cell]) -> str:
    """Return the whole page."""
    known = {(cell["agent"], cell["step"]): cell for cell in cells}
    parts = [
        HEAD,
        "## Results by agent\n",
        _outcomes(known),
        STEPS_NOTE,
        "## Capabilities\n",
        asked_for(),
        "## Reported by the agents\n",
        SAID_NOTE,
        _said(known),
        "## Repairs\n",
        REPAIRS_NOTE,
        _repaired(known),
        truths(),
        "## Full results\n",
        RUN_NOTE,
        _run(cells),
    ]
    return "\n".join(parts)


def asked_for() -> str:
    """Return the table of capabilities in the profiles, for every agent of the matrix."""
    agents = {name: profile(name) for name in AGENTS}
    rows = [
        [f"`{name}`", *("yes" if name in agent.capabilities else "" for agent in agents.values())]
        for name in sorted(CAPABILITIES)
    ]
    return _table(["capability", *(f"`{name}`" for name in agents)], rows)


def truths() -> str:
    lines = ["Limits that Banksman cannot repair:\n"]
    for name in AGENTS:
        lines += [_item(name, truth) for truth in TRUTHS.get(name, ())]
        note = profile(name).note
        if note:
            lines.append(_item(name, f"{note[0].upper()}{note[1:]}."))
    return "\n".join(lines) + "\n"


def _item(name: str, words: str) -> str:
    return textwrap.fill(f"- `{name}`: {words}", 100, subsequent_indent="  ", break_on_hyphens=False)


def repairs(agent: str) -> str:
    """Return the repairs of a profile as one cell."""
    return "; ".join(profile(agent).repairs()) or "leftover processes only"


def profile(name: str) -> Profile:
    return known_agents.load(name)


def _outcomes(known: dict[tuple[str, str], Cell]) -> str:
    rows = [
        [step, *(_of(known.get((agent, step)), "banksman", "outcome", "not run") for agent in AGENTS)] for step in STEPS
    ]
    left = [
        "total left",
        *(in_all([cell for cell in known.values() if cell["agent"] == agent], "banksman", "left") for agent in AGENTS),
    ]
    return _table(["step", *(f"`{name}`" for name in AGENTS)], [*rows, left])


def _said(known: dict[tuple[str, str], Cell]) -> str:
    rows: list[list[str]] = []
    for agent in AGENTS:
        seen = _of(known.get((agent, "start")), "plain", "seen", {})
        abilities = seen.get("abilities", {})
        rows.append([f"`{agent}`", *(abilities.get(name, "not run") for name in NAMES)])
    return _table(["agent", *NAMES], rows)


def _repaired(known: dict[tuple[str, str], Cell]) -> str:
    rows: list[list[str]] = []
    for agent in AGENTS:
        stream, in_tool = (known.get((agent, f"interrupt in a {where}")) for where in ("stream", "tool"))
        cells = [cell for cell in known.values() if cell["agent"] == agent]
        said = [str(_of(cell, "plain", "outcome", "not run")) for cell in (stream, in_tool)]
        error = str(_of(known.get((agent, "model error")), "plain", "outcome", "not run"))
        lives_on = str(_of(in_tool, "plain", "tool_left", "not run"))
        rows.append([f"`{agent}`", *said, error, lives_on, in_all(cells, "plain", "left"), repairs(agent)])
    heads = [
        "agent",
        "interrupt in a stream: reported as",
        "interrupt in a tool: reported as",
        "model error: reported as",
        "still running",
        "left",
        "repaired",
    ]
    return _table(heads, rows)


def _run(cells: list[Cell]) -> str:
    heads = ["agent", "step", *(f"{side}: {what}" for side in SIDES for what in ("s", "outcome", "tool", "left"))]
    rows = [
        [f"`{cell['agent']}`", cell["step"], *(word for side in SIDES for word in _side(cell.get(side)))]
        for cell in ordered(cells)
    ]
    totals = [
        word for side in SIDES for word in ("", "", in_all(cells, side, "tool_left"), in_all(cells, side, "left"))
    ]
    return _table(heads, [*rows, ["total", "", *totals]])


def _side(told: dict[str, Any] | None) -> list[str]:
    if told is None:
        return ["", "failed to run", "?", "?"]
    tool = "" if told["tool_left"] is None else str(told["tool_left"])
    return [f"{told['seconds']:.1f}", str(told["outcome"]), tool, str(told["left"])]


def _of(cell: Cell | None, side: str, what: str, otherwise: Any) -> Any:
    return otherwise if cell is None or side not in cell else cell[side][what]


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in lines)
