"""The protocol of the log: what every engine promises, and all that the rest of the package knows of any.

A store holds sessions; a session holds its events, in order. A `Log` is one host's handle on a store, and several hosts
may have one on the same store. A *session* is claimed, never the store: it has one owner at a time, and what the owner
does is said under an epoch, its generation. `claim` raises the epoch, and an append under an older one is refused
(`NotOwner`), whatever it holds. A session whose owner lives cannot be claimed by another host; one whose owner is dead
can, and so can one that was released. A host may claim what it has: whoever of it wrote before is fenced off.

An append is whole or not at all, and says which seq it expects to follow: two writers that both believe to be the owner
cannot both be right. What changes with a session besides its events (its snapshot, its lease, its name) is changed in
the same way, by somebody who says what it believes to be there; nothing can be overwritten by who read it earlier.

`append`, `advance` and `lease` do not wait. The engine commits in groups and calls `done` later, never inside the call:
with None when what was asked is durable at the engine's level, or with the error that kept it out. For one session the
answers come in the order of the calls; after an append or an advance has failed, those behind it fail too until the
writer was told, since they rest on it. So do those behind a lease that failed by the store (no room, a lock, a fault of
the disk): a writer that is told so begins anew from what was committed before, and must not find more there. A lease
that is refused, since another session has the name, fails nothing behind it: on that rests only what its writer makes
of the answer. A writer waits for the answer to an advance before it asks for another.

What is asked without waiting (`head`, `find`, `sessions`, `owned`) is answered from what this handle knows: of another
handle's changes it may be a moment old, in no other order than they were made. What is awaited sees all that was
answered before, whichever handle it was; of events that is so at the end, a page that is empty.

Readers take what is committed, then wait past the head. There is no other way to hear of an event, so there is no gap
between what was stored and what comes next. Reading needs no claim. There are two orders to read in: that of one
session, by seq, and that of the whole store, by position, in which things were committed.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from banksman.core.session.event import Entry, Event, Project
from banksman.errors import HistoryLost, NotOwner, StoreError, UsageError

_TEXT = re.compile(r"(0|[1-9a-f][0-9a-f]{0,14})(?:\.([1-9][0-9]{0,9}))?")
# A page of events, at most, whatever the caller asks for: a reader must not hold a whole history in memory.
READ_EVENTS_MAX = 1000
# The highest seq and the highest epoch of what is restored. All that reads JSON can hold it, and it leaves room in the
# 64 bits that an engine has: the session counts on from there, and what begins after it was deleted begins past its
# epoch.
NUMBER_MAX = 1 << 53


def checked_limit(limit: int) -> int:
    if limit < 1:
        raise UsageError("a page holds an event or more", hint="limit is 1 or more", limit=limit)
    return min(limit, READ_EVENTS_MAX)


def check_after(session: str, after: int) -> None:
    if after < 0:
        raise UsageError("no event is before the first", hint="after is 0 or more", session=session, after=after)


def check_seq(session: str, seq: int) -> None:
    if seq < 0:
        raise UsageError("no event is before the first", hint="seq is 0 or more", session=session, seq=seq)


def check_text(*texts: str | None) -> None:
    """What is no Unicode cannot be stored."""
    for text in texts:
        try:
            (text or "").encode()
        except UnicodeEncodeError as exc:
            raise UsageError("an id or a name must be text", hint="it has half of a character", text=text) from exc


def check_no_host(session: str) -> None:
    """On the bus a host is asked as a session is, under its own id behind this word. Whoever had a session of that id
    would hear what is meant for the host."""
    if session.startswith("host:"):
        raise UsageError("a session cannot have the id of a host", hint="one that does not begin so", session=session)


# What makes chunks a history, whichever engine restores it, and wherever they come from.


def checked(session: str, chunks: Iterable[Chunk]) -> Iterator[Chunk]:
    """The chunks, as they come. `UsageError` as soon as they are no history: it has an event or more and is dense, its
    epochs do not fall, and its numbers leave room to count on."""
    seq, epoch = None, 1
    for chunk in chunks:
        first = chunk.first if seq is None else seq + 1
        if chunk.first != first or chunk.first < 1 or not chunk.entries:
            raise UsageError(
                "the history is not dense", hint="each chunk begins where the last one ended", session=session, seq=seq
            )
        if chunk.epoch < epoch:
            raise UsageError("the history's epochs fall", session=session, first=chunk.first, epoch=chunk.epoch)
        seq, epoch = chunk.last, chunk.epoch
        if seq > NUMBER_MAX or epoch > NUMBER_MAX:
            raise UsageError(
                "the history's numbers are too high",
                hint=f"no seq and no epoch is more than {NUMBER_MAX}",
                session=session,
                seq=seq,
                epoch=epoch,
            )
        yield chunk
    if seq is None:
        raise UsageError("there is no history", hint="a session that is restored has an event or more", session=session)


# A place in the order of the store's commits, and its text: short, and opaque to who holds it.
#
# All up to the chunk `chunk` is behind it: the whole of that chunk if `taken` is 0, else its first `taken` events.
# There is one way to write each, so that a chunk that was read to its end and then taken by retention is no gap.


class Position(NamedTuple):
    chunk: int
    taken: int = 0

    @classmethod
    def of(cls, text: str | None) -> Position:
        """`UsageError` for what is no position at all."""
        if text is None:
            return BEGINNING
        match = _TEXT.fullmatch(text)
        if match is None:
            hint = "take one that it gave"
            raise UsageError("there is no such position in this store", hint=hint, position=text)
        return cls(int(match[1], 16), int(match[2] or 0))

    @property
    def text(self) -> str:
        return f"{self.chunk:x}.{self.taken}" if self.taken else f"{self.chunk:x}"

    @property
    def whole(self) -> int:
        """The last chunk of which nothing is left to read."""
        return self.chunk - 1 if self.taken else self.chunk


BEGINNING = Position(0)


Done = Callable[[StoreError | NotOwner | None], None]
# How the frames of a session are shown: one dialect for each.
ProjectOf = Callable[[str], Project | None]


class Head(NamedTuple):
    """A session's place: its writer's generation, its last committed seq, and the first one that is still kept."""

    epoch: int
    seq: int
    first: int


class Owner(NamedTuple):
    """Who has a session: a host in the process `pid`, to be found at `address`. `is_alive`: as far as can be seen."""

    pid: int
    address: str
    is_here: bool
    is_alive: bool


class KnownSession(NamedTuple):
    """A session, as a listing shows it. `changed`: the time of its last event, or of its creation."""

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
    """What a session's events up to `seq` fold to, in words that only the core knows."""

    seq: int
    data: bytes

    def is_beside(self, first: int, last: int) -> bool:
        """Whether these events and it, together, say what the session is."""
        return first - 1 <= self.seq <= last


