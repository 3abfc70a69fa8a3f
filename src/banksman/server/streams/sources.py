"""Sources of event streams (one session or many), and the cache of encoded pages for followers.

`OneSession` and `ManySessions` make the page after a place. `SharedPages` makes each page once for
all followers at that place. `follower.py` sends the pages.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from msgspec import Struct, field

from banksman import Event
from banksman.errors import HistoryLost
from banksman.runtime.base_host import Host
from banksman.server.streams.event_format import StreamForm, encode, placed, stored
from banksman.sessions.log_reader import parse_cursor
from banksman.sessions.session import Session
from banksman.store import log as store
from banksman.store.log import READ_EVENTS_MAX

# A finished page is kept for followers that arrive a moment later. Its age is bounded, because
# events that retention removes must not be shown for long. The total size is bounded, too.
PAGE_SECONDS_MAX = 2.0
PAGES_BYTES_MAX = 8 << 20
# Size of a page besides its data. Pages without data are frequent where most frames are skipped.
PAGE_BYTES = 1024
# Limits of one page. Encoding it takes a millisecond or two of the event loop. A page is sent
# whole, so it is also the amount of data that a client can hold without reading.
PAGE_EVENTS_MAX = 250
PAGE_BYTES_MAX = 256 << 10
# Limit of events that are read where frames are skipped: skipping costs almost nothing.
SCAN_EVENTS_MAX = 1000


# Pages of the log, encoded once for all followers at the same place.
#
# A follower is a place in the log. Followers at the same place need the same bytes, so these are
# made once. The first follower starts the work, the others wait for the same result, and a follower
# that arrives a moment later finds it in the cache.
#
# The events after a place never change while its history exists. So a cached page is never wrong;
# it can only be shorter than the present log. Deleting a session clears the cache. A page that has
# lost all its waiters is cancelled.


Place = TypeVar("Place", bound=Hashable)


class EncodedPage(Struct, Generic[Place], frozen=True):
    """Encoded events, possibly none, and the place after them.

    `gaps`: events that are not kept, by session: the first and the last seq.
    """

    data: bytes
    events: int
    place: Place
    gaps: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


class PageTask(Generic[Place]):
    """A page in progress or finished, with a count of its waiters.

    A waiter enters the context, gets the task, and exits when it stops waiting. The last exit
    cancels an unfinished task.
    """

    __slots__ = ("_forsake", "_waiting", "task")

    def __init__(
        self, task: asyncio.Task[EncodedPage[Place]], forsake: Callable[[PageTask[Place]], None]
    ) -> None:
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
    """Cache of pages in progress and of recent pages. Owns the tasks that make them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._making: dict[Hashable, PageTask[Place]] = {}
        # Oldest first.
        self._made: OrderedDict[Hashable, tuple[float, PageTask[Place]]] = OrderedDict()
        self._bytes = 0
        # Cancelled tasks that have not ended yet.
        self._forsaken: set[asyncio.Task[EncodedPage[Place]]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def at(
        self, key: Hashable, make: Callable[[], Coroutine[Any, Any, EncodedPage[Place]]]
    ) -> PageTask[Place]:
        """Return the page of this key, and start to make it if necessary.

        Use it as `with pages.at(key, make) as task`.
        """
        made = self._made.get(key)
        if made is not None and self._loop.time() - made[0] < PAGE_SECONDS_MAX:
            return made[1]
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = PageTask(
                self._loop.create_task(make()), functools.partial(self._forsake, key)
            )
            making.task.add_done_callback(functools.partial(self._keep, key, making))
        return making

    def _forsake(self, key: Hashable, making: PageTask[Place]) -> None:
        """Remove a cancelled page, so that the next follower starts a new one."""
        self._let_go(key, making)
        self._forsaken.add(making.task)

    def _let_go(self, key: Hashable, making: PageTask[Place]) -> None:
        if self._making.get(key) is making:
            del self._making[key]

    def clear(self) -> None:
        """Forget all pages, because a session was deleted.

        Finished pages must not be shown again. Pages in progress continue for their present
        waiters, but no other follower can find them.
        """
        for key in list(self._made):
            self._drop(key)
        self._making.clear()

    def _keep(
        self, key: Hashable, making: PageTask[Place], task: asyncio.Task[EncodedPage[Place]]
    ) -> None:
        """Cache a finished page, and drop the oldest pages beyond the size limit."""
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
        """Drop old pages by a timer: without new events nothing else would drop the last page."""
        self._timer = None
        oldest = self._loop.time() - PAGE_SECONDS_MAX
        while self._made:
            key, (at, _) = next(iter(self._made.items()))
            if at > oldest:
                # The next check is later than the oldest page's expiry: with thousands of pages a
                # second, a timer for each would be too many.
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


# Sources: one session by cursor, or many sessions by position in the store's commit order.
#
# A source makes the page after a place, and waits while there is nothing. For a reader without
# frames a page may be empty and still advance the place. Otherwise this reader could never be seen
# to reach the end, and would scan a million frames again for each page.


class StreamSource(Protocol[Place]):
    """Events of a stream. `key` distinguishes sources that show different bytes."""

    @property
    def key(self) -> Hashable: ...
    async def next(self, place: Place, form: StreamForm) -> EncodedPage[Place]:
        """Return the page after a place, and wait until the log has some."""
        ...

    async def is_at_end(self, place: Place) -> bool:
        """Whether no event follows a place at this moment."""
        ...

    def shown(self, place: Place) -> str | None:
        """Return a place in the form that clients use."""
        ...


class Cursor(NamedTuple):
    """A place after an event.

    `epoch`: None at the beginning, and for an event whose epoch is unknown.
    """

    epoch: int | None
    seq: int


class OneSession:
    """Source for the events of one session.

    A place identifies its history. An id never gets the same epoch twice, even if its session was
    deleted and another one was created under the id. The beginning has no epoch: there the creation
    time of the session identifies the history.
    """

    def __init__(
        self, session: Session, *, raw: bool, partial: bool = False, frames: bool = True
    ) -> None:
        self._session = session
        self._raw = raw
        self._partial = partial
        self._frames = frames
        self._page_events_max = PAGE_EVENTS_MAX if frames else SCAN_EVENTS_MAX
        self.key = (session.id, session.created, raw, partial, frames)

    async def begin(self, after: str | None) -> Cursor:
        """Validate the client's cursor and return its place.

        Raises `HistoryLost` or `UsageError` if no reader can have been there.
        """
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
        # Wait first. If events exist, the wait returns immediately. If not, it saves a read in
        # another thread, which nearly every live follower would need before each event.
        await self._session.wait_past(place.seq)
        while not (page := await self._after(place)).events:
            await self._session.wait_past(place.seq)
        before = place.seq if page.gap is None else page.gap[1]
        assert page.events[0].seq == before + 1, "a page begins right after its cursor"
        data, shown, taken = _joined(self._line(event, form) for event in page.events)
        end = page.events[taken - 1]
        assert end.seq > place.seq, "a page moves forward"
        gaps = {} if page.gap is None else {self._session.id: page.gap}
        return EncodedPage(data, shown, Cursor(end.epoch, end.seq), gaps)

    def _line(self, event: Event, form: StreamForm) -> bytes | None:
        if event.is_frame and not self._frames:
            return None
        return stored(form, event.cursor, encode(event, raw=self._raw, partial=self._partial))

    async def _after(self, place: Cursor) -> store.Page:
        """Read the events after a place, and check in the same read that its event is unchanged."""
        if place.epoch is None:
            return await self._session.page(place.seq, limit=self._page_events_max)
        page = await self._session.page(
            place.seq - 1, limit=min(self._page_events_max + 1, READ_EVENTS_MAX)
        )
        if page.gap is not None:
            # The event of this place is not kept. The gap for this reader begins after it.
            return store.Page(
                page.events, (place.seq + 1, page.gap[1]) if page.gap[1] > place.seq else None
            )
        if not page.events or page.events[0].epoch != place.epoch:
            raise self._lost(f"the store no longer has event {place.epoch}.{place.seq}")
        if len(page.events) == 1:
            # The event may fill the whole page. Then the following events are on the next page.
            return await self._session.page(
                f"{place.epoch}.{place.seq}", limit=self._page_events_max
            )
        return store.Page(page.events[1:], None)

    def _lost(self, message: str) -> HistoryLost:
        hint = "start again from the first event"
        return HistoryLost(message, hint=hint, session=self._session.id)

    def shown(self, place: Cursor) -> str | None:
        if not place.seq:
            return None
        return str(place.seq) if place.epoch is None else f"{place.epoch}.{place.seq}"


class ManySessions:
    """Source for the events of all sessions of the store, or of some, in commit order.

    `frames_of`: the sessions whose frames are shown; None shows all frames.
    """

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
        """Check that the client's position is valid, and return it."""
        await self._host.read_many(after, limit=1, sessions=self._sessions)
        return after

    async def end(self) -> str:
        """Return the place after all present events."""
        # An empty selection reads no events, and still returns the position of the end.
        return (await self._host.read_many(None, limit=1, sessions=())).position

    async def is_at_end(self, place: str | None) -> bool:
        page = await self._host.read_many(place, limit=1, sessions=self._sessions)
        return not page.events and not page.gaps

    async def next(self, place: str | None, form: StreamForm) -> EncodedPage[str | None]:
        page = await self._host.read_many(
            place, limit=self._page_events_max, sessions=self._sessions
        )
        while not page.events and not page.gaps:
            await self._host.wait_past(page.position)
            page = await self._host.read_many(
                page.position, limit=self._page_events_max, sessions=self._sessions
            )
        # All events up to `last` are gone, whether this reader has seen some of them or not.
        gaps = {session: (1, last) for session, last in page.gaps.items()}
        data, shown, taken = _joined(self._line(one, form) for one in page.events)
        position = page.position if taken == len(page.events) else page.events[taken - 1].position
        assert position != place, "a page moves forward"
        return EncodedPage(data, shown, position, gaps)

    def _line(self, one: store.PositionedEvent, form: StreamForm) -> bytes | None:
        event = one.event
        if event.is_frame and self._frames_of is not None and event.session not in self._frames_of:
            return None
        return placed(form, one.position, encode(event, raw=self._raw, partial=self._partial))

    def shown(self, place: str | None) -> str | None:
        return place


def _joined(lines: Iterable[bytes | None]) -> tuple[bytes, int, int]:
    """Join lines to one page of at least one line.

    Returns the data, the number of lines in it, and the number of events consumed. None stands for
    a skipped event. Lines beyond the page are never generated.
    """
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
