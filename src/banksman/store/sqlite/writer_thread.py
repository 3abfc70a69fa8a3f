"""Writer thread: group commit of the queued operations, and upkeep of the store between groups.

The upkeep is retention, removal of deleted data, truncation of the write-ahead log, and the retry
of failed releases.

A commit costs the same for one append as for fifty. So while one commit is in progress, the next
group of operations from all sessions collects in the queue. A group has a size limit, so that a
small append does not wait behind a flood of others. Nothing waits here for a timer; frames of the
agent may have waited a few milliseconds in the event loop (`OperationBatch`).

If the store fails (disk full, a lock, a disk fault), the whole group is rolled back, and each
operation completes with the error. An operation that was refused anyway keeps its own reason. If an
operation raises an unexpected exception, the others must not fail with it. The thread rolls back
and performs each operation again in a separate transaction, so that only the faulty one fails. It
does the same if one of the appends that share a statement must be refused.

The thread is a daemon. It ends cleanly by `stop`, which the log's close and its finalizer call. A
program may exit without either, and then the thread must not block the exit. The interpreter stops
it at an arbitrary point, which equals a crash, and a store must survive a crash in any case.
Uncommitted operations were never acknowledged.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import sqlite3
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from banksman.errors import StoreError, StoreReadOnly
from banksman.store.sqlite import deleted_sessions, maintenance, open_file, ownership, spool
from banksman.store.sqlite.append import AppendOperation, GroupedAppends, RunRefused
from banksman.store.sqlite.maintenance import SqliteRetention
from banksman.store.sqlite.open_file import StoreFiles
from banksman.store.sqlite.operations import Operation, WriterContext
from banksman.store.sqlite.sqlite_errors import ALLOW_WRITING, is_of_store, translate

# Limits of one transaction: some tenths of a second of disk time.
GROUP_BYTES_MAX = 16 << 20
GROUP_OPERATIONS_MAX = 4096
# How long a truncation of the write-ahead log, at the end or after a delete, waits for readers.
TIDY_BUSY_MILLISECONDS = 100
# Retry interval for work that another process blocks, also while the queue is empty. SQLite does
# not report when a reader has finished or a lock is free. The retries run only while work is
# pending.
AGAIN_SECONDS = 1.0

log = logging.getLogger("banksman")


class WriteResult(NamedTuple):
    """Totals of the writer so far.

    Each commit replaces the object, because another thread may read it at any time.
    """

    commits: int = 0
    events: int = 0
    bytes: int = 0
    commit_seconds: float = 0.0
    failures: int = 0


class WriterThread:
    """The thread that owns the writing connection.

    `hand_over`: called in this thread with a performed group, whose operations the event loop
    settles.
    """

    def __init__(
        self,
        work: WriterContext,
        *,
        path: str,
        presence: StoreFiles,
        is_full: bool,
        is_writable: bool,
        retention: SqliteRetention,
        hand_over: Callable[[list[Operation]], None],
    ) -> None:
        self._work = work
        self._path = path
        self._presence = presence
        self._is_full = is_full
        self._is_writable = is_writable
        self._retention = retention
        self._hand_over = hand_over
        self._runs = GroupedAppends(work)
        self.written = WriteResult()
        # Whether commits are synced; None until the first commit has set it. The default of a
        # connection depends on how SQLite was compiled.
        self._is_synced: bool | None = None
        self._is_overwriting = False
        self._has_written = False
        self._has_looked_for_rests = False
        # The earliest time of the next truncation of the write-ahead log. Each attempt may make
        # other connections wait.
        self._tidy_after = 0.0
        # Batches of operations; an empty one ends the thread.
        self._queue: queue.SimpleQueue[list[Operation]] = queue.SimpleQueue()
        self._rest: list[Operation] = []
        self.put: Callable[[list[Operation]], None] = self._queue.put
        self.thread = threading.Thread(target=self._run, name="banksman-store", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """End after all queued operations. Callable from any thread.

        The last group that is handed over is empty.
        """
        self._queue.put([])

    def _run(self) -> None:
        if self._is_writable:
            with contextlib.suppress(OSError):  # Best effort: the next start tries again.
                spool.remove_dead(self._path)
        is_last = False
        while not is_last:
            group, is_last = self._take()
            if group:
                self._perform(group)
                self._keep_up(group)
                self._stay_seen()
                self._hand_over(group)
                self._remove_rest()
            elif not is_last:
                self._make_up()
        self._end()
        self._hand_over([])

    def _take(self) -> tuple[list[Operation], bool]:
        """Return the next group, and whether it is the last one.

        The group holds all queued operations up to the limits. It is empty only at the end, or when
        the timeout for pending retries has passed.
        """
        is_owing = self._work.is_tidy_due or bool(self._work.unreleased)
        if not self._rest:
            try:
                self._rest = self._queue.get(timeout=AGAIN_SECONDS if is_owing else None)
            except queue.Empty:
                return [], False
        group: list[Operation] = []
        size = 0
        while self._rest:
            for taken, operation in enumerate(self._rest, 1):
                group.append(operation)
                size += operation.size
                is_full = size > GROUP_BYTES_MAX or len(group) >= GROUP_OPERATIONS_MAX
                if is_full or operation.is_alone:
                    self._rest = self._rest[taken:]
                    return group, False
            try:
                self._rest = self._queue.get_nowait()
            except queue.Empty:
                self._rest = []
                return group, False
        return group, True

    def _perform(self, group: list[Operation]) -> None:
        """Commit a group.

        An operation with `is_alone`, always the last, gets a separate transaction.
        """
        if group[-1].is_alone and len(group) > 1:
            self._commit(group[:-1])
            self._commit(group[-1:])
        else:
            self._commit(group)

    def _commit(self, group: list[Operation]) -> None:
        """Commit the operations, and set their errors if the transaction fails."""
        failures = self._work.failures.mark()
        error = self._committed(group)
        if error is None:
            return
        if len(group) == 1 or is_of_store(error):
            translated = self._translated(error)
            for operation in group:
                operation.fail(self._work, translated)
            return
        # One operation has a bug, or is an append that must be refused. Undo the failures that this
        # attempt recorded, and find that operation by performing each one alone.
        self._work.failures.return_to(failures)
        for operation in group:
            operation.forget()
            self._commit([operation])

    def _committed(self, group: list[Operation]) -> Exception | None:
        """Run the transaction of a group and return the exception that prevented its commit."""
        began = time.perf_counter()
        try:
            with group[0].around(self._work):
                self._transact(group)
        except RunRefused as exc:
            return exc  # The store has not failed.
        except Exception as exc:
            self.written = self.written._replace(failures=self.written.failures + 1)
            return exc
        self._count(group, time.perf_counter() - began)
        return None

    def _count(self, group: list[Operation], seconds: float) -> None:
        before = self.written
        appends = [
            operation
            for operation in group
            if isinstance(operation, AppendOperation) and operation.error is None
        ]
        self.written = WriteResult(
            commits=before.commits + 1,
            events=before.events + sum(len(append.entries) for append in appends),
            bytes=before.bytes + sum(append.size for append in appends),
            commit_seconds=before.commit_seconds + seconds,
            failures=before.failures,
        )

    def _transact(self, group: list[Operation]) -> None:
        work, runs = self._work, self._runs
        try:
            if not self._is_writable:
                message = f"cannot write to the store {self._path}: it is read-only"
                raise StoreReadOnly(message, hint=ALLOW_WRITING, path=self._path)
            self._overwrite_deleted()
            # SQLite allows a change of the sync level only between transactions.
            self._sync(self._is_full or any(operation.is_synced for operation in group))
            if work.host is None and any(operation.needs_host for operation in group):
                self._presence.check()
                work.become_host()
            work.execute("BEGIN IMMEDIATE")
            for session, epoch in work.unreleased:
                ownership.release(work, session, epoch)
            for operation in group:
                if isinstance(operation, AppendOperation):
                    runs.add(operation)
                else:
                    runs.write()
                    operation.perform(work)
            runs.write()
            # Check before the commit, so that nothing is written to a removed file, and the caller
            # can retry after the file is back. A removal right after the check remains possible.
            self._presence.check()
            work.execute("COMMIT")
            work.unreleased.clear()
            self._has_written = True
        except Exception:
            runs.forget()
            self._roll_back()
            # If the file was replaced, this check explains every other error.
            self._presence.check()
            raise

    def _translated(self, exc: Exception) -> StoreError:
        if isinstance(exc, StoreError):
            return exc
        if not is_of_store(exc):
            # This is a bug in Banksman. It must not end the thread, or every caller would wait
            # forever.
            log.error("the writer failed: this is a bug (store=%s)", self._path, exc_info=exc)
        if isinstance(exc, (sqlite3.Error, OSError)):
            error = translate(exc, self._path, "write to")
        else:
            error = StoreError(f"cannot write to the store {self._path}: {exc!r}", path=self._path)
        error.__cause__ = exc
        return error

    def _roll_back(self) -> None:
        try:
            if self._work.connection.in_transaction:
                self._work.execute("ROLLBACK")
        except sqlite3.Error as exc:
            log.warning("rollback failed: %s (store=%s)", exc, self._path)

    def _overwrite_deleted(self) -> None:
        """Make SQLite overwrite deleted data with zeros.

        The first transaction sets this, not the start of the thread: the statement may fail, and at
        the start no operation could carry the error.
        """
        if not self._is_overwriting:
            self._work.execute("PRAGMA secure_delete = ON")
            self._is_overwriting = True

    def _sync(self, is_synced: bool) -> None:
        """Set whether the next commits are synced to disk."""
        if is_synced != self._is_synced:
            self._work.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'NORMAL'}")
            self._is_synced = is_synced

    # -- after a group ----------------------------------------------------------------------------
    def _keep_up(self, group: list[Operation]) -> None:
        """Apply the retention limits and pending cleanup after a group.

        This happens before the group's completions, so that their callers find the limits applied.
        It uses separate transactions: damaged old chunks that cannot be removed must not block new
        ones. These transactions are not synced. If a power cut undoes a removal, a later pass
        repeats it.

        No exception leaves this method. Otherwise the thread would end with an uncompleted group.
        """
        try:
            if self._retention and self._is_writable:
                self._retain(
                    {
                        one.session: None
                        for one in group
                        if isinstance(one, AppendOperation) and one.error is None
                    }
                )
            self._tidy_if_due()
        except Exception as exc:
            self._roll_back()
            log.warning(
                "store maintenance failed, trying again after a later write (store=%s error=%r)",
                self._path,
                exc,
            )

    def _stay_seen(self) -> None:
        """Take the lock by which other hosts see this host, in case the program has dropped it."""
        try:
            self._work.stay_seen()
        except Exception as exc:
            message = "host lock not renewed, trying again after a later write: %r (store=%s)"
            log.warning(message, exc, self._path)

    def _retain(self, sessions: dict[str, None]) -> None:
        now = time.time()
        self._sync(False)
        for session in sessions:
            # Check without the write lock first, because usually there is nothing to remove.
            if maintenance.excess(self._work, session, self._retention, now) is not None:
                self._work.execute("BEGIN IMMEDIATE")
                maintenance.retain(self._work, session, self._retention, now)
                self._work.execute("COMMIT")

    def _remove_rest(self, *, pieces_max: float = 1) -> None:
        """Remove data of deleted sessions, one piece after each group. So no operation waits long.

        This includes sessions that a dead host was deleting. It starts only after the first write
        of this log, because a log that only reads must write nothing. `pieces_max`: the number of
        pieces.
        """
        if not self._has_written or not self._presence.is_whole:
            return
        work = self._work
        try:
            if not self._has_looked_for_rests:
                self._has_looked_for_rests = True
                work.rests.update(dict.fromkeys(deleted_sessions.found(work)))
            while work.rests and pieces_max > 0:
                pieces_max -= 1
                self._sync(False)
                work.execute("BEGIN IMMEDIATE")
                deleted_sessions.remove_some(work, next(iter(work.rests)))
                work.execute("COMMIT")
            self._tidy_if_due()
        except Exception as exc:
            self._roll_back()
            # The next host tries again. A retry here would run, and log, after every group.
            work.rests.clear()
            message = "removal of deleted data failed: %s, the next host retries (store=%s)"
            log.warning(message, exc, self._path)

    def _make_up(self) -> None:
        """Retry pending releases and the pending truncation while the queue is empty."""
        try:
            if self._work.unreleased:
                self._transact([])
            self._presence.check()
            self._tidy_if_due()
        except Exception as exc:
            self._roll_back()
            # The first attempt has already logged the failure.
            log.debug("retry of pending work failed: %r (store=%s)", exc, self._path)

    def _tidy_if_due(self) -> None:
        """Truncate the write-ahead log if it may hold deleted data and a retry is due.

        This repeats until a truncation succeeds.
        """
        if not self._work.is_tidy_due or time.monotonic() < self._tidy_after:
            return
        is_first = self._tidy_after == 0
        self._tidy_after = time.monotonic() + AGAIN_SECONDS
        if self._tidy():
            self._work.is_tidy_due = False
            self._tidy_after = 0.0
        elif is_first:
            log.warning(
                "truncation of the write-ahead log failed: a reader uses the store; "
                "the log may still hold deleted data, retrying (store=%s)",
                self._path,
            )

    def _tidy(self) -> bool:
        """Checkpoint and truncate the write-ahead log. Return False if a reader prevented it."""
        self._work.execute(f"PRAGMA busy_timeout = {TIDY_BUSY_MILLISECONDS}")
        try:
            ((busy, _, _),) = self._work.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return not busy
        finally:
            self._work.execute(f"PRAGMA busy_timeout = {round(open_file.BUSY_SECONDS_MAX * 1000)}")

    def _end(self) -> None:
        self._remove_rest(pieces_max=math.inf)
        try:
            # If the file was removed or replaced, the file at this path may belong to another host.
            # This writer must not write its state into it.
            self._presence.check()
            self._sync(True)
            self._work.stop_being_host()
            if self._has_written and not self._tidy() and self._work.is_tidy_due:
                log.warning(
                    "truncation of the write-ahead log failed: a reader uses the store; "
                    "deleted data stays there until the last host closes the store (store=%s)",
                    self._path,
                )
        except Exception as exc:
            self._roll_back()
            # No caller is left to receive the error. The acknowledged data is in the store, and
            # other hosts see this host as dead.
            log.warning("store not closed cleanly: %r (store=%s)", exc, self._path)
        finally:
            self._work.let_go()
