"""Who waits for an event that is not there yet, and what lets it through; and single rows, looked up by an index.

What this host commits lets its waiters through at once. What another host commits nobody tells us: SQLite has no call
for that, and the file's own notices (inotify) do not come for what is written by way of shared memory. So the number
that changes with every commit is looked at every `WATCH_SECONDS`. It is the one thing in this project that polls. It is
three microseconds of the loop, it is done only while somebody waits for what another host may write, and it is as late
as a person does not notice. Who waits on a session that is owned here does not need it.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from banksman.errors import StoreError, StoreReadOnly
from banksman.store.log import Head, KnownSession, Owner
from banksman.store.sqlite.host_locks import HostLocks, HostProcess, is_there
from banksman.store.sqlite.ownership import HeldSession
from banksman.store.sqlite.sqlite_errors import translate

# What the loop's own thread asks of the store: single rows, by an index, and lists of sessions.
#
# It may, since a reader of a write-ahead log waits for nobody: such a look takes some microseconds, most of them in
# Python, and the pages it touches were just written and are in memory. To hand it to a thread would take ten times
# that. Each look is read to its end, so that it holds no place in the log.

_KNOWN = (
    "SELECT s.id, s.name, s.agent, s.epoch, s.seq, s.first, s.created, s.changed, s.owner, h.address, "
    "h.boot, h.pid, h.started FROM sessions s LEFT JOIN hosts h ON h.id = s.owner"
)
_OWNED = (
    "SELECT s.count, s.owner, h.address, h.boot, h.pid, h.started FROM "
    "(SELECT owner, count(*) AS count FROM sessions GROUP BY owner) s LEFT JOIN hosts h ON h.id = s.owner"
)

WATCH_SECONDS = 0.05
log = logging.getLogger("banksman")


class SessionPlace(NamedTuple):
    """Where a session is. `number` is its identity: None if there is none. See the schema."""

    head: Head
    number: int | None


NOWHERE = SessionPlace(Head(0, 0, 1), None)


class Lookup:
    """Errors are translated here. For one thread only."""

    def __init__(self, connection: sqlite3.Connection, path: str) -> None:
        self._connection = connection
        self._path = path
        self._hosts: HostLocks | None = None

    def place(self, session: str) -> SessionPlace:
        rows = self._rows("SELECT epoch, seq, first, number FROM sessions WHERE id = ?", session)
        if not rows:
            return NOWHERE
        ((epoch, seq, first, number),) = rows
        return SessionPlace(Head(epoch, seq, first), number)

    def newest_chunk(self) -> int:
        return self._rows("SELECT coalesce(max(id), 0) FROM chunks")[0][0]

    def heads_after(self, chunk: int) -> list[tuple[str, int]]:
        """The sessions that have chunks after this one, each with its last seq."""
        return self._rows(
            "SELECT session, max(last) FROM chunks WHERE id > ? AND +session IN (SELECT id FROM sessions) "
            "GROUP BY +session",
            chunk,
        )

    def version(self) -> int:
        """Changes with every commit of another connection, in whichever process."""
        return self._rows("PRAGMA data_version")[0][0]

    def deletions(self) -> int:
        """How many sessions were ever deleted."""
        return self._rows("SELECT value FROM store WHERE key = 'deletions'")[0][0]

    def sessions(self, host: int | None, after: str | None, limit: int | None) -> list[KnownSession]:
        """Oldest first, as the host of this id sees them."""
        alive: dict[int, bool] = {}
        # A number below 0 is no limit, as SQLite has it.
        rows = self._rows(
            f"{_KNOWN} WHERE ? OR s.number > (SELECT number FROM sessions WHERE id = ?) ORDER BY s.number LIMIT ?",
            *(after is None, after, -1 if limit is None else limit),
        )
        return [self._known(row, host, alive) for row in rows]

    def owned(self, host: int | None) -> list[tuple[Owner | None, int]]:
        rows = self._rows(_OWNED)
        return [(self._owner(owner, process, host, {}), count) for count, owner, *process in rows]

    def find(self, id_or_name: str, host: int | None) -> KnownSession | None:
        rows = self._rows(f"{_KNOWN} WHERE s.id = ?", id_or_name) or self._rows(
            f"{_KNOWN} WHERE s.name = ?", id_or_name
        )
        return self._known(rows[0], host, {}) if rows else None

    def has_live_hosts(self) -> bool:
        """Whether somebody else has sessions of this store, or had some: we are no host any more."""
        rows = self._rows("SELECT id, boot, pid, started FROM hosts")
        return any(self._is_alive(host, HostProcess(*process)) for host, *process in rows)

    def close(self) -> None:
        if self._hosts is not None:
            self._hosts.close()

    def _known(self, row: Any, host: int | None, alive: dict[int, bool]) -> KnownSession:
        id, name, agent, epoch, seq, first, created, changed, owner, *process = row
        return KnownSession(
            id, name, agent, epoch, seq, first, self._owner(owner, process, host, alive), created, changed
        )

    def _owner(
        self, owner: int | None, process: Sequence[Any], host: int | None, alive: dict[int, bool]
    ) -> Owner | None:
        address, boot, pid, started = process
        # An owner without a row has closed in good order, and could not say so here.
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
                return is_there(process)  # There is no lock that could be seen from here.
        return self._hosts.is_alive(owner, process)

    def _rows(self, statement: str, *parameters: object) -> list[Any]:
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except sqlite3.Error as exc:
            raise translate(exc, self._path, "read") from exc


# Its result is the error to raise, so that none is lost with a future whose task was cancelled meanwhile.
_Waiter: TypeAlias = "asyncio.Future[StoreError | None]"
# Of one session: past which seq each waits, and which identity the session had when the wait began.
_Waiters: TypeAlias = "dict[_Waiter, tuple[int, int | None]]"
_NOBODY: Mapping[_Waiter, tuple[int, int | None]] = {}


class TailWaiters:
    """All that wait on one log. `owned`: the sessions that only we write, kept up to date by who gives it."""

    def __init__(self, look: Lookup, owned: Mapping[str, HeldSession]) -> None:
        self._loop = asyncio.get_running_loop()
        self._look = look
        self._owned = owned
        # By session, and not in it: one may wait for a session that nobody has claimed yet.
        self._sessions: dict[str, _Waiters] = {}
        self._positions: dict[_Waiter, int] = {}
        self._timer: asyncio.TimerHandle | None = None
        # Of the last look: the number that changes, the newest chunk, and how many sessions were deleted.
        self._seen = (0, 0, 0)

    def __len__(self) -> int:
        return sum(len(waiters) for waiters in self._sessions.values()) + len(self._positions)

    async def wait_past(self, session: str, seq: int, *, is_known: bool) -> None:
        head, number = self._place(session)
        if head <= seq and session not in self._owned and self._watch():
            # The watch has begun just now, with what is there now. What was committed before it and after the look
            # above is seen by another look only.
            head, number = self._place(session)
        if is_known and number is None:
            # By another thread, since the caller looked. Nobody would tell this waiter: it waits for no session.
            raise StoreError("the session was deleted", session=session)
        if head > seq:
            return
        # From here to the future's place among the waiters nothing else can run in this thread.
        waiters = self._sessions.setdefault(session, {})
        future: _Waiter = self._loop.create_future()
        waiters[future] = (seq, number)
        try:
            error = await future
        finally:
            waiters.pop(future, None)
            # Another set may be in its place by now, if this one was emptied.
            if not waiters and self._sessions.get(session) is waiters:
                del self._sessions[session]
        if error is not None:
            raise error

    async def wait_past_chunk(self, chunk: int) -> None:
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
        """The session's head, and its identity. What is ours is known here: its next commit comes by this loop."""
        held = self._owned.get(session)
        if held is not None:
            return held.seq, held.number
        place = self._look.place(session)
        return place.head.seq, place.number

    # -- what lets them through --------------------------------------------------------------------------------------
    def on_committed(self, session: str, seq: int) -> None:
        for future, (past, _) in self._sessions.get(session, _NOBODY).items():
            if past < seq and not future.done():
                future.set_result(None)

    def on_placed(self, session: str, seq: int, number: int | None) -> None:
        """This is where the session is, and which one it is. Others may have brought it there while nobody looked."""
        self._tell_former(session, number)
        self.on_committed(session, seq)

    def on_group(self) -> None:
        """Something was committed here."""
        if self._positions:
            try:
                self._on_newest(self._look.newest_chunk())
            except StoreError as exc:
                log.warning("! the store could not be looked at: %s", exc)  # The watch looks again.

    def on_released(self, session: str) -> None:
        """What was ours alone may now be written by others. They may have done so already, if it was taken from us."""
        if session not in self._sessions:
            return
        try:
            # The watch first: what it begins with is what was there before the look.
            self._watch()
            place = self._look.place(session)
        except StoreError as exc:
            # It is no affair of who releases. All that there is counts as new, and is looked at in time.
            log.warning("! the store could not be looked at: %s", exc)
            self._seen = (-1, 0, 0)
            if self._timer is None:
                self._timer = self._loop.call_later(WATCH_SECONDS, self._on_time)
        else:
            self.on_placed(session, place.head.seq, place.number)

    def on_deleted(self, session: str, number: int) -> None:
        """Whoever waits on the session of that number is told: the event it waits for would be another history's."""
        for future, (_, known) in self._sessions.get(session, _NOBODY).items():
            if known == number and not future.done():
                future.set_result(StoreError("the session was deleted", session=session))

    def close(self, error: StoreError) -> None:
        """Everybody is told."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        futures = [future for waiters in self._sessions.values() for future in waiters]
        for future in [*futures, *self._positions]:
            if not future.done():
                future.set_result(error)

    # -- what other hosts commit -------------------------------------------------------------------------------------
    def _watch(self) -> bool:
        """Begin to look, if nobody does yet: whether it has begun now."""
        if self._timer is not None:
            return False
        # The number before the rest: what comes in between is looked at once more than needed.
        self._seen = (self._look.version(), self._look.newest_chunk(), self._look.deletions())
        self._timer = self._loop.call_later(WATCH_SECONDS, self._on_time)
        return True

    def _on_time(self) -> None:
        self._timer = None
        if not self._positions and all(session in self._owned for session in self._sessions):
            return
        try:
            self._look_around()
        except StoreError as exc:
            # It is tried again; who reads meanwhile is told by its own call.
            log.warning("! the store could not be looked at: %s", exc)
        self._timer = self._loop.call_later(WATCH_SECONDS, self._on_time)

    def _look_around(self) -> None:
        version, newest, deletions = self._seen
        found = self._look.version()
        if found == version:
            return
        # In this order: what is committed between two of these looks is behind the number, and is seen next time.
        seen = (found, self._look.newest_chunk(), self._look.deletions())
        # Before the rest: whoever waits on a session that was deleted must not be let through by one of the same id.
        if seen[2] != deletions:
            self._check_deleted()
        for session, seq in self._look.heads_after(newest) if self._sessions else ():
            self.on_committed(session, seq)
        self._on_newest(seen[1])
        # Only now: if one of these looks failed, all are done again.
        self._seen = seen

    def _on_newest(self, chunk: int) -> None:
        for future, past in self._positions.items():
            if past < chunk and not future.done():
                future.set_result(None)

    def _check_deleted(self) -> None:
        for session in self._sessions:
            self._tell_former(session, self._look.place(session).number)

    def _tell_former(self, session: str, number: int | None) -> None:
        """Those who wait on a session of this id that was another than the one of that number."""
        for _, known in list(self._sessions.get(session, _NOBODY).values()):
            if known is not None and known != number:
                self.on_deleted(session, known)
