"""Session ownership in the writer's transaction: claim, advance, release, conversation lease.

A claim creates a missing session. A release that failed is retried with the next commit.
A lease here reserves the name of a conversation for one session. Hosts have no leases in this
engine: a claim lasts until its release or the death of its host (`host_locks.py`).

Each function runs inside a transaction that holds the write lock, so no other host can change the
row between its read and its write. Each raises its refusal before it writes.

**Epochs.** A claim of an unowned session raises the epoch by one. A claim of an owned session
raises it by two. The former owner does not know yet that it is fenced off, and may advance. Until
it receives the refusal, its calls carry the epoch after its own, which therefore must belong to no
writer. New sessions begin past the highest epoch that was ever deleted. So no epoch is issued twice
for an id.

**Syncs.** A claim and an advance are synced to disk before their completion, at every level. At
`normal` a power cut may remove the newest events of a session after a reader has seen them. The
reader's cursor, `epoch.seq`, reveals this: after the cut a new claim raises the epoch, so the
events that replace the lost ones have another epoch. If the claim itself could be lost, the same
epoch would be issued again. The reader would then continue in another history without a sign.
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
class ClaimedSession:
    """A session that this handle has claimed.

    `epoch`: the epoch of the claim; an advance may have raised it since. `number`: the identity.
    `seq`: the last acknowledged seq. No other host can change it.
    """

    epoch: int
    # The row number identifies the session over a deletion: a new session of the same id has
    # another number.
    number: int
    seq: int


def claim(work: WriterContext, session: str, name: str | None, agent: str | None) -> ClaimedSession:
    """Claim a session for this host, see `Log.claim`."""
    assert work.host is not None
    # If the lock file was removed, other hosts cannot see this host and would take it for dead.
    work.check_seen()
    epoch = _claimed_epoch(work, session, name, agent)
    # Epoch 0 belongs to no writer. A call with it is refused in every state of the session.
    assert epoch > 0
    # The seq is final. From this transaction on the former owner's appends carry an old epoch, and
    # the writer refuses them.
    number, seq = work.row("SELECT number, seq FROM sessions WHERE id = ?", session)
    return ClaimedSession(epoch, number, seq)


def _claimed_epoch(work: WriterContext, session: str, name: str | None, agent: str | None) -> int:
    """Raise and return the session's epoch, and create the session if it is missing."""
    row = work.row("SELECT epoch, owner FROM sessions WHERE id = ?", session)
    if row is None:
        if not agent:
            message = f"cannot claim session {session}: there is no such session"
            raise UsageError(message, hint="check whether it was deleted", session=session)
        check_name(work, name, session)
        # A deletion removes the chunks of a large session in steps, after the row is gone. The rest
        # must not become the history of the new session.
        deleted_sessions.clear(work, session)
        # A session of the same id may have been deleted, and its writer may still append. The new
        # epoch must be past its epoch.
        epoch = deleted_epoch(work) + 1
        now = time.time()
        work.execute(
            "INSERT INTO sessions "
            "(seq, bytes, changed, epoch, owner, first, trimmed, created, id, name, agent) "
            "VALUES (0, 0, ?, ?, ?, 1, 0, ?, ?, ?, ?)",
            (now, epoch, work.host, now, session, name, agent),
        )
        return epoch
    former, owner = row
    # The check and the update are one transaction under the write lock. So two hosts that see the
    # same dead owner cannot both claim: the second one finds the first as a live owner.
    check_free(work, session, owner)
    epoch = epoch_past(former, owner) + 1
    assert epoch > former
    # The conversation lease ends with the former owner. The new one takes it again, after it has
    # read which conversation the session has.
    work.execute(
        "UPDATE sessions SET epoch = ?, owner = ?, lease = NULL WHERE id = ?",
        (epoch, work.host, session),
    )
    return epoch


def advance(work: WriterContext, session: str, epoch: int) -> None:
    """Raise the owner's epoch by one, see `Log.advance`."""
    # Exactly one more than the caller's epoch, which `_check_owner` has found in the row. A claim
    # of an owned session skips that number, so it belongs to this writer or to none.
    _check_owner(work, session, epoch)
    work.execute("UPDATE sessions SET epoch = ? WHERE id = ?", (epoch + 1, session))


