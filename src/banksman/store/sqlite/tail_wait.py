"""Waiting for new events, and the short queries that run in the event loop's thread.

`TailWaiters` has the waiting tasks. `Lookup` has the queries: heads, listings and owners of
sessions.

A commit of this host wakes its waiters immediately. A commit of another host sends no notification:
SQLite has no call for that, and inotify does not report writes through shared memory. So a timer
reads the number that changes with every commit, every `WATCH_SECONDS`. This is the only polling for
events in this engine. It takes three microseconds of the event loop, and it runs only while a task
waits for events that another host may write. The delay is too short for a person to notice. A
waiter on a session that this host owns does not need the timer.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from banksman.errors import StoreError, StoreReadOnly
from banksman.store.log_values import Head, KnownSession, Owner
from banksman.store.sqlite.host_locks import HostLocks, HostProcess, is_there
from banksman.store.sqlite.ownership import ClaimedSession
from banksman.store.sqlite.sqlite_errors import translate
from banksman.store.tails import Tails

# Queries of the event loop's own thread: single rows by an index, and lists of sessions.
#
# They may run in the loop, because a reader of a write-ahead log waits for no other connection. A
# query takes some microseconds, most of them in Python, and the pages that it reads were just
# written and are in memory. Passing it to a thread would take ten times as long. Each query is read
# to its end, so that it keeps no read mark in the log.

_KNOWN = (
    "SELECT s.id, s.name, s.agent, s.epoch, s.seq, s.first, s.created, s.changed, s.owner, "
    "h.address, h.boot, h.pid, h.started "
    "FROM sessions s LEFT JOIN hosts h ON h.id = s.owner"
)
_OWNED = (
    "SELECT s.count, s.owner, h.address, h.boot, h.pid, h.started FROM "
    "(SELECT owner, count(*) AS count FROM sessions GROUP BY owner) s "
    "LEFT JOIN hosts h ON h.id = s.owner"
)

# Poll interval for the commits of other hosts.
WATCH_SECONDS = 0.05
log = logging.getLogger("banksman")


class SessionPlace(NamedTuple):
    """A session's head and its identity.

    `number`: the identity, see `tables.py`; None if the session does not exist.
    """

    head: Head
    number: int | None


NOWHERE = SessionPlace(Head(0, 0, 1), None)


class Lookup:
    """Short read queries for one thread. SQLite errors become `StoreError`."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        self._hosts: HostLocks | None = None

    def place(self, session: str) -> SessionPlace:
        """Return the session's head and identity."""
        rows = self._rows("SELECT epoch, seq, first, number FROM sessions WHERE id = ?", session)
        if not rows:
            return NOWHERE
        ((epoch, seq, first, number),) = rows
        return SessionPlace(Head(epoch, seq, first), number)

    def newest_chunk(self) -> int:
        """Return the id of the newest chunk; 0 for an empty store."""
        return self._rows("SELECT coalesce(max(id), 0) FROM chunks")[0][0]

    def heads_after(self, chunk: int) -> list[tuple[str, int]]:
        """Return the sessions that have chunks after this one, each with its last seq."""
        return self._rows(
            "SELECT session, max(last) FROM chunks "
            "WHERE id > ? AND +session IN (SELECT id FROM sessions) GROUP BY +session",
            chunk,
        )

    def version(self) -> int:
        """Return a number that changes with every commit of another connection, in any process."""
        return self._rows("PRAGMA data_version")[0][0]

    def deletions(self) -> int:
        """Return how many sessions were ever deleted."""
        return self._rows("SELECT value FROM store WHERE key = 'deletions'")[0][0]

    def sessions(
        self, host: int | None, after: str | None, limit: int | None
    ) -> list[KnownSession]:
        """List sessions, oldest first. `host`: the id of this host, to mark its sessions."""
        alive: dict[int, bool] = {}
        # SQLite treats a negative limit as no limit.
        rows = self._rows(
            f"{_KNOWN} WHERE ? OR s.number > "
            "(SELECT number FROM sessions WHERE id = ?) ORDER BY s.number LIMIT ?",
            *(after is None, after, -1 if limit is None else limit),
        )
        return [self._known(row, host, alive) for row in rows]

    def owned(self, host: int | None) -> list[tuple[Owner | None, int]]:
        """Count the sessions of each owner, see `Log.owned`."""
        rows = self._rows(_OWNED)
        return [(self._owner(owner, process, host, {}), count) for count, owner, *process in rows]

    def find(self, id_or_name: str, host: int | None) -> KnownSession | None:
        """Find a session by its id, else by its name."""
        rows = self._rows(f"{_KNOWN} WHERE s.id = ?", id_or_name) or self._rows(
            f"{_KNOWN} WHERE s.name = ?", id_or_name
        )
        return self._known(rows[0], host, {}) if rows else None

    def has_live_hosts(self) -> bool:
        """Whether other live hosts have rows in the store.

        The caller has given up its own host identity.
        """
        rows = self._rows("SELECT id, boot, pid, started FROM hosts")
        return any(self._is_alive(host, HostProcess(*process)) for host, *process in rows)

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()

    def _known(self, row: Any, host: int | None, alive: dict[int, bool]) -> KnownSession:
        id, name, agent, epoch, seq, first, created, changed, owner, *process = row
        return KnownSession(
            id,
            name,
            agent,
            epoch,
            seq,
            first,
            self._owner(owner, process, host, alive),
            created,
            changed,
        )

    def _owner(
        self, owner: int | None, process: Sequence[Any], host: int | None, alive: dict[int, bool]
    ) -> Owner | None:
        address, boot, pid, started = process
        # An owner without a row has closed cleanly, but could not clear its id from this session.
        if owner is None or pid is None:
            return None
        if owner not in alive:
            alive[owner] = owner == host or self._is_alive(owner, HostProcess(boot, pid, started))
        return Owner(pid, address, is_here=owner == host, is_alive=alive[owner])

    def _is_alive(self, owner: int, process: HostProcess) -> bool:
        if self._hosts is None:
            try:
                self._hosts = HostLocks(self._path)
            except StoreReadOnly:
                return is_there(process)  # The lock file is not accessible.
        return self._hosts.is_alive(owner, process)

    def _rows(self, statement: str, *parameters: object) -> list[Any]:
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except sqlite3.Error as exc:
            raise translate(exc, self._path, "read") from exc


