"""Read events of one or many sessions from any replica, with a cache of the newest messages.

`EventReader` finds, reads and decodes messages, and fetches their blobs. `RecentMessages` is the
cache. `session_directory.py` builds the pages of many sessions with it.
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
# The assumed overhead of a message, beside its body.
MESSAGE_BYTES = 512

PAGE_MESSAGES = 64
# Messages in the first read of a page: full ones would fill the page. Messages beyond the page are
# read again for the next one, so the first read stays small. If they hold fewer events, the next
# read is sized by what they held.
FIRST_MESSAGES = 6
# A replica lags by milliseconds. One that lags for longer than all these reads counts as absent.
LAG_SECONDS = 0.01
LAG_LOOKS_MAX = 200


class _Piece:
    """The cached messages of one session, consecutive and up to the newest."""

    def __init__(self) -> None:
        self.messages: deque[tuple[MessagePlace, MessageBody, int]] = deque()
        self.size = 0


class RecentMessages:
    """Cache of the newest messages of the sessions that are read or written here.

    Per session the cache is consecutive up to the newest message. A reader behind it reads from the
    servers. So all followers of a session on one host cost the servers one read together, and
    followers on the owner's host cost none.
    """

    def __init__(self) -> None:
        self._pieces: OrderedDict[str, _Piece] = OrderedDict()
        self._size = 0

    def keep(self, session: str, place: MessagePlace, body: MessageBody) -> None:
        """Add a stored message with events.

        A message that does not follow the cached ones restarts the cache of its session. A message
        older than the newest is ignored.
        """
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

    def newest(self, session: str) -> MessagePlace | None:
        """Return the place of the newest cached message."""
        piece = self._pieces.get(session)
        return piece.messages[-1][0] if piece is not None and piece.messages else None

    def events(self, session: str, seq: int, limit: int, project: Project | None) -> list[Event]:
        """Return up to `limit` events from `seq` on; empty if `seq` is not cached."""
        piece = self._pieces.get(session)
        if piece is None or not piece.messages or seq < piece.messages[0][0].first:
            return []
        # From the end: a follower wants the newest message, and there may be hundreds before it.
        wanted: list[tuple[MessagePlace, MessageBody]] = []
        for place, body, _ in reversed(piece.messages):
            if place.last < seq:
                break
            wanted.append((place, body))
        made: list[Event] = []
        for place, body in reversed(wanted):
            page = message_codec.events(session, place.epoch, place.first, body, project)
            made += page[max(0, seq - place.first) :][: limit - len(made)]
            if len(made) >= limit:
                break
        return made


# Reads of events, from whichever replica answers.
#
# A message holds many events and knows their seqs, but the servers can only search by stream
# sequence. The message of an event is found by bisection (a probe takes a millisecond), unless an
# earlier read noted its place.

# How many sessions have noted places, and how many places each may have.
SESSIONS_MAX, ANCHORS_MAX = 1024, 512


class StoredMessages(NamedTuple):
    """A stored message with its place and its decoded body."""

    subject: str
    place: MessagePlace
    body: MessageBody


class EventReader:
    """Read events of sessions from the servers."""

    def __init__(self, nats: Nats, streams: NatsStreams) -> None:
        self._nats = nats
        self._streams = streams
        self._names = streams.names
        self._all = f"{streams.names.prefix}.ev.*"
        # By session: seqs of first events and the sequences of their messages, both ascending.
        self._anchors: OrderedDict[str, tuple[list[int], list[int]]] = OrderedDict()
        self.recent = RecentMessages()
        self._gates: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    # -- places of events -------------------------------------------------------------------------
    def note(self, session: str, place: MessagePlace) -> None:
        """Note that a message with events starts at this place."""
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
        """Return a sequence at or before the message with this event, and close to it."""
        newest = self.recent.newest(session)
        if newest is not None and newest.last + 1 == seq and newest.seq < head.seq:
            # A follower: the next message of the session has the event.
            return newest.seq + 1
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
            found, _ = await self._nats.read(
                self._names.events, middle, self._names.event(session), 1
            )
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

    # -- one session ------------------------------------------------------------------------------
    async def read(
        self, session: str, seq: int, limit: int, head: MessagePlace, project: Project | None
    ) -> list[Event]:
        """Return up to `limit` events from `seq` on; `head` is the session's last message."""
        async with self._gates.setdefault(session, asyncio.Lock()):
            # One reader at a time per session: the first one fills the cache for all.
            made = self.recent.events(session, seq, limit, project)
            seq += len(made)
            if seq <= head.last and len(made) < limit:
                made += await self._read(session, seq, limit - len(made), head, project)
            return made

    async def _read(
        self, session: str, seq: int, limit: int, head: MessagePlace, project: Project | None
    ) -> list[Event]:
        made: list[Event] = []
        async for stored in self.messages(
            session, await self.find(session, seq, head), head.seq, limit
        ):
            self.recent.keep(session, stored.place, stored.body)
            if stored.place.last < seq:
                continue
            page = message_codec.events(
                session, stored.place.epoch, stored.place.first, stored.body, project
            )
            made += page[max(0, seq - stored.place.first) :][: limit - len(made)]
            if len(made) >= limit:
                break
        return made

    async def messages(
        self, session: str, begin: int, end: int, wanted: int | None = None
    ) -> AsyncGenerator[StoredMessages]:
        """Yield the session's kept messages between two sequences, both included.

        `wanted`: the number of events that the caller needs.
        """
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
            # The message at `end` exists unless it was purged, so this replica lags.
            looks += 1
            if looks > LAG_LOOKS_MAX:
                raise Unanswered("cannot read committed events: the replicas lag", session=session)
            await asyncio.sleep(LAG_SECONDS)
            if looks % 10 == 0 and not await self._is_there(subject, end):
                return

    @property
    def bucket(self) -> str:
        return self._names.blobs

    async def blobs(self, session: str, end: int) -> AsyncGenerator[str]:
        """Yield the blob names of the session's messages up to a sequence, without opening them."""
        begin, subject = 1, self._names.event(session)
        while begin <= end:
            found, left = await self._nats.read(self._names.events, begin, subject, PAGE_MESSAGES)
            for message in found:
                begin = message.seq + 1
                try:
                    name = message_codec.place_of(message).blob_name
                except StoreDamaged:
                    continue  # A foreign message names no blob.
                if message.seq <= end and name is not None:
                    yield name
            if not (found and left):
                return

    async def _is_there(self, subject: str, seq: int) -> bool:
        last = await self._nats.last(self._names.events, subject)
        return last is not None and last.seq >= seq

    # -- many sessions ----------------------------------------------------------------------------
    async def page(self, begin: int, count: int) -> tuple[list[StreamMessage], int]:
        """Read messages of all sessions from a sequence on, and the number behind them."""
        return await self._nats.read(self._names.events, begin, self._all, count)

    async def page_as_led(self, begin: int, count: int) -> list[StreamMessage]:
        """Do the same, and return empty only if the leader has no message: a replica may lag."""
        for _ in range(LAG_LOOKS_MAX):
            found, _ = await self.page(begin, count)
            if found or not await self._is_there(self._all, begin):
                return found
            await asyncio.sleep(LAG_SECONDS)
        raise Unanswered("cannot read committed events: the replicas lag")

    async def opened(self, message: StreamMessage) -> StoredMessages:
        """Decode a message, and fetch its blob if it has one."""
        place = message_codec.place_of(message)
        data: bytes | None = message.data
        if place.blob_name is not None:
            await self._streams.ensure(self._names.blobs)
            data = await self._nats.get_blob(self._names.blobs, place.blob_name)
            if data is None:
                raise StoreDamaged(
                    "a part of the history is missing from the object store",
                    hint="restore the object store from a backup",
                    blob=place.blob,
                )
        return StoredMessages(message.subject, place, message_codec.body_of(message, data))

    async def last_seq(self) -> int:
        """Return the last sequence of the event stream, from its leader."""
        info = await self._nats.api(f"STREAM.INFO.{self._names.events}", {})
        if "error" in info:
            raise Unanswered(
                f"cannot read the state of {self._names.events}: {info['error'].get('description')}"
            )
        return int(info["state"]["last_seq"])

    async def one(self, session: str, seq: int) -> StoredMessages | None:
        """Return the session's message with this sequence; None if it does not exist."""
        for looks in range(LAG_LOOKS_MAX):
            found, _ = await self._nats.read(self._names.events, seq, self._names.event(session), 1)
            if found:
                return await self.opened(found[0]) if found[0].seq == seq else None
            if looks % 10 == 9 and not await self._is_there(self._names.event(session), seq):
                return None
            await asyncio.sleep(LAG_SECONDS)
        raise Unanswered("cannot read committed events: the replicas lag", session=session)


def _page_messages(wanted: int | None, events: int, messages: int) -> int:
    """Return how many messages to read next, after `messages` that held `events`."""
    if wanted is None:
        return PAGE_MESSAGES
    if not messages:
        return min(FIRST_MESSAGES, max(2, wanted))
    missing = max(1, wanted - events) * messages // max(1, events)
    return min(PAGE_MESSAGES, missing + 2)
