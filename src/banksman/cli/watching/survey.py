"""Every session, as one row: who needs somebody first. What the server says, as values; nothing is drawn here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from banksman.cli.looking import sessions
from banksman.cli.reaching.client import Client, Problem, segment

# By who is to act: somebody is asked, something is wrong, it runs, it will, it could, it is another's, it is over.
ORDER = ("asks", "wedged", "not movable", "unreachable", "running", "queued", "idle", "elsewhere", "gone")
# In these somebody holds it, and there is more to tell.
BUSY = ("asks", "wedged", "running")
# So many are looked at closely. What is further down nobody sees.
CLOSE_MAX = 40
# How far back the beginning of a turn is looked for.
EVENTS_MAX = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
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


class Survey:
    """Asks, and remembers what does not change. Used by one thread at a time."""

    def __init__(self, client: Client) -> None:
        self._client = client
        # When the turn began that a session is busy with.
        self._began: dict[str, tuple[str, float | None]] = {}

    def all(self) -> dict[str, Row]:
        found = {row.id: row for row in map(_row, sessions(self._client))}
        close = sorted((row for row in found.values() if row.state in BUSY), key=lambda row: row.rank)
        return {**found, **{row.id: row for row in self.some(each.id for each in close[:CLOSE_MAX]).values() if row}}

    def some(self, ids: Iterable[str]) -> dict[str, Row | None]:
        """These, closely. None: it was deleted."""
        found: dict[str, Row | None] = {}
        for id in ids:
            try:
                found[id] = self._close(self._client.get(f"/v1/sessions/{segment(id)}/why"))
            except Problem as problem:
                if problem.status != 404:
                    raise
                found[id] = None
        return found

    def _close(self, why: dict[str, Any]) -> Row:
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


def _row(session: dict[str, Any], **more: Any) -> Row:
    return Row(
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
