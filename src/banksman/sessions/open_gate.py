"""Who comes in when sessions are opened, claimed, deleted: one at a time for each, and nobody once the host closes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from banksman.errors import Closed
from banksman.tasks import Waiters


class Gate:
    """For one loop. Ranks: `at_work` first, then a name, then a session; never the other way round."""

    def __init__(self) -> None:
        # The host has begun to close: what is being opened will not be.
        self.is_closing = False
        self._working = 0
        self._pauses = Waiters()
        # What somebody is alone with: "name" or "session", and which.
        self._taken: dict[tuple[str, str], asyncio.Future[None]] = {}

    def check_open(self) -> None:
        if self.is_closing:
            raise Closed("the host is closing; it opens nothing more", hint="open another Host")

    @asynccontextmanager
    async def at_work(self) -> AsyncGenerator[None]:
        """Somebody is at it. Who closes the log waits for that."""
        self._working += 1
        try:
            self.check_open()
            yield
        finally:
            self._working -= 1
            self._pauses.wake()

    @asynccontextmanager
    async def alone(self, what: str, which: str) -> AsyncGenerator[None]:
        """Who opens what is just being opened waits, and then finds it open."""
        while (other := self._taken.get((what, which))) is not None:
            await asyncio.shield(other)
        mine = self._taken[what, which] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._taken[what, which]
            mine.set_result(None)

    async def wait_idle(self) -> None:
        """Until nobody is at work."""
        while self._working:
            await self._pauses.wait()
