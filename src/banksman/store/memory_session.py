"""One session in the log in memory: its chunks, what is committed of them, what is kept, and who waits for more.

A chunk lies in the list from the moment it is accepted, but readers see no further than `seq`, the committed head.
Between `seq` and `tail` lies what is accepted and not yet committed. The entries are kept as they came, one tuple, and
become events only when somebody reads them.

Chunks are numbered through the whole log, in the order in which they were accepted, which is that of their commits. A
place in that order is a chunk's number and how many of its events are behind one.

In-memory index of a session's turns: the seq of each turn's first event, and of the event that ended it.

Without an index, finding a turn means reading the log from its first event. An index follows one log in order: `seen`
is the seq of the last event that it has taken in. An engine that sees every commit feeds it directly (`memory.py`). An
engine that does not keeps `TurnIndexes`, which read the events behind `seen` before each lookup: every event is read
for this purpose once per process, however many lookups there are.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import Generic, NamedTuple, TypeVar

from banksman.core.session.event import TURN_ENDED, TURN_QUEUED, TURN_STARTED, Entry, Event, Project
from banksman.errors import StoreError, UsageError
from banksman.store.log import (
    Head,
    KnownSession,
    Owner,
    Page,
    PositionedEvent,
    ProjectOf,
    Snapshot,
    TurnPlace,
    history_lost,
)

# The kinds by which a turn begins and ends. A turn that the agent opens by itself is never queued.
_MARKS = frozenset((TURN_QUEUED, TURN_STARTED, TURN_ENDED))
# How much a process remembers of logs that it does not feed: so many turns, about 200 bytes each, of so many sessions.
# Beyond that the index of the session that was asked for least recently is dropped and read again when it is needed.
TURNS_MAX = 100_000
SESSIONS_MAX = 1_000

# A turn's id, the seq of the event, and whether the event ended it.
Mark = tuple[str, int, bool]

# What an entry and a chunk weigh besides their data: the tuple (64) and the head of the bytes (33), rounded up as the
# allocator does, and a place in the chunk; the chunk with its numbers, and two places in the list, since what is
# dropped may leave as many empty ones. Without them, empty entries would fill the memory and never the bound. The turn
# and the kind weigh nothing: one string serves all entries of a turn.
ENTRY_BYTES = 128
CHUNK_BYTES = 352


def marks_of(first: int, entries: Iterable[Entry]) -> list[Mark]:
    """The entries that begin or end a turn; `first` is the seq of the first entry."""
    return [
        (turn, seq, kind == TURN_ENDED)
        for seq, (turn, kind, _) in enumerate(entries, first)
        if kind in _MARKS and turn is not None
    ]


class TurnIndex:
    """The turns of one session, as far as its log was read."""

    __slots__ = ("_ended", "_open", "seen")

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen
        self._open: dict[str, int] = {}
        # In the order of their ends, so that retention removes them from the front.
        self._ended: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    def add(self, first: int, entries: Sequence[Entry]) -> None:
        """The next events of the log. A gap before them is what retention took."""
        assert first > self.seen, "events were added twice"
        for turn, seq, is_end in marks_of(first, entries):
            if is_end:
                self._ended[turn] = self._open.pop(turn, seq), seq
            elif turn not in self._ended:
                self._open.setdefault(turn, seq)
        self.seen = first + len(entries) - 1

    def drop_before(self, first: int) -> None:
        """Forget the turns that ended before the first event that is kept."""
        while self._ended:
            turn = next(iter(self._ended))
            if self._ended[turn][1] >= first:
                return
            del self._ended[turn]

    def find(self, turn: str) -> TurnPlace | None:
        if (found := self._ended.get(turn)) is not None:
            return TurnPlace(found[0], found[1], self.seen)
        if (first := self._open.get(turn)) is not None:
            return TurnPlace(first, None, self.seen)
        return None


class TurnIndexes:
    """Indexes of several logs, each brought up to date by reading before a lookup."""

    def __init__(self, read: Callable[[str, int], Awaitable[Page]]) -> None:
        """`read`: the page of a session's events after a seq."""
        self._read = read
        # With the identity of the session: an id may be deleted and made again.
        self._indexes: OrderedDict[tuple[str, int], tuple[TurnIndex, asyncio.Lock]] = OrderedDict()

    async def find(self, session: str, turn: str, *, identity: int, first: int) -> TurnPlace | None:
        """`first`: the first event that is kept."""
        index, lock = self._indexes.setdefault((session, identity), (TurnIndex(), asyncio.Lock()))
        self._indexes.move_to_end((session, identity))
        # Callers that come together read the log once: those who wait find it read.
        async with lock:
            while (page := await self._read(session, index.seen)).events:
                index.add(page.events[0].seq, [(event.turn, event.kind, b"") for event in page.events])
            index.drop_before(first)
        self._drop_oldest()
        return index.find(turn)

    def _drop_oldest(self) -> None:
        # Counted anew each time: an index may be dropped while somebody still fills it.
        turns = sum(len(index) for index, _ in self._indexes.values())
        while len(self._indexes) > 1 and (turns > TURNS_MAX or len(self._indexes) > SESSIONS_MAX):
            turns -= len(self._indexes.popitem(last=False)[1][0])


