"""Tasks with an owner: started by it, known to it, and over before it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

log = logging.getLogger("banksman")


class OwnedTasks:
    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    def cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def wait(self) -> None:
        """Until all are over, those that they start meanwhile too. None of them is what waits."""
        while others := self._tasks - {asyncio.current_task()}:
            await asyncio.wait(others)

    async def end(self) -> None:
        self.cancel()
        await self.wait()

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("! a task that nobody waits for has failed: %r", exc, exc_info=exc)


# Tasks that wait for something to change: woken all at once, to look again for themselves.


class Waiters:
    def __init__(self) -> None:
        self._futures: set[asyncio.Future[None]] = set()

    async def wait(self) -> None:
        """Until the next `wake`. May be woken for nothing: call it in a loop around what is waited for."""
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
