"""docs/conformance.md, made from one run of the matrix: which agent does what, and what Banksman repairs.

The layout, and all that is not measured, comes from the code: two runs differ in their times alone, unless an agent or
Banksman has become another.
"""

from __future__ import annotations

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

*Which agent does what, and what Banksman repairs. Made from one run by `make conformance`, and not to be edited.*

The real agents, each against a model that is played on loopback, in a network namespace that holds nothing else. The
same code for each, by the public API: `Host.open`, `ask`, `interrupt`, `close`. In every step a tool runs in the
background from the first turn on, which has a plain child, one in a session of its own and one that does not hear TERM.
What is left is counted from `/proc`, by a process that knows nothing of Banksman: of an interrupted tool two seconds
after the interrupt, of everything two seconds after the close.

Beside it, with the same agent at the same time: `subprocess.Popen(start_new_session=True)`, a small client of the
agent's protocol, and `killpg(SIGKILL)` at the end. It is the control, and shows what the agent does by itself.
"""

STEPS_NOTE = """\
- *start*: from nothing to the end of the first turn. *tool*: a command in the foreground, whose output the model hears.
  *permission*: asked for twice, allowed and then denied.
- *interrupt in a stream*: the call of the model is given up too, and the next ask is answered with its own words and
  nothing of the old ones.
- *interrupt in a tool*: the tool has the three children too; what an earlier turn has started lives on.
- *model error*: the model answers HTTP 400. The turn has failed with what the model said; the next ask is answered.
- *SIGKILL, then resumed*: the agent is killed while it is in a tool. The turn has failed; the next ask goes to another
  process, and the model hears what was said before.
- *close*: of a session that is in a tool.
"""

SAID_NOTE = """\
The answers to `initialize` and `session/new`; Claude Code and Codex say less. What `history` names is ACP's: `load` and
`resume` go on with a conversation, with and without its history being told again.
"""

REPAIRS_NOTE = """\
*Lives on*: how many processes of the interrupted tool there were two seconds after the agent had said that the turn is
over; it differs from run to run, and with Banksman it is none. *Left*: what `killpg(SIGKILL)` left in all steps; with
Banksman nothing. *Repaired*: what the profile says that this agent does otherwise than it should, and what comes of it;
some of it happens in moments that these steps do not have ([agents.md](agents.md)).
"""

RUN_NOTE = """\
Seconds from the start to the end of the close, of both sides at once and beside other tests: they are for comparing the
two, and no more. Most of Banksman's own are the grace that the TERM-proof child is given before KILL.
"""

# What is true of one agent and cannot be repaired, beside what its profile notes.
TRUTHS = {
    "codex-acp": (
        "It offers no way to say no to a command and go on: a denial ends the turn with `cancelled`, and so it failed.",
    ),
    "gemini": (
        "That a command has ended is told, and not what it said. Who is asked gets the command as a title, no input.",
        "A conversation that is loaded in the same minute in which it was begun is forgotten: the file of its history "
        "is named by the minute, and is taken for a new one. Banksman says `session.context_lost`. The step makes the "
        "file look older.",
    ),
    "opencode": (
        "A denial ends the turn, which is said to have ended well; the model hears of it with the next prompt.",
    ),
}


def text(cells: list[Cell]) -> str:
    """The whole page."""
    known = {(cell["agent"], cell["step"]): cell for cell in cells}
    parts = [
        HEAD,
        "## Which agent does what\n",
        _outcomes(known),
        STEPS_NOTE,
        "## What a session may be asked for\n",
        asked_for(),
        "## What they say of themselves\n",
        SAID_NOTE,
        _said(known),
        "## What Banksman repairs\n",
        REPAIRS_NOTE,
        _repaired(known),
        truths(),
        "## The run\n",
        RUN_NOTE,
        _run(cells),
    ]
    return "\n".join(parts)


def asked_for() -> str:
    """What the profiles say, for every agent of the matrix."""
    agents = {name: profile(name) for name in AGENTS}
    rows = [
        [f"`{name}`", *("yes" if name in agent.capabilities else "" for agent in agents.values())]
        for name in sorted(CAPABILITIES)
    ]
    return _table(["", *(f"`{name}`" for name in agents)], rows)


def truths() -> str:
    lines = ["What is true of one of them, and is not to be repaired:\n"]
    for name in AGENTS:
        lines += [f"- `{name}`: {truth}" for truth in TRUTHS.get(name, ())]
        note = profile(name).note
        if note:
            lines.append(f"- `{name}`: {note[0].upper()}{note[1:]}.")
    return "\n".join(lines) + "\n"


def repairs(agent: str) -> str:
    """What the profile says, in one cell."""
    return "; ".join(profile(agent).repairs()) or "what it leaves, and nothing else"


def profile(name: str) -> Profile:
    return known_agents.load(name)


def _outcomes(known: dict[tuple[str, str], Cell]) -> str:
    rows = [
        [step, *(_of(known.get((agent, step)), "banksman", "outcome", "not run") for agent in AGENTS)] for step in STEPS
    ]
    left = [
        "left in all",
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
        "says after an interrupt in a stream",
        "in a tool",
        "after a model's error",
        "lives on",
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
    return _table(heads, [*rows, ["in all", "", *totals]])


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
