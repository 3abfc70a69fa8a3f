"""What the writer thread works with, and what it is asked to do: operations, each with its answer for the loop.

An operation is made in the loop's thread, performed in the writer's and settled in the loop's again; it belongs to one
of them at a time, so nothing in it is locked. `error` is what kept it out, or None. One that is refused for a reason of
its own raises before it has written anything, so that the others of its group can go on in the same transaction.

Failures. What a writer calls rests on what it appended before, and on its epoch. So after an append or an advance has
failed, those behind it fail too, until the writer was told of the first; and so they do after the transaction of a call
of whichever kind has failed, since its writer begins anew from what it knows to be committed. Failures are numbered,
and told in that order; a call carries the number of the last one that was told when it was made. If the last failure of
its own session and epoch has a higher one, whoever made the call did not know yet. A call under an epoch that is not
the session's is no such failure: nothing can rest on it, and it must not fail the one who has that epoch next. And a
lease that is refused is none: the name is another's, and all else is as its writer believes.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from banksman.errors import NotOwner, Refused, StoreError, UsageError
from banksman.store.log import Done
from banksman.store.sqlite.host_locks import HostLocks, HostProcess, identity

log = logging.getLogger("banksman")

# How far the numbers of chunks jump after a power cut. What was lost was never synced, and SQLite syncs about every
# thousand pages, so far fewer chunks than this were in it.
LOST_CHUNKS_MAX = 1 << 20


class WriterContext:
    """The means of one writer: its connection, its identity among the hosts, and the failures not yet told."""

    def __init__(self, connection: sqlite3.Connection, path: str, address: str) -> None:
        self.connection = connection
        self.execute = connection.execute
        # None until something is claimed: a log that only reads writes nothing.
        self.host: int | None = None
        self.failures = WriterFailures()
        # The sessions of which there is a rest to remove (`deleted_sessions.py`): a dict, for each once and in their
        # order.
        self.rests: dict[str, None] = {}
        # Set when a rest is gone: it is to be gone from the log of the store too.
        self.is_tidy_due = False
        # Which sessions could not be released, and under which epoch. It is done with the next commit; whoever has
        # claimed one of them by then has it under another epoch.
        self.unreleased: dict[tuple[str, int], None] = {}
        self._path = path
        self._address = address
        self._hosts: HostLocks | None = None

    def row(self, statement: str, *parameters: object) -> Any:
        """The one row of a query, or None. Always read to its end, so that no statement keeps its place in the log."""
        rows = self.execute(statement, parameters).fetchall()
        assert len(rows) <= 1, statement
        return rows[0] if rows else None

    def is_alive(self, host: int) -> bool:
        # One without a row has closed in good order, and could not say so everywhere.
        row = self.row("SELECT boot, pid, started FROM hosts WHERE id = ?", host)
        return self._lazy_hosts().is_alive(host, None if row is None else HostProcess(*row))

    def check_seen(self) -> None:
        """`StoreError` if others could not see that we live: then nothing may become ours."""
        self._lazy_hosts().check_file()

    def stay_seen(self) -> None:
        """What this program may have dropped without knowing, our lock, is taken again."""
        if self.host is not None:
            self._lazy_hosts().hold_again()

    def become_host(self) -> None:
        """Be known to the others, in a transaction of its own: our byte is locked before anybody can see our row."""
        assert self.host is None
        hosts = self._lazy_hosts()
        boot, pid, started = identity()
        self.execute("BEGIN IMMEDIATE")
        cursor = self.execute(
            "INSERT INTO hosts (pid, boot, started, address) VALUES (?, ?, ?, ?)", (pid, boot, started, self._address)
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
        """Say of all that is ours that it is nobody's. `let_go` is due then."""
        if self.host is not None:
            self.execute("BEGIN IMMEDIATE")
            self.execute("UPDATE sessions SET owner = NULL, lease = NULL WHERE owner = ?", (self.host,))
            self.execute("DELETE FROM hosts WHERE id = ?", (self.host,))
            self.execute("COMMIT")

    def let_go(self) -> None:
        """Also where nothing could be written: to the others we are dead from here on."""
        self.host = None
        if self._hosts is not None:
            try:
                self._hosts.close()
            except StoreError as exc:
                log.warning("! store=%s could not let go of its locks: %s", self._path, exc)

    def _lazy_hosts(self) -> HostLocks:
        if self._hosts is None:
            self._hosts = HostLocks(self._path)
        return self._hosts

    def _skip_lost(self, boot: str) -> None:
        """After a restart of the machine: chunks may be gone that readers have seen, and their numbers must not be
        given again, or a reader's position would lie behind what it never saw. A host that had claimed something before
        has left its row, since claims are always synced."""
        if self.row("SELECT count(*) FROM hosts WHERE boot != ?", boot)[0]:
            self.execute(
                "INSERT INTO chunks (id, session, first, last, epoch, at, crc, blob) "
                "SELECT coalesce(max(id), 0) + ?, NULL, 0, 0, 0, 0.0, 0, x'' FROM chunks",
                (LOST_CHUNKS_MAX,),
            )
            # Once is enough, and those that still own something are kept for their names. A pid and a start of another
            # boot are nobody's in this one: the same machine gives them again, to the same services.
            self.execute("UPDATE hosts SET boot = ?, started = 0 WHERE boot != ?", (boot, boot))

    def _forget_dead(self, host: int) -> None:
        """The rows of hosts that died and own nothing any more."""
        rows = self.execute(
            "SELECT id FROM hosts WHERE id != ? AND id NOT IN (SELECT owner FROM sessions WHERE owner IS NOT NULL)",
            (host,),
        ).fetchall()
        for (other,) in rows:
            if not self.is_alive(other):
                self.execute("DELETE FROM hosts WHERE id = ?", (other,))


