"""File of a journal: its tables, its lock, and the report files beside it.

`journal.py` has the thread that writes the journal of this process, and reads those of dead hosts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import sqlite3
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from banksman.cluster.log import message_codec
from banksman.core.session.event import Event

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


def locked(path: Path) -> int | None:
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


def rows_of(db: sqlite3.Connection) -> list[JournalRow]:
    found = db.execute("select subject, id, expected, header, body from pending order by number")
    return [JournalRow(*row) for row in found]


def noted_of(db: sqlite3.Connection) -> list[JournalEntry]:
    return [
        JournalEntry(*row)
        for row in db.execute("select * from noted order by subject, epoch, first")
    ]


def pass_by(db: sqlite3.Connection, subject: str, epoch: int, last: int) -> None:
    # A message holds whole appends. So a note that begins at or before `last` is stored as a whole.
    db.execute(
        "delete from noted where subject = ? and epoch = ? and first <= ?", (subject, epoch, last)
    )


def is_empty(db: sqlite3.Connection) -> bool:
    (left,) = db.execute(
        "select exists (select 1 from pending) or exists (select 1 from noted)"
    ).fetchone()
    return not left


def report(journal: Path, row: JournalRow) -> None:
    """Write the events of one message to a report file, one line of JSON each."""
    place = message_codec.place(0, row.header)
    _write_report(
        report_path(journal, row),
        message_codec.events("", place.epoch, place.first, message_codec.decode(row.body), None),
    )


def report_noted(journal: Path, db: sqlite3.Connection, subject: str, epoch: int) -> None:
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
    pass_by(db, subject, epoch, events[-1].seq)


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


def open_file(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, check_same_thread=False)
    db.execute("pragma journal_mode = wal")
    # WAL with `synchronous=normal` survives the death of this process. A power cut may lose the
    # last commits, but it ends the agent too, and the cluster has the rest.
    db.execute("pragma synchronous = normal")
    db.executescript(SCHEMA)
    return db


def remove(path: Path) -> None:
    # The lock file goes last. While it exists and is locked, no other host opens the journal.
    for suffix in (".journal", ".journal-wal", ".journal-shm", ".lock"):
        with contextlib.suppress(OSError):
            os.unlink(path.with_suffix(suffix))
