"""Sessions of the store for a host: find, list, delete, take over, and read several at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import TYPE_CHECKING

from banksman.errors import NotFound

if TYPE_CHECKING:
    import datetime

    from banksman.core.redaction.redactor import Redactor
    from banksman.core.session.budget import CapUse
    from banksman.sessions.cluster_hooks import ClusterHooks
    from banksman.sessions.session import Session
    from banksman.sessions.session_opener import SessionOpener
    from banksman.store.log import Log
    from banksman.store.log_values import KnownSession, MultiSessionPage, UsageBy, UsageRow


class StoredSessions(ABC):
    """Base class of a host: the calls on sessions that are in its store."""

    # None: the store is not open yet.
    _sessions: SessionOpener | None = None
    _is_closing: bool

    @abstractmethod
    def _bind(self) -> None:
        """Bind the host to the running event loop, if it is not bound already."""

    @abstractmethod
    def _own_sessions(self) -> SessionOpener:
        """Return the registry of sessions. Opens the store if necessary."""

    def session(self, id_or_name: str) -> Session:
        """Return a session of the store by id or name.

        Reading it needs no claim. The first ask claims it: `NotOwner` if a live host elsewhere has
        it. A closed host returns only sessions that it had.
        """
        return self._own_sessions().find(id_or_name)

    def sessions(self, after: str | None = None, *, limit: int | None = None) -> list[Session]:
        """Return the sessions of the store, of all owners, oldest first.

        `after`: the id of the session to start after. `limit`: how many to return. A closed host
        returns only sessions that it had.
        """
        if self._is_closing and self._sessions is None:
            return []
        return self._own_sessions().all(after, limit)

    async def delete(self, session: Session | str) -> None:
        """Delete a session with its whole history. A session that is open here is closed first.

        `NotOwner`: a live host elsewhere has it. `NotFound`: there is no such session; the remains
        of an interrupted deletion are removed.
        """
        self._bind()
        sessions = self._own_sessions()
        try:
            found = self.session(session) if isinstance(session, str) else session
        except NotFound:
            await sessions.delete_remains(str(session))
            raise
        await sessions.delete(found)

    async def has_waiting_asks(self, known: KnownSession) -> bool:
        """Whether asks are still waiting in a session without an owner."""
        from banksman.sessions.recovery import has_waiting_asks  # noqa: PLC0415

        return await has_waiting_asks(self._own_sessions().store, known)

    async def take_over(self, id: str) -> Session:
        """Claim a session that has no live owner, and resume it as it was opened the last time.

        `NotOwner`: a live host elsewhere has it. `UsageError`: its log has not enough information
        to open it again.
        """
        self._bind()
        return await self._own_sessions().take_over(id)

    async def take_up(self) -> None:
        """Resume the sessions with accepted asks of dead hosts that no host has opened since.

        For a host that serves its store to clients: the clients do not know that they should ask
        again.
        """
        self._bind()
        await self._own_sessions().take_up()

    async def take_up_held(self) -> None:
        """Resume the sessions whose process another host has handed over, and no others."""
        self._bind()
        await self._own_sessions().take_up_held()

    # -- reading several sessions -----------------------------------------------------------------
    async def read_many(
        self,
        after: str | None = None,
        *,
        limit: int = 1000,
        sessions: Collection[str] | None = None,
    ) -> MultiSessionPage:
        """Read events of all sessions of the store, or of these, in commit order.

        `after`: the position to start after; None: from the first event. `position` of the page is
        the place to continue from.
        """
        self._bind()
        return await self._own_sessions().read_many(after, limit, sessions)

    async def usage(
        self,
        by: UsageBy = "day",
        *,
        since: datetime.date | str | None = None,
        until: datetime.date | str | None = None,
    ) -> list[UsageRow]:
        """Return the usage of all turns in the store: tokens, cost, working time and turns.

        `by`: the rows are days, sessions, agents or callers. `since`, `until`: the first and the
        last day, in UTC. Deleted sessions stay counted, and imported ones are not.
        """
        self._bind()
        store = self._own_sessions().store
        await store.ready()
        return await store.usage(by, since=since, until=until)

    def budget_uses(self) -> tuple[CapUse, ...]:
        """Return the caps of the host and of its callers, and what is used of them today (UTC)."""
        if self._sessions is None or self._sessions.budgets is None:
            return ()
        return self._sessions.budgets.uses()

    async def wait_past(self, position: str) -> None:
        """Wait until an event is committed after a position, in any session."""
        self._bind()
        await self._own_sessions().wait_past(position)

    def our_sessions(self) -> list[Session]:
        """The sessions that this host has, or had until they were closed.

        Does not read the store.
        """
        return [] if self._sessions is None else self._sessions.ours()

    @property
    def log(self) -> Log:
        """The log that stores the sessions."""
        return self._own_sessions().store

    @property
    def redactor(self) -> Redactor | None:
        """The redactor that removes secrets from stored events; None without secrets."""
        return self._own_sessions().redactor

    def set_cluster_hooks(self, hooks: ClusterHooks | None) -> None:
        """Set the hooks that announce this host's sessions to other hosts; None removes them."""
        self._own_sessions().cluster_hooks = hooks
