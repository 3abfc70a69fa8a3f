"""Write-ahead journal of appends that NATS has not acknowledged, in a local SQLite file per host.

A message is written here before it is published, and dropped after its ack. While a message has no
ack, the appends that wait behind it are written here too (`journal_recovery.py`). So the file holds
what is in flight. That is bounded: the host stops reading from an agent once too much is in flight
(`sessions/log_writer.py`).

The next host on the machine publishes the journal of a dead host, and a fenced host its own
(`journal_recovery.py`). Each message keeps the sequence that it expects to follow. If no host has
claimed the session since, the message is stored in its place. Otherwise the servers refuse it, and
it becomes a report file beside the journal, for the operator. It is never appended behind the
events of a new owner.

One thread writes, with group commit. All work of one pass of the event loop is one group at least.
A deletion waits a moment for the next message. Only callers of an awaited method wait for the disk.
A file belongs to the process that holds its lock.

**Why no message is lost or stored twice.** A message is in the file before the first attempt to
publish it, and leaves the file only after its result is known. In between a crash leaves it in the
file, and recovery publishes it under the same id and the same expected sequence. If an earlier
attempt was stored, the servers refuse the second one, because another message is last by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path

from banksman.cluster.log import journal_file
from banksman.cluster.log.journal_file import JournalEntry, JournalRow
from banksman.errors import StoreError

log = logging.getLogger("banksman")

# How long the deletion of an acknowledged message waits for other work. After a crash in this time,
# recovery publishes the message again, and the servers deduplicate it.
DROP_SECONDS_MAX = 0.01

_Answer = Callable[[BaseException | None], None]
_Work = tuple[Callable[[sqlite3.Connection], object], _Answer | None]


class Journal:
    """The journal of this process.

    It is created inside an event loop and belongs to that loop. Raises `StoreError` if its folder
    cannot be used.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._loop = asyncio.get_running_loop()
        self.folder = folder
        self.path = folder / f"{name}.journal"
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = journal_file.locked(self.path)
        except OSError as exc:
            hint = "pass a writable folder as journal="
            raise StoreError(
                f"cannot create a journal in {folder}: {exc.strerror or exc}", hint=hint
            ) from exc
        # The name is a random host id, so no other process can hold its lock.
        assert self._lock is not None, "a host id is unique"
        self._work: queue.SimpleQueue[list[_Work] | None] = queue.SimpleQueue()
        # Work that the thread does not have yet. `_soon` passes it on in the next pass of the loop,
        # `_later` after a moment.
        self._next: list[_Work] = []
        self._soon: asyncio.Handle | None = None
        self._later: asyncio.Handle | None = None
        # A daemon: an interpreter that exits without `close` must not wait for this thread. All
        # answered work is committed by then.
        self._thread = threading.Thread(target=self._run, name="banksman-journal", daemon=True)
        self._thread.start()

    def _add(
        self,
        function: Callable[[sqlite3.Connection], object],
        answer: _Answer | None = None,
        *,
        can_wait: bool = False,
    ) -> None:
        """Queue work for the thread, in the order of the calls."""
        self._next.append((function, answer))
        if not can_wait:
            self._soon = self._soon or self._loop.call_soon(self._flush)
        elif self._later is None:
            self._later = self._loop.call_later(DROP_SECONDS_MAX, self._flush_later)

    def _flush_later(self) -> None:
        self._later = None
        self._flush()

    def _flush(self) -> None:
        """Pass the queued work to the thread: one wakeup for all."""
        self._soon = None
        if self._next:
            self._work.put(self._next)
            self._next = []

    async def put(self, row: JournalRow) -> None:
        """Write a message. When this returns, the message survives the death of this process."""
        # The thread answers through the loop of the constructor. A caller on another loop would
        # never be woken.
        assert asyncio.get_running_loop() is self._loop
        assert row.expected >= 0
        answered: asyncio.Future[None] = self._loop.create_future()

        def answer(exc: BaseException | None) -> None:
            if answered.done():
                return  # The caller was cancelled. The row stays until `drop` or recovery.
            if exc is None:
                answered.set_result(None)
            else:
                answered.set_exception(
                    StoreError(f"cannot write the journal: {exc}", path=str(self.path))
                )

        # Replace a row of the same id: it is an earlier attempt of the same message.
        def insert(db: sqlite3.Connection) -> None:
            db.execute(
                "insert or replace into pending (subject, id, expected, header, body) "
                "values (?,?,?,?,?)",
                row,
            )

        self._add(insert, answer)
        await answered

    def drop(self, id: str) -> None:
        """Delete an acknowledged message, with the next group.

        If the process dies before that, the message is only published again, under the same id.
        """
        self._add(lambda db: db.execute("delete from pending where id = ?", (id,)), can_wait=True)

    def note(self, noted: JournalEntry) -> None:
        """Write appends that wait behind a message in flight, without waiting for the disk."""
        # A note is best effort. Its append has no answer yet, so no caller relies on it. If this
        # process dies before the commit, the append is lost like any unanswered one.
        assert noted.held > 0
        self._add(lambda db: db.execute("insert or replace into noted values (?,?,?,?,?)", noted))

    def pass_by(self, subject: str, epoch: int, last: int) -> None:
        """Delete the notes of this epoch up to the event `last`."""
        # All work goes through one queue, so this deletion follows the notes that it is about. It
        # cannot overtake them.
        assert last >= 0
        self._add(lambda db: journal_file.pass_by(db, subject, epoch, last))

    def report_noted(self, subject: str, epoch: int) -> None:
        """Move the notes of this epoch to a report file."""
        self._add(lambda db: journal_file.report_noted(self.path, db, subject, epoch))

    async def be_of(self, store: str) -> None:
        """Record which store this journal belongs to: journals of other stores share the folder."""
        assert asyncio.get_running_loop() is self._loop
        answered: asyncio.Future[None] = self._loop.create_future()

        def note(db: sqlite3.Connection) -> None:
            db.execute("insert into store (name) values (?)", (store,))

        # An error is ignored: recovery also tries journals whose store is unknown.
        def answer(_: BaseException | None) -> None:
            if not answered.done():
                answered.set_result(None)

        self._add(note, answer)
        await answered

    async def rows(self) -> tuple[list[JournalRow], list[JournalEntry]]:
        """Return the messages in flight in their order, and the notes behind them."""
        assert asyncio.get_running_loop() is self._loop
        found: asyncio.Future[None] = self._loop.create_future()
        # The thread fills these lists before it answers, and does not touch them afterwards.
        rows: list[JournalRow] = []
        noted: list[JournalEntry] = []

        def answer(exc: BaseException | None) -> None:
            if found.done():
                return
            if exc is None:
                found.set_result(None)
            else:
                found.set_exception(
                    StoreError(f"cannot read the journal: {exc}", path=str(self.path))
                )

        def select(db: sqlite3.Connection) -> None:
            rows.extend(journal_file.rows_of(db))
            noted.extend(journal_file.noted_of(db))

        self._add(select, answer)
        await found
        return rows, noted

    def report(self, row: JournalRow) -> None:
        """Move a message that cannot be published to a report file."""

        # First the file, then the deletion. A crash in between repeats the report under the same
        # name, and an existing report is kept.
        def move(db: sqlite3.Connection) -> None:
            try:
                journal_file.report(self.path, row)
            except OSError as exc:
                # The message stays in the journal. The rest of its group must still be committed.
                log.warning("cannot write a report of the journal %s: %s", self.path, exc)
                return
            db.execute("delete from pending where id = ?", (row.id,))

        self._add(move)

    async def close(self) -> None:
        """Stop the thread. An empty file is removed; the next host publishes the rest."""
        # The end marker is last in the queue, so all earlier work is committed before the thread
        # ends. The lock is released after that: a free lock means that the file is complete.
        self._stop()
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        assert not self._thread.is_alive()

    def abandon(self) -> None:
        """Stop the thread without waiting for it."""
        self._stop()

    def _stop(self) -> None:
        """Pass on the rest, and the end marker behind it."""
        for timer in (self._soon, self._later):
            if timer is not None:
                timer.cancel()
        self._flush()
        self._work.put(None)

    # -- in the writer thread ---------------------------------------------------------------------
    def _run(self) -> None:
        """Commit queued work in groups, until the end marker comes."""
        try:
            db = journal_file.open_file(self.path)
        except sqlite3.Error as exc:
            # Without a journal no message may be published, so every `put` fails. The lock stays
            # held until this process ends.
            self._fail_all(exc)
            return
        is_over = False
        while not is_over:
            # Wait for one piece of work, then take all that has gathered: the longer a commit
            # takes, the more work shares the next one.
            group: list[_Work] = []
            work = self._work.get()
            while True:
                if work is None:
                    is_over = True
                    break
                group += work
                try:
                    work = self._work.get_nowait()
                except queue.Empty:
                    break
            self._commit(db, group)
        self._end(db)

    def _commit(self, db: sqlite3.Connection, group: list[_Work]) -> None:
        error: BaseException | None = None
        try:
            # One transaction per group. If any part fails, the whole group is rolled back. Every
            # waiting caller then gets the error, and no caller believes in a write that is not
            # stored.
            with db:
                for function, _ in group:
                    function(db)
        except Exception as exc:  # Any error: a dead thread would never answer.
            error = exc
        answers = [answer for _, answer in group if answer is not None]
        if error is not None and len(answers) < len(group):
            log.warning("cannot write the journal %s: %s", self.path, error)
        if answers:
            self._tell(answers, error)

    def _tell(self, answers: list[_Answer], error: BaseException | None) -> None:
        def tell() -> None:
            for answer in answers:
                answer(error)

        with contextlib.suppress(RuntimeError):  # The loop is closed, so no caller waits.
            self._loop.call_soon_threadsafe(tell)

    def _fail_all(self, error: BaseException) -> None:
        while (work := self._work.get()) is not None:
            self._tell([answer for _, answer in work if answer is not None], error)

    def _end(self, db: sqlite3.Connection) -> None:
        # If in doubt, keep the file. The next host opens it and finds nothing to publish.
        try:
            is_empty = journal_file.is_empty(db)
        except sqlite3.Error:
            is_empty = False
        db.close()
        # Remove the files while the lock is held. Otherwise another host could lock a journal that
        # is about to vanish.
        if is_empty:
            journal_file.remove(self.path)
        if self._lock is not None:
            os.close(self._lock)


