"""Log in memory that can lose its leases, like a remote store, when a test wants it.

It is a log like any other, and behaves like `MemoryLog` between losses. It calls its guard as an engine with heartbeats
does: it reports how long everything is held, and later that it is lost. Sessions that were claimed before a loss are
refused from then on. Sessions that are claimed after it are not.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

from banksman.core.session.event import Entry
from banksman.errors import NotOwner, Unreachable
from banksman.store.log import OwnershipListener
from banksman.store.log_values import Done, KnownSession
from banksman.store.memory import MemoryLog


class Times(NamedTuple):
    fence_at: float
    dead_by: float


def times(held: float, window: float) -> Times:
    now = time.monotonic()
    return Times(now + held, now + held + window)


class LeasedLog(MemoryLog):
    """`is_ready` False: the log cannot be used until `become_ready`. `fences`: it reports the loss at `fence_at`."""

    def __init__(self, until: Times | None = None, *, is_ready: bool = True, fences: bool = False) -> None:
        super().__init__()
        self.until = until
        self.told: OwnershipListener | None = None
        self._fences = fences
        self._fence: asyncio.TimerHandle | None = None
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if is_ready:
            self.become_ready()
        # The epoch of each session that was claimed at the loss.
        self._lost: dict[str, int] = {}
        # An append waits for this future, for a test that wants another event to come first.
        self.append_after: asyncio.Future[None] | None = None

    # -- behaviour of an engine --------------------------------------------------------------------------------------
    def become_ready(self) -> None:
        self._ready.set_result(None)

    def hold(self, until: Times) -> None:
        self.until = until
        if self.told is not None:
            self.told.on_held(*until)
        if self._fence is not None:
            self._fence.cancel()
        if self._fences:
            loop = asyncio.get_running_loop()
            self._fence = loop.call_later(max(0.0, until.fence_at - time.monotonic()), self.lose)

    def lose(self, dead_by: float | None = None) -> None:
        assert self.told is not None
        assert self.until is not None
        self._lost = {known.id: known.epoch for known in self.sessions()}
        self.told.on_lost(self._error(), self.until.dead_by if dead_by is None else dead_by)

    @staticmethod
    def _error() -> NotOwner:
        return NotOwner("no heartbeat was acknowledged in time")

    # -- the log -----------------------------------------------------------------------------------------------------
    def guard(self, guard: OwnershipListener) -> None:
        assert self.told is None
        self.told = guard
        if self.until is not None:
            self.hold(self.until)

    async def ready(self) -> None:
        await asyncio.shield(self._ready)

    async def close(self) -> None:
        if self._fence is not None:
            self._fence.cancel()
        if not self._ready.done():
            self._ready.set_exception(Unreachable("the log was closed before it could be asked"))
            self._ready.exception()
        await super().close()

    def find(self, id_or_name: str) -> KnownSession | None:
        self._check_ready()
        return super().find(id_or_name)

    def sessions(self, after: str | None = None, limit: int | None = None) -> list[KnownSession]:
        self._check_ready()
        return super().sessions(after, limit)

    def _check_ready(self) -> None:
        if not self._ready.done():
            raise Unreachable("the store is not known yet")

    def append(
        self,
        session: str,
        epoch: int,
        expected_seq: int,
        at: float,
        entries: Sequence[Entry],
        done: Done,
        snapshot: bytes | None = None,
    ) -> None:
        if self._is_refused(session, epoch, done):
            return

        def append(_: object = None) -> None:
            super(LeasedLog, self).append(session, epoch, expected_seq, at, entries, done, snapshot)

        if self.append_after is None:
            append()
        else:
            self.append_after.add_done_callback(append)

    def advance(self, session: str, epoch: int, done: Done) -> None:
        if not self._is_refused(session, epoch, done):
            super().advance(session, epoch, done)

    def lease(self, session: str, epoch: int, name: str | None, done: Done) -> None:
        if not self._is_refused(session, epoch, done):
            super().lease(session, epoch, name, done)

    def _is_refused(self, session: str, epoch: int, done: Done) -> bool:
        is_refused = epoch <= self._lost.get(session, 0)
        if is_refused:
            asyncio.get_running_loop().call_soon(done, self._error())
        return is_refused