class Operation:
    """Something for the writer to do. `settled` is called in the loop when it was done, or was not."""

    __slots__ = ("error", "settled")

    # Whether it must be on the disk before it is answered, whatever the level.
    is_synced = False
    # Whether it makes this log a host that others may see.
    needs_host = False
    # Whether it needs a transaction of its own.
    is_alone = False
    # What it holds, so that a group has a bound.
    size = 0

    def __init__(self, settled: Callable[[Any], None]) -> None:
        self.error: Exception | None = None
        self.settled = settled

    def around(self, work: WriterContext) -> AbstractContextManager[None]:
        """Entered before the transaction of one that is alone, and left after it: for what cannot be done inside."""
        del work
        return nullcontext()

    def perform(self, work: WriterContext) -> None:
        raise NotImplementedError

    def fail(self, work: WriterContext, error: StoreError) -> None:
        """What it did is undone, with all that its group did. What was refused anyway keeps its own reason."""
        self.error = self.error or error

    def forget(self) -> None:
        """It had never been performed, and will be once more."""
        self.error = None


class AwaitedOperation(Operation):
    """For somebody who waits for what a function returns. It raises what it refuses for, before it writes."""

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
    """A call of a session's writer, in line with its others."""

    __slots__ = ("done", "epoch", "failure", "session", "told")

    # Whether `NotOwner` says that the session is not its writer's. A lease is also refused for what another one holds.
    is_of_owner = True

    def __init__(self, settled: Callable[[Any], None], session: str, epoch: int, told: int, done: Done) -> None:
        super().__init__(settled)
        self.session = session
        self.epoch = epoch
        self.told = told
        self.done = done
        # Its number, if this is a failure that those behind it wait to be told of.
        self.failure = 0

    def fail(self, work: WriterContext, error: StoreError) -> None:
        if self.error is None:
            work.failures.refuse(self, error)

    def forget(self) -> None:
        super().forget()
        self.failure = 0


class OwnerChange(WriterOperation):
    """A writer's call that is no append. It raises `NotOwner`, before it writes."""

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
    """The last failure of each session's writer under each epoch, as long as somebody may not know of it."""

    def __init__(self) -> None:
        self._number = 0
        self._last: dict[tuple[str, int], int] = {}

    def mark(self) -> tuple[int, dict[tuple[str, int], int]]:
        return self._number, self._last

    def return_to(self, mark: tuple[int, dict[tuple[str, int], int]]) -> None:
        """What failed since had never been: nobody was told of it, and all of it is performed once more."""
        self._number, self._last = mark

    def is_behind(self, call: WriterOperation) -> bool:
        return bool(self._last) and call.told < self._last.get((call.session, call.epoch), 0)

    def refuse(self, call: WriterOperation, error: StoreError | NotOwner) -> None:
        call.error = error
        if self.is_behind(call):
            return
        self._number += 1
        # Calls come in the order in which they were made, so whoever calls from here on knows of these. It is a new
        # dict, since a mark may hold the one before.
        self._last = {key: number for key, number in self._last.items() if number > call.told}
        self._last[call.session, call.epoch] = call.failure = self._number


def behind(session: str, epoch: int) -> NotOwner:
    return NotOwner("what was called before this was refused", session=session, epoch=epoch)
