"""Base classes of the operations that write, their failure rules, and their context.

Most of the operations are in `append.py`, `ownership.py` and `maintenance.py`, and
`group_writer.py` performs them. `WriterContext` also registers this process as a host of the
store.

The event loop creates an operation, the writer thread or the loop itself performs it, and the loop
settles it. Each operation belongs to one thread at a time, so it needs no lock. `error` is the
reason why it failed, or None. An operation that is refused raises before it writes anything. So the
other operations of its group can continue in the same transaction.

**Failures.** A writer's call rests on its earlier appends and on its epoch. After an append or an
advance has failed, the calls queued behind it fail too, until the writer has received the first
failure. The same holds after the transaction of any call has failed, because the writer then
restarts from the state that it knows to be committed.

Failures have numbers, and the writers receive them in that order. A call carries the number of the
last failure that had been delivered when the call was made. If the last failure of its session and
epoch has a higher number, the caller did not know about it yet, and the call fails.

Two refusals do not count as failures:

- A call under an epoch that is not the session's. No call can rest on it, and it must not fail the
  writer that gets this epoch next.
- A refused lease. Another session holds the name, and everything else is as the writer believes.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from banksman.errors import NotOwner, Refused, StoreError, UsageError
from banksman.store.log_values import Done
from banksman.store.sqlite.host_locks import HostLocks, HostProcess, identity

log = logging.getLogger("banksman")

# The jump in chunk numbers after a power cut. SQLite syncs about every thousand pages, and only
# unsynced chunks can be lost. So far fewer chunks than this were lost.
LOST_CHUNKS_MAX = 1 << 20


class WriterContext:
    """The writing connection, the identity of this host, and undelivered failures.

    Belongs to the thread that performs a group.
    """

    def __init__(self, connection: sqlite3.Connection, path: str, address: str) -> None:
        self.connection = connection
        self.execute = connection.execute
        self.executemany = connection.executemany
        # None until the first claim: a log that only reads writes nothing.
        self.host: int | None = None
        self.failures = WriterFailures()
        # Deleted sessions whose data is still to be removed (`deleted_sessions.py`). A dict keeps
        # each session once, in insertion order.
        self.rests: dict[str, None] = {}
        # Set when the data of a deleted session is gone from the tables. A checkpoint must then
        # also remove it from the write-ahead log.
        self.is_tidy_due = False
        # Sessions, with their epochs, whose release failed. The next commit retries the release. A
        # host that has claimed a session in the meantime has a different epoch, so the retry cannot
        # take it away.
        self.unreleased: dict[tuple[str, int], None] = {}
        self._path = path
        self._address = address
        self._hosts: HostLocks | None = None

    def row(self, statement: str, *parameters: object) -> Any:
        """Return the one row of a query, or None.

        The cursor is always read to its end, so that no statement keeps a read mark in the
        write-ahead log.
        """
        rows = self.execute(statement, parameters).fetchall()
        assert len(rows) <= 1, statement
        return rows[0] if rows else None

    def is_alive(self, host: int) -> bool:
        """Whether the host with this id is alive."""
        # A host without a row has closed cleanly, but could not clear its id from every session.
        row = self.row("SELECT boot, pid, started FROM hosts WHERE id = ?", host)
        return self._lazy_hosts().is_alive(host, None if row is None else HostProcess(*row))

    def check_seen(self) -> None:
        """Raise `StoreError` if other hosts could not see that this host is alive.

        A host that others take for dead must not claim anything.
        """
        self._lazy_hosts().check_file()

    def stay_seen(self) -> None:
        """Take this host's lock again, in case the program has dropped it by accident."""
        if self.host is not None:
            self._lazy_hosts().hold_again()

    def become_host(self) -> None:
        """Register this process as a host, in a separate transaction.

        The host's byte is locked before other hosts can see its row. Otherwise they could take the
        new host for dead.
        """
        assert self.host is None
        hosts = self._lazy_hosts()
        boot, pid, started = identity()
        self.execute("BEGIN IMMEDIATE")
        cursor = self.execute(
            "INSERT INTO hosts (pid, boot, started, address) VALUES (?, ?, ?, ?)",
            (pid, boot, started, self._address),
        )
        host = cursor.lastrowid
        assert host is not None
        hosts.hold(host)
        try:
            self._skip_lost(boot)
            self._forget_dead(host)
            self.execute("COMMIT")
        except BaseException:
            hosts.let_go(host)
            raise
        self.host = host

    def stop_being_host(self) -> None:
        """Release every session of this host and delete its row.

        The caller must call `let_go` next.
        """
        if self.host is not None:
            self.execute("BEGIN IMMEDIATE")
            self.execute(
                "UPDATE sessions SET owner = NULL, lease = NULL WHERE owner = ?", (self.host,)
            )
            self.execute("DELETE FROM hosts WHERE id = ?", (self.host,))
            self.execute("COMMIT")

    def let_go(self) -> None:
        """Drop the host lock.

        Other hosts then see this host as dead, even if nothing could be written.
        """
        self.host = None
        if self._hosts is not None:
            try:
                self._hosts.close()
            except StoreError as exc:
                log.warning("release of the host lock failed: %s (store=%s)", exc, self._path)

    def _lazy_hosts(self) -> HostLocks:
        if self._hosts is None:
            self._hosts = HostLocks(self._path)
        return self._hosts

    def _skip_lost(self, boot: str) -> None:
        """After a reboot, skip the chunk numbers that may have been lost.

        A power cut may remove chunks that readers have seen. Their numbers must not be reused, or a
        reader's position would lie behind chunks that it never saw. A row with another boot id
        shows that a host claimed sessions before the reboot: claims are always synced, so the row
        survives.
        """
        if self.row("SELECT count(*) FROM hosts WHERE boot != ?", boot)[0]:
            self.execute(
                "INSERT INTO chunks (id, session, first, last, epoch, at, crc, blob) "
                "SELECT coalesce(max(id), 0) + ?, NULL, 0, 0, 0, 0.0, 0, x'' FROM chunks",
                (LOST_CHUNKS_MAX,),
            )
            # The jump is needed once, so the rows get the current boot id. Rows of owners must
            # stay, because sessions refer to them. A pid and a start time of an earlier boot
            # identify no process of this boot: the same machine reuses them for the same services.
            # So `started` becomes 0, unknown.
            self.execute("UPDATE hosts SET boot = ?, started = 0 WHERE boot != ?", (boot, boot))

    def _forget_dead(self, host: int) -> None:
        """Delete the rows of dead hosts that own no session."""
        rows = self.execute(
            "SELECT id FROM hosts WHERE id != ? AND id NOT IN "
            "(SELECT owner FROM sessions WHERE owner IS NOT NULL)",
            (host,),
        ).fetchall()
        for (other,) in rows:
            if not self.is_alive(other):
                self.execute("DELETE FROM hosts WHERE id = ?", (other,))


