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

One thread writes, with group commit. Only callers of an awaited method wait for the disk. A file
belongs to the process that holds its lock.

**Why no message is lost or stored twice.** A message is in the file before the first attempt to
publish it, and leaves the file only after its result is known. In between a crash leaves it in the
file, and recovery publishes it under the same id and the same expected sequence. If an earlier
attempt was stored, the servers refuse the second one, because another message is last by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import queue
import sqlite3
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from banksman.cluster.log import message_codec
from banksman.core.session.event import Event
from banksman.errors import StoreError

log = logging.getLogger("banksman")

SCHEMA = """
create table if not exists pending (
    number integer primary key, subject text not null, id text not null unique,
    expected integer not null, header text not null, body blob not null
);
create table if not exists noted (
    subject text not null, epoch integer not null, first integer not null, held integer not null,
    body blob not null, primary key (subject, epoch, first)
);
create table if not exists store (name text not null);
"""


class JournalRow(NamedTuple):
    """A message to publish behind the message with the sequence `expected`."""

    subject: str
    id: str
    expected: int
    header: str
    body: bytes


class JournalEntry(NamedTuple):
    """Noted appends that wait behind a message: `held` events, starting at seq `first`."""

    subject: str
    epoch: int
    first: int
    held: int
    body: bytes

    @property
    def last(self) -> int:
        return self.first + self.held - 1


_Answer = Callable[[BaseException | None], None]
_Work = tuple[Callable[[sqlite3.Connection], None], _Answer | None]


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
            self._lock = _locked(self.path)
        except OSError as exc:
            hint = "pass a writable folder as journal="
            raise StoreError(
                f"cannot create a journal in {folder}: {exc.strerror or exc}", hint=hint
            ) from exc
        # The name is a random host id, so no other process can hold its lock.
        assert self._lock is not None, "a host id is unique"
        self._work: queue.SimpleQueue[_Work | None] = queue.SimpleQueue()
        # A daemon: an interpreter that exits without `close` must not wait for this thread. All
        # answered work is committed by then.
        self._thread = threading.Thread(target=self._run, name="banksman-journal", daemon=True)
        self._thread.start()

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

        self._work.put((insert, answer))
        await answered

    def drop(self, id: str) -> None:
        """Delete an acknowledged message, with the next group.

        If the process dies before that, the message is only published again, under the same id.
        """
        self._work.put(
            (lambda db: db.execute("delete from pending where id = ?", (id,)) and None, None)
        )

    def note(self, noted: JournalEntry) -> None:
        """Write appends that wait behind a message in flight, without waiting for the disk."""
        # A note is best effort. Its append has no answer yet, so no caller relies on it. If this
        # process dies before the commit, the append is lost like any unanswered one.
        assert noted.held > 0
        self._work.put(
            (
                lambda db: (
                    db.execute("insert or replace into noted values (?,?,?,?,?)", noted) and None
                ),
                None,
            )
        )

    def pass_by(self, subject: str, epoch: int, last: int) -> None:
        """Delete the notes of this epoch up to the event `last`."""
        # All work goes through one queue, so this deletion follows the notes that it is about. It
        # cannot overtake them.
        assert last >= 0
        self._work.put((lambda db: _pass_by(db, subject, epoch, last), None))

    def report_noted(self, subject: str, epoch: int) -> None:
        """Move the notes of this epoch to a report file."""
        self._work.put((lambda db: _report_noted(self.path, db, subject, epoch), None))

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

        self._work.put((note, answer))
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
            rows.extend(_rows(db))
            noted.extend(_noted(db))

        self._work.put((select, answer))
        await found
        return rows, noted

    def report(self, row: JournalRow) -> None:
        """Move a message that cannot be published to a report file."""

        # First the file, then the deletion. A crash in between repeats the report under the same
        # name, and an existing report is kept.
        def move(db: sqlite3.Connection) -> None:
            try:
                _report(self.path, row)
            except OSError as exc:
                # The message stays in the journal. The rest of its group must still be committed.
                log.warning("cannot write a report of the journal %s: %s", self.path, exc)
                return
            db.execute("delete from pending where id = ?", (row.id,))

        self._work.put((move, None))

    async def close(self) -> None:
        """Stop the thread. An empty file is removed; the next host publishes the rest."""
        # The end marker is last in the queue, so all earlier work is committed before the thread
        # ends. The lock is released after that: a free lock means that the file is complete.
        self._work.put(None)
        await asyncio.get_running_loop().run_in_executor(None, self._thread.join)
        assert not self._thread.is_alive()

    def abandon(self) -> None:
        """Stop the thread without waiting for it."""
        self._work.put(None)

    # -- in the writer thread ---------------------------------------------------------------------
    def _run(self) -> None:
        """Commit queued work in groups, until the end marker comes."""
        try:
            db = _open(self.path)
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
                group.append(work)
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
            if work[1] is not None:
                self._tell([work[1]], error)

    def _end(self, db: sqlite3.Connection) -> None:
        # If in doubt, keep the file. The next host opens it and finds nothing to publish.
        try:
            is_empty = _is_empty(db)
        except sqlite3.Error:
            is_empty = False
        db.close()
        # Remove the files while the lock is held. Otherwise another host could lock a journal that
        # is about to vanish.
        if is_empty:
            _remove(self.path)
        if self._lock is not None:
            os.close(self._lock)


