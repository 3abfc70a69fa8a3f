"""Group commit: one transaction for a group of operations, in the writer thread or in the loop.

If the store fails (disk full, a lock, a disk fault), the whole group is rolled back, and each
operation completes with the error. An operation that was refused anyway keeps its own reason. If an
operation raises an unexpected exception, the others must not fail with it. `perform` rolls back and
performs each operation again in a separate transaction, so that only the faulty one fails. It does
the same if one of the appends that share a statement must be refused.

**In the loop.** At the level `normal` a commit of appends writes to the page cache, in a fraction
of a millisecond. To pass it to the writer thread and back would take longer, and two threads would
compete for the lock of the interpreter. So `try_now` commits appends in the event loop's thread,
but only if nothing can make the loop wait:

- The writer thread neither works nor has results that the loop has not received (`_lock`, and the
  caller's count).
- No other process has a write transaction. SQLite does not wait here (`busy_timeout`).
- No checkpoint is due. A checkpoint syncs the disk, so only the writer thread runs one.
- The last commits were fast. After a slow one the writer thread commits for a while, so that a disk
  under pressure delays the loop for at most `SLOW_SHARE` of its time.

If `try_now` fails for any reason, it leaves no trace, and the writer thread performs the same
group. So every error has one cause and one place.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import sqlite3
import threading
import time
from collections.abc import Generator, Sequence
from operator import attrgetter
from typing import NamedTuple

from banksman.errors import StoreError, StoreReadOnly
from banksman.histogram import Histogram
from banksman.store.log_values import COMMIT_BOUNDS
from banksman.store.sqlite import open_file, ownership
from banksman.store.sqlite.append import AppendOperation, GroupedAppends, RunRefused
from banksman.store.sqlite.open_file import StoreFiles
from banksman.store.sqlite.operations import Operation, WriterContext
from banksman.store.sqlite.sqlite_errors import ALLOW_WRITING, is_of_store, translate

# A larger group is worth the writer thread, which commits beside the loop. With a hundred sessions
# the loop would be the bottleneck.
NOW_BYTES_MAX = 256 << 10
NOW_OPERATIONS_MAX = 32
# A slower commit has waited for the disk, if the kernel has counted a wait of its thread. Otherwise
# the CPU was busy, and the writer thread would be as slow.
SLOW_SECONDS = 0.010
# The part of the loop's time that slow commits may take.
SLOW_SHARE = 0.01
# SQLite checkpoints after this many pages of the write-ahead log, by default. A commit in the loop
# writes at most about this many pages, besides one for each 4096 bytes.
CHECKPOINT_PAGES = 1000
PAGES_OF_COMMIT = 4
PAGES_OF_APPEND = 2
PAGE_BYTES = 4096

log = logging.getLogger("banksman")
_is_quick = attrgetter("is_quick")
_is_synced = attrgetter("is_synced")
_size_of = attrgetter("size")


class WriteResult(NamedTuple):
    """Totals of the writer so far.

    Each commit replaces the object, because another thread may read it at any time.
    """

    commits: int = 0
    events: int = 0
    bytes: int = 0
    failures: int = 0


class GroupWriter:
    """The writing connection, and the transactions of groups.

    `_lock` protects the connection and its context. The writer thread holds it while it
    works, and `try_now` only tries to take it. No other lock is taken before it.
    """

    def __init__(
        self,
        work: WriterContext,
        *,
        path: str,
        presence: StoreFiles,
        is_full: bool,
        is_writable: bool,
    ) -> None:
        self._lock = threading.Lock()
        self.written = WriteResult()
        # Changed under the lock. The event loop reads it without, and may miss the last commit.
        self.commit_times = Histogram(COMMIT_BOUNDS)
        self.has_written = False
        self._pid = os.getpid()
        self._work = work
        self._path = path
        self._presence = presence
        self._is_full = is_full
        self._is_writable = is_writable
        self._runs = GroupedAppends(work)
        # Whether commits are synced; None until the first commit has set it. The default of a
        # connection depends on how SQLite was compiled.
        self._is_synced: bool | None = None
        self._is_overwriting = False
        # Whether the connection is set up for the loop: no waits, and no checkpoints.
        self._is_for_loop = False
        # Whether the last transaction is committed.
        self.has_committed = False
        # Estimate of the pages that the loop has written since the writer thread's last commit.
        self._pages = 0
        # Until then the writer thread commits, by the monotonic clock.
        self._slow_until = 0.0

    # -- in the event loop ------------------------------------------------------------------------
    def try_now(self, group: Sequence[Operation]) -> bool:
        """Commit a group in the event loop's thread. Return False if the writer thread must do it.

        The caller makes sure that the writer thread has handed over all earlier groups. After a
        KeyboardInterrupt, `has_committed` tells what the return value would.
        """
        self.has_committed = False
        size = sum(map(_size_of, group))
        if (
            size > NOW_BYTES_MAX
            or len(group) > NOW_OPERATIONS_MAX
            or self._pages > CHECKPOINT_PAGES
            or not all(map(_is_quick, group))
            # After each of its groups, the writer thread removes a piece of deleted data.
            or self._work.rests
        ):
            return False
        # A forked child has neither the locks nor the connection of its parent.
        if os.getpid() != self._pid:
            return False
        began, waits = time.monotonic(), _waits()
        if began < self._slow_until or not self._lock.acquire(blocking=False):
            return False
        try:
            is_done = self._has_committed_now(group)
        finally:
            self._lock.release()
        seconds = time.monotonic() - began
        if seconds > SLOW_SECONDS and _waits() > waits:
            self._slow_until = began + seconds / SLOW_SHARE
        if is_done:
            self._pages += PAGES_OF_COMMIT + PAGES_OF_APPEND * len(group) + size // PAGE_BYTES
            self._count(group, seconds)
        return is_done

    def _has_committed_now(self, group: Sequence[Operation]) -> bool:
        failures = self._work.failures.mark()
        try:
            self._set_up(is_for_loop=True)
            self._transact(group)
            self.stay_seen()
        except BaseException as exc:
            if not self.has_committed:
                # The writer thread gets the same error and reports it, or it waits for the lock.
                self._work.failures.return_to(failures)
                for operation in group:
                    operation.forget()
            if not isinstance(exc, Exception):
                raise
        return self.has_committed

    # -- in the writer thread ---------------------------------------------------------------------
    @contextlib.contextmanager
    def in_thread(self) -> Generator[None]:
        """Keep the loop from the connection while the writer thread uses it."""
        with self._lock:
            self._set_up(is_for_loop=False)
            yield

    def perform(self, group: list[Operation]) -> None:
        """Commit a group in the writer thread, and set the errors of its operations.

        An operation with `is_alone`, always the last, gets a separate transaction.
        """
        self._pages = 0
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

    def release_pending(self) -> None:
        """Retry the releases that have failed."""
        self._transact([])

    # -- in either thread -------------------------------------------------------------------------
    def _count(self, group: Sequence[Operation], seconds: float) -> None:
        self.commit_times.add(seconds)
        commits, events, size, failures = self.written
        for operation in group:
            if isinstance(operation, AppendOperation) and operation.error is None:
                events += len(operation.entries)
                size += operation.size
        self.written = WriteResult(commits + 1, events, size, failures)

    def _transact(self, group: Sequence[Operation]) -> None:
        work, runs = self._work, self._runs
        self.has_committed = is_last_step = False
        try:
            if not self._is_writable:
                message = f"cannot write to the store {self._path}: it is read-only"
                raise StoreReadOnly(message, hint=ALLOW_WRITING, path=self._path)
            self._overwrite_deleted()
            # SQLite allows a change of the sync level only between transactions.
            self.sync(self._is_full or any(map(_is_synced, group)))
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
            is_last_step = True
            work.execute("COMMIT")
            self.has_committed = True
            work.unreleased.clear()
            self.has_written = True
        except BaseException as exc:
            if is_last_step and not isinstance(exc, Exception):
                # A KeyboardInterrupt, which may come right behind the commit. A commit that fails
                # raises another error.
                self.has_committed = not work.connection.in_transaction
            runs.forget()
            self.roll_back()
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

    def roll_back(self) -> None:
        try:
            if self._work.connection.in_transaction:
                self._work.execute("ROLLBACK")
        except sqlite3.Error as exc:
            log.warning("rollback failed: %s (store=%s)", exc, self._path)

    def stay_seen(self) -> None:
        """Take the lock by which other hosts see this host, in case the program has dropped it."""
        try:
            self._work.stay_seen()
        except Exception as exc:
            message = "host lock not renewed, trying again after a later write: %r (store=%s)"
            log.warning(message, exc, self._path)

    # -- the connection ---------------------------------------------------------------------------
    def _set_up(self, *, is_for_loop: bool) -> None:
        """Let the connection wait for locks and run checkpoints, or do neither in the loop."""
        if is_for_loop != self._is_for_loop:
            self._is_for_loop = is_for_loop
            self.wait_for_locks(0.0 if is_for_loop else open_file.BUSY_SECONDS_MAX)
            pages = 0 if is_for_loop else CHECKPOINT_PAGES
            self._work.execute(f"PRAGMA wal_autocheckpoint = {pages}").fetchall()

    def wait_for_locks(self, seconds: float) -> None:
        """Set how long a statement waits for the locks of other connections."""
        self._work.execute(f"PRAGMA busy_timeout = {round(seconds * 1000)}").fetchall()

    def _overwrite_deleted(self) -> None:
        """Make SQLite overwrite deleted data with zeros.

        The first transaction sets this, not the start of the thread: the statement may fail, and at
        the start no operation could carry the error.
        """
        if not self._is_overwriting:
            self._work.execute("PRAGMA secure_delete = ON")
            self._is_overwriting = True

    def sync(self, is_synced: bool) -> None:
        """Set whether the next commits are synced to disk."""
        if is_synced != self._is_synced:
            self._work.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'NORMAL'}")
            self._is_synced = is_synced


def _waits() -> int:
    """Return how often this thread has waited in the kernel; without Linux, any thread."""
    return resource.getrusage(getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)).ru_nvcsw