class Operation:
    """A unit of work in a transaction of a group.

    `settled`: called in the event loop when the operation has succeeded or failed.
    """

    __slots__ = ("error", "settled")

    # Whether the operation must be on disk before its completion, at every level.
    is_synced = False
    # Whether the operation needs this process to be registered as a host.
    needs_host = False
    # Whether the operation needs a separate transaction.
    is_alone = False
    # Bytes that the operation adds to its group. The size of a group is bounded.
    size = 0
    # Whether the operation may wait a few milliseconds for others, see `OperationBatch`.
    can_wait = False
    # Whether the event loop may perform the operation itself, see `group_writer.py`.
    is_quick = False

    def __init__(self, settled: Callable[[Any], None]) -> None:
        self.error: Exception | None = None
        self.settled = settled

    def around(self, work: WriterContext) -> AbstractContextManager[None]:
        """Return a context manager that wraps the transaction of an operation with `is_alone`.

        It is for statements that SQLite does not allow inside a transaction.
        """
        del work
        return nullcontext()

    def perform(self, work: WriterContext) -> None:
        """Do the work inside the writer's transaction."""
        raise NotImplementedError

    def fail(self, work: WriterContext, error: StoreError) -> None:
        """Record the error of a rolled-back group.

        An operation that was refused keeps its own reason.
        """
        self.error = self.error or error

    def forget(self) -> None:
        """Reset the operation after a rollback, before it is performed again."""
        self.error = None


