"""Rows of sessions, laid out for a width. Pure.

Where there is not room for all columns they go in a fixed order, and what is left is readable: the state and the
session. The prompt takes what room is left, and goes when that is too little to read.
"""

from __future__ import annotations

from collections.abc import Sequence

from banksman.cli.looking import colour_of, money
from banksman.cli.saying.style import Style
from banksman.cli.saying.terminal import as_line
from banksman.cli.saying.widths import cut, padded, width
from banksman.cli.watching.screen import seconds_in_words
from banksman.cli.watching.survey import ORDER, Row

NAME_COLUMNS_MAX, NAME_COLUMNS_MIN = 24, 8
PROMPT_COLUMNS_MIN = 12
_GAP = 2

# In the order in which they are shown.
_HEADS = {
    "state": "STATE",
    "name": "SESSION",
    "agent": "AGENT",
    "host": "HOST",
    "prompt": "DOES",
    "for": "FOR",
    "queue": "QUEUE",
    "asks": "ASKS",
    "cost": "COST",
    "memory": "MEMORY",
    "processes": "PIDS",
    "last": "LAST",
}
# The first goes first.
DROPPED = ("processes", "memory", "agent", "last", "cost", "host", "queue", "prompt", "asks", "for")


def heads(rows: Sequence[Row]) -> dict[str, str]:
    """Where the store is of one machine, nobody asks which host it is."""
    has_hosts = any(row.host is not None for row in rows)
    return {name: head for name, head in _HEADS.items() if name != "host" or has_hosts}


def cells(row: Row, now: float) -> dict[str, str]:
    """As words, none of which a terminal obeys. Nothing to say is a dash."""
    said: dict[str, object] = {
        "state": row.state,
        "name": row.name,
        "agent": row.agent,
        "host": row.host,
        "prompt": " ".join(row.prompt.split()),
        "for": None if row.since is None else seconds_in_words(now - row.since),
        "queue": row.queue or None,
        "asks": row.questions or None,
        "cost": money(row.cost),
        "memory": None if row.memory_bytes is None else f"{row.memory_bytes / (1 << 20):.0f} MiB",
        "processes": row.processes,
        "last": None if row.at is None else f"{seconds_in_words(max(0.0, now - row.at))} ago",
    }
    return {name: as_line(value) if value not in (None, "") else "-" for name, value in said.items()}


def plain(rows: Sequence[Row], now: float) -> tuple[Sequence[str], list[list[str]]]:
    """A head and rows, for a table."""
    head = heads(rows)
    return tuple(head.values()), [[cells(row, now)[name] for name in head] for row in rows]


def lines(rows: Sequence[Row], columns: int, now: float, *, style: Style, selected: str | None) -> list[str]:
    """The head, and a line for each row; each exactly that wide, so that nothing is left of what it is drawn over."""
    said = [cells(row, now) for row in rows]
    head = heads(rows)
    widths = _widths(head, said, columns)
    drawn = [style.bold(_line(head, widths, columns))]
    for row, each in zip(rows, said, strict=True):
        line = _line(each, widths, columns)
        if row.id == selected:
            drawn.append(f"\x1b[7m{line}\x1b[0m")
        else:
            colour = colour_of(style, row.state)
            # Only the word for the state: a table in colours is one that nobody reads.
            drawn.append(colour(line[: widths["state"]]) + line[widths["state"] :])
    return drawn


def summary(rows: Sequence[Row]) -> str:
    counts = [(state, sum(row.state == state for row in rows)) for state in ORDER]
    said = ", ".join(f"{count} {state}" for state, count in counts if count)
    return f"{len(rows)} session{'' if len(rows) == 1 else 's'}{': ' if said else ''}{said}"


def _widths(heads: dict[str, str], said: list[dict[str, str]], columns: int) -> dict[str, int]:
    """Of the columns that there is room for."""
    widths = {name: max([width(head), *(width(each[name]) for each in said)]) for name, head in heads.items()}
    widths["name"] = min(widths["name"], NAME_COLUMNS_MAX)
    wanted, widths["prompt"] = widths["prompt"], PROMPT_COLUMNS_MIN
    for name in DROPPED:
        if _total(widths) <= columns:
            break
        widths.pop(name, None)
    if "prompt" in widths:
        widths["prompt"] = min(max(wanted, PROMPT_COLUMNS_MIN), PROMPT_COLUMNS_MIN + columns - _total(widths))
    elif _total(widths) > columns:
        # A terminal of a few columns: the name is cut, and what is still too wide ends at the edge.
        widths["name"] = max(NAME_COLUMNS_MIN, widths["name"] - (_total(widths) - columns))
    return widths


def _total(widths: dict[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _line(said: dict[str, str], widths: dict[str, int], columns: int) -> str:
    line = (" " * _GAP).join(padded(cut(said[name], size), size) for name, size in widths.items())
    return padded(cut(line, columns), columns)