class LeftJournal:
    """The journal of a dead host. This process holds its lock until `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._db = journal_file.open_file(path)

    @property
    def store(self) -> str | None:
        found = self._db.execute("select name from store").fetchone()
        return None if found is None else str(found[0])

    @property
    def rows(self) -> list[JournalRow]:
        """The messages, in the order in which they were written."""
        return journal_file.rows_of(self._db)

    @property
    def noted(self) -> list[JournalEntry]:
        return journal_file.noted_of(self._db)

    def drop(self, id: str) -> None:
        with self._db:
            self._db.execute("delete from pending where id = ?", (id,))

    def report(self, row: JournalRow) -> None:
        """Move a message that cannot be published to a report file."""
        journal_file.report(self.path, row)
        # Drop it after the report is written: a crash in between repeats the report under the same
        # name.
        self.drop(row.id)

    def pass_by(self, subject: str, epoch: int, last: int) -> None:
        with self._db:
            journal_file.pass_by(self._db, subject, epoch, last)

    def report_noted(self, subject: str, epoch: int) -> None:
        with self._db:
            journal_file.report_noted(self.path, self._db, subject, epoch)

    def close(self) -> None:
        is_empty = journal_file.is_empty(self._db)
        self._db.close()
        if is_empty:
            journal_file.remove(self.path)
        os.close(self._lock)


def store_of(left: LeftJournal) -> str | None:
    """Return which store a journal belongs to; None if its host died before it recorded that."""
    return left.store


def left_behind(folder: Path) -> list[LeftJournal]:
    """Lock and return the journals of dead hosts."""
    found: list[LeftJournal] = []
    # The own journal is in this folder too. Its lock is held by another open file description of
    # this process, so `flock` refuses it like that of any live host.
    for path in sorted(folder.glob("*.journal")):
        try:
            lock = journal_file.locked(path)
            if lock is not None:
                found.append(LeftJournal(path, lock))
        except (OSError, sqlite3.Error) as exc:
            log.warning("cannot read %s, the journal of a dead host: %s", path, exc)
    return found