class LeftJournal:
    """The journal of a dead host. This process holds its lock until `close`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock
        self._db = _open(path)

    @property
    def store(self) -> str | None:
        found = self._db.execute("select name from store").fetchone()
        return None if found is None else str(found[0])

    @property
    def rows(self) -> list[JournalRow]:
        """The messages, in the order in which they were written."""
        return _rows(self._db)

    @property
    def noted(self) -> list[JournalEntry]:
        return _noted(self._db)

    def drop(self, id: str) -> None:
        with self._db:
            self._db.execute("delete from pending where id = ?", (id,))

    def report(self, row: JournalRow) -> None:
        """Move a message that cannot be published to a report file."""
        _report(self.path, row)
        # Drop it after the report is written: a crash in between repeats the report under the same
        # name.
        self.drop(row.id)

    def pass_by(self, subject: str, epoch: int, last: int) -> None:
        with self._db:
            _pass_by(self._db, subject, epoch, last)

    def report_noted(self, subject: str, epoch: int) -> None:
        with self._db:
            _report_noted(self.path, self._db, subject, epoch)

    def close(self) -> None:
        is_empty = _is_empty(self._db)
        self._db.close()
        if is_empty:
            _remove(self.path)
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
            lock = _locked(path)
            if lock is not None:
                found.append(LeftJournal(path, lock))
        except (OSError, sqlite3.Error) as exc:
            log.warning("cannot read %s, the journal of a dead host: %s", path, exc)
    return found


def _locked(path: Path) -> int | None:
    """Open and lock the lock file of a journal; None if another process holds it.

    `flock` belongs to the open file description. Any close of the file in this process would
    release a POSIX record lock, but not this one. The kernel releases it when the process dies, so
    a free lock proves that the host is dead.
    """
    lock_path = path.with_suffix(".lock")
    fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def _rows(db: sqlite3.Connection) -> list[JournalRow]:
    found = db.execute("select subject, id, expected, header, body from pending order by number")
    return [JournalRow(*row) for row in found]


def _noted(db: sqlite3.Connection) -> list[JournalEntry]:
    return [
        JournalEntry(*row)
        for row in db.execute("select * from noted order by subject, epoch, first")
    ]


def _pass_by(db: sqlite3.Connection, subject: str, epoch: int, last: int) -> None:
    # A message holds whole appends. So a note that begins at or before `last` is stored as a whole.
    db.execute(
        "delete from noted where subject = ? and epoch = ? and first <= ?", (subject, epoch, last)
    )


def _is_empty(db: sqlite3.Connection) -> bool:
    (left,) = db.execute(
        "select exists (select 1 from pending) or exists (select 1 from noted)"
    ).fetchone()
    return not left


def _report(journal: Path, row: JournalRow) -> None:
    """Write the events of one message to a report file, one line of JSON each."""
    place = message_codec.place(0, row.header)
    _write_report(
        report_path(journal, row),
        message_codec.events("", place.epoch, place.first, message_codec.decode(row.body), None),
    )


def _report_noted(journal: Path, db: sqlite3.Connection, subject: str, epoch: int) -> None:
    """Write all notes of a session under this epoch to one report file."""
    events: list[Event] = []
    of_it = "select first, body from noted where subject = ? and epoch = ? order by first"
    for first, body in db.execute(of_it, (subject, epoch)):
        events += message_codec.events("", epoch, first, message_codec.decode(body), None)
    if not events:
        return
    try:
        _write_report(noted_report_path(journal, subject, epoch, events[0].seq), events)
    except OSError as exc:
        # The notes stay in the journal. The rest of their group must still be committed.
        log.warning("cannot write a report of the journal %s: %s", journal, exc)
        return
    _pass_by(db, subject, epoch, events[-1].seq)


def report_path(journal: Path, row: JournalRow) -> Path:
    """Return the report file of a message."""
    # Leave out the random end of the id. Repeated attempts of one append are one report, and the
    # first attempt holds the most events.
    return _report_path(journal, row.id.rpartition(".")[0])


def noted_report_path(journal: Path, subject: str, epoch: int, first: int) -> Path:
    """Return the report file of notes. `first`: the seq of their first event."""
    return _report_path(journal, f"{subject.rpartition('.')[2]}.{epoch}.noted-{first}")


def _report_path(journal: Path, name: str) -> Path:
    return journal.parent / "reports" / f"{name}.ndjson"


def _write_report(path: Path, events: Iterable[Event]) -> None:
    path.parent.mkdir(exist_ok=True, mode=0o700)
    lines: list[str] = []
    for event in events:
        line = {
            "seq": event.seq,
            "epoch": event.epoch,
            "at": event.at,
            "turn": event.turn,
            "kind": event.kind,
        }
        lines.append(json.dumps({**line, "data": event.data.decode(errors="replace")}) + "\n")
    # "x": a report that exists is kept. It was written by an earlier attempt, which had the same
    # events or more.
    with (
        contextlib.suppress(FileExistsError),
        open(
            path, "x", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, 0o600)
        ) as file,
    ):
        file.writelines(lines)


def _open(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False)
    db.execute("pragma journal_mode = wal")
    # WAL with `synchronous=normal` survives the death of this process. A power cut may lose the
    # last commits, but it ends the agent too, and the cluster has the rest.
    db.execute("pragma synchronous = normal")
    db.executescript(SCHEMA)
    return db


def _remove(path: Path) -> None:
    # The lock file goes last. While it exists and is locked, no other host opens the journal.
    for suffix in (".journal", ".journal-wal", ".journal-shm", ".lock"):
        with contextlib.suppress(OSError):
            os.unlink(path.with_suffix(suffix))
