"""asyncio helpers: tasks that their owner ends, concurrent work, and a condition variable."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

log = logging.getLogger("banksman")

Item = TypeVar("Item")


class OwnedTasks:
    """A set of background tasks that belong to one object."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Start a task and keep a reference to it until it ends."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def cancel(self) -> None:
        """Cancel all tasks, without waiting."""
        for task in self._tasks:
            task.cancel()

    async def wait(self) -> None:
        """Wait until all tasks have ended, including tasks that they start meanwhile.

        A task of this set may call this; it does not wait for itself.
        """
        while others := self._tasks - {asyncio.current_task()}:
            await asyncio.wait(others)

    async def end(self) -> None:
        """Cancel all tasks and wait until they have ended."""
        self.cancel()
        await self.wait()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            name = getattr(task.get_coro(), "__qualname__", task.get_name())
            log.error("background task failed (task=%s error=%r)", name, exc, exc_info=exc)


async def for_each(
    items: Iterable[Item], work: Callable[[Item], Coroutine[Any, Any, None]], *, at_once: int
) -> None:
    """Do work for each item, in their order, for several items at the same time.

    An error or a cancellation cancels the rest.
    """
    places = asyncio.Semaphore(at_once)

    async def do(item: Item) -> None:
        try:
            await work(item)
        finally:
            places.release()

    async with asyncio.TaskGroup() as tasks:
        for item in items:
            # The items may be made on demand, and there may be many.
            await places.acquire()
            tasks.create_task(do(item))


# Waiters: tasks that wait for a change. All are woken together, and each checks its condition
# again.


class Waiters:
    """Wakes all waiting tasks, like a condition variable."""

    def __init__(self) -> None:
        self._futures: set[asyncio.Future[None]] = set()

    async def wait(self) -> None:
        """Wait until the next `wake`.

        Spurious wake-ups are possible: call it in a loop around the condition.
        """
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._futures.add(future)
        try:
            await future
        finally:
            self._futures.discard(future)

    def wake(self) -> None:
        for future in self._futures:
            if not future.done():
                future.set_result(None)
