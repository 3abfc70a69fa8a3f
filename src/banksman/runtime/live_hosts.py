"""The running event loop, or an error that says what to do without one."""

from __future__ import annotations

import asyncio
import atexit
import os
import threading
import weakref
from typing import Protocol

from banksman.errors import UsageError


def running_loop() -> asyncio.AbstractEventLoop:
    """`UsageError` where asyncio runs no loop: in plain code, and under trio, which has a loop of its own."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        hint = "run it by asyncio.run(); under trio, or without any loop, use banksman.threads (in a worker thread)"
        raise UsageError("there is no running asyncio event loop here", hint=hint) from None


# Every host that is in use: to let go of those whose loop was closed without a word to them, and at the end of all.


class Bound(Protocol):
    """A host that has a loop."""

    def abandon_if_loop_is_closed(self) -> None: ...
    def dismiss_guard(self) -> None: ...


_bound: weakref.WeakSet[Bound] = weakref.WeakSet()
# Protects `_bound`, which hosts of several threads share. Nothing is called while it is held.
_lock = threading.Lock()


def add(host: Bound) -> None:
    """Note that a host is in use, and look after the others."""
    with _lock:
        others = list(_bound)
        _bound.add(host)
    for other in others:
        other.abandon_if_loop_is_closed()


def _dismiss_guards() -> None:
    for host in list(_bound):
        host.dismiss_guard()


def _renew_lock() -> None:
    """In a forked child: whichever thread held it is not here to release it."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()


atexit.register(_dismiss_guards)
os.register_at_fork(after_in_child=_renew_lock)
