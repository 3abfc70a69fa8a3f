"""How a session is claimed, advanced, leased for, released and deleted: by changes of records, and one fence.

A claim changes the record first, under the sequence that was read: of all who try, one succeeds. Then it appends a mark
to the session's events (`session.claimed`), behind whatever is last there: from that message on, every append of an
owner before is refused by the servers, because it expects to follow another. What that owner appended between the two
is before the mark, and the new owner reads it.

What was not answered is unknown, and is found out by looking: the record says who owns it, the last message who wrote
it. Each of these tries until it knows, or until `PATIENCE_SECONDS` have passed.
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
from banksman.cluster.log.session_record import FoundRecord, LeaseRecord, OwnerRecord, SessionRecord, SessionRecords
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
    """A session that is ours: under which host id and epoch, and where its events are."""

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
    def __init__(self, nats: Nats, names: StreamNames, records: SessionRecords, leases: HostLeases) -> None:
        self._nats = nats
        self._names = names
        self._records = records
        self._leases = leases

    async def find(self, session: str) -> SessionRecord | None:
        """As the leader has it."""
        return (await self._records.find(session)).record

    # -- claiming ----------------------------------------------------------------------------------------------------
    async def claim(self, session: str, name: str | None, agent: str | None) -> OwnedEpoch:
        self._leases.check_held()
        host = self._leases.id
        # The same one however often it is tried: under another, which we may have by then, nobody would let go of it.
        owner = OwnerRecord(host, os.getpid(), self._leases.address)
        record = await self.patiently(lambda: self._claim_record(session, name, agent, owner))
        try:
            place = await self.patiently(lambda: self._fence(record))
        except StoreError:
            # Else nobody could have it for as long as we live.
            await self.release(session, record.epoch, message_codec.BEGINNING)
            raise
        return OwnedEpoch(host, record, place)

    async def _claim_record(
        self, session: str, name: str | None, agent: str | None, owner: OwnerRecord
    ) -> SessionRecord:
        found = await self._records.find(session)
        record = found.record
        if record is not None and not record.is_hidden:
            await self._check_free(record)
            epoch = record.epoch_past + 1
            record = msgspec.structs.replace(record, epoch=epoch, tenure=epoch, owner=owner, stuck=None)
            await self._records.change(self._records.write(record, found.seq))
            return record
        if record is not None:
            # Of a history that was to be restored, by who died over it.
            await self._check_free(record)
            await self.purge(session, None)
        if not agent:
            raise UsageError("there is no such session", hint="was it deleted?", session=session)
        record = await self._new(session, name, agent, owner)
        writes = [self._records.write(record, found.seq)]
        if name is not None:
            writes.append(self._records.write_name(name, session, await self._free_name(name, session)))
        await self._records.change(*writes)
        return record

    async def _new(self, session: str, name: str | None, agent: str, owner: OwnerRecord | None) -> SessionRecord:
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
        """Where the name's record must be for the session to have it. `NameTaken`; `WrongLastSequence` if the session
        has it:
        an earlier try, which was not answered, took effect since its record was read."""
        holder, seq = await self._records.find_name(name)
        if holder is not None:
            found = (await self._records.find(holder)).record
            if found is None and await self._records.find_name(name) == (holder, seq):
                # A name goes together with its session, so it is no session's: nobody has written that.
                raise message_codec.record(self._names.record("name", name), seq)
            if holder == session:
                raise WrongLastSequence(f"{session} has the name {name} by now")
            raise NameTaken(f"another session has the name {name}", hint="take another name", session=holder)
        return seq

    async def _check_free(self, record: SessionRecord) -> None:
        """`NotOwner` if a live host elsewhere has it."""
        owner = record.owner
        if owner is None or owner.host == self._leases.id:
            return
        if not await self._leases.is_dead(owner.host):
            raise NotOwner(
                f"another host has the session: {owner.address}",
                hint="ask there",
                session=record.id,
                pid=owner.pid,
                address=owner.address,
            )

    async def _fence(self, record: SessionRecord) -> MessagePlace:
        session, epoch = record.id, record.epoch
        subject = self._names.event(session)
        id = f"{token(session)}.{epoch}.claim"
        message = await self._nats.last(self._names.events, subject)
        before = message_codec.BEGINNING
        if message is not None:
            before = message_codec.place_of(message)
            if message.headers.get(ID) == id:
                return before
            if before.epoch < record.born:
                # Of another session of this id, which was deleted: whoever did so died over it, or its writer was late.
                await self.purge(session, None)
                before = message_codec.BEGINNING
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

    # -- while it is ours --------------------------------------------------------------------------------------------
    async def advance(self, owned_epoch: OwnedEpoch) -> None:
        """Raise its epoch by one."""
        wanted = owned_epoch.epoch + 1

        async def advance() -> SessionRecord:
            found = await self._records.find(owned_epoch.record.id)
            record = self._ours(owned_epoch, found)
            if record.epoch == wanted:
                return record  # It was not answered, and was done.
            record = msgspec.structs.replace(record, epoch=wanted)
            await self._records.change(self._records.write(record, found.seq))
            return record

        owned_epoch.record = await self.patiently(advance)

    async def lease(self, owned_epoch: OwnedEpoch, name: str | None, settle: Callable[[str], Awaitable[None]]) -> None:
        """`NotOwner`, naming the holder, if another session has it, whose owner lives. `settle`: what was called before
        for that session, here, is done first."""

        async def lease() -> None:
            writes: list[BatchMessage] = []
            if name is not None and name != owned_epoch.lease:
                holder, seq = await self._records.find_lease(name)
                if holder is not None and holder.session != owned_epoch.record.id:
                    await settle(holder.session)
                if holder is not None and holder.session != owned_epoch.record.id and await self._is_valid(holder):
                    raise NotOwner(
                        f"{name} is in the hands of session {holder.session}",
                        hint="close that one first",
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

        self._ours(owned_epoch, await self.patiently(lambda: self._records.find(owned_epoch.record.id)))
        await self.patiently(lease)
        owned_epoch.lease = name

    async def _is_valid(self, lease: LeaseRecord) -> bool:
        """Whether whoever took it is still the owner of that session, and lives."""
        record = (await self._records.find(lease.session)).record
        if record is None or record.tenure != lease.tenure or record.owner is None:
            return False
        host = record.owner.host
        return self._leases.is_alive(host) or not await self._leases.is_dead(host)

    def _ours(self, owned_epoch: OwnedEpoch, found: FoundRecord) -> SessionRecord:
        record = found.record
        if record is None or record.tenure != owned_epoch.record.tenure or record.owner is None:
            raise _superseded(owned_epoch.record.id, owned_epoch.epoch)
        return record

    def is_ours(self, session: str, epoch: int) -> bool:
        """By its record, as it was last heard of."""
        record = self._records.all.get(session)
        return record is not None and record.epoch == epoch and self._is_of_ours(record)

    def _is_of_ours(self, record: SessionRecord) -> bool:
        return record.owner is not None and record.owner.host == self._leases.id

    async def release(self, session: str, epoch: int, place: MessagePlace) -> None:
        """Let go of it, if we have it under this epoch. Where nobody answers, the lease's end does the same."""

        async def release() -> None:
            found = await self._records.find(session)
            record = found.record
            if record is None or record.epoch != epoch or not self._is_of_ours(record):
                return
            known = {"seq": place.last, "changed": place.at or record.changed} if place.seq else {}
            record = msgspec.structs.replace(record, owner=None, **known)
            await self._records.change(self._records.write(record, found.seq))

        try:
            # For shorter, and the session would be in the hands of a host that lives and does not have it: for good.
            await self.patiently(release, seconds=max(PATIENCE_SECONDS, self._leases.lease_seconds))
        except StoreError:
            pass

    # -- the session itself ------------------------------------------------------------------------------------------
    async def delete(self, session: str, forget: Callable[[], Awaitable[None]] | None = None) -> None:
        """`NotOwner` if a live host elsewhere has it. Its events go after its record, and so does what they name
        (`forget`), before them: afterwards nobody knows the names.

        Idempotent: a second call finishes what an earlier one began."""

        async def delete() -> int:
            left = await self._last_event(session)
            found = await self._records.find(session)
            record = found.record
            if record is None:
                # An earlier try erased it and was not answered, or its host died over it. Its events are still to be
                # forgotten. A new session of this id writes its record before its first event, so with no record now
                # all that was there before this look belongs to none.
                return left
            await self._check_free(record)
            last = await self._last_event(session)
            deleted, deleted_seq = await self._records.epoch_deleted_max()
            writes = [self._records.erase(session, found.seq)]
            if record.epoch_past > deleted:
                writes.append(self._records.write_deleted(record.epoch_past, deleted_seq))
            if record.name is not None:
                writes.append(self._records.erase_name(record.name))
            await self._records.change(*writes)
            return last

        last = await self.patiently(delete)
        if forget is not None:
            await self.patiently(forget)
        # Not what somebody has said meanwhile who has opened another under this id. What its writer still gets in is
        # purged by who makes the next one.
        await self.patiently(lambda: self.purge(session, last + 1))

    async def _last_event(self, session: str) -> int:
        """The sequence of its last message; 0: there is none."""
        message = await self._nats.last(self._names.events, self._names.event(session))
        return 0 if message is None else message.seq

    async def rename(self, session: str, name: str | None, expected: str | None) -> None:
        is_unknown = False

        async def rename() -> None:
            nonlocal is_unknown
            found = await self._records.find(session)
            record = found.record
            if record is None or record.is_hidden:
                raise UsageError("there is no such session", session=session)
            if is_unknown and record.name == name:
                return  # An earlier try was not answered, and was done.
            if record.name != expected:
                raise UsageError(
                    "the session has another name by now", session=session, name=record.name, expected=expected
                )
            if name == expected:
                return
            writes = [self._records.write(msgspec.structs.replace(record, name=name), found.seq)]
            if name is not None:
                writes.append(self._records.write_name(name, session, await self._free_name(name, session)))
            if expected is not None:
                writes.append(self._records.erase_name(expected))
            try:
                await self._records.change(*writes)
            except Unanswered:
                is_unknown = True
                raise

        await self.patiently(rename)

    async def update(self, session: str, change: Callable[[SessionRecord], SessionRecord]) -> SessionRecord | None:
        """Change what is known of it, whoever owns it; None: it is not there."""

        async def update() -> SessionRecord | None:
            found = await self._records.find(session)
            if found.record is None:
                return None
            record = change(found.record)
            if record != found.record:
                await self._records.change(self._records.write(record, found.seq))
            return record

        return await self.patiently(update)

    # -- a history that comes from elsewhere -------------------------------------------------------------------------
    async def reserve(self, session: str, name: str | None, agent: str) -> SessionRecord:
        """A place for a history, which nobody sees until it is `shown`. `UsageError` if there is a session of this
        id."""
        self._leases.check_held()

        tried: SessionRecord | None = None

        async def reserve() -> SessionRecord:
            nonlocal tried
            found = await self._records.find(session)
            if tried is not None and found.record == tried:
                return tried  # It was not answered, and was done.
            if found.record is not None and not await self._is_abandoned(found.record):
                hint = "delete it, or take another id"
                raise UsageError("there is such a session already", hint=hint, session=session)
            if name is not None:
                await self._free_name(name, session)
            owner = OwnerRecord(self._leases.id, os.getpid(), self._leases.address)
            new = await self._new(session, None, agent, owner)
            tried = msgspec.structs.replace(new, is_hidden=True, born=0)
            await self._records.change(self._records.write(tried, found.seq))
            return tried

        return await self.patiently(reserve)

    async def _is_abandoned(self, record: SessionRecord) -> bool:
        """It was to be restored, by a host that died over it."""
        return record.is_hidden and record.owner is not None and await self._leases.is_dead(record.owner.host)

    async def show(self, record: SessionRecord, name: str | None) -> None:
        """It is all there."""

        async def show() -> None:
            found = await self._records.find(record.id)
            if found.record is not None and not found.record.is_hidden and found.record.created == record.created:
                return  # An earlier try was not answered, and was done.
            if found.record is None or found.record.owner is None or not found.record.is_hidden:
                raise UsageError("the session was deleted meanwhile", session=record.id)
            shown = msgspec.structs.replace(record, name=name, owner=None, is_hidden=False)
            writes = [self._records.write(shown, found.seq)]
            if name is not None:
                writes.append(self._records.write_name(name, record.id, await self._free_name(name, record.id)))
            await self._records.change(*writes)

        await self.patiently(show)

    # -- events ------------------------------------------------------------------------------------------------------
    async def purge(self, session: str, before: int | None) -> None:
        """Forget its messages before a sequence; None: all of them."""
        body: dict[str, object] = {"filter": self._names.event(session)}
        if before is not None:
            body["seq"] = before
        answer = await self._nats.api(f"STREAM.PURGE.{self._names.events}", body)
        if "error" in answer:
            raise Unanswered(f"{self._names.events} cannot be purged: {answer['error'].get('description')}")

    async def patiently(self, attempt: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        """Again and again: what was expected had changed, or nobody answered."""
        give_up = time.monotonic() + (PATIENCE_SECONDS if seconds is None else seconds)
        wait = RETRY_SECONDS
        while True:
            try:
                return await attempt()
            except WrongLastSequence as exc:
                if time.monotonic() > give_up:
                    raise Unanswered("others change the same all the time", hint="try again") from exc
                continue
            except Unreachable:
                if time.monotonic() + wait > give_up:
                    raise
            await asyncio.sleep(wait)
            wait = min(wait * 2, 1.0)

    def owner(self, record: SessionRecord) -> Owner | None:
        owner = record.owner
        if owner is None:
            return None
        is_here = owner.host == self._leases.id
        return Owner(owner.pid, owner.address, is_here, is_here or self._leases.is_alive(owner.host))


def _superseded(session: str, epoch: int) -> NotOwner:
    return NotOwner("another writer has the session", hint="claim it anew", session=session, epoch=epoch)