# The future's result is the error to raise. A cancelled task then leaves no unretrieved exception.
_Waiter: TypeAlias = "asyncio.Future[StoreError | None]"
# The waiters of one session: the seq that each waits past, and the session's identity at that time.
_Waiters: TypeAlias = "dict[_Waiter, tuple[int, int | None]]"
_NOBODY: Mapping[_Waiter, tuple[int, int | None]] = {}


class TailWaiters:
    """All waiting tasks of one log.

    `owned`: the sessions that only this host writes. The caller keeps this mapping up to date.
    """

    def __init__(self, look: Lookup, owned: Mapping[str, ClaimedSession]) -> None:
        self._loop = asyncio.get_running_loop()
        self._look = look
        self._owned = owned
        # A separate mapping by id, because a task may wait for a session that does not exist yet.
        self._sessions: dict[str, _Waiters] = {}
        self._positions: dict[_Waiter, int] = {}
        self.tails = Tails()
        self._timer: asyncio.TimerHandle | None = None
        # Result of the last poll: the change number, the newest chunk, and the number of deletions.
        self._seen = (0, 0, 0)

    def __len__(self) -> int:
        waiting = sum(len(waiters) for waiters in self._sessions.values())
        return waiting + len(self._positions) + len(self.tails)

    async def wait_past(self, session: str, seq: int, *, is_known: bool) -> None:
        """Wait until the session has an event after `seq`, see `Log.wait_past`."""
        head, number = self._place(session)
        if head <= seq and session not in self._owned and self._watch():
            # The watch has started just now, from the current state. A commit between the first
            # lookup and the start of the watch is visible only to a second lookup.
            head, number = self._place(session)
        if is_known and number is None:
            # The session was deleted after the caller's check. No event would wake this waiter,
            # because it has no identity to compare.
            message = f"cannot wait for events of session {session}: it was deleted"
            raise StoreError(message, session=session)
        if head > seq:
            return
        # No other code of this thread runs from the lookup until the future is registered, so no
        # commit of this host falls in between.
        waiters = self._sessions.setdefault(session, {})
        future: _Waiter = self._loop.create_future()
        waiters[future] = (seq, number)
        try:
            error = await future
        finally:
            waiters.pop(future, None)
            # `self._sessions` may hold a newer dict for this id, if this one was emptied before.
            if not waiters and self._sessions.get(session) is waiters:
                del self._sessions[session]
        if error is not None:
            raise error

    async def wait_past_chunk(self, chunk: int) -> None:
        """Wait until the store has a chunk after the given one."""
        self._watch()
        if self._look.newest_chunk() > chunk:
            return
        future: _Waiter = self._loop.create_future()
        self._positions[future] = chunk
        try:
            error = await future
        finally:
            self._positions.pop(future, None)
        if error is not None:
            raise error

    def _place(self, session: str) -> tuple[int, int | None]:
        """Return the session's last seq and its identity.

        For an owned session no query is needed: its next commit passes through this loop.
        """
        held = self._owned.get(session)
        if held is not None:
            return held.seq, held.number
        place = self._look.place(session)
        return place.head.seq, place.number

    # -- wake-ups ---------------------------------------------------------------------------------
    def on_committed(self, session: str, seq: int) -> None:
        """Wake the waiters that an event with this seq satisfies."""
        self.tails.advance(session, seq)
        for future, (past, _) in self._sessions.get(session, _NOBODY).items():
            if past < seq and not future.done():
                future.set_result(None)

    def on_placed(self, session: str, seq: int, number: int | None) -> None:
        """Wake or fail waiters by the session's current seq and identity.

        Other hosts may have changed both unobserved.
        """
        self._tell_former(session, number)
        self.on_committed(session, seq)
        self.tails.wake()

    def on_group(self) -> None:
        """Wake the tails, and the waiters by position, after a commit of this host."""
        self.tails.wake()
        if self._positions:
            try:
                self._on_newest(self._look.newest_chunk())
            except StoreError as exc:
                log.warning("store lookup failed: %s, retrying", exc)  # The watch retries.

    def on_released(self, session: str) -> None:
        """Start to watch a session that other hosts may write now.

        If another host has taken over the session, it may already have written.
        """
        self.tails.end(session)
        if session not in self._sessions:
            return
        try:
            # Start the watch first. Its starting state must not be newer than the lookup.
            self._watch()
            place = self._look.place(session)
        except StoreError as exc:
            # The release itself must not fail. The impossible change number makes the next poll
            # treat everything as new.
            log.warning("store lookup failed: %s, retrying", exc)
            self._seen = (-1, 0, 0)
            if self._timer is None:
                self._timer = self._loop.call_later(WATCH_SECONDS, self._on_time)
        else:
            self.on_placed(session, place.head.seq, place.number)

    def on_deleted(self, session: str, number: int) -> None:
        """Fail the waiters of a deleted session.

        They match by number. Events of a new session with the same id belong to another history.
        """
        for future, (_, known) in self._sessions.get(session, _NOBODY).items():
            if known == number and not future.done():
                message = f"cannot wait for events of session {session}: it was deleted"
                future.set_result(StoreError(message, session=session))

    def close(self, error: StoreError) -> None:
        """Fail all waiters and stop the watch."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        futures = [future for waiters in self._sessions.values() for future in waiters]
        for future in [*futures, *self._positions]:
            if not future.done():
                future.set_result(error)
        self.tails.end_all()

    # -- polling for commits of other hosts -------------------------------------------------------
    def _watch(self) -> bool:
        """Start the watch unless it runs. Return whether it has started now."""
        if self._timer is not None:
            return False
        # The change number is read first. A commit between these queries then causes one more poll,
        # and is not missed.
        self._seen = (self._look.version(), self._look.newest_chunk(), self._look.deletions())
        self._timer = self._loop.call_later(WATCH_SECONDS, self._on_time)
        return True

    def _on_time(self) -> None:
        """Poll, and schedule the next poll, while a waiter depends on other hosts."""
        self._timer = None
        if not self._positions and all(session in self._owned for session in self._sessions):
            return
        try:
            self._look_around()
        except StoreError as exc:
            # The next poll retries. A reader gets the error from its own call.
            log.warning("store lookup failed: %s, retrying", exc)
        self._timer = self._loop.call_later(WATCH_SECONDS, self._on_time)

    def _look_around(self) -> None:
        """Compare the store with the last poll, and wake the waiters."""
        version, newest, deletions = self._seen
        found = self._look.version()
        if found == version:
            return
        # The change number is read before the rest. A commit between these queries has a higher
        # number, so the next poll sees it.
        seen = (found, self._look.newest_chunk(), self._look.deletions())
        # Deletions come first. A waiter of a deleted session must not be woken by a new session
        # with its id.
        if seen[2] != deletions:
            self._check_deleted()
        for session, seq in self._look.heads_after(newest) if self._sessions else ():
            self.on_committed(session, seq)
        self._on_newest(seen[1])
        # Assigned last: if one of these queries fails, the next poll repeats all of them.
        self._seen = seen

    def _on_newest(self, chunk: int) -> None:
        for future, past in self._positions.items():
            if past < chunk and not future.done():
                future.set_result(None)

    def _check_deleted(self) -> None:
        for session in self._sessions:
            self._tell_former(session, self._look.place(session).number)

    def _tell_former(self, session: str, number: int | None) -> None:
        """Fail the waiters whose session of this id had another identity than `number`."""
        for _, known in list(self._sessions.get(session, _NOBODY).values()):
            if known is not None and known != number:
                self.on_deleted(session, known)
