"""In-memory index of a session's turns: the seq of each turn's first event, and of the event that ended it.

Without an index, finding a turn means reading the log from its first event. An index follows one log in order: `seen`
is the seq of the last event that it has taken in. An engine that sees every commit feeds it directly (`memory.py`). An
engine that does not keeps `TurnIndexes`, which read the events behind `seen` before each lookup: every event is read
for this purpose once per process, however many lookups there are.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Sequence

from banksman.core.session.event import TURN_ENDED, TURN_QUEUED, TURN_STARTED, Entry
from banksman.store.log import Page, TurnPlace

# The kinds by which a turn begins and ends. A turn that the agent opens by itself is never queued.
_MARKS = frozenset((TURN_QUEUED, TURN_STARTED, TURN_ENDED))
# How much a process remembers of logs that it does not feed: so many turns, about 200 bytes each, of so many sessions.
# Beyond that the index of the session that was asked for least recently is dropped and read again when it is needed.
TURNS_MAX = 100_000
SESSIONS_MAX = 1_000

# A turn's id, the seq of the event, and whether the event ended it.
Mark = tuple[str, int, bool]


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
