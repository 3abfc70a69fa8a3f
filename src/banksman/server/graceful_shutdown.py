"""State of a shutdown of the server: its limits, its two requests, and the end of running work.

The first request starts the shutdown. It may ask for a hand-over, which keeps the running work for
the next server. The second request skips the wait for running work. It changes nothing in a
hand-over, which is short: it would end work that the next server is about to get.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, Protocol

from banksman import Host

if TYPE_CHECKING:
    from banksman.cluster.host import Member


class StartDrain(Protocol):
    """Starts the shutdown for a client: see `GracefulShutdown.ask`."""

    def __call__(self, seconds: float | None = None, hold_seconds: float | None = None) -> bool: ...


class GracefulShutdown:
    """The state of a shutdown: requested, or requested a second time.

    The first request starts the shutdown with its time limit. The second one skips the rest of that
    time. Belongs to the event loop in which it is created.

    `hold_seconds`: how long processes that are handed over wait for the next server; None without a
    hand-over.
    """

    def __init__(self, drain_seconds: float) -> None:
        loop = asyncio.get_running_loop()
        self.asked: asyncio.Future[None] = loop.create_future()
        self._now: asyncio.Future[None] = loop.create_future()
        self.seconds = drain_seconds
        self.hold_seconds: float | None = None

    def ask(self, seconds: float | None = None, hold_seconds: float | None = None) -> bool:
        """Request the shutdown. Later calls change nothing, and return False.

        `seconds`: time limit for running turns; None keeps the present limit. `hold_seconds`: hand
        over what runs; None: finish it.
        """
        if self.asked.done():
            return False
        if seconds is not None:
            self.seconds = seconds
        self.hold_seconds = hold_seconds
        self.asked.set_result(None)
        return True

    def hurry(self) -> bool:
        """Stop running turns now.

        Returns False if that was requested before, or if the work is handed over.
        """
        if self._now.done() or self.hold_seconds is not None:
            return False
        self._now.set_result(None)
        return True

    async def wait(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this coroutine within the time limit.

        It is cancelled at the limit, or when `hurry` is called. It has ended when this returns.
        """
        task = asyncio.ensure_future(work)
        try:
            await asyncio.wait(
                (task, self._now), timeout=self.seconds, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            task.cancel()
            await asyncio.wait((task,))
        if not task.cancelled():
            task.result()

    async def leave(self, member: Member) -> None:
        """Hand the sessions of this host over to other hosts.

        The time that this takes is subtracted from the limit of `finish`.
        """
        began = time.monotonic()
        await self.wait(member.drain(timeout=self.seconds))
        self.seconds = max(0.0, self.seconds - (time.monotonic() - began))

    async def finish(
        self, host: Host, *, keeps_asks: bool = False, scope: str | None = None
    ) -> None:
        """Wait until nothing runs, or hand over what runs.

        The host stops what still runs at the time limit, or when `hurry` is called. `keeps_asks`:
        the asks that wait stay in the store, for the next server. Otherwise they are refused.
        `scope`: hand over what the next server of this scope can continue; the host is closed then.
        """
        work = self._drain(host, keeps_asks) if scope is None else self._hand_over(host, scope)
        finishing = asyncio.ensure_future(work)
        try:
            await asyncio.wait((finishing, self._now), return_when=asyncio.FIRST_COMPLETED)
            if not finishing.done():
                await host.finish(timeout=0)
            await finishing
        finally:
            if not finishing.done():
                # This task was cancelled. Cancelling `finishing` only stops the wait: the host owns
                # what runs, and the host is closed next.
                finishing.cancel()
                await asyncio.wait((finishing,))

    async def _drain(self, host: Host, keeps_asks: bool) -> None:
        if keeps_asks:
            for session in host.our_sessions():
                session.leave_nowait()
        await host.finish(timeout=self.seconds)

    async def _hand_over(self, host: Host, scope: str) -> None:
        assert self.hold_seconds is not None
        # The sessions first: from then on no turn needs a new process, and none would get one.
        drained = host.drain(timeout=self.seconds, hand_over=True, hold_seconds=self.hold_seconds)
        await asyncio.gather(drained, host.hand_over_commands(self.hold_seconds, scope=scope))
