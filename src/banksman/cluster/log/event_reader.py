"""The newest messages of the sessions that somebody follows or writes: what all who are woken by one bell want.

Of each session it is one piece without a hole, up to its newest; whoever is behind it reads from the servers. So a
session's followers at one host cost the servers one read together, and its owner's cost none.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator
from typing import NamedTuple
from weakref import WeakValueDictionary

from banksman.cluster.jetstream import StreamMessage
from banksman.cluster.log import message_codec
from banksman.cluster.log.message_codec import MessageBody, MessagePlace
from banksman.cluster.log.streams import NatsStreams
from banksman.cluster.nats import Nats
from banksman.core.session.event import Event, Project
from banksman.errors import StoreDamaged, Unanswered

SESSION_BYTES_MAX = 256 << 10
BYTES_MAX = 32 << 20
# What a message weighs besides its body.
MESSAGE_BYTES = 512

PAGE_MESSAGES = 64
# The first question for a page of events: full messages would fill it. What is read beyond a page is read again for the
# next one, so not more; where they are smaller, what is missing is asked for by what they hold.
FIRST_MESSAGES = 6
# A replica lags by milliseconds. One that lags for longer than these looks together is as good as none.
LAG_SECONDS = 0.01
LAG_LOOKS_MAX = 200


class _Piece:
    def __init__(self) -> None:
        self.messages: deque[tuple[MessagePlace, MessageBody, int]] = deque()
        self.size = 0


class RecentMessages:
    def __init__(self) -> None:
        self._pieces: OrderedDict[str, _Piece] = OrderedDict()
        self._size = 0

    def keep(self, session: str, place: MessagePlace, body: MessageBody) -> None:
        """A message with events that is stored. One that does not follow what is kept begins anew; one that is older
        than the newest changes nothing."""
        if not place.held:
            return
        piece = self._pieces.setdefault(session, _Piece())
        self._pieces.move_to_end(session)
        if piece.messages:
            newest = piece.messages[-1][0]
            if place.seq <= newest.seq:
                return
            if place.first != newest.last + 1:
                self._drop(piece, len(piece.messages))
        size = MESSAGE_BYTES + sum(len(data) for part in body.parts for _, _, data in part.entries)
        piece.messages.append((place, body, size))
        piece.size += size
        self._size += size
        while piece.size > SESSION_BYTES_MAX and len(piece.messages) > 1:
            self._drop(piece, 1)
        while self._size > BYTES_MAX and len(self._pieces) > 1:
            _, oldest = self._pieces.popitem(last=False)
            self._drop(oldest, len(oldest.messages))

    def _drop(self, piece: _Piece, count: int) -> None:
        for _ in range(count):
            _, _, size = piece.messages.popleft()
            piece.size -= size
            self._size -= size

    def forget(self, session: str) -> None:
        piece = self._pieces.pop(session, None)
        if piece is not None:
            self._drop(piece, len(piece.messages))

    def events(self, session: str, seq: int, limit: int, project: Project | None) -> list[Event]:
        """From this one on, at most so many; none if it is not kept."""
        piece = self._pieces.get(session)
        if piece is None or not piece.messages or seq < piece.messages[0][0].first:
            return []
        made: list[Event] = []
        for place, body, _ in piece.messages:
            if place.last >= seq:
                page = message_codec.events(session, place.epoch, place.first, body, project)
                made += page[max(0, seq - place.first) :][: limit - len(made)]
                if len(made) >= limit:
                    break
        return made


# Reading a session's events, and those of many, from whichever replica answers.
#
# A message holds many events, and knows its place among them; a sequence of the stream is all that one can ask for.
# Where a session's event lies is found by halves (a look is a millisecond), unless it was read before: then it is
# known.

# Of so many sessions it is remembered where some of their events lie, and of each so many.
SESSIONS_MAX, ANCHORS_MAX = 1024, 512


class StoredMessages(NamedTuple):
    subject: str
    place: MessagePlace
    body: MessageBody


class EventReader:
    def __init__(self, nats: Nats, streams: NatsStreams) -> None:
        self._nats = nats
        self._streams = streams
        self._names = streams.names
        self._all = f"{streams.names.prefix}.ev.*"
        # For each session, first seqs and the sequences of their messages, both rising.
        self._anchors: OrderedDict[str, tuple[list[int], list[int]]] = OrderedDict()
        self.recent = RecentMessages()
        self._gates: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- where it is -------------------------------------------------------------------------------------------------
    def note(self, session: str, place: MessagePlace) -> None:
        """A message with events begins there."""
        if not place.held:
            return
        firsts, seqs = self._anchors.setdefault(session, ([], []))
        self._anchors.move_to_end(session)
        index = bisect_right(firsts, place.first)
        if index and firsts[index - 1] == place.first:
            return
        firsts.insert(index, place.first)
        seqs.insert(index, place.seq)
        if len(firsts) > ANCHORS_MAX:
            del firsts[::2], seqs[::2]
        if len(self._anchors) > SESSIONS_MAX:
            self._anchors.popitem(last=False)

    def forget(self, session: str) -> None:
        self._anchors.pop(session, None)
        self.recent.forget(session)

    async def find(self, session: str, seq: int, head: MessagePlace) -> int:
        """The sequence of the message with this event, or of one before it that has none behind."""
        firsts, seqs = self._anchors.get(session, ([], []))
        index = bisect_right(firsts, seq)
        low = seqs[index - 1] if index else 1
        if index and index < len(firsts) and firsts[index] == seq:
            return seqs[index]
        if (index and firsts[index - 1] == seq) or (not index and seq == 1):
            return low
        high = seqs[index] if index < len(seqs) else head.seq
        while high - low > 1:
            middle = (low + high) // 2
            found, _ = await self._nats.read(self._names.events, middle, self._names.event(session), 1)
            if not found or found[0].seq >= high:
                high = middle
                continue
            place = message_codec.place_of(found[0])
            self.note(session, place)
            if place.last < seq:
                low = place.seq
            elif place.first > seq:
                high = middle
            else:
                return place.seq
        return low

    # -- one session -------------------------------------------------------------------------------------------------
    async def read(
        self, session: str, seq: int, limit: int, head: MessagePlace, project: Project | None
    ) -> list[Event]:
        """The events from `seq` on, at most `limit`; all that are kept of them are behind `head`."""
        async with self._gates.setdefault(session, asyncio.Lock()):
            # Whoever came first may have read them for all.
            made = self.recent.events(session, seq, limit, project)
            seq += len(made)
            if seq <= head.last and len(made) < limit:
                made += await self._read(session, seq, limit - len(made), head, project)
            return made

    async def _read(
        self, session: str, seq: int, limit: int, head: MessagePlace, project: Project | None
    ) -> list[Event]:
        made: list[Event] = []
        async for stored in self.messages(session, await self.find(session, seq, head), head.seq, limit):
            self.recent.keep(session, stored.place, stored.body)
            if stored.place.last < seq:
                continue
            page = message_codec.events(session, stored.place.epoch, stored.place.first, stored.body, project)
            made += page[max(0, seq - stored.place.first) :][: limit - len(made)]
            if len(made) >= limit:
                break
        return made

    async def messages(
        self, session: str, begin: int, end: int, wanted: int | None = None
    ) -> AsyncGenerator[StoredMessages]:
        """The session's messages from one sequence to another, both included, those that are kept. `wanted`: so many
        events are enough."""
        subject = self._names.event(session)
        looks = events = messages = 0
        while begin <= end:
            count = _page_messages(wanted, events, messages)
            found, left = await self._nats.read(self._names.events, begin, subject, count)
            for message in found:
                if message.seq > end:
                    return
                stored = await self.opened(message)
                self.note(session, stored.place)
                events += stored.place.held
                messages += 1
                yield stored
                begin = message.seq + 1
            if found or left:
                continue
            # The last one is known to be there, unless it was purged: this replica lags.
            looks += 1
            if looks > LAG_LOOKS_MAX:
                raise Unanswered("the replicas lag behind what was committed", session=session)
            await asyncio.sleep(LAG_SECONDS)
            if looks % 10 == 0 and not await self._is_there(subject, end):
                return

    @property
    def bucket(self) -> str:
        return self._names.blobs

    async def blobs(self, session: str, end: int) -> AsyncGenerator[str]:
        """The names of those that the session's messages up to a sequence have, without opening them."""
        begin, subject = 1, self._names.event(session)
        while begin <= end:
            found, left = await self._nats.read(self._names.events, begin, subject, PAGE_MESSAGES)
            for message in found:
                begin = message.seq + 1
                try:
                    name = message_codec.place_of(message).blob_name
                except StoreDamaged:
                    continue  # It is not ours, and so has none.
                if message.seq <= end and name is not None:
                    yield name
            if not (found and left):
                return

    async def _is_there(self, subject: str, seq: int) -> bool:
        last = await self._nats.last(self._names.events, subject)
        return last is not None and last.seq >= seq

    # -- many --------------------------------------------------------------------------------------------------------
    async def page(self, begin: int, count: int) -> tuple[list[StreamMessage], int]:
        """Messages of all sessions from a sequence on, not opened, and how many are behind them."""
        return await self._nats.read(self._names.events, begin, self._all, count)

    async def page_as_led(self, begin: int, count: int) -> list[StreamMessage]:
        """The same, and empty only if the leader has none: a replica may lag."""
        for _ in range(LAG_LOOKS_MAX):
            found, _ = await self.page(begin, count)
            if found or not await self._is_there(self._all, begin):
                return found
            await asyncio.sleep(LAG_SECONDS)
        raise Unanswered("the replicas lag behind what was committed")

    async def opened(self, message: StreamMessage) -> StoredMessages:
        place = message_codec.place_of(message)
        data: bytes | None = message.data
        if place.blob_name is not None:
            await self._streams.ensure(self._names.blobs)
            data = await self._nats.get_blob(self._names.blobs, place.blob_name)
            if data is None:
                raise StoreDamaged(
                    "a part of the history is not there", hint="is the object store whole?", blob=place.blob
                )
        return StoredMessages(message.subject, place, message_codec.body_of(message, data))

    async def last_seq(self) -> int:
        """Of the whole stream, as its leader has it."""
        info = await self._nats.api(f"STREAM.INFO.{self._names.events}", {})
        if "error" in info:
            raise Unanswered(f"{self._names.events} cannot be asked: {info['error'].get('description')}")
        return int(info["state"]["last_seq"])

    async def one(self, session: str, seq: int) -> StoredMessages | None:
        """The session's message with this sequence."""
        for looks in range(LAG_LOOKS_MAX):
            found, _ = await self._nats.read(self._names.events, seq, self._names.event(session), 1)
            if found:
                return await self.opened(found[0]) if found[0].seq == seq else None
            if looks % 10 == 9 and not await self._is_there(self._names.event(session), seq):
                return None
            await asyncio.sleep(LAG_SECONDS)
        raise Unanswered("the replicas lag behind what was committed", session=session)


def _page_messages(wanted: int | None, events: int, messages: int) -> int:
    """How many to ask for, after so many that held so much."""
    if wanted is None:
        return PAGE_MESSAGES
    if not messages:
        return min(FIRST_MESSAGES, max(2, wanted))
    missing = max(1, wanted - events) * messages // max(1, events)
    return min(PAGE_MESSAGES, missing + 2)
