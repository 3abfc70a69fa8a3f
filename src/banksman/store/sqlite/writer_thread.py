"""Writer thread: commit the queued operations in groups, and keep the store up between groups.

The upkeep is retention, removal of deleted data, truncation of the write-ahead log, and the retry
of failed releases.

A commit costs the same for one append as for fifty. So while one commit is in progress, the next
group of operations from all sessions collects in the queue. A group has a size limit, so that a
small append does not wait behind a flood of others. Nothing waits here for a timer; frames of the
agent may have waited a few milliseconds in the event loop (`OperationBatch`). Groups that the event
loop commits itself do not come here. `group_writer.py` has the transactions of both.

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
import threading
import time
from collections.abc import Callable

from banksman.store.sqlite import deleted_sessions, maintenance, open_file, spool
from banksman.store.sqlite.append import AppendOperation
from banksman.store.sqlite.group_writer import GroupWriter
from banksman.store.sqlite.maintenance import SqliteRetention
from banksman.store.sqlite.open_file import StoreFiles
from banksman.store.sqlite.operations import Operation, WriterContext

# Limits of one transaction: some tenths of a second of disk time.
GROUP_BYTES_MAX = 16 << 20
GROUP_OPERATIONS_MAX = 4096
# How long a truncation of the write-ahead log, at the end or after a delete, waits for readers.
TIDY_BUSY_SECONDS = 0.1
# Retry interval for work that another process blocks, also while the queue is empty. SQLite does
# not report when a reader has finished or a lock is free. The retries run only while work is
# pending.
AGAIN_SECONDS = 1.0

log = logging.getLogger("banksman")


class WriterThread:
    """The thread that writes, and whose connection the event loop may use while it is idle.

    `hand_over`: called in this thread with a performed group, whose operations the event loop
    settles.
    """

    def __init__(
        self,
        work: WriterContext,
        group_writer: GroupWriter,
        *,
        path: str,
        presence: StoreFiles,
        is_writable: bool,
        retention: SqliteRetention,
        hand_over: Callable[[list[Operation]], None],
    ) -> None:
        self._work = work
        self._group_writer = group_writer
        self._path = path
        self._presence = presence
        self._is_writable = is_writable
        self._retention = retention
        self._hand_over = hand_over
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
        while not self._serve_group():
            pass
        with self._group_writer.in_thread():
            self._end()
        self._hand_over([])

    def _serve_group(self) -> bool:
        """Write the next group and hand it over. Return whether it was the last one.

        The thread waits here for the group. It must not hold the one before it, whose callbacks
        refer to objects of the callers.
        """
        group, is_last = self._take()
        if group:
            with self._group_writer.in_thread():
                self._group_writer.perform(group)
                self._keep_up(group)
                self._group_writer.stay_seen()
            self._hand_over(group)
            with self._group_writer.in_thread():
                self._remove_rest()
        elif not is_last:
            with self._group_writer.in_thread():
                self._make_up()
        return is_last

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
            self._group_writer.roll_back()
            log.warning(
                "store maintenance failed, trying again after a later write (store=%s error=%r)",
                self._path,
                exc,
            )

    def _retain(self, sessions: dict[str, None]) -> None:
        now = time.time()
        self._group_writer.sync(False)
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
        if not self._group_writer.has_written or not self._presence.is_whole:
            return
        work = self._work
        try:
            if not self._has_looked_for_rests:
                self._has_looked_for_rests = True
                work.rests.update(dict.fromkeys(deleted_sessions.found(work)))
            while work.rests and pieces_max > 0:
                pieces_max -= 1
                self._group_writer.sync(False)
                work.execute("BEGIN IMMEDIATE")
                deleted_sessions.remove_some(work, next(iter(work.rests)))
                work.execute("COMMIT")
            self._tidy_if_due()
        except Exception as exc:
            self._group_writer.roll_back()
            # The next host tries again. A retry here would run, and log, after every group.
            work.rests.clear()
            message = "removal of deleted data failed: %s, the next host retries (store=%s)"
            log.warning(message, exc, self._path)

    def _make_up(self) -> None:
        """Retry pending releases and the pending truncation while the queue is empty."""
        try:
            if self._work.unreleased:
                self._group_writer.release_pending()
            self._presence.check()
            self._tidy_if_due()
        except Exception as exc:
            self._group_writer.roll_back()
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
        self._group_writer.wait_for_locks(TIDY_BUSY_SECONDS)
        try:
            ((busy, _, _),) = self._work.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return not busy
        finally:
            self._group_writer.wait_for_locks(open_file.BUSY_SECONDS_MAX)

    def _end(self) -> None:
        self._remove_rest(pieces_max=math.inf)
        try:
            # If the file was removed or replaced, the file at this path may belong to another host.
            # This writer must not write its state into it.
            self._presence.check()
            self._group_writer.sync(True)
            self._work.stop_being_host()
            if self._group_writer.has_written and not self._tidy() and self._work.is_tidy_due:
                log.warning(
                    "truncation of the write-ahead log failed: a reader uses the store; "
                    "deleted data stays there until the last host closes the store (store=%s)",
                    self._path,
                )
        except Exception as exc:
            self._group_writer.roll_back()
            # No caller is left to receive the error. The acknowledged data is in the store, and
            # other hosts see this host as dead.
            log.warning("store not closed cleanly: %r (store=%s)", exc, self._path)
        finally:
            self._work.let_go()
