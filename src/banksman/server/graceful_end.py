"""How a server ends: who told it to, how long what runs may take, and who would not wait."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any

from banksman import Host

if TYPE_CHECKING:
    from banksman.cluster.host import Member


class GracefulEnd:
    """The first word counts; the second says: now. Belongs to the loop it is made in."""

    def __init__(self, drain_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.asked: asyncio.Future[None] = loop.create_future()
        self._now: asyncio.Future[None] = loop.create_future()
        self.seconds = drain_seconds

    def ask(self, seconds: float | None = None) -> None:
        if not self.asked.done():
            if seconds is not None:
                self.seconds = seconds
            self.asked.set_result(None)

    def hurry(self) -> bool:
        """What runs is stopped. False: that was said already."""
        if self._now.done():
            return False
        self._now.set_result(None)
        return True

    async def wait(self, work: Coroutine[Any, Any, None]) -> None:
        """For this, within the same deadline, or until somebody would not wait. It has ended when this returns."""
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait((task, self._now), timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED)
        finally:
            task.cancel()
            await asyncio.wait((task,))
        if not task.cancelled():
            task.result()

    async def leave(self, member: Member) -> None:
        """Other hosts go on with our sessions. What this takes is taken from what `finish` may take."""
        began = time.monotonic()
        await self.wait(member.drain(timeout=self.seconds))
        self.seconds = max(0.0, self.seconds - (time.monotonic() - began))

    async def finish(self, host: Host) -> None:
        """Until nothing runs any more: by itself, by the deadline, or because somebody would not wait."""
        finishing = asyncio.ensure_future(host.finish(timeout=self.seconds))
        try:
            await asyncio.wait((finishing, self._now), return_when=asyncio.FIRST_COMPLETED)
            if not finishing.done():
                await host.finish(timeout=0)
            await finishing
        finally:
            if not finishing.done():
                # We were cancelled. This only stops the waiting: what runs is the host's, which is closed next.
                finishing.cancel()
                await asyncio.wait((finishing,))
