"""Usage of a store on NATS: counted from the events, and recorded before events are removed.

The servers keep no sums. A host reads the events of each session once, and later only new ones. So
the first query of a process reads all histories, page by page.

Before a session is deleted, or retention removes events, its usage so far is written to a record,
one per session id. The record says up to which event it counts, so every event is counted once,
even if the host dies between the record and the removal. A restored session gets a record that
covers its whole history, without any usage.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import msgspec

from banksman.cluster.jetstream import BatchMessage, StreamMessage
from banksman.cluster.log import message_codec
from banksman.cluster.log.session_record import SessionRecord, SessionRecords, encode, patiently
from banksman.cluster.log.stream_mirror import StreamMirror
from banksman.cluster.log.streams import StreamNames
from banksman.cluster.nats import Nats
from banksman.core.session.usage import Usage
from banksman.errors import StoreDamaged
from banksman.store.log_values import NUMBER_MAX, KnownSession
from banksman.store.usage_sums import (
    ReadPage,
    SessionUsageReader,
    UsageKey,
    UsageTable,
    count_events,
)

log = logging.getLogger("banksman")


class UsageSum(msgspec.Struct, frozen=True, array_like=True):
    """Usage of one day, agent and caller."""

    day: str
    agent: str
    caller: str | None
    usage: Usage


class UsageRecord(msgspec.Struct, frozen=True):
    """Usage of a session id up to an event.

    `session`: the id. `sums`: usage of the present session up to the event `seq`, and of all
    deleted sessions with this id. `born`, `created`: identify the session that `seq` refers to.
    """

    session: str
    born: int
    created: float
    seq: int
    sums: tuple[UsageSum, ...] = ()

    def counted(self, record: SessionRecord) -> int:
        """Return the last event of this session that the sums include."""
        is_same = (self.born, self.created) == (record.born, record.created)
        return self.seq if is_same else 0

    @property
    def table(self) -> UsageTable:
        table = UsageTable()
        for each in self.sums:
            table.add(UsageKey(each.day, self.session, each.agent, each.caller), each.usage)
        return table


class UsageRecords:
    """The usage of a store. `read`: reads a page of a session."""

    def __init__(
        self, nats: Nats, names: StreamNames, records: SessionRecords, read: ReadPage
    ) -> None:
        self._nats = nats
        self._names = names
        self._records = records
        self._read = read
        self._reader = SessionUsageReader(read)
        self._kept: dict[str, UsageRecord] = {}
        self._mirror = StreamMirror(
            nats,
            names.records,
            f"{names.prefix}.rec.usage.*",
            f"{names.prefix}.live.rec.usage.*",
            self._on_change,
        )
        # Only a host that was asked for usage follows the records.
        self._is_following = False
        self._starting = asyncio.Lock()

    async def stop(self) -> None:
        await self._mirror.stop()

    def reload_soon(self) -> None:
        """Read the records again after a reconnect."""
        if self._is_following:
            self._mirror.reload_soon()

    async def table(self, sessions: Sequence[KnownSession]) -> UsageTable:
        """Count the usage of these sessions, and of all deleted ones."""
        async with self._starting:
            if not self._is_following:
                await patiently(self._mirror.start)
                self._is_following = True
        total = UsageTable()
        for known in sessions:
            record = self._records.all.get(known.id)
            if record is None:
                continue  # It was deleted just now.
            kept = self._kept.get(known.id)
            begin = 0 if kept is None else kept.counted(record)
            counted = await self._reader.count(
                known.id,
                known.agent,
                identity=(record.born, record.created),
                begin=begin,
                end=known.seq,
            )
            total.update(counted)
        self._reader.keep_only([known.id for known in sessions])
        for kept in self._kept.values():
            total.update(kept.table)
        return total

    async def keep(self, session: str, last: int = NUMBER_MAX) -> None:
        """Record the usage up to the event `last`, which may be removed then."""

        async def keep() -> None:
            found = (await self._records.find(session)).record
            if found is None:
                return
            before, seq = await self._find(session)
            begin = 0 if before is None else before.counted(found)
            table = UsageTable() if before is None else before.table
            if begin >= last:
                return
            try:
                end = await count_events(
                    self._read, table, session, found.agent, begin=begin, end=last
                )
            except StoreDamaged as exc:
                # The removal of a damaged session must not fail because of its usage.
                log.warning("usage not counted: %s (session=%s)", exc, session)
                end = last
            await self._write(found, end, table, seq)

        await patiently(keep)

    async def skip(self, session: str) -> None:
        """Record that no present event of the session counts: it was restored."""

        async def skip() -> None:
            found = (await self._records.find(session)).record
            if found is not None:
                before, seq = await self._find(session)
                table = UsageTable() if before is None else before.table
                await self._write(found, found.seq, table, seq)

        await patiently(skip)

    async def _find(self, session: str) -> tuple[UsageRecord | None, int]:
        """Return the record as the leader has it, and its sequence."""
        subject = self._names.record("usage", session)
        message = await self._nats.last(self._names.records, subject)
        return (None, 0) if message is None else (_decoded(message), message.seq)

    async def _write(
        self, record: SessionRecord, seq: int, table: UsageTable, expected: int
    ) -> None:
        sums = tuple(
            UsageSum(key.day, key.agent, key.caller, usage) for key, usage in table.items()
        )
        data = encode(UsageRecord(record.id, record.born, record.created, seq, sums))
        subject = self._names.record("usage", record.id)
        number = await self._nats.publish_all([BatchMessage(subject, data, expected)])
        self._mirror.put(StreamMessage(subject, data, {}, number))

    def _on_change(self, subject: str, message: StreamMessage | None) -> None:
        if message is None:
            return  # These records are never deleted.
        try:
            record = _decoded(message)
        except StoreDamaged as exc:
            log.warning("usage record ignored: %s (%s)", exc.args[0], exc.hint)
            return
        self._kept[record.session] = record


def _decoded(message: StreamMessage) -> UsageRecord:
    try:
        return msgspec.json.decode(message.data, type=UsageRecord)
    except msgspec.DecodeError as exc:
        raise message_codec.record(message.subject, message.seq) from exc
