"""What a host's journal still holds: published in order, and after a crash published again."""

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
from banksman.cluster.log.host_leases import HostLeases
from banksman.cluster.log.journal import Journal, JournalEntry, JournalRow, LeftJournal, left_behind, store_of
from banksman.cluster.log.message_codec import EVENTS_MAX, MessageBody, MessagePart, MessagePlace
from banksman.cluster.log.publisher import Call, QueuedAppend
from banksman.cluster.log.streams import NatsStreams
from banksman.cluster.nats import Nats
from banksman.core.session.event import TURN_QUEUED, TURN_STARTED, Entry
from banksman.errors import StoreDamaged, StoreError, Unreachable

# What waits behind a message that nobody answers for: it goes to the journal too, so that it outlives this host.
#
# As long as the cluster answers, what gathers behind a message is on its way a moment later, and the journal need not
# know of it. When it does not, an agent goes on talking until the lease is nearly over, and all of that would be in
# memory alone. So once a message is overdue, every append that waits is noted as it comes, by its place in the session;
# and passed by when a message with it has been stored.
#
# Nothing is noted from the first ask on, nor from the start of a turn: whoever asks is told that it was not accepted,
# and a prompt is sent only when its start is stored. Neither may be made true later by somebody who finds it in a
# journal.

# A healthy cluster answers in milliseconds, and one that has lost a leader in seconds.
OVERDUE_SECONDS = 0.25
BEGINNINGS = (TURN_QUEUED, TURN_STARTED)


def before_a_beginning(entries: Sequence[Entry]) -> Sequence[Entry]:
    """What comes before the first ask, or the first start of a turn."""
    return list(itertools.takewhile(lambda entry: entry[1] not in BEGINNINGS, entries))


class BlockedAppends:
    """Of one session, whose events are under `subject`."""

    def __init__(self, journal: Journal, subject: str) -> None:
        self._journal = journal
        self._subject = subject
        self._epoch = 0
        # What comes next, while a message is overdue.
        self._next: int | None = None
        # The last that was noted under this epoch, and is not passed by.
        self._noted = 0

    def begin(self, epoch: int, first: int, calls: Iterable[Call]) -> None:
        """What was to be stored under this epoch, before the event `first`, is overdue; these wait."""
        if epoch != self._epoch:
            self._epoch, self._noted = epoch, 0
        self._next = first
        for call in calls:
            self.note(call)

    def note(self, call: Call) -> None:
        first = self._next
        if first is None:
            return
        if not isinstance(call, QueuedAppend) or not self._follows(call, first):
            self._next = None  # What comes behind it rests on what nobody knows yet.
            return
        entries = before_a_beginning(call.part.entries)
        is_whole = len(entries) == len(call.part.entries)
        if entries:
            self._noted = first + len(entries) - 1
            snapshot = call.snapshot if is_whole else None
            body = message_codec.encode(MessageBody([MessagePart(call.part.at, entries)], snapshot, self._noted))
            self._journal.note(JournalEntry(self._subject, self._epoch, first, len(entries), body))
        self._next = self._noted + 1 if is_whole else None

    def _follows(self, call: QueuedAppend, first: int) -> bool:
        is_next = call.epoch == self._epoch and call.expected_seq == first - 1
        return is_next and call.error is None and bool(call.part.entries)

    def pass_by(self, last: int) -> None:
        """All up to this event is stored, and somebody answers again."""
        self._next = None
        if self._noted:
            self._journal.pass_by(self._subject, self._epoch, last)
            self._noted = self._noted if self._noted > last else 0

    def forget(self) -> None:
        """Whoever called was told that none of it is stored, and may say something else in its place."""
        self.pass_by(self._noted)

    def report(self) -> None:
        """None of it will be stored: it is another's session."""
        self._next = None
        if self._noted:
            self._journal.report_noted(self._subject, self._epoch)
            self._noted = 0

    def stop(self) -> None:
        """It is ours no more. What is noted may still find its place: see `journal_recovery.py`."""
        self._next, self._noted = None, 0


# What was in a journal and not in the cluster, when its host died or was fenced: put in its place, if it still is one.
#
# A message is published under the sequence that it was to follow. If nobody has claimed the session since, that is the
# last one, and the message is what its owner said; else it is refused, and kept as a report. So nothing is ever put
# behind what a new owner has said.
#
# What was noted behind a message (`BlockedAppends`) does not know the sequence that it follows. It has its place by
# the epoch and by the number of its first event: if what is last is of that epoch and ends just before it, it is what
# comes next.

log = logging.getLogger("banksman")

RETRY_SECONDS = 0.5