def release(work: WriterContext, session: str, epoch: int) -> None:
    """Clear owner and lease, if this host still owns the session under this epoch."""
    # No error if the row does not match: another host has claimed the session, or this one has
    # claimed it again. A late release must not end either claim.
    work.execute(
        "UPDATE sessions SET owner = NULL, lease = NULL WHERE id = ? AND epoch = ? AND owner = ?",
        (session, epoch, work.host),
    )


class ReleaseOperation(Operation):
    """A release without a waiting caller.

    If the store fails, the release stays pending and the writer retries it. Otherwise no other host
    could claim the session as long as this process lives.
    """

    __slots__ = ("_epoch", "_session")

    def __init__(self, session: str, epoch: int) -> None:
        super().__init__(ReleaseOperation._settled)
        self._session = session
        self._epoch = epoch

    def perform(self, work: WriterContext) -> None:
        release(work, self._session, self._epoch)

    def fail(self, work: WriterContext, error: StoreError) -> None:
        # The key contains the epoch. A retry after a later claim of this host matches no row.
        super().fail(work, error)
        work.unreleased[self._session, self._epoch] = None

    def _settled(self) -> None:
        if self.error is not None:
            log.warning(
                "session release failed: %s, retrying (session=%s)", self.error, self._session
            )


def lease(work: WriterContext, session: str, epoch: int, name: str | None) -> None:
    """Reserve a name for the session, see `Log.lease`."""
    _check_owner(work, session, epoch)
    if name is not None:
        row = work.row("SELECT id, owner FROM sessions WHERE lease = ? AND id != ?", name, session)
        if row is not None:
            holder, owner = row
            # This host is alive, so the holder's process may run here. For another host its lock
            # decides.
            if owner is not None and (owner == work.host or work.is_alive(owner)):
                message = f"cannot lease {name}: session {holder} holds it"
                raise NotOwner(message, hint="close that session first", session=holder)
            # The holder has no live owner, so its lease is void. Its next owner does not miss it: a
            # claim clears the lease anyway.
            work.execute("UPDATE sessions SET lease = NULL WHERE id = ?", (holder,))
    work.execute("UPDATE sessions SET lease = ? WHERE id = ?", (name, session))


def check_name(work: WriterContext, name: str | None, session: str) -> None:
    """Raise `NameTaken` if another session has the name."""
    row = (
        None
        if name is None
        else work.row("SELECT id FROM sessions WHERE name = ? AND id != ?", name, session)
    )
    if row is not None:
        message = f"another session has the name {name}"
        raise NameTaken(message, hint="use another name", session=row[0])


def check_free(work: WriterContext, session: str, owner: int | None) -> None:
    """Raise `NotOwner` if another live host owns the session."""
    # A session of this host is free too. The new epoch fences off the former writer in this
    # process, as it does with a writer elsewhere.
    if owner is None or owner == work.host or not work.is_alive(owner):
        return
    pid, address = work.row("SELECT pid, address FROM hosts WHERE id = ?", owner) or (0, "")
    where = f" at {address}" if address else ""
    raise NotOwner(
        f"session {session} is owned by a live host, process {pid}{where}",
        hint="close it there, or end that process",
        session=session,
        pid=pid,
        address=address,
    )


def epoch_past(epoch: int, owner: int | None) -> int:
    """Return the highest epoch that any writer may believe to have.

    An owner may have a call to `advance` in flight.
    """
    # Without an owner no writer believes in more: the last one has released the session under its
    # own epoch, and calls behind a release are refused.
    return epoch if owner is None else epoch + 1


def deleted_epoch(work: WriterContext) -> int:
    """Return the highest epoch of all deleted sessions."""
    return work.row("SELECT value FROM store WHERE key = 'deleted_epoch'")[0]


def _check_owner(work: WriterContext, session: str, epoch: int) -> None:
    # Inside the transaction of the caller's write. A check before it would prove nothing.
    error = no_owner(work, session, epoch)
    if error is not None:
        raise error
