"""Sessions that nobody has: what a list says of them.

At a glance they are gone. But an ask that was accepted is kept, whatever became of its host, and in one that was left,
or lost, somebody may wait until a host comes. Only its log says so, and a store may have ten thousand that were closed
long since. So of those in a list that nobody has, the ones that changed last are looked at, a bounded number in a
bounded time; what a log said is remembered for as long as the log is the same. A server that is asked again goes on
where it was.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

from banksman import Host
from banksman.errors import BanksmanError
from banksman.sessions.session import Session
from banksman.sessions.status import UNOWNED_PHASES, Status, Waiting

# For one list, which is a page of at most a thousand. A verb with a host inside, which has nothing to remember from,
# asks for ten of them where there are ten thousand: that is three seconds, and not a minute.
LOOKS_MAX = 100
LOOK_SECONDS_MAX = 0.3
LOOKS_AT_ONCE_MAX = 16
# Of so many it is remembered who waits there: mostly nobody.
REMEMBERED_MAX = 20_000


class Nobodys:
    """Of one host's store. Belongs to its loop."""

    def __init__(self, host: Host) -> None:
        self._host = host
        # By id: the epoch and the seq up to which it was read, and who waited.
        self._seen: OrderedDict[str, tuple[tuple[int, int], tuple[Waiting, ...]]] = OrderedDict()

    async def glance(self, sessions: Sequence[Session]) -> list[Status]:
        """What each is doing, in the same order."""
        found = [session.status() for session in sessions]
        unknown = [
            session
            for session, status in zip(sessions, found, strict=True)
            if status.phase in UNOWNED_PHASES and status.seq and self._waiting(status) is None
        ]
        if unknown:
            unknown.sort(key=lambda session: 0.0 if session.known is None else -session.known.changed)
            await self._look_at(unknown[:LOOKS_MAX])
        return [self._told(status) for status in found]

    def _waiting(self, status: Status) -> tuple[Waiting, ...] | None:
        """None: it was not looked at, or something has happened in it since."""
        place, waiting = self._seen.get(status.id, ((0, 0), ()))
        # At a glance less may be known than was read. Whoever writes in it has claimed it first, under a higher epoch.
        return waiting if (status.epoch, status.seq) <= place else None

    def _told(self, status: Status) -> Status:
        waiting = self._waiting(status) if status.phase in UNOWNED_PHASES else None
        return replace(status, state="queued", queue=waiting) if waiting else status

    async def _look_at(self, sessions: Sequence[Session]) -> None:
        places = asyncio.Semaphore(LOOKS_AT_ONCE_MAX)

        async def look(session: Session) -> None:
            # One that cannot be read keeps no other from being listed.
            async with places:
                with suppress(BanksmanError):
                    await self._look(session)

        with suppress(TimeoutError):
            async with asyncio.timeout(LOOK_SECONDS_MAX):
                await asyncio.gather(*map(look, sessions))

    async def _look(self, session: Session) -> None:
        known = session.known
        if known is None:
            return
        # Of one that was closed in good order, which nearly all were, the last event is enough.
        # That we have let go of it the store may say a moment later.
        is_waited_in = await self._host.is_waited_in(known._replace(owner=None))
        status = await session.look() if is_waited_in else session.status()
        if status.phase not in UNOWNED_PHASES:
            return  # Somebody has it by now, and says it better.
        self._seen[session.id] = (status.epoch, status.seq), status.queue
        self._seen.move_to_end(session.id)
        while len(self._seen) > REMEMBERED_MAX:
            self._seen.popitem(last=False)
