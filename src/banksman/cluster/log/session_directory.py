"""Reads across sessions: the cached list of sessions, and their events merged in stored order.

`SessionDirectory` answers from local mirrors, without waiting. `MultiReader` reads the events of
many sessions from the servers, and waits for new ones.
"""

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
from banksman.store.log_values import (
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
# The interval of reads by a waiter that gets no notification.
LOOK_SECONDS = 2.0
# Messages without a wanted event that are searched before an empty page is returned, so that other
# tasks get their turn.
LOOKED_MAX = 4096
# How many foreign messages are logged. More of them would tell the operator nothing new.
DAMAGED_MAX = 100


class SessionDirectory:
    """The list of sessions, from local mirrors, for callers that do not wait.

    This host knows its own sessions first-hand. For other sessions the record names the owner, and
    notifications give the last place.

    `owned_epoch_of`: returns this host's ownership of a session, or None.
    """

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
        """Invalidate the sorted list: a record has changed."""
        self._sorted = None

    def record(self, session: str) -> SessionRecord | None:
        """Return the record of a visible session."""
        record = self._records.all.get(session)
        return None if record is None or record.is_hidden else record

    def head(self, session: str) -> Head:
        record = self.record(session)
        return Head(0, 0, 1) if record is None else self._head(record, self._heads.place(session))

    def _head(self, record: SessionRecord, place: MessagePlace | None) -> Head:
        if place is not None and place.epoch < record.born:
            place = None  # It belongs to a deleted session of this id.
        seq = 0 if place is None else place.last
        owned_epoch = self._owned_epoch_of(record.id)
        if owned_epoch is not None:
            # The notification of an append may arrive before its ack.
            return Head(owned_epoch.epoch, max(owned_epoch.seq, seq), record.first)
        return Head(
            max(record.epoch, 0 if place is None else place.epoch),
            max(record.seq, seq),
            record.first,
        )

    def find(self, id_or_name: str) -> KnownSession | None:
        record = self.record(id_or_name) or self.record(self._records.named.get(id_or_name, ""))
        return None if record is None else self._known(record)

    def sessions(self, after: str | None, limit: int | None) -> list[KnownSession]:
        if self._sorted is None:
            shown = (record for record in self._records.all.values() if not record.is_hidden)
            self._sorted = sorted(shown, key=lambda record: (record.created, record.id))
        begin = 0
        if after is not None:
            begin = next(
                (index for index, one in enumerate(self._sorted, 1) if one.id == after),
                len(self._sorted),
            )
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


# Reads of many sessions, in the order in which the servers stored their messages.
#
# A position is a message of the stream and the number of its events that were read. Claim marks are
# messages without events, and a reader skips them.


# A leader lags for this long at most. By then it has caught up, or knows its successor.
BEHIND_SECONDS_MAX, BEHIND_SECONDS_BETWEEN = 4.0, 0.25


class MultiReader:
    """Read the events of many sessions in stored order."""

    def __init__(
        self,
        reading: EventReader,
        records: SessionRecords,
        heads: StreamHeads,
        waiting: AppendWaiters,
    ) -> None:
        self._reading = reading
        self._records = records
        self._heads = heads
        self._waiting = waiting
        self._newest = 0
        self._damaged: set[int] = set()

    async def read(
        self,
        after: str | None,
        limit: int,
        sessions: Collection[str] | None,
        project_of: ProjectOf | None,
    ) -> MultiSessionPage:
        """Return the events after a position, and the gaps that retention left."""
        position = Position.of(after)
        end = await self._check(position)
        wanted = None if sessions is None else frozenset(sessions)
        dropped = [
            one
            for one in self._records.all.values()
            if one.dropped > position.whole and not one.is_hidden
        ]
        gaps = {one.id: one.first - 1 for one in dropped if wanted is None or one.id in wanted}
        if wanted is not None and not wanted:
            # An empty selection asks for the end, to follow from there.
            return MultiSessionPage(
                (), Position(max(end, await self._reading.last_seq())).text, gaps
            )
        placed: list[PositionedEvent] = []
        begin, looked = max(1, position.whole + 1), 0
        at = position
        while begin <= end and len(placed) < limit and looked < LOOKED_MAX:
            messages = await self._reading.page_as_led(begin, PAGE_MESSAGES)
            if not messages:
                break  # The rest up to the end was deleted.
            for message in messages:
                record = self._shown(message, wanted)
                skipped = position.taken if message.seq == position.chunk else 0
                if record is not None:
                    placed += await self._opened(
                        message, record, skipped, limit - len(placed), project_of
                    )
                    if len(placed) >= limit:
                        return MultiSessionPage(placed, placed[-1].position, gaps)
                at = Position(message.seq)
                begin = message.seq + 1
            looked += len(messages)
        # Return the searched position even without an event: `wait_past` on an older one would
        # return immediately for messages that this reader does not want.
        return MultiSessionPage(placed, at.text, gaps)

    def _shown(self, message: StreamMessage, wanted: frozenset[str] | None) -> SessionRecord | None:
        """Return the record of the message's session if that session is wanted and visible."""
        id = self._records.id_of(message.subject.rpartition(".")[2])
        record = (
            None
            if id is None or (wanted is not None and id not in wanted)
            else self._records.all.get(id)
        )
        return None if record is None or record.is_hidden else record

    async def _opened(
        self,
        message: StreamMessage,
        record: SessionRecord,
        skipped: int,
        limit: int,
        project_of: ProjectOf | None,
    ) -> list[PositionedEvent]:
        place = self._place(message)
        if (
            place is None
            or not place.held
            or place.epoch < record.born
            or place.last < record.first
        ):
            return []
        try:
            stored = await self._reading.opened(message)
        except StoreDamaged as exc:
            now = self._records.all.get(record.id)
            # Otherwise it was just deleted or trimmed.
            if now is not None and now.born == record.born and now.first <= place.last:
                self._tell(message, exc)
            return []
        project = None if project_of is None else project_of(record.id)
        events: list[Event] = message_codec.events(
            record.id, place.epoch, place.first, stored.body, project
        )
        return [
            PositionedEvent(Position(place.seq, 0 if count == len(events) else count).text, event)
            for count, event in enumerate(events[skipped : skipped + limit], skipped + 1)
        ]

    def _place(self, message: StreamMessage) -> MessagePlace | None:
        """Return the place of a message; None if it is foreign.

        A reader of that session gets the error. Here it must not stop the other sessions.
        """
        try:
            return message_codec.place_of(message)
        except StoreDamaged as exc:
            self._tell(message, exc)
            return None

    def _tell(self, message: StreamMessage, exc: StoreDamaged) -> None:
        """Log an unreadable message once, although every read passes it."""
        if message.seq not in self._damaged and len(self._damaged) < DAMAGED_MAX:
            self._damaged.add(message.seq)
            log.warning("unreadable message skipped: %s", exc)

    async def _check(self, position: Position) -> int:
        """Return the sequence up to which events exist.

        Raises `HistoryLost` if the position lies beyond the end of the store. One read is not
        enough for that. A newly elected leader may lag behind what another host has already shown,
        and so may a frozen leader that does not know its successor.
        """
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
        """Wait until an event is stored behind the position."""
        place = Position.of(position)
        await self._check(place)
        await self._heads.hear_all()
        while True:
            waiting = asyncio.ensure_future(self._waiting.past_all(place.whole))
            try:
                # The waiter is registered from here on, so nothing falls between it and the read
                # below.
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
        """Return whether a message with events is stored behind this sequence."""
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
