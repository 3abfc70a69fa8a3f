"""Pages of the log, encoded once for everybody who stands at the same place.

A follower is a place in the log and nothing more. Those who stand at the same one want the same bytes, so they are
made once: the first who asks begins, the others wait for the same, and who comes a moment later finds it still there.
What comes after a place never changes, so a page cannot be wrong, only shorter than what there is by now. A page that
nobody waits for any more is not made to its end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Generator, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

# Kept for who comes a moment later: by age, for what retention takes must not be shown for long; and by size.
PAGE_SECONDS_MAX = 2.0
PAGES_BYTES_MAX = 8 << 20

Place = TypeVar("Place", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Page(Generic[Place]):
    """What is to be sent, and the place after it. `gaps`: what is no longer there, by session: the first and the last
    seq."""

    pieces: tuple[bytes, ...]
    events: int
    place: Place
    gaps: Mapping[str, tuple[int, int]] = field(default_factory=dict[str, tuple[int, int]])

    @property
    def bytes(self) -> int:
        return sum(map(len, self.pieces))


@dataclass(slots=True)
class _Making(Generic[Place]):
    task: asyncio.Task[Page[Place]]
    waiting: int = 0


class Pages(Generic[Place]):
    """The pages that are being made, and the last ones that were. It owns the tasks that make them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._making: dict[Hashable, _Making[Place]] = {}
        self._made: OrderedDict[Hashable, tuple[float, asyncio.Task[Page[Place]]]] = OrderedDict()
        self._bytes = 0
        self._timer: asyncio.TimerHandle | None = None

    @contextlib.contextmanager
    def at(
        self, key: Hashable, make: Callable[[], Coroutine[Any, Any, Page[Place]]]
    ) -> Generator[asyncio.Task[Page[Place]]]:
        """The task that makes the page of this key, or has made it; for as long as it is waited for."""
        made = self._made.get(key)
        if made is not None and self._loop.time() - made[0] < PAGE_SECONDS_MAX:
            yield made[1]
            return
        making = self._making.get(key)
        if making is None:
            making = self._making[key] = _Making(self._loop.create_task(make()))
            making.task.add_done_callback(lambda task: self._keep(key, task))
        making.waiting += 1
        try:
            yield making.task
        finally:
            making.waiting -= 1
            if not making.waiting and not making.task.done():
                making.task.cancel()
                # Who comes next begins anew: this one will never be made.
                if self._making.get(key) is making:
                    del self._making[key]

    def _keep(self, key: Hashable, task: asyncio.Task[Page[Place]]) -> None:
        making = self._making.get(key)
        if making is not None and making.task is task:
            del self._making[key]
        if task.cancelled() or task.exception() is not None:
            return
        self._drop(key)
        self._made[key] = self._loop.time(), task
        self._bytes += task.result().bytes
        while self._made and self._bytes > PAGES_BYTES_MAX:
            self._drop(next(iter(self._made)))
        if self._timer is None:
            self._timer = self._loop.call_later(PAGE_SECONDS_MAX, self._forget_old)

    def _drop(self, key: Hashable) -> None:
        found = self._made.pop(key, None)
        if found is not None:
            self._bytes -= found[1].result().bytes

    def _forget_old(self) -> None:
        """Of a session that is quiet nobody would else take the last page away."""
        self._timer = None
        oldest = self._loop.time() - PAGE_SECONDS_MAX
        for key, (at, _) in list(self._made.items()):
            if at > oldest:
                self._timer = self._loop.call_at(at + PAGE_SECONDS_MAX, self._forget_old)
                break
            self._drop(key)

    async def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        tasks = [making.task for making in self._making.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
