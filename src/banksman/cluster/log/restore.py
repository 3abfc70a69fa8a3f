"""A session that was kept elsewhere: its messages first, under a record that nobody sees, then the record is shown.

Whoever dies over it leaves a record that is hidden, of a host that is dead: the next one who wants that id takes its
place.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress

import msgspec

from banksman.cluster.jetstream import ID, WrongLast
from banksman.cluster.log import message_codec
from banksman.cluster.log.message_codec import MessageBody, MessagePart, MessagePlace
from banksman.cluster.log.session_ownership import Owning
from banksman.cluster.log.session_record import SessionRecord, SessionRecords
from banksman.cluster.log.streams import NatsStreams, token
from banksman.cluster.nats import Nats
from banksman.errors import BanksmanError, NotOwner, StoreError, UsageError
from banksman.store.checks import checked
from banksman.store.log import Chunk, Snapshot

CHUNKS_AT_ONCE = 32
ATTEMPTS_MAX = 20
RETRY_SECONDS = 0.5


class Restoring:
    def __init__(self, nats: Nats, streams: NatsStreams, owning: Owning, records: SessionRecords) -> None:
        self._nats = nats
        self._streams = streams
        self._names = streams.names
        self._owning = owning
        self._records = records

    async def restore(
        self,
        session: str,
        name: str | None,
        agent: str,
        chunks: Callable[[], Iterable[Chunk]],
        snapshot: Snapshot | None,
    ) -> None:
        record = await self._owning.reserve(session, name, agent)
        try:
            await self._owning.purge(session, None)
            shown = await self._fill(record, chunks, snapshot)
            await self._owning.show(shown, name)
        except BaseException:
            with suppress(BanksmanError):
                await asyncio.shield(self._owning.delete(session))
            raise

    async def _fill(
        self, record: SessionRecord, chunks: Callable[[], Iterable[Chunk]], snapshot: Snapshot | None
    ) -> SessionRecord:
        iterator = await asyncio.to_thread(lambda: checked(record.id, chunks()))
        place, first, created = message_codec.BEGINNING, 0, record.created
        # One behind: the last one carries the snapshot.
        held = await asyncio.to_thread(_take, iterator)
        while held:
            following = await asyncio.to_thread(_take, iterator)
            for index, chunk in enumerate(held):
                if not first:
                    first, created = chunk.first, chunk.at
                    place = place._replace(first=first)
                is_last = not following and index == len(held) - 1
                if is_last and snapshot is not None and not snapshot.is_beside(first, chunk.last):
                    raise UsageError("the snapshot is not of these events", session=record.id, seq=snapshot.seq)
                place = await self._store(record.id, place, chunk, snapshot if is_last else None)
            held = following
        deleted, _ = await self._records.epoch_deleted_max()
        return msgspec.structs.replace(
            record,
            created=created,
            changed=place.at,
            first=first,
            seq=place.last,
            # Past what was ever given here under this id, too.
            epoch=max(place.epoch, deleted),
            tenure=max(place.epoch, deleted),
        )

    async def _store(self, session: str, before: MessagePlace, chunk: Chunk, snapshot: Snapshot | None) -> MessagePlace:
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
                    subject, data, expected=before.seq, id=id, headers={message_codec.HEADER: header}
                )
                return message_codec.place(seq, header)
            except WrongLast:
                last = await self._nats.last(self._names.events, subject)
                if last is not None and last.headers.get(ID) == id:
                    return message_codec.place(last.seq, header)
                raise NotOwner("another writer has the session", session=session) from None
            except StoreError:
                await asyncio.sleep(RETRY_SECONDS)
        raise StoreError("the history could not be stored: nobody answers", session=session)


def _take(iterator: Iterator[Chunk]) -> list[Chunk]:
    return list(itertools.islice(iterator, CHUNKS_AT_ONCE))