# A chunk's number, and how many of its events are behind it. Before the first chunk: 0 and 0.
Place = tuple[int, int]
BEGINNING: Place = (0, 0)
Point = TypeVar("Point", int, Place)


class StoredChunk(NamedTuple):
    """A chunk, as it is kept."""

    number: int
    first: int
    epoch: int
    at: float
    entries: tuple[Entry, ...]
    weight: int

    @property
    def last(self) -> int:
        return self.first + len(self.entries) - 1


# Stands where a chunk was, until the list is shortened.
_DROPPED = StoredChunk(0, 0, 0, 0.0, (), 0)
_first = attrgetter("first")
_number = attrgetter("number")
_data = itemgetter(2)


class PointWaiters(Generic[Point]):
    """Tasks that wait until the log has passed a point. Each has the point it waits past."""

    def __init__(self) -> None:
        # A future's result is the error to raise, so that none is lost when its task was cancelled meanwhile.
        self._points: dict[asyncio.Future[StoreError | None], Point] = {}

    def __len__(self) -> int:
        return len(self._points)

    async def past(self, point: Point) -> None:
        future: asyncio.Future[StoreError | None] = asyncio.get_running_loop().create_future()
        self._points[future] = point
        try:
            error = await future
        finally:
            self._points.pop(future, None)
        if error is not None:
            raise error

    def reach(self, end: Point) -> None:
        for future, point in self._points.items():
            if point < end and not future.done():
                future.set_result(None)

    def fail(self, error: StoreError) -> None:
        for future in self._points:
            if not future.done():
                future.set_result(error)


class MemorySession:
    """`chunks` are oldest first, and `chunks[:dropped]` are gone; `seq` and `tail` are where chunks end."""

    __slots__ = (
        "_next_snapshot",
        "agent",
        "changed",
        "chunks",
        "created",
        "dropped",
        "epoch",
        "failed",
        "id",
        "is_owned",
        "last_dropped",
        "lease",
        "name",
        "seq",
        "snapshot",
        "tail",
        "turns",
        "weight",
    )

    def __init__(self, id: str, *, name: str | None, agent: str, epoch: int, at: float) -> None:
        self.id = id
        self.name = name
        self.agent = agent
        self.created = self.changed = at
        self.epoch = epoch
        self.is_owned = False
        self.lease: str | None = None
        self.seq = 0
        self.tail = 0
        # Of what is committed.
        self.turns = TurnIndex()
        self.chunks: list[StoredChunk] = []
        self.dropped = 0
        # Where the last chunk that is gone had ended.
        self.last_dropped = BEGINNING
        self.weight = 0
        self.snapshot: Snapshot | None = None
        # Accepted and not yet committed.
        self._next_snapshot: Snapshot | None = None
        # The first failure under this epoch of which the writer has not been told.
        self.failed: object | None = None

    @property
    def first(self) -> int:
        return self.chunks[self.dropped].first if self.chunks else self.seq + 1

    @property
    def end(self) -> Place:
        """Behind its last chunk."""
        return (self.chunks[-1].number, len(self.chunks[-1].entries)) if self.chunks else BEGINNING

    @property
    def epoch_past(self) -> int:
        """The highest epoch that anybody may believe to have. An owner that is fenced off does not know it yet, and may
        advance: what it says until it is told is under the epoch behind its own, which must be nobody's."""
        return self.epoch + 1 if self.is_owned else self.epoch

    @property
    def head(self) -> Head:
        return Head(self.epoch, self.seq, self.first)

    def known(self, owner: Owner) -> KnownSession:
        """As a listing shows it; `owner` is whoever has what is owned here."""
        return KnownSession(
            id=self.id,
            name=self.name,
            agent=self.agent,
            epoch=self.epoch,
            seq=self.seq,
            first=self.first,
            owner=owner if self.is_owned else None,
            created=self.created,
            changed=self.changed,
        )

    # -- writing -----------------------------------------------------------------------------------------------------
    def accept(self, number: int, at: float, entries: Sequence[Entry]) -> None:
        """The entries will be the events after `tail`."""
        kept = tuple(entries)  # The caller may go on using its list.
        weight = sum(map(len, map(_data, kept))) + ENTRY_BYTES * len(kept) + CHUNK_BYTES
        self.chunks.append(StoredChunk(number, self.tail + 1, self.epoch, at, kept, weight))
        self.tail += len(kept)
        self.weight += weight

    def accept_snapshot(self, data: bytes) -> None:
        """It is what the events up to `tail` fold to."""
        self._next_snapshot = Snapshot(self.tail, data)

    def commit(self) -> None:
        if self.seq < self.tail:
            for chunk in self.chunks[bisect_right(self.chunks, self.seq, lo=self.dropped, key=_first) :]:
                self.turns.add(chunk.first, chunk.entries)
            self.seq = self.tail
            self.changed = self.chunks[-1].at
        if self._next_snapshot is not None:
            self.snapshot, self._next_snapshot = self._next_snapshot, None

    def refuse_uncommitted(self) -> None:
        """What was accepted and not committed had never been."""
        while self.chunks and self.chunks[-1].first > self.seq:
            self.weight -= self.chunks.pop().weight
        self.tail = self.seq
        self._next_snapshot = None

    # -- what is kept ------------------------------------------------------------------------------------------------
    def drop_beyond(self, bytes_max: int) -> None:
        """Drop the oldest chunks until the rest fits, as far as they may go."""
        while self.weight > bytes_max and self._may_drop():
            self._drop()
        self._shorten()

    def drop_before(self, seq: int) -> None:
        """Drop the chunks that lie before a seq, as far as they may go."""
        while self._may_drop() and self.chunks[self.dropped].last < seq:
            self._drop()
        self._shorten()

    def _may_drop(self) -> bool:
        """The newest stays, whatever it weighs, or nobody could read it. And so does all that the last snapshot does
        not hold: what the session was could not be told from the rest."""
        if self.snapshot is None or self.dropped >= len(self.chunks) - 1:
            return False
        return self.chunks[self.dropped].last <= self.snapshot.seq

    def _drop(self) -> None:
        chunk = self.chunks[self.dropped]
        self.weight -= chunk.weight
        self.last_dropped = (chunk.number, len(chunk.entries))
        self.chunks[self.dropped] = _DROPPED
        self.dropped += 1

    def _shorten(self) -> None:
        # To shorten a list at its front moves all the rest: only once half of it is gone, so that each chunk is moved
        # about once.
        self.turns.drop_before(self.first)
        if self.dropped * 2 > len(self.chunks):
            del self.chunks[: self.dropped]
            self.dropped = 0

    # -- reading -----------------------------------------------------------------------------------------------------
    def events(self, seq: int, last: int, project: Project | None) -> list[Event]:
        """The events from `seq` to `last`, both kept and committed."""
        assert self.first <= seq
        assert last <= self.seq
        events: list[Event] = []
        # Never a dropped place: they are all before `dropped`, and the one there begins at or before `seq`.
        index = bisect_right(self.chunks, seq, lo=self.dropped, key=_first) - 1
        while seq <= last:
            chunk = self.chunks[index]
            skipped = seq - chunk.first
            wanted = _events_of(self.id, chunk, skipped, last + 1 - seq, project)
            assert wanted, f"seq {seq} is not in the chunk at {chunk.first}"
            events += wanted
            seq += len(wanted)
            index += 1
        return events

    def chunks_from(self, number: int) -> Iterator[tuple[int, MemorySession, StoredChunk]]:
        """The committed chunks from that number on, in their order, each with its number before it."""
        index = bisect_right(self.chunks, number - 1, lo=self.dropped, key=_number)
        while index < len(self.chunks) and self.chunks[index].first <= self.seq:
            yield self.chunks[index].number, self, self.chunks[index]
            index += 1


