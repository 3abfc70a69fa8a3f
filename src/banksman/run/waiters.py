"""Tasks that wait for something to change: woken all at once, to look again for themselves."""

from __future__ import annotations

import asyncio


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