class JournalRecovery:
    def __init__(self, nats: Nats, streams: NatsStreams, folder: Path) -> None:
        self._nats = nats
        self._streams = streams
        self._names = streams.names
        self._folder = folder

    async def run(self, journal: Journal) -> None:
        """What dead hosts have left on this machine. Of this very store, by its name and the birth of its stream: what
        is of another waits for a host of that one."""
        store = await self._store()
        await journal.be_of(store)
        found = await asyncio.to_thread(left_behind, self._folder)
        try:
            for left in found:
                try:
                    if await asyncio.to_thread(store_of, left) in (store, None):
                        await self._settle(left)
                except (ValueError, sqlite3.Error, OSError) as exc:
                    log.warning("! %s was left by a dead host, and cannot be understood: %s", left.path, exc)
        finally:
            for left in found:
                await asyncio.to_thread(left.close)

    async def _store(self) -> str:
        while True:
            try:
                info = await self._nats.api(f"STREAM.INFO.{self._names.events}", {})
                return f"{self._names.events} {info['created']}"
            except (Unreachable, KeyError):
                await asyncio.sleep(RETRY_SECONDS)

    async def later(self, journal: Journal, leases: HostLeases) -> None:
        """What this host had on its way when it was fenced; as soon as somebody answers again."""
        rows, noted = await journal.rows()
        while (rows or noted) and not leases.is_held:  # noqa: ASYNC110  Nobody is told when a lease is held again.
            await asyncio.sleep(RETRY_SECONDS)
        for row in rows:
            if await self._put_as_told(row):
                journal.drop(row.id)
            else:
                journal.report(row)
                _tell(row.id)
        for group in _grouped(noted):
            last = await self._put_noted(group)
            journal.pass_by(group[0].subject, group[0].epoch, last)
            if last < group[-1].last:
                journal.report_noted(group[0].subject, group[0].epoch)
                _tell(group[0].subject)

    async def _settle(self, left: LeftJournal) -> None:
        for row in await asyncio.to_thread(lambda: left.rows):
            if not row.subject.startswith(f"{self._names.prefix}.ev."):
                continue
            if await self._put(row):
                await asyncio.to_thread(left.drop, row.id)
            else:
                await asyncio.to_thread(left.report, row)
                _tell(row.id)
        for group in _grouped(await asyncio.to_thread(lambda: left.noted)):
            if not group[0].subject.startswith(f"{self._names.prefix}.ev."):
                continue
            last = await self._put_noted(group)
            await asyncio.to_thread(left.pass_by, group[0].subject, group[0].epoch, last)
            if last < group[-1].last:
                await asyncio.to_thread(left.report_noted, group[0].subject, group[0].epoch)
                _tell(group[0].subject)

    async def _put_as_told(self, row: JournalRow) -> bool:
        """Whether all of it is in its place. Whoever asked in it was told that it was not accepted, and what it starts
        was not sent: of what is not stored by now, that part is not."""
        told = _without_beginnings(row)
        if told is row:
            return await self._put(row)
        if not await self._is_last(row) and told is not None:
            await self._put(told)
        return await self._is_last(row)

    async def _is_last(self, row: JournalRow) -> bool:
        while True:
            try:
                last = await self._nats.last(self._names.events, row.subject)
            except Unreachable:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            return last is not None and last.headers.get(ID) == row.id

    async def _put_noted(self, noted: Sequence[JournalEntry]) -> int:
        """What one owner has noted of one session: the last event of it that is in its place."""
        stored = noted[0].first - 1
        while waiting := [one for one in noted if one.first > stored]:
            place = await self._last_place(waiting[0].subject)
            if place is not None and place.epoch == waiting[0].epoch and place.last > stored:
                stored = place.last  # By a message whose answer did not come.
                continue
            if place is None or place.epoch != waiting[0].epoch or place.last != waiting[0].first - 1:
                break
            row, last = _packed(waiting, place)
            if not await self._put(row):
                break
            stored = last
        return stored

    async def _last_place(self, subject: str) -> MessagePlace | None:
        while True:
            try:
                last = await self._nats.last(self._names.events, subject)
            except Unreachable:
                await asyncio.sleep(RETRY_SECONDS)
                continue
            # Behind what is none of ours nothing finds its place.
            with suppress(StoreDamaged):
                return None if last is None else message_codec.place_of(last)
            return None

    async def _put(self, row: JournalRow) -> bool:
        """Whether it is in its place."""
        body, headers = row.body, {message_codec.HEADER: row.header}
        while True:
            try:
                if message_codec.place(0, row.header).blob_name is not None:
                    await self._streams.ensure(self._names.blobs)
                    await self._nats.put_blob(self._names.blobs, row.id, row.body)
                    body = b""
                await self._nats.publish(row.subject, body, expected=row.expected, id=row.id, headers=headers)
                return True
            except WrongLastSequence:
                try:
                    last = await self._nats.last(self._names.events, row.subject)
                except Unreachable:
                    await asyncio.sleep(RETRY_SECONDS)
                    continue
                if last is not None and last.seq == row.expected:
                    await asyncio.sleep(RETRY_SECONDS)  # A leader that has just been chosen.
                    continue
                return last is not None and last.headers.get(ID) == row.id
            except Unreachable:
                await asyncio.sleep(RETRY_SECONDS)
            except StoreError:
                return False


def _grouped(noted: Iterable[JournalEntry]) -> list[list[JournalEntry]]:
    """By session and owner, each in its order."""
    return [list(group) for _, group in itertools.groupby(noted, lambda one: (one.subject, one.epoch))]


def _without_beginnings(row: JournalRow) -> JournalRow | None:
    """What of it comes before the first ask and the first start of a turn; the row itself, if it has none."""
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
    # A snapshot is of all that was appended. And what was too large may still be: it is for the report.
    if not held or body.snapshot is not None or place.blob_name is not None:
        return None
    header = message_codec.header(
        epoch=place.epoch, first=place.first, held=held, snapshot=place.snapshot, at=parts[-1].at, blob=place.blob
    )
    return row._replace(id=f"{row.id}.told", header=header, body=message_codec.encode(MessageBody(parts)))


def _packed(waiting: Sequence[JournalEntry], before: MessagePlace) -> tuple[JournalRow, int]:
    """As much of it as one message holds, behind the one before it; and its last event."""
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


def _tell(what: str) -> None:
    log.warning("! %s: what its owner said last was not taken any more, and is kept as a report", what)
