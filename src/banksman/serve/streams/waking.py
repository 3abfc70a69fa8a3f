"""What wakes one follower: the page that it waits for, its end, or that it is time for a sign of life.

`asyncio.wait` says the same. But it hangs itself on every one of them for each page, and to take itself off again it
walks past all who hang there: on the future that tells the server's end, that is everybody. A thousand followers would
pay for a million steps at each event. So a follower hangs on its ends once, for as long as it lasts. Its timer is not
moved at each page either, but when it fires: then it is seen how long nothing has come.
"""

from __future__ import annotations

import asyncio
from typing import Any


class Waking:
    """Of one follower, while it is entered. After `lost` or `closing` is done there is nothing to wait for."""

    def __init__(self, *, lost: asyncio.Future[None], closing: asyncio.Future[None], quiet_seconds: float) -> None:
        self._loop = asyncio.get_running_loop()
        self._ends = (lost, closing)
        self._quiet_seconds = quiet_seconds
        # Since when it waits; None while it does not.
        self._since: float | None = None
        self._waiter: asyncio.Future[bool] = self._loop.create_future()
        self._timer: asyncio.TimerHandle | None = None

    def __enter__(self) -> Waking:
        for end in self._ends:
            end.add_done_callback(self._wake)
        self._timer = self._loop.call_later(self._quiet_seconds, self._on_time)
        return self

    def __exit__(self, *_: object) -> None:
        for end in self._ends:
            end.remove_done_callback(self._wake)
        assert self._timer is not None
        self._timer.cancel()

    @property
    def is_over(self) -> bool:
        lost, closing = self._ends  # Asked twice a page: no generator.
        return lost.done() or closing.done()

    async def wait(self, task: asyncio.Task[Any], *, quiet_since: float | None = None) -> bool:
        """Until it is done, or one of the ends; False: neither, and it is quiet for so long: since this wait began, or
        longer. The task is not cancelled with who waits for it."""
        if task.done() or self.is_over:
            return True
        self._since = self._loop.time() if quiet_since is None else quiet_since
        task.add_done_callback(self._wake)
        try:
            while not (task.done() or self.is_over):
                self._waiter = self._loop.create_future()
                if not await self._waiter:
                    return False
                # Else look again: a page that was done in the moment in which the timer fired has its word to us still
                # on its way when we wait for the next one.
            return True
        finally:
            self._since = None
            task.remove_done_callback(self._wake)

    def _wake(self, _: object) -> None:
        if not self._waiter.done():
            self._waiter.set_result(True)

    def _on_time(self) -> None:
        now = self._loop.time()
        due = (now if self._since is None else self._since) + self._quiet_seconds
        if due <= now:
            due = now + self._quiet_seconds
            if not self._waiter.done():
                self._waiter.set_result(False)
        self._timer = self._loop.call_at(due, self._on_time)
