"""Pages of event streams, encoded once for all followers at the same place.

A follower is a place in the log. Followers at the same place need the same bytes, so these are made
once. The first follower starts the work, the others wait for the same result, and a follower that
arrives a moment later finds it in the cache. `sources.py` makes the pages, and `follower.py` sends
them.

The events after a place never change while its history exists. So a cached page is never wrong; it
can only be shorter than the present log. Deleting a session clears the cache. A page that has lost
all its waiters is cancelled.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Hashable, Mapping
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

from msgspec import Struct

from banksman.server.streams.event_format import StreamForm
from banksman.store.log import LogTail

# A finished page is kept for followers that arrive a moment later. Its age is bounded, because
# events that retention removes must not be shown for long. The total size is bounded, too.
PAGE_SECONDS_MAX = 2.0
PAGES_BYTES_MAX = 8 << 20
# Size of a page besides its data. Pages without data are frequent where most frames are skipped.
PAGE_BYTES = 1024

Place = TypeVar("Place", bound=Hashable)
Gaps = Mapping[str, tuple[int, int]]
NO_GAPS: Gaps = {}


class EncodedPage(Struct, Generic[Place], frozen=True):
    """Encoded events, possibly none, and the place after them.

    `gaps`: events that are not kept, by session: the first and the last seq.
    """

    data: bytes
    events: int
    place: Place
    gaps: Gaps


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

    def tail(self, place: Place, wake: Callable[[], None]) -> LogTail | None:
        """Open a tail for a reader at a place: `wake` is called at each commit.

        None if this host cannot see each commit, or does not know the place. A deletion ends the
        tail, so the place stays in the tail's history.
        """
        ...

    def seq(self, place: Place) -> int:
        """Return a place in the form that a tail uses."""
        ...

    def recent(self, place: Place, form: StreamForm) -> EncodedPage[Place] | None:
        """Return the page after a place from memory; None if it must be read in another way."""
        ...

    def shown(self, place: Place) -> str | None:
        """Return a place in the form that clients use."""
        ...


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


class LiveSource(Generic[Place]):
    """The followers of one source that are served from memory, and the last page made for them."""

    __slots__ = ("after", "at", "followers", "page")

    def __init__(self) -> None:
        self.followers = 0
        # The last page, the place before it, and when it was made. One follower needs no copy.
        self.page: EncodedPage[Place] | None = None
        self.after: Place | None = None
        self.at = 0.0


class LivePages(Generic[Place]):
    """Pages of one follower that has caught up, made from memory without a task.

    A live event then costs the follower one wakeup. Nearly all events of a live session take this
    path. `SharedPages.at` is for the others: a history, a session of another host, many sessions.
    """

    __slots__ = ("_form", "_loop", "_shared", "_source", "_tail", "_wake")

    def __init__(
        self,
        shared: LiveSource[Place],
        source: StreamSource[Place],
        form: StreamForm,
        wake: Callable[[], None],
    ) -> None:
        self._shared = shared
        self._source = source
        self._form = form
        self._wake = wake
        self._tail: LogTail | None = None
        self._loop = asyncio.get_running_loop()

    def is_at_end(self, place: Place) -> bool:
        """Whether no event follows a place, and `wake` will be called at the next one.

        Opens a tail if there is none.
        """
        if self._tail is None or not self._tail.is_live:
            # This host may have claimed the session since the last call.
            self.close()
            self._tail = self._source.tail(place, self._wake)
        return self.has_all(place)

    def has_all(self, place: Place) -> bool:
        """Whether no event that the tail has seen follows a place."""
        return self._tail is not None and self._source.seq(place) >= self._tail.seq

    def next(self, place: Place) -> EncodedPage[Place] | None:
        """Return the page after a place, made once for all followers at that place.

        None if the events are not in memory.
        """
        if self._tail is None or not self._tail.is_live:
            return None
        shared = self._shared
        if shared.followers == 1:
            return self._source.recent(place, self._form)
        now = self._loop.time()
        # None is kept too: the events are not in memory, or too large.
        if shared.after != place or now - shared.at >= PAGE_SECONDS_MAX:
            shared.page = self._source.recent(place, self._form)
            shared.after, shared.at = place, now
        return shared.page

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None


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
        self._live: dict[Hashable, LiveSource[Place]] = {}

    @contextmanager
    def live(
        self, source: StreamSource[Place], form: StreamForm, wake: Callable[[], None]
    ) -> Generator[LivePages[Place]]:
        """Serve one follower from memory while it has caught up. `wake`: called at each commit."""
        key = (source.key, form)
        shared = self._live.setdefault(key, LiveSource())
        live = LivePages(shared, source, form, wake)
        shared.followers += 1
        try:
            yield live
        finally:
            live.close()
            shared.followers -= 1
            if not shared.followers:
                del self._live[key]

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
        for shared in self._live.values():
            shared.page = shared.after = None

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
