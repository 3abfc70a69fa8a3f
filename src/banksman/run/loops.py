"""The running event loop, or an error that says what to do without one."""

from __future__ import annotations

import asyncio

from banksman.errors import UsageError


def running_loop() -> asyncio.AbstractEventLoop:
    """`UsageError` where asyncio runs no loop: in plain code, and under trio, which has a loop of its own."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        hint = "run it by asyncio.run(); under trio, or without any loop, use banksman.threads (in a worker thread)"
        raise UsageError("there is no running asyncio event loop here", hint=hint) from None
