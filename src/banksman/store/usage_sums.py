"""Usage of a store: the additions in events, counted by day, session, agent and caller.

`UsageTable` sums up what events add (`core/session/usage.py`), and answers `Log.usage`.
`SessionUsageReader` counts a session whose engine has no table, by reading its log. Days are days
in UTC.
"""

from __future__ import annotations

import asyncio
import datetime
import re
from collections.abc import Awaitable, Callable, Iterable, Sequence
from operator import attrgetter
from typing import NamedTuple

from banksman.core.session.event import Entry
from banksman.core.session.usage import NO_USAGE, Usage, additions
from banksman.errors import UsageError
from banksman.store.log_values import READ_EVENTS_MAX, Page, UsageBy, UsageRow, day_of

BY: tuple[UsageBy, ...] = ("day", "session", "agent", "caller")
_DAY = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


class UsageKey(NamedTuple):
    """Key of a count. `day`: as `YYYY-MM-DD`. `caller`: None without a caller."""

    day: str
    session: str
    agent: str
    caller: str | None


class UsageQuery(NamedTuple):
    """A checked query of `Log.usage`. `since`, `until`: the first and the last day, or None."""

    by: UsageBy
    since: str | None
    until: str | None


def checked_query(
    by: str, since: datetime.date | str | None, until: datetime.date | str | None
) -> UsageQuery:
    """Check the arguments of `Log.usage`. Raises `UsageError`."""
    known: list[UsageBy] = [name for name in BY if name == by]
    if not known:
        raise UsageError(f"cannot count usage by {by!r:.60}", hint=f"use one of: {', '.join(BY)}")
    return UsageQuery(known[0], _day("since", since), _day("until", until))


def _day(name: str, value: datetime.date | str | None) -> str | None:
    if value is None:
        return None
    try:
        # Python also reads 20261118 and 2026-W47-3, which no other reader of a day knows.
        if isinstance(value, str) and _DAY.fullmatch(value) is None:
            raise ValueError(value)
        day = datetime.date.fromisoformat(value) if isinstance(value, str) else value
        if isinstance(day, datetime.datetime):
            day = (day.astimezone(datetime.UTC) if day.tzinfo is not None else day).date()
        return datetime.date.isoformat(day)
    except (TypeError, ValueError) as exc:
        hint = "use a day as YYYY-MM-DD, in UTC"
        raise UsageError(f"{name} cannot be {value!r:.60}", hint=hint) from exc


class UsageTable:
    """Sums of additions, by everything that a query can ask for."""

    def __init__(self) -> None:
        self._sums: dict[UsageKey, Usage] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def add(self, key: UsageKey, usage: Usage) -> None:
        self._sums[key] = self._sums.get(key, NO_USAGE).plus(usage)

    def add_entries(self, session: str, agent: str, at: float, entries: Sequence[Entry]) -> None:
        """Add what the entries of one append add. `agent`: the first agent of the session."""
        for caller, other, usage in additions(entries):
            self.add(UsageKey(day_of(at), session, other or agent, caller), usage)

    def update(self, other: UsageTable) -> None:
        for key, usage in other.items():
            self.add(key, usage)

    def items(self) -> Iterable[tuple[UsageKey, Usage]]:
        return self._sums.items()

    def rows(self, query: UsageQuery) -> list[UsageRow]:
        """Return the sums that a query asks for, in the order of their keys."""
        found: dict[str | None, Usage] = {}
        key_of = attrgetter(query.by)
        for key, usage in self._sums.items():
            if (query.since or key.day) <= key.day <= (query.until or key.day):
                name = key_of(key)
                found[name] = found.get(name, NO_USAGE).plus(usage)
        return sorted_rows(UsageRow(name, usage) for name, usage in found.items())


def sorted_rows(rows: Iterable[UsageRow]) -> list[UsageRow]:
    """Sort rows by their key. The row without a key comes first."""
    return sorted(rows, key=lambda row: (row.key is not None, row.key or ""))


def merged(some: Iterable[UsageRow], more: Iterable[UsageRow]) -> list[UsageRow]:
    """Return the sums of two results of the same query."""
    sums: dict[str | None, Usage] = {}
    for key, usage in (*some, *more):
        sums[key] = sums.get(key, NO_USAGE).plus(usage)
    return sorted_rows(UsageRow(key, usage) for key, usage in sums.items())


# Reads a page of a session: session, after, limit.
ReadPage = Callable[[str, int, int], Awaitable[Page]]


async def count_events(
    read: ReadPage, table: UsageTable, session: str, agent: str, *, begin: int, end: int
) -> int:
    """Add the usage in the events after `begin`, up to `end` or the head of the log.

    Returns the seq of the last event that was counted.
    """
    while begin < end:
        page = await read(session, begin, READ_EVENTS_MAX)
        events = [event for event in page.events if event.seq <= end]
        if not events:
            break
        for event in events:
            entry = (event.turn, event.kind, event.data)
            table.add_entries(session, agent, event.at, (entry,))
        begin = events[-1].seq
    return begin


class _Counted:
    """The usage of one session from the event after `begin` to the event `seen`."""

    def __init__(self, identity: object, begin: int) -> None:
        self.identity = identity
        self.begin = begin
        self.seen = begin
        self.table = UsageTable()


class SessionUsageReader:
    """Counts sessions by reading their events. Each event is read once while this object lives.

    The first call for a session reads its history page by page; later calls read only new events.
    """

    def __init__(self, read: ReadPage) -> None:
        self._read = read
        self._counted: dict[str, _Counted] = {}
        # Held while a session is counted: of two callers, the second one finds the result.
        self._counting = asyncio.Lock()

    async def count(
        self, session: str, agent: str, *, identity: object, begin: int, end: int
    ) -> UsageTable:
        """Return the usage in the events after `begin`, up to `end`.

        `identity`: distinguishes the session from a deleted one with the same id.
        """
        async with self._counting:
            counted = self._counted.get(session)
            if counted is None or (counted.identity, counted.begin) != (identity, begin):
                counted = self._counted[session] = _Counted(identity, begin)
            counted.seen = await count_events(
                self._read, counted.table, session, agent, begin=counted.seen, end=end
            )
        return counted.table

    def keep_only(self, sessions: Sequence[str]) -> None:
        """Drop the counts of all other sessions."""
        known = set(sessions)
        for session in [session for session in self._counted if session not in known]:
            del self._counted[session]
