"""Values that the methods of a log take and return: see `log.py`.

The engines on SQLite and NATS use `Position` for places in the commit order. The in-memory engine
has another form, in `memory_session.py`. `history_lost` is the error of all engines for a place
past the end.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from banksman.core.session.event import Entry, Event, Project
from banksman.core.session.usage import Usage
from banksman.errors import HistoryLost, NotOwner, StoreError, UsageError

# Bucket limits of the durations of commits, in seconds: from a write to a page of memory to a stall
# of the disk.
COMMIT_BOUNDS = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
)
_TEXT = re.compile(r"(0|[1-9a-f][0-9a-f]{0,14})(?:\.([1-9][0-9]{0,9}))?")


class Position(NamedTuple):
    """Place in the commit order of a store: a chunk, and the number of its events already read.

    Everything up to the chunk `chunk` lies behind the position: the whole chunk if `taken` is 0,
    else its first `taken` events. Each position has exactly one text form. So a reader that has
    finished a chunk sees no gap when retention removes that chunk.
    """

    chunk: int
    taken: int = 0

    @classmethod
    def of(cls, text: str | None) -> Position:
        """Parse the text of a position; None is the beginning.

        Raise `UsageError` for malformed text.
        """
        if text is None:
            return BEGINNING
        match = _TEXT.fullmatch(text)
        if match is None:
            hint = "pass a position that this store has returned"
            raise UsageError("there is no such position in this store", hint=hint, position=text)
        return cls(int(match[1], 16), int(match[2] or 0))

    @property
    def text(self) -> str:
        """The text form: the chunk in hexadecimal, then the number of events taken."""
        return f"{self.chunk:x}.{self.taken}" if self.taken else f"{self.chunk:x}"

    @property
    def whole(self) -> int:
        """The last chunk that has been read completely."""
        return self.chunk - 1 if self.taken else self.chunk

    def check(self, newest: int) -> None:
        """Raise `HistoryLost` if the place is past the newest chunk."""
        if self.chunk > newest:
            raise history_lost(self.text)


BEGINNING = Position(0)


def history_lost(position: str) -> HistoryLost:
    """Build the error for a position past the end of this store.

    The reader got the position from a longer history, for example before a restore of a backup.
    """
    hint = "begin again at the first event, without a position"
    message = f"cannot read after position {position}: the store ends before it"
    return HistoryLost(message, hint=hint, position=position)


# Upper bound of a page, whatever limit the caller passes. It keeps a reader from holding a whole
# history in memory.
READ_EVENTS_MAX = 1000
# Highest seq and highest epoch of a restored session. Every JSON reader can represent this number.
# It also leaves headroom in the 64 bits of an engine: the session counts up from its last seq, and
# after a deletion new sessions begin past the deleted epoch.
NUMBER_MAX = 1 << 53
_SECONDS_PER_DAY = 86_400
_EPOCH = datetime.date(1970, 1, 1)
# The years that a date can express. A clock outside of them counts as the nearest day.
_DAY_MAX = (datetime.date.max - _EPOCH).days

Done = Callable[[StoreError | NotOwner | None], None]
# Returns the projection that shows a session's frames to readers: one dialect per session.
ProjectOf = Callable[[str], Project | None]
UsageBy = Literal["day", "session", "agent", "caller"]


class Head(NamedTuple):
    """Epoch, last committed seq and first retained seq of a session."""

    epoch: int
    seq: int
    first: int


class Owner(NamedTuple):
    """The host that owns a session: its process `pid` and its `address`.

    `is_here`: the owner is the host of this handle. `is_alive`: to the knowledge of this handle.
    """

    pid: int
    address: str
    is_here: bool
    is_alive: bool


class KnownSession(NamedTuple):
    """A session as a listing shows it.

    `changed`: the time of its last event, or of its creation.
    """

    id: str
    name: str | None
    agent: str
    epoch: int
    seq: int
    first: int
    owner: Owner | None
    created: float
    changed: float


class Snapshot(NamedTuple):
    """The fold of a session's events up to `seq`, in an encoding that only the core reads."""

    seq: int
    data: bytes

    def is_beside(self, first: int, last: int) -> bool:
        """Whether the snapshot and the events from `first` to `last` leave no gap."""
        return first - 1 <= self.seq <= last


class Chunk(NamedTuple):
    """Events of one append, with the seq of the first one and the fields that they share."""

    first: int
    epoch: int
    at: float
    entries: Sequence[Entry]

    @property
    def last(self) -> int:
        """The seq of the chunk's last event."""
        return self.first + len(self.entries) - 1


class Page(NamedTuple):
    """The events after a seq.

    `gap`: first and last seq of the range before these events that retention removed, or None.
    """

    events: Sequence[Event]
    gap: tuple[int, int] | None


class TurnPlace(NamedTuple):
    """Location of a turn in its session's log.

    `first`: the seq of the turn's first event. `ended`: the seq of the event that ended the turn,
    or None while no event up to `seen` has ended it. `seen`: the seq of the last event that was
    examined.
    """

    first: int
    ended: int | None
    seen: int


class PositionedEvent(NamedTuple):
    """An event with the position directly after it in the store's commit order."""

    position: str
    event: Event


class MultiSessionPage(NamedTuple):
    """Events of many sessions in commit order.

    `position`: the place from which to continue. `gaps`: the sessions that lost events after the
    requested position, to retention or to damage. Each value is the last lost seq: all events up to
    it are gone.
    """

    events: Sequence[PositionedEvent]
    position: str
    gaps: Mapping[str, int]


class UsageRow(NamedTuple):
    """Usage of one day, session, agent or caller.

    `key`: the day as `YYYY-MM-DD` in UTC, the session's id, the agent's name or the caller; None
    for turns without a caller.
    """

    key: str | None
    usage: Usage


def day_of(at: float) -> str:
    """Return the day of a wall time, in UTC."""
    days = int(at // _SECONDS_PER_DAY) if abs(at) < 1e15 else _DAY_MAX
    return (_EPOCH + datetime.timedelta(days=min(max(days, 0), _DAY_MAX))).isoformat()
