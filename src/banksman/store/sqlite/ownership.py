"""Who has a session, as the writer decides it: claim, advance, release, and what only one of them may have.

Each of these is called inside a transaction that holds the write lock, so what it reads is what it changes. It raises
its refusal before it writes.

Epochs. A claim raises the epoch by one; by two where somebody has the session, for its owner does not know yet that it
is fenced off, and may advance: what it says until it is told is under the epoch behind its own, which must be nobody's.
New sessions begin past the highest epoch that was ever deleted, so that no epoch is given twice for an id.

A claim and an advance are synced to the disk before they are answered, at every level. At `normal` a power cut may take
the newest events of a session, and a reader may have seen them. Its cursor, `epoch.seq`, tells: after the cut a new
claim raises the epoch, so the events that come in the place of the lost ones are of another. If the claim itself could
be lost, the same epoch would be given again, and the reader would go on in another history without a sign.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from banksman.errors import NameTaken, NotOwner, StoreError, UsageError
from banksman.store.sqlite import deleted_sessions
from banksman.store.sqlite.append import no_owner
from banksman.store.sqlite.operations import Operation, WriterContext

log = logging.getLogger("banksman")


@dataclass(slots=True)
class HeldSession:
    """A session that is claimed here, under that epoch or by now a higher one. `seq` is its head, as it was answered:
    nobody else can move it."""

    epoch: int
    number: int
    seq: int


def claim(work: WriterContext, session: str, name: str | None, agent: str | None) -> HeldSession:
    assert work.host is not None
    work.check_seen()
    epoch = _claimed_epoch(work, session, name, agent)
    number, seq = work.row("SELECT number, seq FROM sessions WHERE id = ?", session)
    return HeldSession(epoch, number, seq)


def _claimed_epoch(work: WriterContext, session: str, name: str | None, agent: str | None) -> int:
    row = work.row("SELECT epoch, owner FROM sessions WHERE id = ?", session)
    if row is None:
        if not agent:
            raise UsageError("there is no such session", hint="was it deleted?", session=session)
        check_name(work, name, session)
        deleted_sessions.clear(work, session)
        epoch = deleted_epoch(work) + 1
        now = time.time()
        work.execute(
            "INSERT INTO sessions (seq, bytes, changed, epoch, owner, first, trimmed, created, id, name, agent) "
            "VALUES (0, 0, ?, ?, ?, 1, 0, ?, ?, ?, ?)",
            (now, epoch, work.host, now, session, name, agent),
        )
        return epoch
    epoch, owner = row
    check_free(work, session, owner)
    epoch = epoch_past(epoch, owner) + 1
    work.execute("UPDATE sessions SET epoch = ?, owner = ?, lease = NULL WHERE id = ?", (epoch, work.host, session))
    return epoch


def advance(work: WriterContext, session: str, epoch: int) -> None:
    _check_owner(work, session, epoch)
    work.execute("UPDATE sessions SET epoch = ? WHERE id = ?", (epoch + 1, session))


def release(work: WriterContext, session: str, epoch: int) -> None:
    work.execute(
        "UPDATE sessions SET owner = NULL, lease = NULL WHERE id = ? AND epoch = ? AND owner = ?",
        (session, epoch, work.host),
    )


class ReleaseOperation(Operation):
    """A release for which nobody waits. If the store fails it is not forgotten: as long as this process lives nobody
    else could have the session."""

    __slots__ = ("_epoch", "_session")

    def __init__(self, session: str, epoch: int) -> None:
        super().__init__(ReleaseOperation._settled)
        self._session = session
        self._epoch = epoch

    def perform(self, work: WriterContext) -> None:
        release(work, self._session, self._epoch)

    def fail(self, work: WriterContext, error: StoreError) -> None:
        super().fail(work, error)
        work.unreleased[self._session, self._epoch] = None

    def _settled(self) -> None:
        if self.error is not None:
            log.warning("! session=%s could not be released yet: %s", self._session, self.error)


def lease(work: WriterContext, session: str, epoch: int, name: str | None) -> None:
    _check_owner(work, session, epoch)
    if name is not None:
        row = work.row("SELECT id, owner FROM sessions WHERE lease = ? AND id != ?", name, session)
        if row is not None:
            holder, owner = row
            if owner is not None and (owner == work.host or work.is_alive(owner)):
                raise NotOwner(
                    f"{name} is in the hands of session {holder}", hint="close that one first", session=holder
                )
            work.execute("UPDATE sessions SET lease = NULL WHERE id = ?", (holder,))
    work.execute("UPDATE sessions SET lease = ? WHERE id = ?", (name, session))


def check_name(work: WriterContext, name: str | None, session: str) -> None:
    """`NameTaken` if another session has it."""
    row = None if name is None else work.row("SELECT id FROM sessions WHERE name = ? AND id != ?", name, session)
    if row is not None:
        raise NameTaken(f"another session has the name {name}", hint="take another name", session=row[0])


def check_free(work: WriterContext, session: str, owner: int | None) -> None:
    """`NotOwner` if a live host that is not this one has the session."""
    if owner is None or owner == work.host or not work.is_alive(owner):
        return
    pid, address = work.row("SELECT pid, address FROM hosts WHERE id = ?", owner) or (0, "")
    where = f" at {address}" if address else ""
    raise NotOwner(
        f"the session {session} is in the hands of a live host, process {pid}{where}",
        hint="close it there, or end that process",
        session=session,
        pid=pid,
        address=address,
    )


def epoch_past(epoch: int, owner: int | None) -> int:
    """The highest epoch that anybody may believe to have."""
    return epoch if owner is None else epoch + 1


def deleted_epoch(work: WriterContext) -> int:
    return work.row("SELECT value FROM store WHERE key = 'deleted_epoch'")[0]


def _check_owner(work: WriterContext, session: str, epoch: int) -> None:
    error = no_owner(work, session, epoch)
    if error is not None:
        raise error
