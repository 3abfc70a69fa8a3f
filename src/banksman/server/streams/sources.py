"""Where a stream's events come from: one session or many, with pages of the log that all readers share."""

from __future__ import annotations

import asyncio
import base64
import enum
import functools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Struct, field

from banksman import Event
from banksman.errors import HistoryLost
from banksman.runtime.base_host import Host
from banksman.sessions.log_reader import parse_cursor
from banksman.sessions.session import Session
from banksman.store import log as store
from banksman.store.log import READ_EVENTS_MAX

RETRY_MILLISECONDS = 1000

_encoder = msgspec.json.Encoder()

# Kept for who comes a moment later: by age, for what retention takes must not be shown for long; and by size.
PAGE_SECONDS_MAX = 2.0
PAGES_BYTES_MAX = 8 << 20
# What a page takes besides its data: those that show nothing to a reader are many where much is said.
PAGE_BYTES = 1024
# Read in one go, and encoded until there is enough: the loop is everybody's, and this is a millisecond or two of it. A
# page goes out as it is, so it is also what a client that does not read can hold.
PAGE_EVENTS_MAX = 250
PAGE_BYTES_MAX = 256 << 10
# The same, where frames are passed over: that costs next to nothing.
SCAN_EVENTS_MAX = 1000


class StreamForm(enum.Enum):
    SSE = "text/event-stream"
    NDJSON = "application/x-ndjson"


def encode(event: Event, *, raw: bool, partial: bool = False) -> bytes:
    """One event, as every reader sees it, whichever way it asks."""
    # Our own kinds are stored as the JSON that they are shown as.
    body: dict[str, Any] | msgspec.Raw = msgspec.Raw(event.data)
    if event.is_frame:
        body = event.body
        if partial and (said := event.partial):
            body["partial"] = said
    shown: dict[str, Any] = {
        "cursor": event.cursor,
        "session": event.session,
        "epoch": event.epoch,
        "seq": event.seq,
        "at": event.at,
        "turn": event.turn,
        "kind": event.kind,
        "body": body,
    }
    if raw and event.is_frame:
        try:
            shown["frame"] = event.data.decode()
        except UnicodeDecodeError:
            shown["frame"] = event.data.decode(errors="replace")
            shown["frame_base64"] = base64.b64encode(event.data)
    return _encoder.encode(shown)


def stored(form: StreamForm, id: str, data: bytes) -> bytes:
    """An event of the log, with the place right after it. JSON has no line end in it."""
    return b"id: %b\ndata: %b\n\n" % (id.encode(), data) if form is StreamForm.SSE else data + b"\n"


def placed(form: StreamForm, position: str, data: bytes) -> bytes:
    """An event among those of many sessions. NDJSON has no `id:`, and a cursor is of one session, so that the position
    is a member there: without it nobody could come back."""
    if form is StreamForm.NDJSON:
        assert data.startswith(b'{"')
        return b'{"position":"%b",%b\n' % (position.encode(), data[1:])
    return stored(form, position, data)


def made(form: StreamForm, kind: str, **more: object) -> bytes:
    """What is made for one reader. It has no place, so that nobody comes back to it."""
    data = _encoder.encode({"kind": kind, **more})
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), data) if form is StreamForm.SSE else data + b"\n"


def preamble(form: StreamForm) -> bytes:
    """The first bytes of a stream. `retry:` is a line of the first event and no block of its own: some clients deliver
    a block without `data:` as an event, and fail to decode it."""
    return b"retry: %d\n" % RETRY_MILLISECONDS if form is StreamForm.SSE else b""


# Pages of the log, encoded once for everybody who stands at the same place.
#
# A follower is a place in the log and nothing more. Those who stand at the same one want the same bytes, so they are
# made once: the first who asks begins, the others wait for the same, and who comes a moment later finds it still there.
# What comes after a place never changes, as long as its history is there, so a page cannot be wrong, only shorter than
# what there is by now; what is deleted here is forgotten here. A page that nobody waits for any more is not made to its
# end.


Place = TypeVar("Place", bound=Hashable)


class EncodedPage(Struct, Generic[Place], frozen=True):
    """What is to be sent, which may be nothing, and the place after it. `gaps`: what is no longer there, by session:
    the first and the last seq."""

    data: bytes
    events: int
    place: Place
    gaps: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


class PageTask(Generic[Place]):
    """A page that is being made, or was. Entered by everybody for as long as it is waited for; gives the task."""

    __slots__ = ("_forsake", "_waiting", "task")

    def __init__(self, task: asyncio.Task[EncodedPage[Place]], forsake: Callable[[PageTask[Place]], None]) -> None:
        self.task = task
        self._forsake = forsake
        self._waiting = 0

    def __enter__(self) -> asyncio.Task[EncodedPage[Place]]:
        self._waiting += 1
        return self.task

    def __exit__(self, *_: object) -> None:
        self._waiting -= 1
        if not self._waiting and not self.task.done():
            self.task.cancel()
            self._forsake(self)


