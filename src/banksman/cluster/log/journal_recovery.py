"""Recovery of a journal after a crash or a fence.

`JournalRecovery` publishes the journals of dead hosts, and that of this host after it lost its
lease. `journal.py` has the file, and `blocked_appends.py` notes the appends that wait in it.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from banksman.cluster.jetstream import ID, WrongLastSequence
from banksman.cluster.log import message_codec
from banksman.cluster.log.blocked_appends import before_a_beginning
from banksman.cluster.log.host_leases import HostLeases
from banksman.cluster.log.journal import Journal, LeftJournal, left_behind, store_of
from banksman.cluster.log.journal_file import (
    JournalEntry,
    JournalRow,
    noted_report_path,
    report_path,
)
from banksman.cluster.log.message_codec import EVENTS_MAX, MessageBody, MessagePart, MessagePlace
from banksman.cluster.log.streams import NatsStreams
from banksman.cluster.nats import Nats
from banksman.errors import StoreDamaged, StoreError, Unreachable

log = logging.getLogger("banksman")
RETRY_SECONDS = 0.5


class JournalRecovery:
    """Publish journals of dead hosts, and this host's journal after a fence.

    A message is published under the sequence that it was to follow. If no host has claimed the
    session since, that sequence is the last one, and the message is stored as its owner's own.
    Otherwise the claim's mark is last, and the servers refuse the message. It is then kept as a
    report. So a message never ends up behind the events of a new owner.

    Notes (`BlockedAppends`) do not know the sequence that they follow. Their place is given by the
    epoch and the seq of their first event. If the last message has that epoch and ends just before
    that seq, the notes come next.
    """

    def __init__(self, nats: Nats, streams: NatsStreams, folder: Path) -> None:
        self._nats = nats
        self._streams = streams
        self._names = streams.names
        self._folder = folder

    async def run(self, journal: Journal) -> None:
        """Publish the journals that dead hosts left on this machine.

        Only journals of this store count. A store is identified by its name and the creation time
        of its event stream. Journals of other stores wait for a host of that store.
        """
        # Name the own journal before the search for others. From then on a crash of this host
        # leaves a journal that the right store recovers.
        store = await self._store()
        await journal.be_of(store)
        found = await asyncio.to_thread(left_behind, self._folder)
        try:
            for left in found:
                try:
                    if await asyncio.to_thread(store_of, left) in (store, None):
                        await self._settle(left)
                except (ValueError, sqlite3.Error, OSError) as exc:
                    log.warning("cannot recover %s, the journal of a dead host: %s", left.path, exc)
        finally:
            # Close all, also those of other stores: their locks must be free for a host of that
            # store. The lock was held during the whole recovery, so no two hosts publish one file.
            for left in found:
                await asyncio.to_thread(left.close)

    async def _store(self) -> str:
        """Return the identity of this store."""
        while True:
            try:
                info = await self._nats.api(f"STREAM.INFO.{self._names.events}", {})
                return f"{self._names.events} {info['created']}"
            except (Unreachable, KeyError):
                await asyncio.sleep(RETRY_SECONDS)

    async def later(self, journal: Journal, leases: HostLeases) -> None:
        """Publish this host's journal after a fence, as soon as it holds a lease again."""
        # Read the journal now, and wait for the lease afterwards. A message that this host puts
        # later, under its next lease, is still in flight and must not be published by recovery.
        rows, noted = await journal.rows()
        # Poll: no callback exists for a lease that is held again.
        while (rows or noted) and not leases.is_held:  # noqa: ASYNC110
            await asyncio.sleep(RETRY_SECONDS)
        # Messages first, then notes: the notes follow the messages.
        for row in rows:
            # The process still lives, so its callers were answered at the fence. Only what agrees
            # with those answers may be stored. A message that another claim has fenced off is
            # refused here, and becomes a report. A claim of this host under its new id has the
            # same effect.
            if await self._put_as_told(row):
                journal.drop(row.id)
            else:
                journal.report(row)
                _tell_refused(row.subject, report_path(journal.path, row))
        for group in _grouped(noted):
            # First delete the stored notes, then report the rest. The report holds only events
            # that are not in the cluster.
            last = await self._put_noted(group)
            journal.pass_by(group[0].subject, group[0].epoch, last)
            if last < group[-1].last:
                journal.report_noted(group[0].subject, group[0].epoch)
                _tell_refused(group[0].subject, _path_of_rest(journal.path, group, last))

    async def _settle(self, left: LeftJournal) -> None:
        """Publish the messages and notes of one journal of a dead host."""
        # In the order in which they were written: a message expects the one before it.
        for row in await asyncio.to_thread(lambda: left.rows):
            # A journal without a store may be of another prefix. Its rows stay in the file.
            if not row.subject.startswith(f"{self._names.prefix}.ev."):
                continue
            # Store the whole message. A host that dies with a message in flight has not answered
            # the callers of its appends, so no answer contradicts the message.
            if await self._put(row):
                await asyncio.to_thread(left.drop, row.id)
            else:
                await asyncio.to_thread(left.report, row)
                _tell_refused(row.subject, report_path(left.path, row))
        for group in _grouped(await asyncio.to_thread(lambda: left.noted)):
            if not group[0].subject.startswith(f"{self._names.prefix}.ev."):
                continue
            last = await self._put_noted(group)
            await asyncio.to_thread(left.pass_by, group[0].subject, group[0].epoch, last)
            if last < group[-1].last:
                await asyncio.to_thread(left.report_noted, group[0].subject, group[0].epoch)
                _tell_refused(group[0].subject, _path_of_rest(left.path, group, last))

    async def _put_as_told(self, row: JournalRow) -> bool:
        """Store the part of a message that agrees with the answers its callers got at the fence.

        Those callers learned that their ask was not accepted, and no prompt was sent for a start in
        it. If the message is not stored yet, that part is left out. Returns whether the whole
        message is in its place.
        """
        told = _without_beginnings(row)
        if told is row:
            return await self._put(row)
        # Look before the cut part is published. If the whole message was stored without an ack, the
        # part must not follow it. Between the look and the publish nothing changes that: the part
        # expects the same message before it, so the servers store one of the two.
        if not await self._is_last(row) and told is not None:
            await self._put(told)
        return await self._is_last(row)

    async def _is_last(self, row: JournalRow) -> bool:
        """Return whether this message is the session's last one."""
        while True:
            try:
                last = await self._nats.last(self._names.events, row.subject)
            except Unreachable:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            return last is not None and last.headers.get(ID) == row.id

    async def _is_stored(self, row: JournalRow) -> bool:
        """Return whether this message directly follows the one that it expects."""
        while True:
            try:
                events = self._names.events
                found, _ = await self._nats.read(events, row.expected + 1, row.subject, 1)
                if found:
                    return found[0].headers.get(ID) == row.id
                # Nothing follows, or the replica lags. The leader knows.
                last = await self._nats.last(events, row.subject)
                if last is None or last.seq <= row.expected:
                    return False
            except Unreachable:
                pass
            await asyncio.sleep(RETRY_SECONDS)

    async def _put_noted(self, noted: Sequence[JournalEntry]) -> int:
        """Store the notes of one session and epoch. Returns the last event in its place."""
        assert noted, "a group has a note"
        assert len({(one.subject, one.epoch) for one in noted}) == 1
        stored = noted[0].first - 1
        while waiting := [one for one in noted if one.first > stored]:
            place = await self._last_place(waiting[0].subject)
            if place is not None and place.epoch == waiting[0].epoch and place.last > stored:
                stored = place.last  # A message without an ack was stored.
                continue
            # Another epoch means another claim. Another end means that events in between are lost.
            # In both cases the notes would land behind events that they do not follow.
            if (
                place is None
                or place.epoch != waiting[0].epoch
                or place.last != waiting[0].first - 1
            ):
                break
            # The compare-and-set covers the time between the read of the place and the publish: a
            # claim in between puts its mark there, and the notes are refused.
            row, last = _packed(waiting, place)
            if not await self._put(row):
                break
            stored = last
        assert stored >= noted[0].first - 1
        return stored

    async def _last_place(self, subject: str) -> MessagePlace | None:
        """Return the place of the last message of a subject; None if none can follow it."""
        while True:
            try:
                last = await self._nats.last(self._names.events, subject)
            except Unreachable:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            # No message can follow one that this program did not write.
            with suppress(StoreDamaged):
                return None if last is None else message_codec.place_of(last)
            return None

    async def _put(self, row: JournalRow) -> bool:
        """Publish a message, and return whether it is stored in its place."""
        # Retry without a limit while the cluster is away. A message that is given up here becomes a
        # report, and only a definite refusal justifies that.
        body, headers = row.body, {message_codec.HEADER: row.header}
        while True:
            try:
                # The blob comes first: a message that names a missing blob would be unreadable.
                if message_codec.place(0, row.header).blob_name is not None:
                    await self._streams.ensure(self._names.blobs)
                    await self._nats.put_blob(self._names.blobs, row.id, row.body)
                    body = b""
                await self._nats.publish(
                    row.subject, body, expected=row.expected, id=row.id, headers=headers
                )
                return True
            except WrongLastSequence:
                try:
                    last = await self._nats.last(self._names.events, row.subject)
                except Unreachable:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                if last is not None and last.seq == row.expected:
                    # A newly elected leader has not caught up yet.
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                # Another message is in its place, unless an earlier attempt of this one was stored:
                # its host died before it had the ack, or before it deleted the row.
                return await self._is_stored(row)
            except Unreachable:
                await asyncio.sleep(RETRY_SECONDS)
            except StoreError:
                # The servers refuse the message: it is too large, or the store is full. A retry
                # would get the same answer, and the messages behind this one wait.
                return False


