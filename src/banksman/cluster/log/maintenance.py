"""Retention, trimming, blob deletion and restore of session histories on NATS.

`ClusterRetention` only counts bytes. `HistoryTrim` removes messages and blobs. `HistoryRestore`
stores the history of `Log.restore`. `session_ownership.py` deletes whole sessions.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import msgspec

from banksman.cluster.jetstream import ID, WrongLastSequence
from banksman.cluster.log import message_codec
from banksman.cluster.log.event_reader import EventReader
from banksman.cluster.log.host_leases import HostLeases
from banksman.cluster.log.message_codec import NO_BLOB, MessageBody, MessagePart, MessagePlace
from banksman.cluster.log.session_ownership import SessionOwnership
from banksman.cluster.log.session_record import (
    OwnerRecord,
    SessionRecord,
    SessionRecords,
    patiently,
)
from banksman.cluster.log.stream_mirror import StreamHeads
from banksman.cluster.log.streams import NatsStreams, token
from banksman.cluster.log.usage_records import UsageRecords
from banksman.cluster.nats import Nats
from banksman.errors import BanksmanError, NotOwner, StoreDamaged, StoreError, UsageError
from banksman.store.log_values import Chunk, Snapshot
from banksman.store.preconditions import checked

# Retention drops the oldest messages of a session. It drops whole messages only, and none that the
# last snapshot does not cover.
#
# The record states the first kept event before anything is purged, so a concurrent reader sees the
# gap in the record first. The message with the last snapshot stays, even if its events are dropped.

# The assumed overhead of a message, beside its body.
MESSAGE_BYTES = 256
# Trim only beyond this factor: every purge is a commit of the servers.
SLACK = 1.25
CHUNKS_AT_ONCE = 32
ATTEMPTS_MAX = 20
RETRY_SECONDS = 0.5


class ClusterRetention:
    """Count the stored bytes of each owned session that this host wrote."""

    def __init__(self, bytes_max: int | None) -> None:
        self._bytes_max = bytes_max
        self._weights: dict[str, deque[tuple[int, int]]] = {}
        self._totals: dict[str, int] = {}

    def weigh(self, session: str, place: MessagePlace, size: int) -> int | None:
        """Count a stored message. Returns the event before which history may go; None: keep all."""
        if self._bytes_max is None or not size:
            return None
        weights = self._weights.setdefault(session, deque())
        weights.append((place.last, size + MESSAGE_BYTES))
        total = self._totals[session] = self._totals.get(session, 0) + size + MESSAGE_BYTES
        if total <= self._bytes_max * SLACK or not place.snapshot:
            return None
        before = None
        while len(weights) > 1 and total > self._bytes_max:
            last, weight = weights.popleft()
            total -= weight
            before = last + 1
        self._totals[session] = total
        return before

    def forget(self, session: str) -> None:
        self._weights.pop(session, None)
        self._totals.pop(session, None)


class HistoryTrim:
    """Drop old messages of a session and their blobs."""

    def __init__(
        self,
        nats: Nats,
        streams: NatsStreams,
        reading: EventReader,
        heads: StreamHeads,
        records: SessionRecords,
        *,
        usage: UsageRecords,
    ) -> None:
        self._nats = nats
        self._streams = streams
        self._reading = reading
        self._heads = heads
        self._records = records
        self._usage = usage

    async def trim(self, session: str, before: int) -> None:
        """Drop the events before `before`, up to a message border and the last snapshot."""
        record = self._records.all.get(session)
        place = await self._heads.look_closer(session)
        if record is None or place is None or not place.snapshot or not place.last:
            return
        held = await self._reading.one(session, place.snapshot)
        if held is None or held.body.snapshot is None:
            return
        limit = min(before, held.body.snapshot_seq + 1, place.last)
        if limit <= record.first:
            return
        # The message with that event stays, and all messages behind it.
        kept = await self._reading.find(session, limit, place)
        first = 0
        async for stored in self._reading.messages(session, max(1, kept), place.seq):
            if stored.place.held and stored.place.last >= limit:
                first = stored.place.first
                break
        if first <= record.first:
            return
        dropped = await self._reading.find(session, first - 1, place)

        def forget(found: SessionRecord) -> SessionRecord:
            if found.first >= first:
                return found
            return msgspec.structs.replace(found, first=first, dropped=max(found.dropped, dropped))

        await self._usage.keep(session, first - 1)
        # First the record, then the blobs, then the events. The events are the only list of the
        # blob names, and a reader must see the gap before the events are gone.
        await self._records.update(session, forget)
        border = min(dropped + 1, place.snapshot)
        await self.forget_blobs(session, border)
        await self._streams.purge(session, border)

    async def forget_blobs(self, session: str, before: int | None) -> None:
        """Delete the blobs of messages that are about to be purged; None: of all messages.

        If the host dies in between, some blobs stay behind. They cost only space.
        """
        try:
            place = await self._heads.look_closer(session)
        except StoreDamaged:
            # The last message is foreign, so it does not say whether there are blobs. Search all
            # messages.
            last = await self._reading.last_seq()
        else:
            if place is None or place.blob == NO_BLOB:
                return
            last = place.seq
        end = last if before is None else before - 1
        async for name in self._reading.blobs(session, end):
            await self._nats.delete_blob(self._reading.bucket, name)


class HistoryRestore:
    """Store the history of a session that comes from another store.

    A restore stores the messages first, under a hidden record, and then shows the record.

    If its host dies, a hidden record of a dead host remains. The next restore or claim of that id
    replaces it.
    """

    def __init__(
        self,
        nats: Nats,
        streams: NatsStreams,
        ownership: SessionOwnership,
        records: SessionRecords,
        leases: HostLeases,
        *,
        usage: UsageRecords,
    ) -> None:
        self._nats = nats
        self._streams = streams
        self._names = streams.names
        self._usage = usage
        self._ownership = ownership
        self._records = records
        self._leases = leases

    async def restore(
        self,
        session: str,
        name: str | None,
        agent: str,
        chunks: Callable[[], Iterable[Chunk]],
        snapshot: Snapshot | None,
    ) -> None:
        """Restore a session. A failure deletes what was stored."""
        record = await self._reserve(session, name, agent)
        try:
            await self._streams.purge(session, None)
            shown = await self._fill(record, chunks, snapshot)
            await self._show(shown, name)
        except BaseException:
            # Clean up after a cancellation too: the hidden record names a live host, so it would
            # block the id.
            with suppress(BanksmanError):
                await asyncio.shield(self._ownership.delete(session))
            raise

    async def _reserve(self, session: str, name: str | None, agent: str) -> SessionRecord:
        """Create a hidden record for a history that is about to be restored (`_show`).

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
                await self._records.free_name(name, session)
            owner = OwnerRecord(self._leases.id, os.getpid(), self._leases.address)
            new = await self._records.new(session, None, agent, owner)
            # Restored messages keep the epochs of their former store, so no epoch may count as too
            # old for this session.
            tried = msgspec.structs.replace(new, is_hidden=True, born=0)
            await self._records.change(self._records.write(tried, found.seq))
            return tried

        return await patiently(reserve)

    async def _is_abandoned(self, record: SessionRecord) -> bool:
        """Return whether a host died while it restored this session."""
        return (
            record.is_hidden
            and record.owner is not None
            and await self._leases.is_dead(record.owner.host)
        )

    async def _show(self, record: SessionRecord, name: str | None) -> None:
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
                        name, record.id, await self._records.free_name(name, record.id)
                    )
                )
            await self._records.change(*writes)

        await patiently(show)
        await self._usage.skip(record.id)

    async def _fill(
        self,
        record: SessionRecord,
        chunks: Callable[[], Iterable[Chunk]],
        snapshot: Snapshot | None,
    ) -> SessionRecord:
        """Store the chunks. Returns the record to show."""
        iterator = await asyncio.to_thread(lambda: checked(record.id, chunks()))
        place, first, created = message_codec.BEGINNING, 0, record.created
        # Read one group ahead: the last chunk carries the snapshot.
        held = await asyncio.to_thread(_take, iterator)
        while held:
            following = await asyncio.to_thread(_take, iterator)
            for index, chunk in enumerate(held):
                if not first:
                    first, created = chunk.first, chunk.at
                    place = place._replace(first=first)
                is_last = not following and index == len(held) - 1
                if is_last and snapshot is not None and not snapshot.is_beside(first, chunk.last):
                    message = f"cannot restore session {record.id}: the snapshot is of other events"
                    raise UsageError(message, session=record.id, seq=snapshot.seq)
                place = await self._store(record.id, place, chunk, snapshot if is_last else None)
            held = following
        deleted, _ = await self._records.epoch_deleted_max()
        return msgspec.structs.replace(
            record,
            created=created,
            changed=place.at,
            first=first,
            seq=place.last,
            # Not below any epoch that this store gave to a deleted session: the next claim goes
            # above it.
            epoch=max(place.epoch, deleted),
            tenure=max(place.epoch, deleted),
        )

    async def _store(
        self, session: str, before: MessagePlace, chunk: Chunk, snapshot: Snapshot | None
    ) -> MessagePlace:
        body = MessageBody([MessagePart(chunk.at, tuple(chunk.entries))])
        if snapshot is not None:
            body = MessageBody(body.parts, snapshot.data, snapshot.seq)
        data = message_codec.encode(body)
        id = f"{token(session)}.r{chunk.epoch}.{before.seq}"
        blob = id if len(data) > message_codec.MESSAGE_BYTES_MAX else before.blob_after
        if blob == id:
            await self._streams.ensure(self._names.blobs)
            await self._nats.put_blob(self._names.blobs, id, data)
            data = b""
        header = message_codec.header(
            epoch=chunk.epoch,
            first=chunk.first,
            held=len(chunk.entries),
            snapshot=before.snapshot if snapshot is None else None,
            at=chunk.at,
            blob=blob,
        )
        subject = self._names.event(session)
        for _ in range(ATTEMPTS_MAX):
            try:
                seq = await self._nats.publish(
                    subject,
                    data,
                    expected=before.seq,
                    id=id,
                    headers={message_codec.HEADER: header},
                )
                return message_codec.place(seq, header)
            except WrongLastSequence:
                last = await self._nats.last(self._names.events, subject)
                if last is not None and last.headers.get(ID) == id:
                    return message_codec.place(last.seq, header)
                message = f"cannot write session {session}: another writer owns it"
                raise NotOwner(message, session=session) from None
            except StoreError:
                await asyncio.sleep(RETRY_SECONDS)
        raise StoreError("cannot store the history: the cluster does not answer", session=session)


def _take(iterator: Iterator[Chunk]) -> list[Chunk]:
    return list(itertools.islice(iterator, CHUNKS_AT_ONCE))
