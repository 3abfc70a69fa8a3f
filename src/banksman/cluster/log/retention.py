"""What is forgotten of a session, oldest first: whole messages, and nothing that its last snapshot does not hold.

The record says where what is kept begins, before anything is purged: whoever reads meanwhile is told a gap and not
surprised by one. The message with the last snapshot stays, even where its events are forgotten.
"""

from __future__ import annotations

from collections import deque

import msgspec

from banksman.cluster.log.event_reader import Reading
from banksman.cluster.log.message_codec import NO_BLOB, MessagePlace
from banksman.cluster.log.session_ownership import Owning
from banksman.cluster.log.session_record import SessionRecord, SessionRecords
from banksman.cluster.log.stream_heads import Heads
from banksman.cluster.nats import Nats
from banksman.errors import StoreDamaged

# What a message weighs besides its body.
MESSAGE_BYTES = 256
# Not for every message: a purge is a commit of its own.
SLACK = 1.25


class ClusterRetention:
    """How much is kept of each session that is ours, as far as we have written it."""

    def __init__(self, bytes_max: int | None) -> None:
        self._bytes_max = bytes_max
        self._weights: dict[str, deque[tuple[int, int]]] = {}
        self._totals: dict[str, int] = {}

    def weigh(self, session: str, place: MessagePlace, size: int) -> int | None:
        """After a message was stored: before which event all may be forgotten; None: nothing."""
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


class Trimming:
    """Forgets what need not be kept."""

    def __init__(self, nats: Nats, owning: Owning, reading: Reading, heads: Heads, records: SessionRecords) -> None:
        self._nats = nats
        self._owning = owning
        self._reading = reading
        self._heads = heads
        self._records = records

    async def trim(self, session: str, before: int) -> None:
        """Forget what is before an event, as far as a message's border and the last snapshot allow."""
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
        # The message with that event stays, and all behind it.
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

        await self._owning.update(session, forget)
        border = min(dropped + 1, place.snapshot)
        await self.forget_blobs(session, border)
        await self._owning.purge(session, border)

    async def forget_blobs(self, session: str, before: int | None) -> None:
        """Those of the messages that are about to be purged; None: of all. Who dies over it leaves some behind, which
        cost room and nothing else."""
        try:
            place = await self._heads.look_closer(session)
        except StoreDamaged:
            # What is last is none of ours, and does not say whether there are any: so they are looked for.
            last = await self._reading.last_seq()
        else:
            if place is None or place.blob == NO_BLOB:
                return
            last = place.seq
        end = last if before is None else before - 1
        async for name in self._reading.blobs(session, end):
            await self._nats.delete_blob(self._reading.bucket, name)
