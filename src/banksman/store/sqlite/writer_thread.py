"""The one thread that writes: it takes all that waits, commits it as one transaction, and answers for all at once.

A commit costs the same for one append as for fifty, so while one is on its way the next group gathers, of all sessions.
Nothing waits for a timer. A group has a bound, so that no small append waits behind a flood of others.

If the store fails (no room, a lock, a fault of the disk), nothing of the group was written, and each of it is answered
with the error; but for those that were refused for a reason of their own, and would have been anyway. If one of them
raises what nobody expects, it is none of the others': all is undone, and each is done once more in a transaction of its
own, so that only that one fails.

The thread is a daemon. It ends in good order by `stop`, which the log's close and its finaliser call. But a program may
end without either, and then nothing may hang: the thread is stopped where it is, as by a crash, and that is what a
store must survive in any case. What it had not committed was not acknowledged to anybody.
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
from banksman.store.sqlite.append import AppendOperation, GroupedAppends
from banksman.store.sqlite.maintenance import SqliteRetention
from banksman.store.sqlite.open_file import StoreFiles
from banksman.store.sqlite.operations import Operation, WriterContext
from banksman.store.sqlite.sqlite_errors import ALLOW_WRITING, is_of_store, translate

# What one transaction may hold: some tenths of a second of a disk's time.
GROUP_BYTES_MAX = 16 << 20
GROUP_OPERATIONS_MAX = 4096
# Truncating the log at the end, or after a delete, waits so long for readers.
TIDY_BUSY_MILLISECONDS = 100
# What could not be done for somebody else's sake is tried again so often, also while nobody calls: SQLite tells nobody
# when a reader has gone or a lock is free. It is done only while something is owed.
AGAIN_SECONDS = 1.0

log = logging.getLogger("banksman")


class WriteResult(NamedTuple):
    """What was written so far. A new one with each commit: another thread may look at it at any moment."""

    commits: int = 0
    events: int = 0
    bytes: int = 0
    commit_seconds: float = 0.0
    failures: int = 0


class WriterThread:
    """`hand_over` is called in the thread, with a group whose operations are to be settled in the loop's."""

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
        # Whether commits are synced; None until it was said. How a connection begins is chosen when SQLite is compiled.
        self._is_synced: bool | None = None
        self._is_overwriting = False
        self._has_written = False
        self._has_looked_for_rests = False
        # Before this time the log is not truncated again: each attempt may keep others waiting.
        self._tidy_after = 0.0
        self._queue: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self.put: Callable[[Operation], None] = self._queue.put
        self.thread = threading.Thread(target=self._run, name="banksman-store", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """End, behind all that was put. The last that is handed over is an empty group. From any thread."""
        self._queue.put(None)

    def _run(self) -> None:
        if self._is_writable:
            with contextlib.suppress(OSError):  # Nobody waits for it, and the next one tries again.
                spool.remove_dead(self._path)
        is_last = False
        while not is_last:
            group, is_last = self._take()
            if group:
                self._perform(group)
                self._keep_up(group)
                self._hand_over(group)
                self._remove_rest()
            elif not is_last:
                self._make_up()
        self._end()
        self._hand_over([])

    def _take(self) -> tuple[list[Operation], bool]:
        """All that waits, up to the bounds; at least one, unless something is owed. And whether it is the last."""
        group: list[Operation] = []
        size = 0
        is_owing = self._work.is_tidy_due or bool(self._work.unreleased)
        try:
            operation = self._queue.get(timeout=AGAIN_SECONDS if is_owing else None)
        except queue.Empty:
            return group, False
        while operation is not None:
            group.append(operation)
            size += operation.size
            if size > GROUP_BYTES_MAX or len(group) >= GROUP_OPERATIONS_MAX or operation.is_alone:
                return group, False
            try:
                operation = self._queue.get_nowait()
            except queue.Empty:
                return group, False
        return group, True

    def _perform(self, group: list[Operation]) -> None:
        """One that is alone is always the last of what was taken, and gets a transaction after the others'."""
        if group[-1].is_alone and len(group) > 1:
            self._commit(group[:-1])
            self._commit(group[-1:])
        else:
            self._commit(group)

    def _commit(self, group: list[Operation]) -> None:
        failures = self._work.failures.mark()
        error = self._committed(group)
        if error is None:
            return
        if len(group) == 1 or is_of_store(error):
            translated = self._translated(error)
            for operation in group:
                operation.fail(self._work, translated)
            return
        self._work.failures.return_to(failures)
        for operation in group:
            operation.forget()
            self._commit([operation])

    def _committed(self, group: list[Operation]) -> Exception | None:
        """What kept the transaction out, if anything did."""
        began = time.perf_counter()
        try:
            with group[0].around(self._work):
                self._transact(group)
        except Exception as exc:
            self.written = self.written._replace(failures=self.written.failures + 1)
            return exc
        self._count(group, time.perf_counter() - began)
        return None

    def _count(self, group: list[Operation], seconds: float) -> None:
        before = self.written
        appends = [
            operation for operation in group if isinstance(operation, AppendOperation) and operation.error is None
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
                raise StoreReadOnly(f"the store {self._path} may not be written", hint=ALLOW_WRITING, path=self._path)
            self._overwrite_deleted()
            # The level can be changed between transactions only.
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
            # Before the commit, though it could be gone a moment later as well: so nothing of it is written, and
            # whoever puts the file back can try again.
            self._presence.check()
            work.execute("COMMIT")
            work.unreleased.clear()
            self._has_written = True
        except Exception:
            runs.forget()
            self._roll_back()
            # A file that is another one by now explains whatever else went wrong.
            self._presence.check()
            raise

    def _translated(self, exc: Exception) -> StoreError:
        if isinstance(exc, StoreError):
            return exc
        if not is_of_store(exc):
            # A bug of ours, which must not take the thread with it: everybody would wait for ever.
            log.error("! store=%s the writer failed", self._path, exc_info=exc)
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
            log.warning("! store=%s could not roll back: %s", self._path, exc)

    def _overwrite_deleted(self) -> None:
        """Said once, and not when the thread begins: it may fail, and there is nobody then who could be told."""
        if not self._is_overwriting:
            self._work.execute("PRAGMA secure_delete = ON")
            self._is_overwriting = True

    def _sync(self, is_synced: bool) -> None:
        if is_synced != self._is_synced:
            self._work.execute(f"PRAGMA synchronous = {'FULL' if is_synced else 'NORMAL'}")
            self._is_synced = is_synced

    # -- after a group -----------------------------------------------------------------------------------------------
    def _keep_up(self, group: list[Operation]) -> None:
        """What nobody asked for: to keep within the bounds. It comes before the answers, so that who is answered finds
        them kept, and in transactions of its own: old chunks that cannot be removed, since they are damaged, must not
        keep the new ones out. Nothing of it need be synced: what comes back after a power cut goes again.

        Whatever it raises, those of the group are answered: the thread must not end with them in its hands."""
        try:
            self._work.stay_seen()
            if self._retention and self._is_writable:
                self._retain(
                    {one.session: None for one in group if isinstance(one, AppendOperation) and one.error is None}
                )
            self._tidy_if_due()
        except Exception as exc:
            self._roll_back()
            log.warning("! store=%s upkeep failed: %r", self._path, exc)

    def _retain(self, sessions: dict[str, None]) -> None:
        now = time.time()
        self._sync(False)
        for session in sessions:
            # Looked at first without the lock, since mostly there is nothing to take.
            if maintenance.excess(self._work, session, self._retention, now) is not None:
                self._work.execute("BEGIN IMMEDIATE")
                maintenance.retain(self._work, session, self._retention, now)
                self._work.execute("COMMIT")

    def _remove_rest(self, *, pieces_max: float = 1) -> None:
        """What is left of sessions that were deleted, here or by a host that died over it: a piece after each group, so
        that nobody waits long. Not before something was written: a log that only reads writes nothing."""
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
            # The next host tries again: here it would be tried, and told, after each group.
            work.rests.clear()
            log.warning("! store=%s what was deleted is not all gone yet: %s", self._path, exc)

    def _make_up(self) -> None:
        """What is owed, while nobody calls."""
        try:
            if self._work.unreleased:
                self._transact([])
            self._presence.check()
            self._tidy_if_due()
        except Exception as exc:
            self._roll_back()
            # That it failed was said with the first attempt.
            log.debug("! store=%s could not be made up for: %r", self._path, exc)

    def _tidy_if_due(self) -> None:
        """What was deleted is to be gone from the log too: until it is, the log is truncated again and again."""
        if not self._work.is_tidy_due or time.monotonic() < self._tidy_after:
            return
        is_first = self._tidy_after == 0
        self._tidy_after = time.monotonic() + AGAIN_SECONDS
        if self._tidy():
            self._work.is_tidy_due = False
            self._tidy_after = 0.0
        elif is_first:
            log.warning("! store=%s what was deleted is in its log until a reader of the store has gone", self._path)

    def _tidy(self) -> bool:
        """Fold the log of the store back into the file, and empty it: whether no reader was in the way."""
        self._work.execute(f"PRAGMA busy_timeout = {TIDY_BUSY_MILLISECONDS}")
        try:
            ((busy, _, _),) = self._work.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
            return not busy
        finally:
            self._work.execute(f"PRAGMA busy_timeout = {round(open_file.BUSY_SECONDS_MAX * 1000)}")

    def _end(self) -> None:
        self._remove_rest(pieces_max=math.inf)
        try:
            # What was removed or replaced may be another host's by now: nothing of what we have belongs into it.
            self._presence.check()
            self._sync(True)
            self._work.stop_being_host()
            if self._has_written and not self._tidy() and self._work.is_tidy_due:
                log.warning("! store=%s what was deleted is in its log until the last host has closed it", self._path)
        except Exception as exc:
            self._roll_back()
            # Nobody is left to tell. What was acknowledged is there, and to the others this host is dead.
            log.warning("! store=%s could not be closed in good order: %r", self._path, exc)
        finally:
            self._work.let_go()
