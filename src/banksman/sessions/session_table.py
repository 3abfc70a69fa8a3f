"""The sessions of a store as objects of this host: those that it has or had, and handles on all others.

A session is in the store, whichever host owns it. `SessionTable` finds it there and gives every caller the same object
for it. Opening and claiming is the registry's: see registry.py.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Collection

from banksman.core.session.event import Project
from banksman.core.wire.redaction import Redactor
from banksman.errors import NotFound
from banksman.sessions import known_agents
from banksman.sessions.arguments import checked_id
from banksman.sessions.log_reader import REST_BYTES_MAX, LogReaders
from banksman.sessions.ownership import OwnershipGuard
from banksman.sessions.profile import Profile
from banksman.sessions.session import Claim, Session
from banksman.store.log import KnownSession, Log, MultiSessionPage

# Closed sessions that can still be asked for. Each may hold its whole history in memory.
SESSIONS_KEPT_MAX = 32


class SessionTable:
    """For one loop. `claim` is called by a session that is asked and is not ours."""

    def __init__(self, store: Log, guard: OwnershipGuard, claim: Claim, redactor: Redactor | None = None) -> None:
        self._store = store
        self._guard = guard
        self._claim = claim
        self._redactor = redactor
        # Those that we have, or had until they were closed, oldest first.
        self._ours: dict[str, Session] = {}
        # Handles on sessions that are not ours, as long as a caller has one.
        self._others: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        # A reader keeps its own alive, and not the session that it had it from.
        self._readers: weakref.WeakSet[LogReaders] = weakref.WeakSet()
        self._ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # By agent, for a store may have thousands of sessions with few of them.
        self._profile = functools.cache(known_agents.load_or_plain)

    # -- finding -----------------------------------------------------------------------------------------------------
    def find(self, id_or_name: str) -> Session:
        checked_id(id_or_name)
        if self._ends.done():
            found = [session for session in self.ours() if id_or_name in (session.id, session.name)]
            if found:
                return found[-1]
        elif (known := self._store.find(id_or_name)) is not None:
            return self.handle(known)
        raise NotFound(f"there is no session {id_or_name!r}", hint="see sessions()")

    def all(self, after: str | None = None, limit: int | None = None) -> list[Session]:
        if self._ends.done():
            return self.ours()
        return [self.handle(known) for known in self._store.sessions(after, limit)]

    def ours(self) -> list[Session]:
        return list(self._ours.values())

    def here(self, id: str) -> Session | None:
        """The session of this id that we have, or had until it was closed."""
        return self._ours.get(id)

    def handle(self, known: KnownSession) -> Session:
        """One that was closed here is asked anew by another handle: any host may claim it again."""
        here = self._ours.get(known.id)
        if here is not None and not here.is_closed and not self._guard.is_ending(known.id):
            here.name, here.seen = known.name, known
            return here
        other = self._others.get(known.id)
        if other is None:
            other = self._others[known.id] = self.new(known.id, known.name, self._profile(known.agent))
        other.name, other.seen = known.name, known
        return other

    # -- reading many ------------------------------------------------------------------------------------------------
    async def read_many(self, after: str | None, limit: int, sessions: Collection[str] | None) -> MultiSessionPage:
        await self._store.ready()
        return await self._store.read_many(after, limit, sessions=sessions, project_of=self._project_of)

    def _project_of(self, session: str) -> Project | None:
        known = self._store.find(session)
        if known is None:
            return None
        dialect = self._profile(known.agent).dialect
        return Project(dialect.project, dialect.partial)

    # -- changing ----------------------------------------------------------------------------------------------------
    def new(self, id: str, name: str | None, profile: Profile) -> Session:
        return Session(
            id,
            name=name,
            agent=profile.name,
            dialect=profile.dialect,
            store=self._store,
            ends=self._ends,
            readers=self._readers,
            capabilities=profile.capabilities,
            claim=self._claim,
            redactor=self._redactor,
        )

    def to_open(self, known: KnownSession, profile: Profile) -> Session:
        """The one to be opened: a caller that has a handle on it has the one that is opened."""
        return self._others.get(known.id) or self.new(known.id, known.name, profile)

    def add(self, session: Session) -> None:
        """It is ours from here on."""
        self._others.pop(session.id, None)
        self._ours[session.id] = session

    def forget(self, id: str) -> None:
        self._ours.pop(id, None)
        self._others.pop(id, None)

    async def forget_closed(self) -> None:
        """All but the last ones."""
        closed = [session for session in self.ours() if session.is_closed]
        for session in closed[: max(0, len(closed) - SESSIONS_KEPT_MAX)]:
            self._ours.pop(session.id, None)
            # In one that has left an ask may wait, and the host that comes next is to find it.
            has_waiting = session.is_leaving and bool(session.status().queue)
            if not self._store.is_durable and not has_waiting:
                await self._store.delete(session.id)

    # -- the end -----------------------------------------------------------------------------------------------------
    def end(self) -> None:
        """From here on nothing is looked for in the store."""
        if not self._ends.done():
            self._ends.set_result(None)

    async def keep_rest(self) -> None:
        """Keep what followers have not read yet: the log is about to be closed."""
        left = REST_BYTES_MAX
        for readers in list(self._readers):
            left -= await readers.keep_rest(left)