def _grouped(noted: Iterable[JournalEntry]) -> list[list[JournalEntry]]:
    """Group notes by session and epoch, in their order."""
    return [
        list(group) for _, group in itertools.groupby(noted, lambda one: (one.subject, one.epoch))
    ]


def _without_beginnings(row: JournalRow) -> JournalRow | None:
    """Cut a message before its first ask or start of a turn.

    Returns the row itself if it has neither, and None if nothing useful is left.
    """
    # Everything behind the first beginning goes too, also frames of the agent: they belong to a
    # turn that did not start for its caller.
    place, body = message_codec.place(0, row.header), message_codec.decode(row.body)
    parts: list[MessagePart] = []
    for part in body.parts:
        entries = before_a_beginning(part.entries)
        if len(entries) == len(part.entries):
            parts.append(part)
            continue
        if entries:
            parts.append(MessagePart(part.at, entries))
        break
    else:
        return row
    held = sum(len(part.entries) for part in parts)
    # A snapshot covers every append of the message, so it does not fit to a part. A message in a
    # blob may still be too large after the cut. Both go to the report.
    if not held or body.snapshot is not None or place.blob_name is not None:
        return None
    header = message_codec.header(
        epoch=place.epoch,
        first=place.first,
        held=held,
        snapshot=place.snapshot,
        at=parts[-1].at,
        blob=place.blob,
    )
    return row._replace(
        id=f"{row.id}.told", header=header, body=message_codec.encode(MessageBody(parts))
    )


