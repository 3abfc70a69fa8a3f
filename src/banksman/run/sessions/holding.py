"""Holds: which of them a task is inside of, and how one is entered and left."""

from __future__ import annotations

import asyncio
import contextvars
import os
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from types import MappingProxyType

from banksman.core.session_facts import HoldAsked, HoldReleased
from banksman.run.sessions.promises import Promises, ignore

# The holds that the running task is inside of, by session: asks made there are made in the hold.
_holds: contextvars.ContextVar[Mapping[str, str]] = contextvars.ContextVar(
    "banksman_holds", default=MappingProxyType({})
)


def inside(session: str) -> str | None:
    """The hold of this session that the running task is inside of."""
    return _holds.get().get(session)


@asynccontextmanager
async def held(
    session: str,
    promises: Promises,
    priority: int,
    tell: Callable[[HoldAsked | HoldReleased], None],
    raise_if_failed: Callable[[asyncio.Future[None]], None],
) -> AsyncGenerator[None]:
    """See `Session.hold`. `raise_if_failed`: of a session that a bug has failed nobody hears any more."""
    now = promises.loop.time
    holds = _holds.get()
    # Only one that is still there: a task that was started inside a hold may outlive it.
    if promises.has_hold(holds.get(session)):
        yield  # Its own: whoever holds the session already has what it asks for.
        return
    id = f"h-{os.urandom(8).hex()}"
    granted = promises.expect_hold(id)
    token = _holds.set({**holds, session: id})
    try:
        tell(HoldAsked(now(), id, priority))
        raise_if_failed(granted)
        await asyncio.shield(granted)
        yield
    except asyncio.CancelledError:
        ignore(granted)
        raise
    finally:
        promises.forget_hold(id)
        tell(HoldReleased(now(), id))
        # Left in another context than it was entered in (a fixture, a generator that is closed by the loop): there is
        # nothing to be put back there.
        with suppress(ValueError):
            _holds.reset(token)