class Chunk(NamedTuple):
    """Events that were appended together: the first one's seq, and what they share."""

    first: int
    epoch: int
    at: float
    entries: Sequence[Entry]

    @property
    def last(self) -> int:
        return self.first + len(self.entries) - 1


class Page(NamedTuple):
    """`events` follow `after`, but for the range `gap` (first, last) that retention took, if there is one."""

    events: Sequence[Event]
    gap: tuple[int, int] | None


class TurnPlace(NamedTuple):
    """Where a turn is in its session's log: the seq of its first event, and of the event that ended it. `ended` is None
    while no event up to `seen`, the last one that was looked at, has ended the turn."""

    first: int
    ended: int | None
    seen: int


class PositionedEvent(NamedTuple):
    """An event, and the position in the store's order that is right after it."""

    position: str
    event: Event


class MultiSessionPage(NamedTuple):
    """Events of many sessions in the order of their commits. `position` is where to go on. `gaps`: the sessions
    that lost events after the position asked for, to retention or to damage; all up to the one named are gone."""

    events: Sequence[PositionedEvent]
    position: str
    gaps: Mapping[str, int]


def history_lost(position: str) -> HistoryLost:
    """Whoever was there has read from a store that was longer than this one is."""
    hint = "begin again (after=None)"
    return HistoryLost(f"the store does not go as far as {position}", hint=hint, position=position)


