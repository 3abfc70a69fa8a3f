"""In-memory storage of one session, its positions, and in-memory indexes of turns.

The storage belongs to the in-memory engine (`memory.py`). The parts for turns (`marks_of`,
`TurnIndexes`) also serve the engines on SQLite and NATS.

**Chunks.** An accepted chunk is in the list immediately, but readers see only events up to `seq`,
the committed head. The chunks between `seq` and `tail` are accepted and not yet committed. The
entries stay as one tuple and become events only when a reader asks for them.

Chunks have numbers across the whole log, in the order of acceptance, which is the commit order. A
place in that order is a chunk's number and the number of its events already read.

**Turns.** An index holds the seq of each turn's first event, and of the event that ended the turn.
Without an index, a lookup would read the log from its first event. An index follows one log in
order: `seen` is the seq of the last event that it has processed. An engine that sees every commit
feeds the index directly (`memory.py`). Another engine uses `TurnIndexes`, which reads the events
after `seen` before each lookup. So each process reads every event at most once for this purpose,
however many lookups there are.
"""

from __future__ import annotations

import asyncio
import heapq
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from operator import attrgetter, itemgetter
from typing import NamedTuple

from banksman.core.session.event import (
    TURN_ENDED,
    TURN_QUEUED,
    TURN_STARTED,
    Entry,
    Event,
    Project,
    is_output,
)
from banksman.errors import UsageError
from banksman.store.log_values import (
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

# The event kinds that begin or end a turn. A turn that the agent opens unasked is never queued.
_MARKS = frozenset((TURN_QUEUED, TURN_STARTED, TURN_ENDED))
# Memory limits for the indexes of logs that are read on demand: turns, at about 200 bytes each, and
# sessions. Beyond them, the index of the session with the oldest lookup is dropped. The next lookup
# rebuilds it.
TURNS_MAX = 100_000
SESSIONS_MAX = 1_000

# A turn's id, the seq of the event, and whether the event ended the turn.
Mark = tuple[str, int, bool]

# Memory of an entry and of a chunk besides their data. An entry has a tuple (64) and the header of
# the bytes (33), rounded up as the allocator does, and a place in the chunk. A chunk has its object
# with its numbers, and two places in the list, because dropped chunks may leave as many empty
# places. Without these numbers, empty entries would fill the memory and never reach the limit. The
# turn and the kind count as nothing, because all entries of a turn share one string.
ENTRY_BYTES = 128
CHUNK_BYTES = 352


def marks_of(first: int, entries: Sequence[Entry]) -> list[Mark]:
    """Return a mark for each entry that begins or ends a turn.

    `first`: the seq of the first entry.
    """
    if is_output(entries):
        return []
    return [
        (turn, seq, kind == TURN_ENDED)
        for seq, (turn, kind, _) in enumerate(entries, first)
        if kind in _MARKS and turn is not None
    ]


class TurnIndex:
    """The turns of one session, up to the event `seen`."""

    __slots__ = ("_ended", "_open", "seen")

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen
        self._open: dict[str, int] = {}
        # Ordered by the end of the turn, so that retention removes turns from the front.
        self._ended: dict[str, tuple[int, int]] = {}

    def __len__(self) -> int:
        return len(self._open) + len(self._ended)

    def add(self, first: int, entries: Sequence[Entry]) -> None:
        """Process the next events of the log.

        A gap before them is the part that retention removed.
        """
        assert first > self.seen, "events were added twice"
        for turn, seq, is_end in marks_of(first, entries):
            if is_end:
                self._ended[turn] = self._open.pop(turn, seq), seq
            elif turn not in self._ended:
                self._open.setdefault(turn, seq)
        self.seen = first + len(entries) - 1

    def drop_before(self, first: int) -> None:
        """Drop the turns that ended before the first retained event."""
        while self._ended:
            turn = next(iter(self._ended))
            if self._ended[turn][1] >= first:
                return
            del self._ended[turn]

    def find(self, turn: str) -> TurnPlace | None:
        """Return the place of a turn, or None."""
        if (found := self._ended.get(turn)) is not None:
            return TurnPlace(found[0], found[1], self.seen)
        if (first := self._open.get(turn)) is not None:
            return TurnPlace(first, None, self.seen)
        return None


class TurnIndexes:
    """Indexes of several logs, each updated by reading the log before a lookup."""

    def __init__(self, read: Callable[[str, int], Awaitable[Page]]) -> None:
        """`read`: returns the page of a session's events after a seq."""
        self._read = read
        # The key includes the session's identity, because an id may be deleted and created again.
        self._indexes: OrderedDict[tuple[str, int], tuple[TurnIndex, asyncio.Lock]] = OrderedDict()

    async def find(self, session: str, turn: str, *, identity: int, first: int) -> TurnPlace | None:
        """Update the session's index and look up a turn.

        `identity`: distinguishes sessions with the same id. `first`: the first retained event.
        """
        index, lock = self._indexes.setdefault((session, identity), (TurnIndex(), asyncio.Lock()))
        self._indexes.move_to_end((session, identity))
        # Concurrent callers read the log once: the waiting ones find an updated index.
        async with lock:
            while (page := await self._read(session, index.seen)).events:
                index.add(
                    page.events[0].seq, [(event.turn, event.kind, b"") for event in page.events]
                )
            index.drop_before(first)
        self._drop_oldest()
        return index.find(turn)

    def _drop_oldest(self) -> None:
        # Counted each time, because a task may still fill an index that was dropped.
        turns = sum(len(index) for index, _ in self._indexes.values())
        while len(self._indexes) > 1 and (turns > TURNS_MAX or len(self._indexes) > SESSIONS_MAX):
            turns -= len(self._indexes.popitem(last=False)[1][0])


# A chunk's number, and the number of its events already read. Before the first chunk: 0 and 0.
Place = tuple[int, int]
BEGINNING: Place = (0, 0)


class StoredChunk(NamedTuple):
    """A chunk as the engine keeps it. `weight`: its memory in bytes."""

    number: int
    first: int
    epoch: int
    at: float
    entries: tuple[Entry, ...]
    weight: int

    @property
    def last(self) -> int:
        """The seq of the chunk's last event."""
        return self.first + len(self.entries) - 1


# Placeholder for a dropped chunk, until the list is shortened.
_DROPPED = StoredChunk(0, 0, 0, 0.0, (), 0)
_first = attrgetter("first")
_number = attrgetter("number")
_data = itemgetter(2)


class MemorySession:
    """State and events of one session.

    `chunks`: oldest first; `chunks[:dropped]` are placeholders. `seq`: the committed head. `tail`:
    the accepted head. Both are ends of chunks.
    """

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
        # Index of the committed turns.
        self.turns = TurnIndex()
        self.chunks: list[StoredChunk] = []
        self.dropped = 0
        # The end of the last dropped chunk in the commit order.
        self.last_dropped = BEGINNING
        self.weight = 0
        self.snapshot: Snapshot | None = None
        # An accepted and not yet committed snapshot.
        self._next_snapshot: Snapshot | None = None
        # The first failure under this epoch that the writer has not received.
        self.failed: object | None = None

    @property
    def first(self) -> int:
        """The first retained seq."""
        return self.chunks[self.dropped].first if self.chunks else self.seq + 1

    @property
    def end(self) -> Place:
        """The place after the session's last chunk."""
        return (self.chunks[-1].number, len(self.chunks[-1].entries)) if self.chunks else BEGINNING

    @property
    def epoch_past(self) -> int:
        """The highest epoch that any writer may believe to have.

        A fenced-off owner does not know about the claim yet and may advance. Until it receives the
        refusal, its calls carry the epoch after its own. That epoch must belong to no writer.
        """
        return self.epoch + 1 if self.is_owned else self.epoch

    @property
    def head(self) -> Head:
        return Head(self.epoch, self.seq, self.first)

    def known(self, owner: Owner) -> KnownSession:
        """Return the session as a listing shows it. `owner`: the owner of all owned sessions."""
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

    # -- writing ----------------------------------------------------------------------------------
    def accept(self, number: int, at: float, entries: Sequence[Entry]) -> None:
        """Accept the entries as the events after `tail`."""
        kept = tuple(entries)  # The caller may reuse its list.
        weight = sum(map(len, map(_data, kept))) + ENTRY_BYTES * len(kept) + CHUNK_BYTES
        self.chunks.append(StoredChunk(number, self.tail + 1, self.epoch, at, kept, weight))
        self.tail += len(kept)
        self.weight += weight

    def accept_snapshot(self, data: bytes) -> None:
        """Accept a snapshot of the events up to `tail`."""
        self._next_snapshot = Snapshot(self.tail, data)

    def commit(self) -> None:
        """Make the accepted chunks and the accepted snapshot visible to readers."""
        if self.seq < self.tail:
            for chunk in self.chunks[
                bisect_right(self.chunks, self.seq, lo=self.dropped, key=_first) :
            ]:
                self.turns.add(chunk.first, chunk.entries)
            self.seq = self.tail
            self.changed = self.chunks[-1].at
        if self._next_snapshot is not None:
            self.snapshot, self._next_snapshot = self._next_snapshot, None

    def refuse_uncommitted(self) -> None:
        """Discard the chunks and the snapshot that were accepted and not committed."""
        while self.chunks and self.chunks[-1].first > self.seq:
            self.weight -= self.chunks.pop().weight
        self.tail = self.seq
        self._next_snapshot = None

    # -- retention --------------------------------------------------------------------------------
    def drop_beyond(self, bytes_max: int) -> None:
        """Drop the oldest removable chunks until the rest fits."""
        while self.weight > bytes_max and self._may_drop():
            self._drop()
        self._shorten()

    def drop_before(self, seq: int) -> None:
        """Drop the removable chunks before a seq."""
        while self._may_drop() and self.chunks[self.dropped].last < seq:
            self._drop()
        self._shorten()

    def _may_drop(self) -> bool:
        """Whether the oldest chunk may be dropped.

        The newest chunk stays, whatever its size, or no reader could read it. Events that the last
        snapshot does not cover stay too: without them the session's state could not be derived.
        """
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
        # A deletion at the front of a list moves all later items. It happens only when more than
        # half of the list is placeholders, so each chunk is moved about once.
        self.turns.drop_before(self.first)
        if self.dropped * 2 > len(self.chunks):
            del self.chunks[: self.dropped]
            self.dropped = 0

    # -- reading ----------------------------------------------------------------------------------
    def events(self, seq: int, last: int, project: Project | None) -> list[Event]:
        """Return the events from `seq` to `last`. Both must be retained and committed."""
        assert self.first <= seq
        assert last <= self.seq
        events: list[Event] = []
        # Never a placeholder: these are all before `dropped`, and the chunk there begins at or
        # before `seq`.
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
        """Yield the committed chunks from a number on, in order, each after its number."""
        index = bisect_right(self.chunks, number - 1, lo=self.dropped, key=_number)
        while index < len(self.chunks) and self.chunks[index].first <= self.seq:
            yield self.chunks[index].number, self, self.chunks[index]
            index += 1


def _events_of(
    session: str, chunk: StoredChunk, skipped: int, limit: int, project: Project | None
) -> list[Event]:
    """Return at most `limit` events of a chunk, after its first `skipped` ones."""
    wanted = chunk.entries[skipped : skipped + limit]
    return [
        Event(session, chunk.epoch, number, chunk.at, turn, kind, data, project)
        for number, (turn, kind, data) in enumerate(wanted, chunk.first + skipped)
    ]


def placed_after(
    states: Iterable[MemorySession], place: Place, limit: int, project_of: ProjectOf | None
) -> list[PositionedEvent]:
    """Return at most `limit` committed events of these sessions after a place, in commit order."""
    events: list[PositionedEvent] = []
    # Few of many sessions have new events for a follower. The others cost one comparison each.
    chunks = [state.chunks_from(place[0]) for state in states if state.end > place]
    for number, state, chunk in heapq.merge(*chunks):
        skipped = place[1] if number == place[0] else 0
        project = None if project_of is None else project_of(state.id)
        page = _events_of(state.id, chunk, skipped, limit - len(events), project)
        events += [
            PositionedEvent(position_of((number, count)), event)
            for count, event in enumerate(page, skipped + 1)
        ]
        if len(events) == limit:
            break
    return events


def place_of(position: str | None, end: Place) -> Place:
    """Parse a position. `end`: the end of the commit order.

    Raises `UsageError` for a text that this engine never issues, `HistoryLost` for a place after
    `end`.
    """
    if position is None:
        return BEGINNING
    number, _, count = position.partition(".")
    if number.isdecimal() and count.isdecimal():
        place = int(number), int(count)
        # Each place has one text form: "07.1" is never issued. Every place except the beginning
        # follows an event.
        if position == position_of(place) and (place == BEGINNING or (place[0] and place[1])):
            if place > end:
                raise history_lost(position)
            return place
    hint = "pass a position that this store has returned"
    raise UsageError("there is no such position in this store", hint=hint, position=position)


def position_of(place: Place) -> str:
    return f"{place[0]}.{place[1]}"