class AwaitedOperation(Operation):
    """An operation whose caller awaits the function's return value.

    The function raises a refusal before it writes.
    """

    __slots__ = ("_around", "_function", "is_alone", "is_synced", "needs_host", "value")

    def __init__(
        self,
        settled: Callable[[AwaitedOperation], None],
        function: Callable[[WriterContext], Any],
        *,
        is_synced: bool = False,
        needs_host: bool = False,
        is_alone: bool = False,
        around: Callable[[WriterContext], AbstractContextManager[None]] | None = None,
    ) -> None:
        super().__init__(settled)
        assert around is None or is_alone
        self._around = around
        self._function = function
        self.is_synced = is_synced
        self.needs_host = needs_host
        self.is_alone = is_alone
        self.value: Any = None

    def around(self, work: WriterContext) -> AbstractContextManager[None]:
        return super().around(work) if self._around is None else self._around(work)

    def perform(self, work: WriterContext) -> None:
        try:
            self.value = self._function(work)
        except (Refused, UsageError, StoreError) as exc:
            self.error = exc


class WriterOperation(Operation):
    """A call of a session's writer, ordered with the writer's other calls."""

    __slots__ = ("done", "epoch", "failure", "session", "told")

    # Whether `NotOwner` means that the session was lost. A lease is also refused because another
    # session holds the name.
    is_of_owner = True

    def __init__(
        self, settled: Callable[[Any], None], session: str, epoch: int, told: int, done: Done
    ) -> None:
        super().__init__(settled)
        self.session = session
        self.epoch = epoch
        self.told = told
        self.done = done
        # The failure number of this call, or 0. Calls queued behind it fail until the writer
        # receives it.
        self.failure = 0

    def fail(self, work: WriterContext, error: StoreError) -> None:
        if self.error is None:
            work.failures.refuse(self, error)

    def forget(self) -> None:
        super().forget()
        self.failure = 0


class OwnerChange(WriterOperation):
    """A writer's call other than an append. Its function raises `NotOwner` before it writes."""

    __slots__ = ("_function", "is_of_owner", "is_synced")

    def __init__(  # noqa: PLR0917
        self,
        settled: Callable[[Any], None],
        session: str,
        epoch: int,
        told: int,
        done: Done,
        function: Callable[[WriterContext], None],
        *,
        is_synced: bool = False,
        is_of_owner: bool = True,
    ) -> None:
        super().__init__(settled, session, epoch, told, done)
        self._function = function
        self.is_synced = is_synced
        self.is_of_owner = is_of_owner

    def perform(self, work: WriterContext) -> None:
        if work.failures.is_behind(self):
            work.failures.refuse(self, behind(self.session, self.epoch))
            return
        try:
            self._function(work)
        except NotOwner as exc:
            self.error = exc


class WriterFailures:
    """The last undelivered failure of each session's writer, per epoch."""

    def __init__(self) -> None:
        self._number = 0
        self._last: dict[tuple[str, int], int] = {}

    def mark(self) -> tuple[int, dict[tuple[str, int], int]]:
        """Return the current state, for `return_to`."""
        return self._number, self._last

    def return_to(self, mark: tuple[int, dict[tuple[str, int], int]]) -> None:
        """Undo all failures since the mark.

        No writer has received them, and all operations of the group are performed again.
        """
        self._number, self._last = mark

    def is_behind(self, call: WriterOperation) -> bool:
        """Whether the writer made this call before it received its last failure."""
        return bool(self._last) and call.told < self._last.get((call.session, call.epoch), 0)

    def refuse(self, call: WriterOperation, error: StoreError | NotOwner) -> None:
        """Set the call's error, and number it unless it only follows an earlier failure."""
        call.error = error
        if self.is_behind(call):
            return
        self._number += 1
        # Calls arrive in the order in which they were made. So every later call knows the failures
        # up to `call.told`, and these can be dropped. The dict is new, because a mark may hold the
        # old one.
        self._last = {key: number for key, number in self._last.items() if number > call.told}
        self._last[call.session, call.epoch] = call.failure = self._number


def behind(session: str, epoch: int) -> NotOwner:
    """Build the error for a call that follows a failed one."""
    message = f"cannot write session {session}: an earlier call was refused"
    return NotOwner(message, session=session, epoch=epoch)