def _events_of(session: str, chunk: StoredChunk, skipped: int, limit: int, project: Project | None) -> list[Event]:
    """At most `limit` of the chunk's events, from the one behind the `skipped` first."""
    wanted = chunk.entries[skipped : skipped + limit]
    return [
        Event(session, chunk.epoch, number, chunk.at, turn, kind, data, project)
        for number, (turn, kind, data) in enumerate(wanted, chunk.first + skipped)
    ]


def placed_after(
    states: Iterable[MemorySession], place: Place, limit: int, project_of: ProjectOf | None
) -> list[PositionedEvent]:
    """The committed events of these sessions after a place in the log's order, at most `limit`."""
    events: list[PositionedEvent] = []
    # Of many sessions few have news for who follows them: the others cost one look each.
    chunks = [state.chunks_from(place[0]) for state in states if state.end > place]
    for number, state, chunk in heapq.merge(*chunks):
        skipped = place[1] if number == place[0] else 0
        project = None if project_of is None else project_of(state.id)
        page = _events_of(state.id, chunk, skipped, limit - len(events), project)
        events += [
            PositionedEvent(position_of((number, count)), event) for count, event in enumerate(page, skipped + 1)
        ]
        if len(events) == limit:
            break
    return events


def place_of(position: str | None, end: Place) -> Place:
    """What a position stands for. `UsageError` if it cannot have been given; `end` is the last that was here."""
    if position is None:
        return BEGINNING
    number, _, count = position.partition(".")
    if number.isdecimal() and count.isdecimal():
        place = int(number), int(count)
        # Only the one way to write it, "07.1" was never given; and but for the beginning each is behind an event.
        if position == position_of(place) and (place == BEGINNING or (place[0] and place[1])):
            if place > end:
                raise history_lost(position)
            return place
    raise UsageError("there is no such position in this store", hint="take one that it gave", position=position)


def position_of(place: Place) -> str:
    return f"{place[0]}.{place[1]}"
