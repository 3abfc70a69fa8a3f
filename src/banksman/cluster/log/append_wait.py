"""Who waits for the next event, of one session or of any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import TypeAlias

from banksman.cluster.log.message_codec import MessagePlace
from banksman.errors import StoreError

# Its result is the error to raise, so that none is lost with a future whose task was cancelled meanwhile.
Waiter: TypeAlias = "asyncio.Future[StoreError | None]"


class AppendWaiters:
    def __init__(self) -> None:
        self._waiters: dict[str, dict[Waiter, int]] = {}
        self._of_all: dict[Waiter, int] = {}
        self._closed: StoreError | None = None

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values())) + len(self._of_all)

    def sessions(self) -> set[str]:
        """Those that somebody waits for."""
        return set(self._waiters)

    @property
    def is_any(self) -> bool:
        """Whether somebody waits for all of them."""
        return bool(self._of_all)

    @asynccontextmanager
    async def past(self, session: str, seq: int) -> AsyncGenerator[Waiter]:
        """What is waited for by `outcome`, until an event after `seq` is committed. It is in place from the
        beginning."""
        waiters = self._waiters.setdefault(session, {})
        waiter: Waiter = asyncio.get_running_loop().create_future()
        waiters[waiter] = seq
        try:
            yield waiter
        finally:
            waiters.pop(waiter, None)
            # Another set may be in its place by now, if this one was emptied by a delete.
            if not waiters and self._waiters.get(session) is waiters:
                del self._waiters[session]

    async def past_all(self, seq: int) -> None:
        """Until a message with events is stored behind this sequence, of whichever session."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._of_all[waiter] = seq
        try:
            await outcome(waiter)
        finally:
            self._of_all.pop(waiter, None)

    def on_moved(self, session: str, place: MessagePlace) -> None:
        for waiter, seq in self._waiters.get(session, {}).items():
            if seq < place.last and not waiter.done():
                waiter.set_result(None)
        if place.held:
            self.on_newest(place.seq)

    def on_newest(self, seq: int) -> None:
        for waiter, behind in self._of_all.items():
            if behind < seq and not waiter.done():
                waiter.set_result(None)

    def give_up(self, session: str, error: StoreError) -> None:
        for waiter in self._waiters.pop(session, {}):
            if not waiter.done():
                waiter.set_result(error)

    def close(self, error: StoreError) -> None:
        for session in list(self._waiters):
            self.give_up(session, error)
        for waiter in self._of_all:
            if not waiter.done():
                waiter.set_result(error)


async def outcome(waiter: Waiter) -> None:
    error = await waiter
    if error is not None:
        raise error
