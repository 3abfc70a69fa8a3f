"""Table of the session objects of a host: owned sessions, closed sessions and handles.

A session is in the store, whichever host owns it. `SessionTable` finds the session there and gives
every caller the same object for it. The registry opens and claims sessions: see registry.py.
"""

from __future__ import annotations

import asyncio
import functools
import weakref
from collections.abc import Collection

from banksman.core.dialects.log_dialect import reader_of
from banksman.core.redaction.redactor import Redactor
from banksman.core.session.event import Project
from banksman.errors import NotFound
from banksman.sessions import known_agents
from banksman.sessions.arguments import checked_id
from banksman.sessions.log_reader import REST_BYTES_MAX, LogReaders
from banksman.sessions.ownership import OwnershipGuard
from banksman.sessions.profile import Profile
from banksman.sessions.readable_session import SessionParts
from banksman.sessions.session import Claim, Session, Share
from banksman.store.log import Log
from banksman.store.log_values import KnownSession, MultiSessionPage

# Number of closed sessions that stay available. Each may hold its whole history in memory.
SESSIONS_KEPT_MAX = 32


class SessionTable:
    """Session objects by id.

    Belongs to one event loop. `claim`: called by a session that needs ownership and does not have
    it. `share`: appends `session.shared` to a session that is not open here.
    """

    def __init__(
        self,
        store: Log,
        guard: OwnershipGuard,
        claim: Claim,
        share: Share,
        redactor: Redactor | None = None,
    ) -> None:
        self._store = store
        self._guard = guard
        self._claim = claim
        self._share = share
        self._redactor = redactor
        # Sessions that this host owns, or owned until they were closed, oldest first.
        self._ours: dict[str, Session] = {}
        # Handles on sessions that this host does not own, as long as a caller references them.
        self._others: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        # An iterating caller keeps its `LogReaders` alive, but not the session that created it. So
        # the table tracks the readers separately.
        self._readers: weakref.WeakSet[LogReaders] = weakref.WeakSet()
        self._ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Cached per agent, because a store may have thousands of sessions with few agents. The
        # cache lives as long as the table.
        self._profile = functools.cache(known_agents.load_or_plain)

    # -- finding ----------------------------------------------------------------------------------
    def find(self, id_or_name: str) -> Session:
        checked_id(id_or_name)
        if self._ends.done():
            found = [session for session in self.ours() if id_or_name in (session.id, session.name)]
            if found:
                return found[-1]
        elif (known := self._store.find(id_or_name)) is not None:
            return self.handle(known)
        raise NotFound(f"there is no session {id_or_name!r}", hint="list the sessions")

    def all(self, after: str | None = None, limit: int | None = None) -> list[Session]:
        if self._ends.done():
            return self.ours()
        return [self.handle(known) for known in self._store.sessions(after, limit)]

    def ours(self) -> list[Session]:
        return list(self._ours.values())

    def here(self, id: str) -> Session | None:
        """Return the session that this host owns, or owned until it was closed."""
        return self._ours.get(id)

    def is_open_here(self, id: str) -> bool:
        """Whether this host has the session open."""
        here = self._ours.get(id)
        return here is not None and not here.is_closed

    def handle(self, known: KnownSession) -> Session:
        """Return the object for a session of the store.

        A session that was closed here gets a new handle, because any host may claim it again.
        """
        here = self._ours.get(known.id)
        if here is not None and not here.is_closed and not self._guard.is_ending(known.id):
            here.name, here.seen = known.name, known
            return here
        other = self._others.get(known.id)
        if other is None:
            other = self._others[known.id] = self.new(
                known.id, known.name, self._profile(known.agent)
            )
        other.name, other.seen = known.name, known
        return other

    # -- reading many -----------------------------------------------------------------------------
    async def read_many(
        self, after: str | None, limit: int, sessions: Collection[str] | None
    ) -> MultiSessionPage:
        await self._store.ready()
        return await self._store.read_many(
            after, limit, sessions=sessions, project_of=self._project_of
        )

    def _project_of(self, session: str) -> Project | None:
        known = self._store.find(session)
        if known is None:
            return None
        frames = reader_of(self._profile(known.agent).dialect)
        return Project(frames.project, frames.partial)

    # -- changing ---------------------------------------------------------------------------------
    def new(self, id: str, name: str | None, profile: Profile) -> Session:
        parts = SessionParts(
            id=id,
            name=name,
            agent=profile.name,
            dialect=profile.dialect,
            store=self._store,
            ends=self._ends,
            readers=self._readers,
        )
        return Session(
            parts,
            capabilities=profile.capabilities,
            claim=self._claim,
            share=self._share,
            redactor=self._redactor,
        )

    def to_open(self, known: KnownSession, profile: Profile) -> Session:
        """Return the session object to open, which is the existing handle if a caller has one."""
        return self._others.get(known.id) or self.new(known.id, known.name, profile)

    def add(self, session: Session) -> None:
        """Register a session that this host has claimed."""
        self._others.pop(session.id, None)
        self._ours[session.id] = session

    def forget(self, id: str) -> None:
        self._ours.pop(id, None)
        self._others.pop(id, None)

    async def forget_closed(self) -> None:
        """Drop the oldest closed sessions beyond the limit.

        In a store that is not durable this also deletes them.
        """
        closed = [session for session in self.ours() if session.is_closed]
        for session in closed[: max(0, len(closed) - SESSIONS_KEPT_MAX)]:
            self._ours.pop(session.id, None)
            # Queued asks may wait in a session that has left, and the next owner must find them. So
            # it is not deleted.
            has_waiting = session.is_leaving and bool(session.status().queue)
            if not self._store.is_durable and not has_waiting:
                await self._store.delete(session.id)

    # -- the end ----------------------------------------------------------------------------------
    def end(self) -> None:
        """Stop using the store for lookups."""
        if not self._ends.done():
            self._ends.set_result(None)

    async def keep_rest(self) -> None:
        """Buffer the events that followers have not read yet, before the log is closed."""
        left = REST_BYTES_MAX
        for readers in list(self._readers):
            left -= await readers.keep_rest(left)
