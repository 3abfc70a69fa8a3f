"""Pages of the log, encoded once for everybody who stands at the same place.

A follower is a place in the log and nothing more. Those who stand at the same one want the same bytes, so they are
made once: the first who asks begins, the others wait for the same, and who comes a moment later finds it still there.
What comes after a place never changes, as long as its history is there, so a page cannot be wrong, only shorter than
what there is by now; what is deleted here is forgotten here. A page that nobody waits for any more is not made to its
end.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Hashable, Mapping
from typing import Any, Generic, TypeVar

from msgspec import Struct, field

# Kept for who comes a moment later: by age, for what retention takes must not be shown for long; and by size.
PAGE_SECONDS_MAX = 2.0
PAGES_BYTES_MAX = 8 << 20
# What a page takes besides its data: those that show nothing to a reader are many where much is said.
PAGE_BYTES = 1024

Place = TypeVar("Place", bound=Hashable)


class EncodedPage(Struct, Generic[Place], frozen=True):
    """What is to be sent, which may be nothing, and the place after it. `gaps`: what is no longer there, by session:
    the first and the last seq."""

    data: bytes
    events: int
    place: Place
    gaps: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])


class Making(Generic[Place]):
    """A page that is being made, or was. Entered by everybody for as long as it is waited for; gives the task."""

    __slots__ = ("_forsake", "_waiting", "task")

    def __init__(self, task: asyncio.Task[EncodedPage[Place]], forsake: Callable[[Making[Place]], None]) -> None:
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
        self._making: dict[Hashable, Making[Place]] = {}
        # Oldest first.
        self._made: OrderedDict[Hashable, tuple[float, Making[Place]]] = OrderedDict()
        self._bytes = 0
        # Those that nobody wants any more, until they have ended.
        self._forsaken: set[asyncio.Task[EncodedPage[Place]]] = set()
        self._timer: asyncio.TimerHandle | None = None

    def at(self, key: Hashable, make: Callable[[], Coroutine[Any, Any, EncodedPage[Place]]]) -> Making[Place]:
        """The page of this key: `with pages.at(key, make) as task`."""
        made = self._made.get(key)
        if made is not None and self._loop.time() - made[0] < PAGE_SECONDS_MAX:
            return made[1]
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = Making(self._loop.create_task(make()), functools.partial(self._forsake, key))
            making.task.add_done_callback(functools.partial(self._keep, key, making))
        return making

    def _forsake(self, key: Hashable, making: Making[Place]) -> None:
        """Who comes next begins anew: this one will never be made."""
        self._let_go(key, making)
        self._forsaken.add(making.task)

    def _let_go(self, key: Hashable, making: Making[Place]) -> None:
        if self._making.get(key) is making:
            del self._making[key]

    def clear(self) -> None:
        """A session was deleted: what was made of it is shown to nobody any more, and what is being made of it has no
        name under which it could be found."""
        for key in list(self._made):
            self._drop(key)
        self._making.clear()

    def _keep(self, key: Hashable, making: Making[Place], task: asyncio.Task[EncodedPage[Place]]) -> None:
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