def _packed(waiting: Sequence[JournalEntry], before: MessagePlace) -> tuple[JournalRow, int]:
    """Pack as many notes as fit into one message behind `before`. Returns it and its last event."""
    # Notes do not know the sequence that they follow, only their seq. This message may follow
    # `before` only if that one ends just in front of the first note.
    assert before.last == waiting[0].first - 1
    first, size = waiting[0], 0
    parts: list[MessagePart] = []
    snapshot, snapshot_seq, last = None, 0, before.last
    for one in waiting:
        size += len(one.body)
        if one.first != last + 1 or (
            parts and (size > message_codec.MESSAGE_BYTES_MAX or last - before.last >= EVENTS_MAX)
        ):
            break
        body = message_codec.decode(one.body)
        parts += body.parts
        if body.snapshot is not None:
            snapshot, snapshot_seq = body.snapshot, body.snapshot_seq
        last = one.last
    data = message_codec.encode(MessageBody(parts, snapshot, snapshot_seq))
    # The id names the place and not the attempt. So a crash of recovery and its repetition publish
    # under one id, and the servers store it once.
    id = f"{first.subject.rpartition('.')[2]}.{first.epoch}.{first.first}.{last}.noted"
    header = message_codec.header(
        epoch=first.epoch,
        first=first.first,
        held=last - before.last,
        snapshot=before.snapshot if snapshot is None else None,
        at=parts[-1].at,
        blob=id if len(data) > message_codec.MESSAGE_BYTES_MAX else before.blob_after,
    )
    return JournalRow(first.subject, id, before.seq, header, data), last


def _path_of_rest(journal: Path, group: Sequence[JournalEntry], last: int) -> Path:
    """Return the report file of the notes of a group that begin after the event `last`."""
    first = next((note.first for note in group if note.first > last), last + 1)
    return noted_report_path(journal, group[0].subject, group[0].epoch, first)


def _tell_refused(subject: str, report: Path) -> None:
    log.warning(
        "events of a former owner were refused and moved to a report:"
        " read the report, then delete it (session=%s report=%s)",
        subject.rpartition(".")[2],
        report,
    )
