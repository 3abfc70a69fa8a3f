"""Bind a host to one event loop, and drain or abandon the host when that loop ends.

A host belongs to the loop in which it is first used. A loop ends in one of three ways:

- It closes its async generators (`asyncio.run` does). The host drains while the loop still runs.
- It is closed without that. The next host of the process abandons the host, whose processes end
  with the loop.
- The interpreter exits and the loop was left open. An exit handler closes the guard of the host.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable

from banksman.errors import UsageError


def running_loop() -> asyncio.AbstractEventLoop:
    """Return the running asyncio loop.

    Raises `UsageError` in plain code, which has no loop, and under trio, which has another kind of
    loop.
    """
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        hint = "use asyncio.run(); under trio or without a loop, use banksman.threads in a thread"
        raise UsageError("no asyncio event loop is running here", hint=hint) from None


class LoopBound(ABC):
    """Base class of a host: binds it to its loop at first use, and drains it at the loop's end."""

    # A weak reference: the default host of a loop is a value in a mapping keyed by that loop, and
    # must not keep its key alive. None: not bound yet.
    _loop: Callable[[], asyncio.AbstractEventLoop | None] | None = None
    # A suspended generator that drains when the loop closes it.
    _guard: AsyncGenerator[None] | None = None

    @abstractmethod
    async def _drain(self) -> None:
        """End everything that runs. Called in the loop."""

    @abstractmethod
    def _abandon(self) -> None:
        """Forget everything that ran: the loop is closed, so nothing can be awaited."""

    def abandon_if_loop_is_closed(self) -> None:
        """Abandon everything if the loop was closed without closing this host."""
        loop = None if self._loop is None else self._loop()
        if loop is not None and loop.is_closed():
            self.dismiss_guard()
            self._abandon()

    def _bind(self) -> None:
        """Bind the host to the running loop, or check that it is the same loop."""
        loop = running_loop()
        if self._loop is None:
            self._loop = weakref.ref(loop)
            _note_bound(self)
            # A loop that ends closes its async generators, after it has cancelled its tasks. So a
            # suspended generator learns of the end while the loop can still drain.
            self._guard = self._drain_at_loop_end()
            with contextlib.suppress(StopIteration):
                self._guard.__anext__().__await__().__next__()
        elif self._loop() is not loop:
            raise UsageError(
                "this host belongs to another event loop", hint="make one Host per loop"
            )

    async def _drain_at_loop_end(self) -> AsyncGenerator[None]:
        try:
            yield
        finally:
            # Without a guard there is no loop to drain in: see `dismiss_guard`.
            if self._guard is not None:
                await self._drain()
                # The generator refers to its loop, and the loop's mapping refers to this host.
                # Clearing the guard breaks that cycle.
                self._guard = None

    def dismiss_guard(self) -> None:
        """Close the guard at interpreter exit, if its loop was left open.

        No other code can do that. If the generator were left to the garbage collector, it would be
        handed to a loop that never runs again, which warns about it.
        """
        guard, self._guard = self._guard, None
        if guard is not None:
            with contextlib.suppress(StopIteration, RuntimeError):
                guard.aclose().__await__().__next__()


# Every host with a loop. Needed to abandon hosts after their loop was closed without closing them,
# and at interpreter exit.
_bound: weakref.WeakSet[LoopBound] = weakref.WeakSet()
# Protects `_bound`, which hosts of several threads share. No other function is called while it is
# held.
_lock = threading.Lock()


def _note_bound(host: LoopBound) -> None:
    """Register a host, and abandon other hosts whose loop is closed."""
    with _lock:
        others = list(_bound)
        _bound.add(host)
    for other in others:
        other.abandon_if_loop_is_closed()


def _dismiss_guards() -> None:
    for host in list(_bound):
        host.dismiss_guard()


def _renew_lock() -> None:
    """Replace the lock in a forked child: the thread that held it does not exist there."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


atexit.register(_dismiss_guards)
os.register_at_fork(after_in_child=_renew_lock)
