"""Session ownership on NATS: claim, advance, release, delete and a lock on the conversation.

Every change is a compare-and-set, and each claim fences off the owner before it. A lease here is
the right of one session to a conversation. Leases of hosts are in `host_leases.py`.

A claim changes the record first, at the sequence at which it was read, so exactly one of several
claimants succeeds. Then it appends a mark (`session.claimed`) behind the last message of the
session's events. From the mark on, the servers refuse every append of an earlier owner, because
that append expects to follow another message. An append that the earlier owner got in between the
two steps lies before the mark, and the new owner reads it.

**Three numbers.** `epoch` is the fencing token: each claim and each advance raises it. `tenure` is
the epoch of the last claim, so it stays the same while one owner advances. `born` is the epoch of
the first claim, and separates a session from a deleted one of the same id. Epochs of one id only
grow, over deletions too: a deletion raises the store's highest deleted epoch, and a new session
starts above it.

**Two authorities.** The record decides which host may write, and the lease of that host decides for
how long (`host_leases.py`). The events decide what was written: a compare-and-set on the last
message keeps out every writer that does not know that message. So an owner that has lost its lease
and has not noticed it can do no harm to the log: its append expects a message that is not the last.

A change without an answer is unknown, and a read decides it. The record names the owner, and the
last message names its writer. Each operation retries until it knows the result, for a limited time
(`session_record.patiently`).
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec

from banksman.cluster.jetstream import ID, BatchMessage
from banksman.cluster.log import message_codec
from banksman.cluster.log.host_leases import HostLeases
from banksman.cluster.log.message_codec import MessagePlace
from banksman.cluster.log.session_record import (
    FoundRecord,
    LeaseRecord,
    OwnerRecord,
    SessionRecord,
    SessionRecords,
    patiently,
)
from banksman.cluster.log.streams import NatsStreams, token
from banksman.cluster.nats import Nats
from banksman.errors import NotOwner, StoreError, UsageError
from banksman.store.log_values import Owner

CLAIMED = "session.claimed"


@dataclass(slots=True, eq=False)
class OwnedEpoch:
    """A session that this host owns: its host id and epoch, and the end of its events."""

    # The id under which the session was claimed. This host changes its id after a fence, so an
    # ownership of a lost lease is recognised by its old id.
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
        self, nats: Nats, streams: NatsStreams, records: SessionRecords, leases: HostLeases
    ) -> None:
        self._nats = nats
        self._streams = streams
        self._names = streams.names
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
        # Without a valid lease the record would name a host that the servers may already count as
        # dead. Another host could then claim the session while this one starts its process.
        self._leases.check_held()
        host = self._leases.id
        # Every retry uses the same owner, even if this host's id changes in between. A record under
        # the old id is free once that lease has ended. A record under the new id would name a live
        # host that has discarded the claim, and no code would ever release it.
        owner = OwnerRecord(host, os.getpid(), self._leases.address)
        record = await patiently(lambda: self._claim_record(session, name, agent, owner))
        assert record.owner == owner
        # Every claim starts a tenure. A conversation lease of an earlier owner carries another one,
        # and is void from here on (`_is_valid`).
        assert record.tenure == record.epoch
        try:
            place = await patiently(lambda: self._fence(record))
        except StoreError:
            # Undo the record. Otherwise it would name a live owner that does not have the session,
            # and no host could claim it while this one lives. `NotOwner` needs no undo: a later
            # claim replaced the record. The place is unknown here, so the release does not change
            # the end of the events in the record.
            await self.release(session, record.epoch, message_codec.BEGINNING)
            raise
        return OwnedEpoch(host, record, place)

    async def _claim_record(
        self, session: str, name: str | None, agent: str | None, owner: OwnerRecord
    ) -> SessionRecord:
        """Write this host into the session's record as its owner. Creates a missing session."""
        # An earlier attempt that was stored without an answer needs no special case. While this
        # host keeps its id, that record counts as free, and this attempt claims the session once
        # more under the next epoch.
        found = await self._records.find(session)
        record = found.record
        if record is not None and not record.is_hidden:
            # The owner cannot come back to life between this check and the write: an expired host
            # id never returns. And a claim by a third host changes the record, so the write fails.
            await self._check_free(record)
            # Go past the epoch that a fenced owner may have advanced to without an ack. An equal
            # epoch would make its late appends look like those of the new owner.
            epoch = record.epoch_past + 1
            assert epoch > record.epoch
            record = msgspec.structs.replace(
                record, epoch=epoch, tenure=epoch, owner=owner, stuck=None
            )
            await self._records.change(self._records.write(record, found.seq))
            return record
        if record is not None:
            # The remains of a restore whose host died. Purge its messages and create the session.
            # A restore that still runs on another host has a live owner, and the check refuses the
            # claim.
            await self._check_free(record)
            await self._streams.purge(session, None)
        if not agent:
            message = f"cannot claim session {session}: there is no such session"
            raise UsageError(message, hint="check whether it was deleted", session=session)
        record = await self._records.new(session, name, agent, owner)
        # The record and the name change in one batch, so two sessions never get the same name.
        writes = [self._records.write(record, found.seq)]
        if name is not None:
            writes.append(
                self._records.write_name(
                    name, session, await self._records.free_name(name, session)
                )
            )
        await self._records.change(*writes)
        return record

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
        # The id names the claim and not the attempt. So the servers deduplicate the mark, and a
        # retry recognises a mark that was stored without an answer.
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
                await self._streams.purge(session, None)
                before = message_codec.BEGINNING
        # A later claim has already fenced the events. Appending behind its mark would fence the
        # rightful owner.
        if before.epoch > epoch:
            raise _superseded(session, epoch)
        # Between the record and the mark the earlier owner may still append. Its append is before
        # the mark, was acknowledged to its caller, and belongs to the history that the new owner
        # reads. Nothing follows the mark but messages of this epoch or a later one.
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
        place = message_codec.place(seq, header)
        # The mark takes no seq. Readers count events, and must not see a gap at each claim.
        assert place.last == before.last
        return place

    # -- operations of the owner ------------------------------------------------------------------
    async def advance(self, owned_epoch: OwnedEpoch) -> None:
        """Raise the epoch of an owned session by one."""
        # Fix the target outside of the attempt. A retry after an unknown result would otherwise
        # advance a second time, and the writer's calls would carry an epoch that is already past.
        wanted = owned_epoch.epoch + 1

        async def advance() -> SessionRecord:
            found = await self._records.find(owned_epoch.record.id)
            record = self._ours(owned_epoch, found)
            if record.epoch == wanted:
                return record  # An earlier attempt was stored without an answer.
            record = msgspec.structs.replace(record, epoch=wanted)
            await self._records.change(self._records.write(record, found.seq))
            return record

        # An advance writes no mark: the writer stays the same, so its appends already follow each
        # other. The servers refuse late ones by their expected sequence.
        owned_epoch.record = await patiently(advance)
        assert owned_epoch.epoch == wanted

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
                    # Wait after the read. If the holder gives the lease back during the wait, the
                    # write below meets another sequence, and the retry reads the lease again.
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
            # One batch takes the new lease and gives the old one back. A crash leaves this session
            # with one of the two, never with both or with none.
            if owned_epoch.lease is not None and owned_epoch.lease != name:
                holder, seq = await self._records.find_lease(owned_epoch.lease)
                if holder is not None and holder.session == owned_epoch.record.id:
                    writes.append(self._records.write_lease(owned_epoch.lease, None, seq))
            # No write is needed to keep the lease, or to give back a lease that was never held.
            assert name is not None or len(writes) <= 1
            if writes:
                await self._records.change(*writes)

        # The batch below does not compare the session's record. If another host claims the session
        # in between, the lease carries the old tenure and is void (`_is_valid`).
        self._ours(owned_epoch, await patiently(lambda: self._records.find(owned_epoch.record.id)))
        await patiently(lease)
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
        # The mirror is good enough: a wrong answer costs one release that changes nothing, or
        # leaves the session to the next search for stray sessions.
        record = self._records.all.get(session)
        return record is not None and record.epoch == epoch and self._is_of_ours(record)

    def _is_of_ours(self, record: SessionRecord) -> bool:
        # Compare the current id. A record under an id that this host has lost does not count:
        # another host may claim that session at any moment.
        return record.owner is not None and record.owner.host == self._leases.id

    async def release(self, session: str, epoch: int, place: MessagePlace) -> None:
        """Give up the session, if this host owns it under this epoch.

        If the servers do not answer, the end of the lease has the same effect.
        """

        async def release() -> None:
            found = await self._records.find(session)
            record = found.record
            # The epoch is compared and not the tenure. A release that was queued before a later
            # claim on this same host must not end that claim.
            if record is None or record.epoch != epoch or not self._is_of_ours(record):
                return
            known = {"seq": place.last, "changed": place.at or record.changed} if place.seq else {}
            record = msgspec.structs.replace(record, owner=None, **known)
            await self._records.change(self._records.write(record, found.seq))

        try:
            # Retry for at least a lease. If the servers are away for longer, this host loses its
            # lease, which frees the session. A shorter retry could leave the session with a live
            # host that does not have it.
            await patiently(release, seconds_min=self._leases.lease_seconds)
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
            # Read the events before the record. In the other order a session that is created in
            # between would have its first events purged.
            left = await self._last_event(session)
            found = await self._records.find(session)
            record = found.record
            if record is None:
                # An earlier attempt erased the record without an answer, or its host died
                # afterwards. Its events remain to be purged. A new session of this id writes its
                # record before its first event. There is no record now, so every event up to `left`
                # belongs to no session.
                return left
            # A deletion needs no claim. The batch below compares the record, so a claim in between
            # makes it fail, and the retry then refuses a session with a live owner elsewhere.
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
            assert writes[0].expected == found.seq
            await self._records.change(*writes)
            return last

        last = await patiently(delete)
        if forget is not None:
            await patiently(forget)
        # Purge only up to `last`: another session may have been opened under this id since. An
        # append that the deleted session's writer still gets in is purged by the next claim of the
        # id.
        await patiently(lambda: self._streams.purge(session, last + 1))

    async def _last_event(self, session: str) -> int:
        """Return the sequence of the session's last message, or 0 if it has none."""
        message = await self._nats.last(self._names.events, self._names.event(session))
        return 0 if message is None else message.seq

    def owner(self, record: SessionRecord) -> Owner | None:
        """Return the owner that a record names, as readers see it.

        This host counts as alive under its current id, even while its lease is in doubt: it fences
        itself.
        """
        # Readers see the mirror's view, which may lag. No claim is decided by it (`_check_free`).
        owner = record.owner
        if owner is None:
            return None
        is_here = owner.host == self._leases.id
        return Owner(
            owner.pid, owner.address, is_here, is_here or self._leases.is_alive(owner.host)
        )


def _superseded(session: str, epoch: int) -> NotOwner:
    message = f"cannot write session {session}: another writer owns it"
    return NotOwner(
        message, hint="open the session again, or use it at its owner", session=session, epoch=epoch
    )
