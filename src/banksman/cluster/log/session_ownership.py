"""Claim, advance, lease, release and delete sessions by compare-and-set, with one fence per claim.

A claim changes the record first, at the sequence at which it was read, so exactly one of several
claimants succeeds. Then it appends a mark (`session.claimed`) behind the last message of the
session's events. From the mark on, the servers refuse every append of an earlier owner, because
that append expects to follow another message. An append that the earlier owner got in between the
two steps lies before the mark, and the new owner reads it.

A change without an answer is unknown, and a read decides it. The record names the owner, and the
last message names its writer. Each operation retries until it knows the result, or until
`PATIENCE_SECONDS` have passed.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from banksman.cluster.jetstream import ID, BatchMessage, WrongLastSequence
from banksman.cluster.log import message_codec
from banksman.cluster.log.host_leases import HostLeases
from banksman.cluster.log.message_codec import MessagePlace
from banksman.cluster.log.session_record import (
    FoundRecord,
    LeaseRecord,
    OwnerRecord,
    SessionRecord,
    SessionRecords,
)
from banksman.cluster.log.streams import StreamNames, token
from banksman.cluster.nats import Nats
from banksman.errors import NameTaken, NotOwner, StoreError, Unanswered, Unreachable, UsageError
from banksman.store.log import Owner

PATIENCE_SECONDS = 12.0
RETRY_SECONDS = 0.05
CLAIMED = "session.claimed"

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class OwnedEpoch:
    """A session that this host owns: its host id and epoch, and the end of its events."""

    host: str
    record: SessionRecord
    place: MessagePlace
    lease: str | None = None

    @property
    def epoch(self) -> int:
        return self.record.epoch

    @property
    def seq(self) -> int:
        return self.place.last


class SessionOwnership:
    """Operations on the records of sessions that decide ownership."""

    def __init__(
        self, nats: Nats, names: StreamNames, records: SessionRecords, leases: HostLeases
    ) -> None:
        self._nats = nats
        self._names = names
        self._records = records
        self._leases = leases

    async def find(self, session: str) -> SessionRecord | None:
        """Read the record from the stream's leader."""
        return (await self._records.find(session)).record

    # -- claims -----------------------------------------------------------------------------------
    async def claim(self, session: str, name: str | None, agent: str | None) -> OwnedEpoch:
        """Claim the session under a new epoch: record first, fence second.

        Raises `NotOwner` if a live host elsewhere owns it. The record comes first because it
        selects one of several claimants. Fencing first would let a claimant that then loses cut off
        the rightful owner.
        """
        self._leases.check_held()
        host = self._leases.id
        # Every retry uses the same owner, even if this host's id changes in between. A record under
        # the old id is free once that lease has ended. A record under the new id would name a live
        # host that has discarded the claim, and no code would ever release it.
        owner = OwnerRecord(host, os.getpid(), self._leases.address)
        record = await self.patiently(lambda: self._claim_record(session, name, agent, owner))
        try:
            place = await self.patiently(lambda: self._fence(record))
        except StoreError:
            # Undo the record. Otherwise it would name a live owner that does not have the session,
            # and no host could claim it while this one lives. `NotOwner` needs no undo: a later
            # claim replaced the record.
            await self.release(session, record.epoch, message_codec.BEGINNING)
            raise
        return OwnedEpoch(host, record, place)

    async def _claim_record(
        self, session: str, name: str | None, agent: str | None, owner: OwnerRecord
    ) -> SessionRecord:
        """Write this host into the session's record as its owner. Creates a missing session."""
        found = await self._records.find(session)
        record = found.record
        if record is not None and not record.is_hidden:
            await self._check_free(record)
            # Go past the epoch that a fenced owner may have advanced to without an ack. An equal
            # epoch would make its late appends look like those of the new owner.
            epoch = record.epoch_past + 1
            record = msgspec.structs.replace(
                record, epoch=epoch, tenure=epoch, owner=owner, stuck=None
            )
            await self._records.change(self._records.write(record, found.seq))
            return record
        if record is not None:
            # The remains of a restore whose host died. Purge its messages and create the session.
            await self._check_free(record)
            await self.purge(session, None)
        if not agent:
            message = f"cannot claim session {session}: there is no such session"
            raise UsageError(message, hint="check whether it was deleted", session=session)
        record = await self._new(session, name, agent, owner)
        # The record and the name change in one batch, so two sessions never get the same name.
        writes = [self._records.write(record, found.seq)]
        if name is not None:
            writes.append(
                self._records.write_name(name, session, await self._free_name(name, session))
            )
        await self._records.change(*writes)
        return record

    async def _new(
        self, session: str, name: str | None, agent: str, owner: OwnerRecord | None
    ) -> SessionRecord:
        """Build the record of a new session, above the epoch of every deleted session."""
        deleted, _ = await self._records.epoch_deleted_max()
        now = time.time()
        return SessionRecord(
            id=session,
            agent=agent,
            created=now,
            changed=now,
            epoch=deleted + 1,
            tenure=deleted + 1,
            born=deleted + 1,
            name=name,
            owner=owner,
        )

    async def _free_name(self, name: str, session: str) -> int:
        """Return the sequence that the name's record must have for the session to take the name.

        Raises `NameTaken` if another session has the name. Raises `WrongLastSequence` if this
        session has it: an earlier attempt without an answer took effect after its record was read.
        The retry then reads the new record.
        """
        holder, seq = await self._records.find_name(name)
        if holder is not None:
            found = (await self._records.find(holder)).record
            if found is None and await self._records.find_name(name) == (holder, seq):
                # A name and its session are written and deleted in one batch. A name without a
                # session was not written by this program.
                raise message_codec.record(self._names.record("name", name), seq)
            if holder == session:
                raise WrongLastSequence(f"session {session} already has the name {name}")
            hint = "use another name"
            raise NameTaken(f"another session has the name {name}", hint=hint, session=holder)
        return seq

    async def _check_free(self, record: SessionRecord) -> None:
        """Raise `NotOwner` if a live host elsewhere owns the session."""
        owner = record.owner
        # A host may claim its own session: the new epoch fences off the former writer on this host.
        if owner is None or owner.host == self._leases.id:
            return
        # Ask the leader, not the mirror: only the servers' end of the lease proves that the owner's
        # processes are dead.
        if not await self._leases.is_dead(owner.host):
            raise NotOwner(
                f"cannot claim session {record.id}: another host owns it: {owner.address}",
                hint="send the request to that host",
                session=record.id,
                pid=owner.pid,
                address=owner.address,
            )

    async def _fence(self, record: SessionRecord) -> MessagePlace:
        """Append the mark of this claim, and return its place.

        The mark is published behind the last message. If the earlier owner appends in between, the
        compare-and-set fails and the retry reads that append first.
        """
        session, epoch = record.id, record.epoch
        subject = self._names.event(session)
        id = f"{token(session)}.{epoch}.claim"
        message = await self._nats.last(self._names.events, subject)
        before = message_codec.BEGINNING
        if message is not None:
            before = message_codec.place_of(message)
            # An earlier attempt was stored without an answer.
            if message.headers.get(ID) == id:
                return before
            if before.epoch < record.born:
                # The message belongs to a deleted session of this id. Its deleter died before the
                # purge, or its writer appended late.
                await self.purge(session, None)
                before = message_codec.BEGINNING
        # A later claim has already fenced the events. Appending behind its mark would fence the
        # rightful owner.
        if before.epoch > epoch:
            raise _superseded(session, epoch)
        header = message_codec.header(
            epoch=epoch,
            first=before.last + 1,
            held=0,
            snapshot=before.snapshot,
            at=before.at,
            blob=before.blob_after,
        )
        headers = {message_codec.HEADER: header, "Banksman-Kind": CLAIMED}
        seq = await self._nats.publish(subject, b"", expected=before.seq, id=id, headers=headers)
        return message_codec.place(seq, header)

    # -- operations of the owner ------------------------------------------------------------------
    async def advance(self, owned_epoch: OwnedEpoch) -> None:
        """Raise the epoch of an owned session by one."""
        wanted = owned_epoch.epoch + 1

        async def advance() -> SessionRecord:
            found = await self._records.find(owned_epoch.record.id)
            record = self._ours(owned_epoch, found)
            if record.epoch == wanted:
                return record  # An earlier attempt was stored without an answer.
            record = msgspec.structs.replace(record, epoch=wanted)
            await self._records.change(self._records.write(record, found.seq))
            return record

        owned_epoch.record = await self.patiently(advance)

    async def lease(
        self, owned_epoch: OwnedEpoch, name: str | None, settle: Callable[[str], Awaitable[None]]
    ) -> None:
        """Take the conversation lease `name` for an owned session, and give back its previous one.

        None only gives back. Raises `NotOwner`, naming the holder, if another session with a live
        owner holds the lease. `settle`: waits for earlier calls of this log about the holder, such
        as its release.
        """

        async def lease() -> None:
            writes: list[BatchMessage] = []
            if name is not None and name != owned_epoch.lease:
                holder, seq = await self._records.find_lease(name)
                if holder is not None and holder.session != owned_epoch.record.id:
                    await settle(holder.session)
                if (
                    holder is not None
                    and holder.session != owned_epoch.record.id
                    and await self._is_valid(holder)
                ):
                    raise NotOwner(
                        f"cannot lease {name}: session {holder.session} holds it",
                        hint="close that session first",
                        session=holder.session,
                    )
                mine = LeaseRecord(owned_epoch.record.id, owned_epoch.record.tenure)
                writes.append(self._records.write_lease(name, mine, seq))
            if owned_epoch.lease is not None and owned_epoch.lease != name:
                holder, seq = await self._records.find_lease(owned_epoch.lease)
                if holder is not None and holder.session == owned_epoch.record.id:
                    writes.append(self._records.write_lease(owned_epoch.lease, None, seq))
            if writes:
                await self._records.change(*writes)

        # The batch below does not compare the session's record. If another host claims the session
        # in between, the lease carries the old tenure and is void (`_is_valid`).
        self._ours(
            owned_epoch, await self.patiently(lambda: self._records.find(owned_epoch.record.id))
        )
        await self.patiently(lease)
        owned_epoch.lease = name

    async def _is_valid(self, lease: LeaseRecord) -> bool:
        """Return whether the owner that took the lease still owns the session and lives."""
        record = (await self._records.find(lease.session)).record
        # Each claim changes the tenure, so a lease of an earlier owner is void without being
        # deleted.
        if record is None or record.tenure != lease.tenure or record.owner is None:
            return False
        host = record.owner.host
        # The mirror may confirm life, which only costs a refusal. Death needs the word of the
        # leader.
        return self._leases.is_alive(host) or not await self._leases.is_dead(host)

    def _ours(self, owned_epoch: OwnedEpoch, found: FoundRecord) -> SessionRecord:
        """Return the record if the session still has this owner. Raises `NotOwner` otherwise.

        The tenure is compared and not the epoch: an advance changes the epoch, and only a claim
        changes the tenure.
        """
        record = found.record
        if record is None or record.tenure != owned_epoch.record.tenure or record.owner is None:
            raise _superseded(owned_epoch.record.id, owned_epoch.epoch)
        return record

    def is_ours(self, session: str, epoch: int) -> bool:
        """Return whether this host owns the session under this epoch, according to the mirror."""
        record = self._records.all.get(session)
        return record is not None and record.epoch == epoch and self._is_of_ours(record)

    def _is_of_ours(self, record: SessionRecord) -> bool:
        return record.owner is not None and record.owner.host == self._leases.id

    async def release(self, session: str, epoch: int, place: MessagePlace) -> None:
        """Give up the session, if this host owns it under this epoch.

        If the servers do not answer, the end of the lease has the same effect.
        """

        async def release() -> None:
            found = await self._records.find(session)
            record = found.record
            if record is None or record.epoch != epoch or not self._is_of_ours(record):
                return
            known = {"seq": place.last, "changed": place.at or record.changed} if place.seq else {}
            record = msgspec.structs.replace(record, owner=None, **known)
            await self._records.change(self._records.write(record, found.seq))

        try:
            # Retry for at least a lease. If the servers are away for longer, this host loses its
            # lease, which frees the session. A shorter retry could leave the session with a live
            # host that does not have it.
            await self.patiently(release, seconds=max(PATIENCE_SECONDS, self._leases.lease_seconds))
        except StoreError:
            pass

    # -- sessions ---------------------------------------------------------------------------------
    async def delete(
        self, session: str, forget: Callable[[], Awaitable[None]] | None = None
    ) -> None:
        """Delete the session. Raises `NotOwner` if a live host elsewhere owns it.

        The record goes first, then the blobs (`forget`), then the events: only the events know the
        names of the blobs. A second call finishes what an interrupted one began.
        """

        async def delete() -> int:
            left = await self._last_event(session)
            found = await self._records.find(session)
            record = found.record
            if record is None:
                # An earlier attempt erased the record without an answer, or its host died
                # afterwards. Its events remain to be purged. A new session of this id writes its
                # record before its first event. There is no record now, so every event up to `left`
                # belongs to no session.
                return left
            await self._check_free(record)
            last = await self._last_event(session)
            deleted, deleted_seq = await self._records.epoch_deleted_max()
            # The batch also raises the store's highest deleted epoch. A later session of this id
            # starts above it, so late messages of this one are recognisably older (`born`).
            writes = [self._records.erase(session, found.seq)]
            if record.epoch_past > deleted:
                writes.append(self._records.write_deleted(record.epoch_past, deleted_seq))
            if record.name is not None:
                # The name needs no expected sequence: it only changes in a batch with this record,
                # and the first write compares the record.
                writes.append(self._records.erase_name(record.name))
            await self._records.change(*writes)
            return last

        last = await self.patiently(delete)
        if forget is not None:
            await self.patiently(forget)
        # Purge only up to `last`: another session may have been opened under this id since. An
        # append that the deleted session's writer still gets in is purged by the next claim of the
        # id.
        await self.patiently(lambda: self.purge(session, last + 1))

    async def _last_event(self, session: str) -> int:
        """Return the sequence of the session's last message, or 0 if it has none."""
        message = await self._nats.last(self._names.events, self._names.event(session))
        return 0 if message is None else message.seq

    async def rename(self, session: str, name: str | None, expected: str | None) -> None:
        """Change the name from `expected` to `name`; None is no name."""
        is_unknown = False

        async def rename() -> None:
            nonlocal is_unknown
            found = await self._records.find(session)
            record = found.record
            if record is None or record.is_hidden:
                message = f"cannot rename session {session}: there is no such session"
                raise UsageError(message, session=session)
            if is_unknown and record.name == name:
                return  # An earlier attempt was stored without an answer.
            if record.name != expected:
                message = f"cannot rename session {session}: its name has changed meanwhile"
                raise UsageError(message, session=session, name=record.name, expected=expected)
            if name == expected:
                return
            writes = [self._records.write(msgspec.structs.replace(record, name=name), found.seq)]
            if name is not None:
                writes.append(
                    self._records.write_name(name, session, await self._free_name(name, session))
                )
            if expected is not None:
                writes.append(self._records.erase_name(expected))
            try:
                await self._records.change(*writes)
            except Unanswered:
                is_unknown = True
                raise

        await self.patiently(rename)

    async def update(
        self, session: str, change: Callable[[SessionRecord], SessionRecord]
    ) -> SessionRecord | None:
        """Change fields of the record, whichever host owns it. Returns None without a record."""

        async def update() -> SessionRecord | None:
            found = await self._records.find(session)
            if found.record is None:
                return None
            record = change(found.record)
            if record != found.record:
                await self._records.change(self._records.write(record, found.seq))
            return record

        return await self.patiently(update)

    # -- restored histories -----------------------------------------------------------------------
    async def reserve(self, session: str, name: str | None, agent: str) -> SessionRecord:
        """Create a hidden record for a history that is about to be restored (`show`).

        Raises `UsageError` if a session of this id exists.
        """
        self._leases.check_held()

        tried: SessionRecord | None = None

        async def reserve() -> SessionRecord:
            nonlocal tried
            found = await self._records.find(session)
            if tried is not None and found.record == tried:
                return tried  # An earlier attempt was stored without an answer.
            if found.record is not None and not await self._is_abandoned(found.record):
                message = f"cannot restore session {session}: it exists already"
                raise UsageError(message, hint="delete it, or use another id", session=session)
            if name is not None:
                await self._free_name(name, session)
            owner = OwnerRecord(self._leases.id, os.getpid(), self._leases.address)
            new = await self._new(session, None, agent, owner)
            # Restored messages keep the epochs of their former store, so no epoch may count as too
            # old for this session.
            tried = msgspec.structs.replace(new, is_hidden=True, born=0)
            await self._records.change(self._records.write(tried, found.seq))
            return tried

        return await self.patiently(reserve)

    async def _is_abandoned(self, record: SessionRecord) -> bool:
        """Return whether a host died while it restored this session."""
        return (
            record.is_hidden
            and record.owner is not None
            and await self._leases.is_dead(record.owner.host)
        )

    async def show(self, record: SessionRecord, name: str | None) -> None:
        """Make a restored session visible, with its name."""

        async def show() -> None:
            found = await self._records.find(record.id)
            if (
                found.record is not None
                and not found.record.is_hidden
                and found.record.created == record.created
            ):
                return  # An earlier attempt was stored without an answer.
            if found.record is None or found.record.owner is None or not found.record.is_hidden:
                message = f"cannot restore session {record.id}: it was deleted meanwhile"
                raise UsageError(message, session=record.id)
            shown = msgspec.structs.replace(record, name=name, owner=None, is_hidden=False)
            writes = [self._records.write(shown, found.seq)]
            if name is not None:
                writes.append(
                    self._records.write_name(
                        name, record.id, await self._free_name(name, record.id)
                    )
                )
            await self._records.change(*writes)

        await self.patiently(show)

    # -- events -----------------------------------------------------------------------------------
    async def purge(self, session: str, before: int | None) -> None:
        """Delete the session's messages before a sequence; None deletes all."""
        body: dict[str, object] = {"filter": self._names.event(session)}
        if before is not None:
            body["seq"] = before
        answer = await self._nats.api(f"STREAM.PURGE.{self._names.events}", body)
        if "error" in answer:
            raise Unanswered(
                f"cannot purge {self._names.events}: {answer['error'].get('description')}"
            )

    async def patiently(
        self, attempt: Callable[[], Awaitable[T]], seconds: float | None = None
    ) -> T:
        """Retry an attempt while its compare-and-set fails or the servers do not answer.

        Each attempt reads the current state again, so a retry after an unknown result is safe.
        `seconds`: the time until the last error is raised; None means `PATIENCE_SECONDS`.
        """
        give_up = time.monotonic() + (PATIENCE_SECONDS if seconds is None else seconds)
        wait = RETRY_SECONDS
        while True:
            try:
                return await attempt()
            except WrongLastSequence as exc:
                if time.monotonic() > give_up:
                    raise Unanswered(
                        "cannot change the record: other hosts keep changing it", hint="try again"
                    ) from exc
                # Another writer made progress. Read its change and try again without a pause.
                continue
            except Unreachable:
                if time.monotonic() + wait > give_up:
                    raise
            await asyncio.sleep(wait)
            wait = min(wait * 2, 1.0)

    def owner(self, record: SessionRecord) -> Owner | None:
        """Return the owner that a record names, as readers see it.

        This host counts as alive under its current id, even while its lease is in doubt: it fences
        itself.
        """
        owner = record.owner
        if owner is None:
            return None
        is_here = owner.host == self._leases.id
        return Owner(
            owner.pid, owner.address, is_here, is_here or self._leases.is_alive(owner.host)
        )


def _superseded(session: str, epoch: int) -> NotOwner:
    message = f"cannot write session {session}: another writer owns it"
    return NotOwner(message, hint="claim the session again", session=session, epoch=epoch)
