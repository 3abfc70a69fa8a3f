"""Calls that block, one after the other, in a thread of the loop's own.

One at a time and in the order in which they were asked for: an agent that writes a file twice, or writes one and runs
it, means them in that order, though it does not wait for the answers. It is also the bound: however much is asked, one
thread per session is at it. A call cannot be cancelled while it runs; it is given up: it asks `is_wanted` before it
does what cannot be undone.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from banksman.errors import Closed

log = logging.getLogger("banksman")

# How long the end of a session waits for a call that is at it: a disk that hangs must not keep it for ever.
ENDING_SECONDS_MAX = 5.0

Result = TypeVar("Result")


class Lane:
    def __init__(self) -> None:
        self._one_at_a_time = asyncio.Lock()
        # Each until its thread is done with it, whoever still waits; and how it is told that nobody does.
        self._calls: dict[asyncio.Task[Any], threading.Event] = {}

    async def run(
        self, call: Callable[[Callable[[], bool]], Result], *, discard: Callable[[Result], None] | None = None
    ) -> Result:
        """What `call(is_wanted)` returns or raises. Cancelled, it is given up, and its place is kept until it ends;
        `discard` gets what it returned, if nobody does."""
        given_up = threading.Event()
        task = asyncio.ensure_future(self._in_turn(call, given_up))
        self._calls[task] = given_up
        task.add_done_callback(self._over)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            given_up.set()
            if discard is not None:
                # At once, if it is over already: it may have been in the very pass of the loop in which we were
                # cancelled.
                task.add_done_callback(lambda _: _discard(task, discard))
            raise

    async def _in_turn(self, call: Callable[[Callable[[], bool]], Result], given_up: threading.Event) -> Result:
        # Held across the wait for the thread, which is the point of it; nothing else is called while it is held.
        async with self._one_at_a_time:
            if given_up.is_set():
                raise Closed("nobody waits for this any more; nothing was done")
            return await asyncio.to_thread(call, lambda: not given_up.is_set())

    def _over(self, task: asyncio.Task[Any]) -> None:
        del self._calls[task]
        # Looked at: whoever asked may be gone, and asyncio complains of what nobody looked at.
        if not task.cancelled():
            task.exception()

    @property
    def is_running(self) -> bool:
        return bool(self._calls)

    def give_up(self) -> None:
        for given_up in self._calls.values():
            given_up.set()

    async def wait_ended(self) -> None:
        """Until none is at it any more, and not for ever."""
        if self._calls:
            _, late = await asyncio.wait(set(self._calls), timeout=ENDING_SECONDS_MAX)
            if late:
                log.warning("! %d calls to the file system go on after the end of their session", len(late))


def _discard(task: asyncio.Task[Result], discard: Callable[[Result], None]) -> None:
    if not task.cancelled() and task.exception() is None:
        discard(task.result())