class SharedPages(Generic[Place]):
    """The pages that are being made, and the last ones that were. It owns the tasks that make them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._making: dict[Hashable, PageTask[Place]] = {}
        # Oldest first.
        self._made: OrderedDict[Hashable, tuple[float, PageTask[Place]]] = OrderedDict()
        self._bytes = 0
        # Those that nobody wants any more, until they have ended.
        self._forsaken: set[asyncio.Task[EncodedPage[Place]]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def at(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, EncodedPage[Place]]]) -> PageTask[Place]:
        """The page of this key: `with pages.at(key, make) as task`."""
        made = self._made.get(key)
        if made is not None and self._loop.time() - made[0] < PAGE_SECONDS_MAX:
            return made[1]
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = PageTask(self._loop.create_task(make()), functools.partial(self._forsake, key))
            making.task.add_done_callback(functools.partial(self._keep, key, making))
        return making

    def _forsake(self, key: Hashable, making: PageTask[Place]) -> None:
        """Who comes next begins anew: this one will never be made."""
        self._let_go(key, making)
        self._forsaken.add(making.task)

    def _let_go(self, key: Hashable, making: PageTask[Place]) -> None:
        if self._making.get(key) is making:
            del self._making[key]

    def clear(self) -> None:
        """A session was deleted: what was made of it is shown to nobody any more, and what is being made of it has no
        name under which it could be found."""
        for key in list(self._made):
            self._drop(key)
        self._making.clear()

    def _keep(self, key: Hashable, making: PageTask[Place], task: asyncio.Task[EncodedPage[Place]]) -> None:
        self._forsaken.discard(task)
        is_wanted = self._making.get(key) is making
        self._let_go(key, making)
        if task.cancelled() or task.exception() is not None or not is_wanted:
            return
        self._drop(key)
        self._made[key] = self._loop.time(), making
        self._bytes += PAGE_BYTES + len(task.result().data)
        while self._made and self._bytes > PAGES_BYTES_MAX:
            self._drop(next(iter(self._made)))
        if self._timer is None:
            self._timer = self._loop.call_later(PAGE_SECONDS_MAX, self._forget_old)

    def _drop(self, key: Hashable) -> None:
        found = self._made.pop(key, None)
        if found is not None:
            self._bytes -= PAGE_BYTES + len(found[1].task.result().data)

    def _forget_old(self) -> None:
        """Of a session that is quiet nobody would else take the last page away."""
        self._timer = None
        oldest = self._loop.time() - PAGE_SECONDS_MAX
        while self._made:
            key, (at, _) = next(iter(self._made.items()))
            if at > oldest:
                # Not at the moment of each: where thousands are made in a second, that would be a timer for each.
                self._timer = self._loop.call_at(at + 1.25 * PAGE_SECONDS_MAX, self._forget_old)
                break
            self._drop(key)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = {*(making.task for making in self._making.values()), *self._forsaken}
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        assert all(task.done() for task in self._forsaken)


# Where a stream comes from: one session, by cursor, or many, by the position in the store's order of commits.
#
# A source knows how to make the page after a place; when there is nothing, it waits. Where a reader does not want the
# agent's frames, a page may have nothing to show, and leads on all the same: else nobody could tell that such a reader
# has come to the end, and who looked through a million frames would look through them again with the next.


class StreamSource(Protocol[Place]):
    """`key` tells those apart that do not show the same."""

    @property
    def key(self) -> Hashable: ...
    async def next(self, place: Place, form: StreamForm) -> EncodedPage[Place]:
        """The page after a place: what is there now, or, if there is nothing, what comes."""
        ...

    async def is_at_end(self, place: Place) -> bool:
        """Whether there is nothing after a place, at this moment."""
        ...

    def shown(self, place: Place) -> str | None:
        """A place, as a client knows it."""
        ...


class Cursor(NamedTuple):
    """After which event. `epoch` None: nobody can tell any more under which it was written, or it is the beginning."""

    epoch: int | None
    seq: int


class OneSession:
    """The events of one session.

    A place names its history: no epoch is given twice for an id, also if a session was deleted and another made under
    the same one. For the beginning, which has no epoch, the time at which the session was made says which it is.
    """

    def __init__(self, session: Session, *, raw: bool, partial: bool = False, frames: bool = True) -> None:
        self._session = session
        self._raw = raw
        self._partial = partial
        self._frames = frames
        self._page_events_max = PAGE_EVENTS_MAX if frames else SCAN_EVENTS_MAX
        self.key = (session.id, session.created, raw, partial, frames)

    async def begin(self, after: str | None) -> Cursor:
        """`HistoryLost`, `UsageError`: nobody can have been there."""
        epoch, seq = parse_cursor(after)
        if not seq:
            return Cursor(None, 0)
        await self._session.page(after, limit=1)
        found = await self._session.page(seq - 1, limit=1)
        if found.gap is not None:
            return Cursor(epoch, seq)
        if not found.events:
            raise self._lost(f"the store has no event {seq}")
        return Cursor(found.events[0].epoch, seq)

    async def is_at_end(self, place: Cursor) -> bool:
        return self._session.committed <= place.seq

    async def next(self, place: Cursor, form: StreamForm) -> EncodedPage[Cursor]:
        # First this: where there is something it costs nothing, and where there is nothing it spares a look at the disk
        # by another thread, which nearly everybody who is live would take before each event.
        await self._session.wait_past(place.seq)
        while not (page := await self._after(place)).events:
            await self._session.wait_past(place.seq)
        before = place.seq if page.gap is None else page.gap[1]
        assert page.events[0].seq == before + 1, "a page begins right after its place"
        data, shown, taken = _joined(self._line(event, form) for event in page.events)
        end = page.events[taken - 1]
        assert end.seq > place.seq, "a page leads on"
        gaps = {} if page.gap is None else {self._session.id: page.gap}
        return EncodedPage(data, shown, Cursor(end.epoch, end.seq), gaps)

    def _line(self, event: Event, form: StreamForm) -> bytes | None:
        if event.is_frame and not self._frames:
            return None
        return stored(form, event.cursor, encode(event, raw=self._raw, partial=self._partial))

    async def _after(self, place: Cursor) -> store.Page:
        """What follows, with the event at which the reader stands looked at in the same read: it must be the one that
        it was."""
        if place.epoch is None:
            return await self._session.page(place.seq, limit=self._page_events_max)
        page = await self._session.page(place.seq - 1, limit=min(self._page_events_max + 1, READ_EVENTS_MAX))
        if page.gap is not None:
            # It is no longer kept, and what is missing for this reader begins after it.
            return store.Page(page.events, (place.seq + 1, page.gap[1]) if page.gap[1] > place.seq else None)
        if not page.events or page.events[0].epoch != place.epoch:
            raise self._lost(f"the store has no event {place.epoch}.{place.seq} any more")
        if len(page.events) == 1:
            # It may fill a page by itself: what comes after it is in the next then.
            return await self._session.page(f"{place.epoch}.{place.seq}", limit=self._page_events_max)
        return store.Page(page.events[1:], None)

    def _lost(self, message: str) -> HistoryLost:
        return HistoryLost(message, hint="begin again from the first event", session=self._session.id)

    def shown(self, place: Cursor) -> str | None:
        if not place.seq:
            return None
        return str(place.seq) if place.epoch is None else f"{place.epoch}.{place.seq}"


class ManySessions:
    """The events of every session of the store, or of those named, in the order of their commits. `frames_of`: only of
    these also what the agent said and was told; None: of each."""

    def __init__(
        self,
        host: Host,
        sessions: frozenset[str] | None,
        *,
        raw: bool,
        partial: bool = False,
        frames_of: frozenset[str] | None = None,
    ) -> None:
        self._host = host
        self._sessions = sessions
        self._raw = raw
        self._partial = partial
        self._frames_of = frames_of
        self._page_events_max = PAGE_EVENTS_MAX if frames_of is None else SCAN_EVENTS_MAX
        self.key = (sessions, raw, partial, frames_of)

    async def begin(self, after: str | None) -> str | None:
        await self._host.read_many(after, limit=1, sessions=self._sessions)
        return after

    async def end(self) -> str:
        """The place after all that there is."""
        # Of nobody: there is nothing to look through, and the position is behind it all.
        return (await self._host.read_many(None, limit=1, sessions=())).position

    async def is_at_end(self, place: str | None) -> bool:
        page = await self._host.read_many(place, limit=1, sessions=self._sessions)
        return not page.events and not page.gaps

    async def next(self, place: str | None, form: StreamForm) -> EncodedPage[str | None]:
        page = await self._host.read_many(place, limit=self._page_events_max, sessions=self._sessions)
        while not page.events and not page.gaps:
            await self._host.wait_past(page.position)
            page = await self._host.read_many(page.position, limit=self._page_events_max, sessions=self._sessions)
        # All up to the last one are gone, whether this reader has seen some of them or not.
        gaps = {session: (1, last) for session, last in page.gaps.items()}
        data, shown, taken = _joined(self._line(one, form) for one in page.events)
        position = page.position if taken == len(page.events) else page.events[taken - 1].position
        assert position != place, "a page leads on"
        return EncodedPage(data, shown, position, gaps)

    def _line(self, one: store.PositionedEvent, form: StreamForm) -> bytes | None:
        event = one.event
        if event.is_frame and self._frames_of is not None and event.session not in self._frames_of:
            return None
        return placed(form, one.position, encode(event, raw=self._raw, partial=self._partial))

    def shown(self, place: str | None) -> str | None:
        return place


def _joined(lines: Iterable[bytes | None]) -> tuple[bytes, int, int]:
    """As many of these as make a page, at least one; how many they are, and how many were passed by, too: None is
    nothing to show. The rest is not even made."""
    shown: list[bytes] = []
    size = taken = 0
    for line in lines:
        if line is not None:
            if shown and (size + len(line) > PAGE_BYTES_MAX or len(shown) == PAGE_EVENTS_MAX):
                break
            shown.append(line)
            size += len(line)
        taken += 1
    return b"".join(shown), len(shown), taken
