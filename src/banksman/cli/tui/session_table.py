"""Session rows of `banksman top`: fetching, order, columns and layout.

`ps` and `why` share parts of it: the listing, the order and colours of the states, the format of
costs. The layout of `ps` is in `commands/ps.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from banksman.cli.client.client import Client, segment
from banksman.cli.client.exchange import RequestRefused
from banksman.cli.output import Style, as_line, cut, padded, width
from banksman.cli.tui.screen import seconds_in_words

Shown = dict[str, Any]

# States by urgency: a question waits, something is wrong, it runs, it will run, it could run,
# another host has it, it is over.
ORDER = (
    "asks",
    "wedged",
    "not movable",
    "unreachable",
    "running",
    "queued",
    "idle",
    "elsewhere",
    "gone",
)
# In these states a turn holds the session, and more details are fetched.
BUSY = ("asks", "wedged", "running")
# Maximum number of sessions to fetch in detail. Rows further down do not fit a screen.
CLOSE_MAX = 40
# How many events are searched backwards for the start of a turn.
EVENTS_MAX = 100
PROMPT_COLUMNS_MIN = 12
_GAP = 2
# Columns in display order.
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
# Columns to drop on a narrow terminal, in this order.
DROPPED = ("processes", "memory", "agent", "last", "cost", "host", "queue", "prompt", "asks", "for")


def sessions(client: Client) -> Iterator[Shown]:
    """Yield all sessions, oldest first, page by page."""
    after: str | None = None
    while True:
        page = client.get("/v1/sessions", {"after": after})
        yield from page["sessions"]
        after = page["next"]
        if after is None:
            return


def money(cost: float | None) -> str | None:
    """Format a cost."""
    return None if cost is None else f"${cost:.4f}"


def limit_in_words(session: Shown, now: float) -> str | None:
    """Describe the usage limit of a session's account; None if it is not limited.

    A server of an older release does not send the field.
    """
    until: float = session.get("limited_until") or 0.0
    # The asks wait a little longer than the limit, or for a delay that the provider named.
    if until <= now and not session.get("waits_for_limit"):
        return None
    waiting = len(session["queue"])
    asks = f", {waiting} ask{'' if waiting == 1 else 's'} wait{'s' * (waiting == 1)}"
    end = f" until {_clock_time(until, now)}" if until > now else ""
    return f"limited{end}{asks if waiting else ''}"


def budget_in_words(session: Shown) -> str | None:
    """Describe the budget that holds a session back; None if none does.

    A server of an older release does not send the field.
    """
    use = next((use for use in session.get("budget", ()) if use["reached"]), None)
    if use is None:
        return None
    waiting = len(session["queue"])
    asks = f"; {waiting} ask{'' if waiting == 1 else 's'} wait{'s' * (waiting == 1)}"
    return f"over budget: {cap_in_words(use)}{asks if waiting else ''}"


def cap_in_words(use: Shown) -> str:
    """Describe a cap and what is used of it."""
    what = {"usd": "US dollars (estimate)", "working_seconds": "seconds of work"}
    scope = {"host": " of today", "caller": f" of {use['caller'] or 'no caller'} today"}
    used, cap = (f"{number:,.2f}".removesuffix(".00") for number in (use["used"], use["cap"]))
    unit = use["unit"]
    return f"{used} of {cap} {what.get(unit, unit)}{scope.get(use['scope'], '')}"


def _clock_time(at: float, now: float) -> str:
    """Format a time of this machine's zone, with the day if it is not within 24 hours."""
    return time.strftime("%H:%M" if at - now < 86_400 else "%Y-%m-%d %H:%M", time.localtime(at))


def retry_in_words(retry: Shown) -> str:
    """Describe the retry that a turn waits for."""
    most = f" of {retry['attempts_max']}" if retry["attempts_max"] else ""
    due = f" in {retry['seconds']:.0f} s" if retry["seconds"] else ""
    status = f" ({retry['status']})" if retry["status"] else ""
    error = str(retry["error"]).replace("_", " ")
    return f"retry {retry['attempt']}{most}{due}: {error}{status}"


def colour_of(style: Style, state: str) -> Callable[[str], str]:
    """Return the colour for a session's state."""
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
    """One session in the table.

    `since`: when the running turn began; None if no turn runs or the time is unknown. `host`: the
    owner, if several hosts share the store.
    """

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
    limit: str | None = None
    retry: str | None = None

    @property
    def rank(self) -> tuple[int, float, str]:
        """Sort key: the most urgent sessions first."""
        place = ORDER.index(self.state) if self.state in ORDER else len(ORDER)
        return place, self.created, self.id