class OwnershipListener(Protocol):
    """Whoever has processes that must not outlive the ownership of what they work for: a host. Times are
    `time.monotonic()`, which is one clock for all processes of a machine. Both are called in the loop of the log."""

    def on_held(self, fence_at: float, dead_by: float) -> None:
        """Renewed: until `fence_at` nothing needs to be done. Whoever hears nothing more begins to end its processes
        then, and has ended them by `dead_by`. The times of a call replace those of the one before, and never lie before
        them."""
        ...

    def on_lost(self, error: NotOwner, dead_by: float) -> None:
        """Nothing that was claimed is ours any more; every process must be dead by then. What is claimed after this
        call is ours again, under the times that are told next."""
        ...


class LogPhase(enum.Enum):
    """Where an engine is between its creation and its end. Not every engine has every phase."""

    NEW, OPEN, CLOSING, CLOSED = range(4)


class Log(Protocol):
    """One host's handle on a store. Every method belongs to the loop it was opened in.

    `is_durable` False: it lasts as long as its host, and whoever forgets a session should delete its history.
    """

    is_durable: bool

    # -- the store itself, and its guard -----------------------------------------------------------------------------
    async def ready(self) -> None:
        """Until it can be asked. An engine that is far away has to learn first what there is: before this has returned,
        what answers at once (`head`, `find`, `sessions`, `owned`) may raise `StoreError`. A store on this machine
        returns at once."""
        ...

    def guard(self, guard: OwnershipListener) -> None:
        """Who is told how long what is claimed here stays ours. Once, before anything is claimed. Where ownership ends
        by a release or a death only (memory, a file), nobody is ever told anything."""
        ...

    # -- owning ------------------------------------------------------------------------------------------------------
    async def claim(self, session: str, *, name: str | None = None, agent: str | None = None) -> int:
        """Become the writer: the new epoch. What a writer before still appends is refused from here on.

        With an agent, a session that is not there is made, for this agent and with this name: `NameTaken`, naming the
        session in its ids, if another has the name. Without one it must be there, or it is a `UsageError`: whoever
        means the one it knows must not make another in its place when that was deleted. One that is there keeps what
        it has. `NotOwner`, naming pid and address, if a live host has it. No epoch is given twice for a session, not
        even if it was deleted in between.
        """
        ...

    def advance(self, session: str, epoch: int, done: Done) -> None:
        """Raise our own epoch by one; the new one holds for what is called from here on. `NotOwner`, and for that too,
        if somebody has claimed the session since."""
        ...

    def release(self, session: str, epoch: int) -> None:
        """Let go of it: anybody may claim it, and what is leased is given back. Behind all that was called before.
        Under another epoch than the session's nothing happens."""
        ...

    def lease(self, session: str, epoch: int, name: str | None, done: Done) -> None:
        """Let this session, and no other, have what this name stands for: a conversation of an agent's. What it had
        before is given back; None: only that. `NotOwner`, naming the holder, if another session has it, whose owner
        lives; what it had before is then still its own."""
        ...

    # -- writing -----------------------------------------------------------------------------------------------------
    def append(  # noqa: PLR0917
        self,
        session: str,
        epoch: int,
        expected_seq: int,
        at: float,
        entries: Sequence[Entry],
        done: Done,
        snapshot: bytes | None = None,
    ) -> None:
        """Write `entries` as the events after `expected_seq`, at wall time `at`; `snapshot` is what all events up to
        the last of these fold to, and replaces the one before in the same commit. See the module."""
        ...

    async def restore(
        self,
        session: str,
        *,
        name: str | None,
        agent: str,
        chunks: Callable[[], Iterable[Chunk]],
        snapshot: Snapshot | None = None,
    ) -> None:
        """A session that was kept elsewhere, whole or not at all, and owned by nobody. `UsageError` if there is one of
        this id, if the chunks are not dense, have epochs that fall or numbers beyond `NUMBER_MAX`, or if the snapshot
        is of events that do not border on them; `NameTaken`. `chunks` is called in a thread of the engine's; what it
        raises is raised here. Nobody else, here or in another host, waits while it is read."""
        ...

    # -- reading -----------------------------------------------------------------------------------------------------
    def head(self, session: str) -> Head:
        """Where a session is. One that was never claimed: epoch 0, seq 0, first 1."""
        ...

    async def read(
        self, session: str, after: int, limit: int = READ_EVENTS_MAX, project: Project | None = None
    ) -> Page:
        """The committed events after a seq, oldest first, at most `limit`. `project` is for the events to have: see
        `Event.body`."""
        ...

    async def find_turn(self, session: str, turn: str) -> TurnPlace | None:
        """Find a turn by its id. None: no committed event that is kept belongs to such a turn. The cost does not grow
        with the history: each engine has an index, and says what an old history costs the first time."""
        ...

    async def snapshot(self, session: str) -> Snapshot | None:
        """The last one that was appended, if any."""
        ...

    async def wait_past(self, session: str, seq: int, *, is_known: bool = False) -> None:
        """Until an event after `seq` is committed, by whichever host. Cancelling it leaves nothing behind.

        One may wait for a session that is yet to come. `is_known`: it was there, so if it is not, it was deleted, and
        that is a `StoreError`. To look before one waits would not do: it may be deleted between the two.
        """
        ...

    async def read_many(
        self,
        after: str | None,
        limit: int = READ_EVENTS_MAX,
        *,
        sessions: Collection[str] | None = None,
        project_of: ProjectOf | None = None,
    ) -> MultiSessionPage:
        """The committed events after a position, in the order of the commits, at most `limit`; after None: from the
        beginning. `sessions`: of these only. `UsageError` for what can be no position of this store, `HistoryLost` for
        one of a history that it does not have any more."""
        ...

    async def wait_past_position(self, position: str) -> None:
        """Until something is committed after it, in whichever session. Cancelling it leaves nothing behind."""
        ...

    # -- the sessions of the store -----------------------------------------------------------------------------------
    def sessions(self, after: str | None = None, limit: int | None = None) -> list[KnownSession]:
        """Every session of the store, oldest first; or those after the one of this id, so many at most. After one that
        is not there: none."""
        ...

    def owned(self) -> list[tuple[Owner | None, int]]:
        """How many sessions of the store each owner has, and how many nobody: in one look, however many there are."""
        ...

    def find(self, id_or_name: str) -> KnownSession | None:
        """By its id, else by its name."""
        ...

    async def rename(self, session: str, name: str | None, *, expected: str | None) -> None:
        """Give it another name, or none, if it has the one that is expected. `UsageError` if it has another, or there
        is no such session; `NameTaken` if another session has the new one."""
        ...

    async def trim(self, session: str, before: int) -> int:
        """Forget the events before a seq, as far as a chunk's border and the last snapshot allow: the first seq that is
        still kept. An engine may also do so by itself, within the same bounds."""
        ...

    async def delete(self, session: str) -> None:
        """Forget a session's history for good. Its writer, if it is ours, is refused from here on; `NotOwner` if a live
        host elsewhere has it."""
        ...

    async def close(self) -> None:
        """Commit what was appended, release what is ours, then let go. Appends are refused from the first moment."""
        ...

    def abandon(self) -> None:
        """The same, where the loop was closed before: nobody is answered any more."""
        ...

    # -- looking at the store itself ---------------------------------------------------------------------------------
    def check(self) -> None:
        """Raise `StoreError` if the store cannot be read, or is no longer where what is written would last. One lookup:
        it neither writes nor waits, and a store that cannot take an append for another reason is not found by it."""
        ...

    def counters(self) -> Mapping[str, float]:
        """What this handle has written since it was opened, also after its close; none of it ever falls. `commits`, the
        `events` and `bytes` that were appended with them, the `commit_seconds` that they took; `failures`: commits that
        the store did not take. What was refused to a writer that is not the owner is none."""
        ...
