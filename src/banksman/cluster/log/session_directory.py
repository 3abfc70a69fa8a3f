"""Reads across sessions: the cached list of sessions, and their events merged in stored order."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection

from banksman.cluster.jetstream import StreamMessage
from banksman.cluster.log import message_codec
from banksman.cluster.log.event_reader import EventReader
from banksman.cluster.log.message_codec import MessagePlace
from banksman.cluster.log.session_ownership import OwnedEpoch, SessionOwnership
from banksman.cluster.log.session_queues import AppendWaiters
from banksman.cluster.log.session_record import SessionRecord, SessionRecords
from banksman.cluster.log.stream_mirror import StreamHeads
from banksman.core.session.event import Event
from banksman.errors import StoreDamaged
from banksman.store.log import (
    Head,
    KnownSession,
    MultiSessionPage,
    Owner,
    Position,
    PositionedEvent,
    ProjectOf,
    history_lost,
)

log = logging.getLogger("banksman")
PAGE_MESSAGES = 256
# Between two looks, for who waits, that no bell has asked for.
LOOK_SECONDS = 2.0
# How many messages are looked through in vain before a page is given that holds nothing: others have their turn.
LOOKED_MAX = 4096
# So many that are none of ours are told of. Beyond, whoever puts them there has been told.
DAMAGED_MAX = 100


# The sessions of the store, as they were last heard of: for who looks and does not wait.
#
# Of what is ours we are the first to know; of the rest the record says who has it, and a bell where it is.


class SessionDirectory:
    """`tenancy_of`: how we have a session, if we do."""

    def __init__(
        self,
        records: SessionRecords,
        heads: StreamHeads,
        ownership: SessionOwnership,
        owned_epoch_of: Callable[[str], OwnedEpoch | None],
    ) -> None:
        self._records = records
        self._heads = heads
        self._ownership = ownership
        self._owned_epoch_of = owned_epoch_of
        self._sorted: list[SessionRecord] | None = None

    def on_change(self) -> None:
        """What is listed is not as it was."""
        self._sorted = None

    def record(self, session: str) -> SessionRecord | None:
        record = self._records.all.get(session)
        return None if record is None or record.is_hidden else record

    def head(self, session: str) -> Head:
        record = self.record(session)
        return Head(0, 0, 1) if record is None else self._head(record, self._heads.place(session))

    def _head(self, record: SessionRecord, place: MessagePlace | None) -> Head:
        if place is not None and place.epoch < record.born:
            place = None  # Of another session, which had this id.
        seq = 0 if place is None else place.last
        owned_epoch = self._owned_epoch_of(record.id)
        if owned_epoch is not None:
            # A bell may be quicker than the answer to who has rung it.
            return Head(owned_epoch.epoch, max(owned_epoch.seq, seq), record.first)
        return Head(max(record.epoch, 0 if place is None else place.epoch), max(record.seq, seq), record.first)

    def find(self, id_or_name: str) -> KnownSession | None:
        record = self.record(id_or_name) or self.record(self._records.named.get(id_or_name, ""))
        return None if record is None else self._known(record)

    def sessions(self, after: str | None, limit: int | None) -> list[KnownSession]:
        if self._sorted is None:
            shown = (record for record in self._records.all.values() if not record.is_hidden)
            self._sorted = sorted(shown, key=lambda record: (record.created, record.id))
        begin = 0
        if after is not None:
            begin = next((index for index, one in enumerate(self._sorted, 1) if one.id == after), len(self._sorted))
        end = None if limit is None else begin + limit
        return [self._known(record) for record in self._sorted[begin:end]]

    def owned(self) -> list[tuple[Owner | None, int]]:
        counts: dict[Owner | None, int] = {}
        for record in self._records.all.values():
            if not record.is_hidden:
                owner = self._ownership.owner(record)
                counts[owner] = counts.get(owner, 0) + 1
        return list(counts.items())

    def _known(self, record: SessionRecord) -> KnownSession:
        place = self._heads.known(record.id)
        head = self._head(record, place)
        return KnownSession(
            id=record.id,
            name=record.name,
            agent=record.agent,
            epoch=head.epoch,
            seq=head.seq,
            first=head.first,
            owner=self._ownership.owner(record),
            created=record.created,
            changed=record.changed if place is None or not place.last else place.at,
        )


# Reading many sessions, in the order in which the servers stored what they said.
#
# A position is a message of the stream and how many of its events are behind. Marks of claims are messages too, and
# hold no event: a reader passes them without a word.


# A leader is behind for so long, at most: then it has heard of the next one, or has caught up.
BEHIND_SECONDS_MAX, BEHIND_SECONDS_BETWEEN = 4.0, 0.25


class MultiReader:
    def __init__(
        self, reading: EventReader, records: SessionRecords, heads: StreamHeads, waiting: AppendWaiters
    ) -> None:
        self._reading = reading
        self._records = records
        self._heads = heads
        self._waiting = waiting
        self._newest = 0
        self._damaged: set[int] = set()

    async def read(
        self, after: str | None, limit: int, sessions: Collection[str] | None, project_of: ProjectOf | None
    ) -> MultiSessionPage:
        position = Position.of(after)
        end = await self._check(position)
        wanted = None if sessions is None else frozenset(sessions)
        dropped = [one for one in self._records.all.values() if one.dropped > position.whole and not one.is_hidden]
        gaps = {one.id: one.first - 1 for one in dropped if wanted is None or one.id in wanted}
        if wanted is not None and not wanted:
            # Who wants none of them wants to know where the end is, to follow from there.
            return MultiSessionPage((), Position(max(end, await self._reading.last_seq())).text, gaps)
        placed: list[PositionedEvent] = []
        begin, looked = max(1, position.whole + 1), 0
        at = position
        while begin <= end and len(placed) < limit and looked < LOOKED_MAX:
            messages = await self._reading.page_as_led(begin, PAGE_MESSAGES)
            if not messages:
                break  # What was there up to the end is deleted.
            for message in messages:
                record = self._shown(message, wanted)
                skipped = position.taken if message.seq == position.chunk else 0
                if record is not None:
                    placed += await self._opened(message, record, skipped, limit - len(placed), project_of)
                    if len(placed) >= limit:
                        return MultiSessionPage(placed, placed[-1].position, gaps)
                at = Position(message.seq)
                begin = message.seq + 1
            looked += len(messages)
        # All was looked through, and what is not wanted need not be again: a reader that waits past its position must
        # not be let through by it.
        return MultiSessionPage(placed, at.text, gaps)

    def _shown(self, message: StreamMessage, wanted: frozenset[str] | None) -> SessionRecord | None:
        """The session that it is of, if somebody wants it."""
        id = self._records.id_of(message.subject.rpartition(".")[2])
        record = None if id is None or (wanted is not None and id not in wanted) else self._records.all.get(id)
        return None if record is None or record.is_hidden else record

    async def _opened(
        self, message: StreamMessage, record: SessionRecord, skipped: int, limit: int, project_of: ProjectOf | None
    ) -> list[PositionedEvent]:
        place = self._place(message)
        if place is None or not place.held or place.epoch < record.born or place.last < record.first:
            return []
        try:
            stored = await self._reading.opened(message)
        except StoreDamaged as exc:
            now = self._records.all.get(record.id)
            if now is not None and now.born == record.born and now.first <= place.last:  # Else it was just deleted.
                self._tell(message, exc)
            return []
        project = None if project_of is None else project_of(record.id)
        events: list[Event] = message_codec.events(record.id, place.epoch, place.first, stored.body, project)
        return [
            PositionedEvent(Position(place.seq, 0 if count == len(events) else count).text, event)
            for count, event in enumerate(events[skipped : skipped + limit], skipped + 1)
        ]

    def _place(self, message: StreamMessage) -> MessagePlace | None:
        """None: it is none of ours. Its session says so to who reads it; here it must not stop the others."""
        try:
            return message_codec.place_of(message)
        except StoreDamaged as exc:
            self._tell(message, exc)
            return None

    def _tell(self, message: StreamMessage, exc: StoreDamaged) -> None:
        """Once of each: it is passed by with every read."""
        if message.seq not in self._damaged and len(self._damaged) < DAMAGED_MAX:
            self._damaged.add(message.seq)
            log.warning("! who reads all sessions passes by what cannot be read: %s", exc)

    async def _check(self, position: Position) -> int:
        """How far there is something to read. `HistoryLost` if the position is of a store that was longer: not by one
        look, for a leader that was just chosen, or that was frozen and does not know yet that it leads no more, is
        behind what another front end has told."""
        newest = max(self._newest, self._heads.newest)
        until = time.monotonic() + BEHIND_SECONDS_MAX
        if position.chunk >= newest:
            newest = max(newest, await self._reading.last_seq())
        while position.chunk > newest:
            if time.monotonic() > until:
                raise history_lost(position.text)
            await asyncio.sleep(BEHIND_SECONDS_BETWEEN)
            newest = max(newest, self._heads.newest, await self._reading.last_seq())
        self._newest = newest
        return newest

    async def wait_past(self, position: str) -> None:
        place = Position.of(position)
        await self._check(place)
        await self._heads.hear_all()
        while True:
            waiting = asyncio.ensure_future(self._waiting.past_all(place.whole))
            try:
                # It waits from here on, so nothing falls between this look and it.
                await asyncio.sleep(0)
                if await self._is_past(place.whole):
                    return
                done, _ = await asyncio.wait((waiting,), timeout=LOOK_SECONDS)
                if done:
                    waiting.result()
                    return
            finally:
                waiting.cancel()
                await asyncio.wait((waiting,))

    async def _is_past(self, whole: int) -> bool:
        """Whether a message with events is stored behind it."""
        begin = whole + 1
        while True:
            messages, left = await self._reading.page(begin, PAGE_MESSAGES)
            for message in messages:
                record = self._records.id_of(message.subject.rpartition(".")[2])
                place = self._place(message)
                if place is not None and place.held and record is not None:
                    return True
                begin = message.seq + 1
            if not (messages and left):
                return False
