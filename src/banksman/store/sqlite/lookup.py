"""What the loop's own thread asks of the store: single rows, by an index, and lists of sessions.

It may, since a reader of a write-ahead log waits for nobody: such a look takes some microseconds, most of them in
Python, and the pages it touches were just written and are in memory. To hand it to a thread would take ten times that.
Each look is read to its end, so that it holds no place in the log.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from banksman.errors import StoreReadOnly
from banksman.store.log import Head, Known, Owner
from banksman.store.sqlite.host_locks import HostLocks, HostProcess, is_there
from banksman.store.sqlite.sqlite_errors import translate

_KNOWN = (
    "SELECT s.id, s.name, s.agent, s.epoch, s.seq, s.first, s.created, s.changed, s.owner, h.address, "
    "h.boot, h.pid, h.started FROM sessions s LEFT JOIN hosts h ON h.id = s.owner"
)
_OWNED = (
    "SELECT s.count, s.owner, h.address, h.boot, h.pid, h.started FROM "
    "(SELECT owner, count(*) AS count FROM sessions GROUP BY owner) s LEFT JOIN hosts h ON h.id = s.owner"
)


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

    def sessions(self, host: int | None, after: str | None, limit: int | None) -> list[Known]:
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

    def find(self, id_or_name: str, host: int | None) -> Known | None:
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

    def _known(self, row: Any, host: int | None, alive: dict[int, bool]) -> Known:
        id, name, agent, epoch, seq, first, created, changed, owner, *process = row
        return Known(id, name, agent, epoch, seq, first, self._owner(owner, process, host, alive), created, changed)

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