class SessionRows:
    """Fetch rows, and cache the parts that do not change. Used by one thread at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # The turn that holds each session, and its start.
        self._began: dict[str, tuple[str, float | None]] = {}

    def all(self) -> dict[str, SessionRow]:
        """Fetch all sessions, and details of the first `CLOSE_MAX` busy ones."""
        found = {row.id: row for row in map(_row, sessions(self._client))}
        close = sorted(
            (row for row in found.values() if row.state in BUSY), key=lambda row: row.rank
        )
        return {
            **found,
            **{
                row.id: row
                for row in self.some(each.id for each in close[:CLOSE_MAX]).values()
                if row
            },
        }

    def some(self, ids: Iterable[str]) -> dict[str, SessionRow | None]:
        """Fetch these sessions with details. A deleted session maps to None."""
        found: dict[str, SessionRow | None] = {}
        for id in ids:
            try:
                found[id] = self._close(self._client.get(f"/v1/sessions/{segment(id)}/why"))
            except RequestRefused as problem:
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
            memory_bytes=_memory_bytes(why),
            retry=retry_in_words(why["retry"]) if why.get("retry") else None,
        )

    def _since(self, id: str, turn: str, seq: int) -> float | None:
        known = self._began.get(id)
        if known is None or known[0] != turn:
            query = {"before": seq + 1, "limit": EVENTS_MAX, "frames": 0}
            own = self._client.get(f"/v1/sessions/{segment(id)}/events", query)["events"]
            began = [
                event["at"]
                for event in own
                if event["turn"] == turn and event["kind"] == "turn.started"
            ]
            known = self._began[id] = turn, began[-1] if began else None
        return known[1]


def _memory_bytes(why: dict[str, Any]) -> int:
    """Return the memory of a session's processes: of their group, or the sum over them."""
    group = why.get("containment", {}).get("cgroup")
    if group is not None and group["memory_bytes"] is not None:
        return int(group["memory_bytes"])
    return sum(each["rss_bytes"] or 0 for each in why["tree"])


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
        # A server of an older release does not send this field.
        host=session.get("host"),
        turn=session["holder"],
        limit=limit_in_words(session, time.time()) or budget_in_words(session),
        **more,
    )


# Layout of the rows for a width. Pure.
#
# If the width is too small, columns are dropped in a fixed order. The state and the session always
# stay. The prompt takes the remaining room, and is dropped if that is too small to read.

NAME_COLUMNS_MAX, NAME_COLUMNS_MIN = 24, 8


def heads(rows: Sequence[SessionRow]) -> dict[str, str]:
    """Return the column headings. The host column is dropped if all sessions are on one machine."""
    has_hosts = any(row.host is not None for row in rows)
    return {name: head for name, head in _HEADS.items() if name != "host" or has_hosts}


def cells(row: SessionRow, now: float) -> dict[str, str]:
    """Return the cells as safe text. An empty cell is a dash."""
    said: dict[str, object] = {
        "state": row.state,
        "name": row.name,
        "agent": row.agent,
        "host": row.host,
        "prompt": _does(row),
        "for": None if row.since is None else seconds_in_words(now - row.since),
        "queue": row.queue or None,
        "asks": row.questions or None,
        "cost": money(row.cost),
        "memory": None if row.memory_bytes is None else f"{row.memory_bytes / (1 << 20):.0f} MiB",
        "processes": row.processes,
        "last": None if row.at is None else f"{seconds_in_words(max(0.0, now - row.at))} ago",
    }
    return {
        name: as_line(value) if value not in (None, "") else "-" for name, value in said.items()
    }


def _does(row: SessionRow) -> str:
    """Return what the session waits for, if that is the provider, and its prompt."""
    waits = [each for each in (row.limit, row.retry) if each is not None]
    return " ".join(" · ".join((*waits, row.prompt)).split()).removesuffix(" ·")


def plain(rows: Sequence[SessionRow], now: float) -> tuple[Sequence[str], list[list[str]]]:
    """Return headings and rows for a plain table."""
    head = heads(rows)
    return tuple(head.values()), [[cells(row, now)[name] for name in head] for row in rows]


def lines(
    rows: Sequence[SessionRow], columns: int, now: float, *, style: Style, selected: str | None
) -> list[str]:
    """Return the heading and one line per row, each exactly `columns` wide.

    Full-width lines overwrite everything that was drawn before.
    """
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
            # Only the state is coloured, because a table full of colours is hard to read.
            drawn.append(colour(line[: widths["state"]]) + line[widths["state"] :])
    return drawn


def summary(rows: Sequence[SessionRow]) -> str:
    """Count the sessions by state, in words."""
    counts = [(state, sum(row.state == state for row in rows)) for state in ORDER]
    said = ", ".join(f"{count} {state}" for state, count in counts if count)
    return f"{len(rows)} session{'' if len(rows) == 1 else 's'}{': ' if said else ''}{said}"


def _widths(heads: dict[str, str], said: list[dict[str, str]], columns: int) -> dict[str, int]:
    """Return the widths of the columns that fit."""
    widths = {
        name: max([width(head), *(width(each[name]) for each in said)])
        for name, head in heads.items()
    }
    widths["name"] = min(widths["name"], NAME_COLUMNS_MAX)
    wanted, widths["prompt"] = widths["prompt"], PROMPT_COLUMNS_MIN
    for name in DROPPED:
        if _total(widths) <= columns:
            break
        widths.pop(name, None)
    if "prompt" in widths:
        widths["prompt"] = min(
            max(wanted, PROMPT_COLUMNS_MIN), PROMPT_COLUMNS_MIN + columns - _total(widths)
        )
    elif _total(widths) > columns:
        # On a very narrow terminal the name is cut. A line that is still too wide ends at the edge.
        widths["name"] = max(NAME_COLUMNS_MIN, widths["name"] - (_total(widths) - columns))
    return widths


def _total(widths: dict[str, int]) -> int:
    return sum(widths.values()) + _GAP * (len(widths) - 1)


def _line(said: dict[str, str], widths: dict[str, int], columns: int) -> str:
    line = (" " * _GAP).join(padded(cut(said[name], size), size) for name, size in widths.items())
    return padded(cut(line, columns), columns)
