"""What there is to see of sessions: what `ps` and its like have in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from banksman.cli.client.client import Client, Problem, segment
from banksman.cli.output import Style, as_line, cut, padded, width
from banksman.cli.tui.screen import seconds_in_words

Shown = dict[str, Any]

# By who is to act: somebody is asked, something is wrong, it runs, it will, it could, it is another's, it is over.
ORDER = ("asks", "wedged", "not movable", "unreachable", "running", "queued", "idle", "elsewhere", "gone")
# In these somebody holds it, and there is more to tell.
BUSY = ("asks", "wedged", "running")
# So many are looked at closely. What is further down nobody sees.
CLOSE_MAX = 40
# How far back the beginning of a turn is looked for.
EVENTS_MAX = 100
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


def sessions(client: Client) -> Iterator[Shown]:
    """All of them, oldest first, page by page."""
    after: str | None = None
    while True:
        page = client.get("/v1/sessions", {"after": after})
        yield from page["sessions"]
        after = page["next"]
        if after is None:
            return


def money(cost: float | None) -> str | None:
    return None if cost is None else f"${cost:.4f}"


def colour_of(style: Style, state: str) -> Callable[[str], str]:
    """Of the word for a session's state: who needs somebody, and who is at work."""
    match state:
        case "asks":
            return style.yellow
        case "wedged" | "not movable" | "unreachable":
            return style.red
        case "running":
            return style.green
        case "gone" | "elsewhere":
            return style.dim
        case _:
            return str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRow:
    """`since`: when the turn that runs began; None: none does, or nobody can tell. `host`: which of many has it."""

    id: str
    state: str
    name: str
    agent: str
    created: float
    at: float | None
    cost: float | None
    queue: int
    questions: int
    host: str | None = None
    prompt: str = ""
    turn: str | None = None
    since: float | None = None
    processes: int | None = None
    memory_bytes: int | None = None

    @property
    def rank(self) -> tuple[int, float, str]:
        place = ORDER.index(self.state) if self.state in ORDER else len(ORDER)
        return place, self.created, self.id


class SessionRows:
    """Asks, and remembers what does not change. Used by one thread at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # When the turn began that a session is busy with.
        self._began: dict[str, tuple[str, float | None]] = {}

    def all(self) -> dict[str, SessionRow]:
        found = {row.id: row for row in map(_row, sessions(self._client))}
        close = sorted((row for row in found.values() if row.state in BUSY), key=lambda row: row.rank)
        return {**found, **{row.id: row for row in self.some(each.id for each in close[:CLOSE_MAX]).values() if row}}

    def some(self, ids: Iterable[str]) -> dict[str, SessionRow | None]:
        """These, closely. None: it was deleted."""
        found: dict[str, SessionRow | None] = {}
        for id in ids:
            try:
                found[id] = self._close(self._client.get(f"/v1/sessions/{segment(id)}/why"))
            except Problem as problem:
                if problem.status != 404:
                    raise
                found[id] = None
        return found

    def _close(self, why: dict[str, Any]) -> SessionRow:
        row = _row(why)
        if row.turn is None:
            self._began.pop(row.id, None)
            return row
        return _row(
            why,
            prompt=str(why.get("holder_prompt") or ""),
            since=self._since(row.id, row.turn, why["seq"]),
            processes=len(why["tree"]),
            memory_bytes=sum(each["rss_bytes"] or 0 for each in why["tree"]),
        )

    def _since(self, id: str, turn: str, seq: int) -> float | None:
        known = self._began.get(id)
        if known is None or known[0] != turn:
            query = {"before": seq + 1, "limit": EVENTS_MAX, "frames": 0}
            own = self._client.get(f"/v1/sessions/{segment(id)}/events", query)["events"]
            began = [event["at"] for event in own if event["turn"] == turn and event["kind"] == "turn.started"]
            known = self._began[id] = turn, began[-1] if began else None
        return known[1]


def _row(session: dict[str, Any], **more: Any) -> SessionRow:
    return SessionRow(
        id=session["id"],
        state=session["state"],
        name=session["name"] or session["id"],
        agent=session["agent"],
        created=session["created"],
        at=session["at"],
        cost=session["cost"],
        queue=len(session["queue"]),
        questions=len(session["questions"]),
        # A server of an older release does not say.
        host=session.get("host"),
        turn=session["holder"],
        **more,
    )


# Rows of sessions, laid out for a width. Pure.
#
# Where there is not room for all columns they go in a fixed order, and what is left is readable: the state and the
# session. The prompt takes what room is left, and goes when that is too little to read.

NAME_COLUMNS_MAX, NAME_COLUMNS_MIN = 24, 8


def heads(rows: Sequence[SessionRow]) -> dict[str, str]:
    """Where the store is of one machine, nobody asks which host it is."""
    has_hosts = any(row.host is not None for row in rows)
    return {name: head for name, head in _HEADS.items() if name != "host" or has_hosts}


def cells(row: SessionRow, now: float) -> dict[str, str]:
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


def plain(rows: Sequence[SessionRow], now: float) -> tuple[Sequence[str], list[list[str]]]:
    """A head and rows, for a table."""
    head = heads(rows)
    return tuple(head.values()), [[cells(row, now)[name] for name in head] for row in rows]


def lines(rows: Sequence[SessionRow], columns: int, now: float, *, style: Style, selected: str | None) -> list[str]:
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


def summary(rows: Sequence[SessionRow]) -> str:
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
