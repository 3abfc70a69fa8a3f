"""Session registry of a host: open, reopen, fork, claim and delete sessions.

All sessions share one log and one pool. To open a session, the host claims it and takes it over
(recovery.py). A new session has no past. Two callers that open the same session at the same time
get the same object: the second call waits for the first. `session_table.py` finds session objects,
and `session_spec.py` checks the arguments of an open.
"""

from __future__ import annotations

import functools
import logging
import os
import shlex
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import asynccontextmanager, suppress

from msgspec.structs import replace

from banksman.core.session import fallback
from banksman.core.session.event import SESSION_OPENED, SESSION_SETTING, Entry, entry
from banksman.core.session.history import SessionHistory
from banksman.core.session.session_config import Config
from banksman.core.wire.redaction import Redactor
from banksman.errors import BanksmanError, Moving, NameTaken, NotOwner, UsageError
from banksman.sessions import known_agents, recovery
from banksman.sessions.accounts import AccountLimits, SessionAccounts
from banksman.sessions.arguments import checked_id, checked_name
from banksman.sessions.budget_ledger import SharedBudgets
from banksman.sessions.budgets import HostBudgets
from banksman.sessions.cluster_hooks import ClusterHooks
from banksman.sessions.diagnostics import CountTotals
from banksman.sessions.ownership import ClaimGate, OwnedSession, OwnershipGuard, Startup
from banksman.sessions.pool import Pool
from banksman.sessions.questions import OnQuestion
from banksman.sessions.recovery import DeadHostCleanup, has_waiting_asks
from banksman.sessions.session import Session
from banksman.sessions.session_spec import Permit, SessionSpec
from banksman.sessions.session_table import SessionTable
from banksman.store.log import KnownSession, Log, MultiSessionPage

log = logging.getLogger("banksman")


class SessionRegistry:
    """Opens and claims the sessions of one host.

    Belongs to one event loop. The registry closes only its readers. The host closes the sessions
    and the log.
    """

    def __init__(
        self,
        store: Log,
        pool: Pool,
        redactor: Redactor | None = None,
        permit: Permit | None = None,
        budgets: SharedBudgets | None = None,
    ) -> None:
        """Create a registry for a log.

        `permit`: raises if a session may not be opened again with the spec that its log records. It
        is also called before each start of a process. `budgets`: budgets that all sessions share.
        """
        self.store = store
        self.permit = permit
        self.redactor = redactor
        self.totals = CountTotals()
        # Set on a cluster member: announces its sessions to the other hosts.
        self.cluster_hooks: ClusterHooks | None = None
        # The budgets that all sessions of the host share; None: there are none.
        self.budgets = None if budgets is None else HostBudgets(store, budgets)
        self._guard = OwnershipGuard()
        store.guard(self._guard)
        self._pool = pool
        self._accounts = AccountLimits()
        # The specs of the open sessions.
        self._startups: dict[str, Startup] = {}
        self._gate = ClaimGate()
        # In a store that hosts share over a network, another host resumes the sessions of a dead
        # host. A cleanup would only hold claims and delay that.
        alone = functools.partial(self._gate.alone, "session")
        self._cleanup = (
            None if getattr(store, "cluster", None) is not None else DeadHostCleanup(store, alone)
        )
        self._table = SessionTable(store, self._guard, self._claim, redactor)

    # -- opening ----------------------------------------------------------------------------------
    @asynccontextmanager
    async def _at_work(self) -> AsyncGenerator[None]:
        """Enter a call that claims: the store is ready and the host is not closing."""
        # Before the gate, because a close waits for the calls inside the gate, and the store may be
        # unavailable for a long time.
        await self.store.ready()
        async with self._gate.at_work():
            yield

    async def open(
        self,
        spec: SessionSpec,
        *,
        name: str | None,
        on_question: OnQuestion | None,
        id: str | None = None,
    ) -> Session:
        """Open a new session, or the known session of this name.

        `id`: the id of a new session. A session that is open here is returned, and the new spec
        applies from its next turn on. Any other known session is claimed and resumes where it was.
        """
        checked_name(name, self.redactor)
        async with self._at_work():
            if self._cleanup is not None:
                self._cleanup.begin()
            session = await self._open(spec, name, on_question, id)
        return await self._heard(session)

    async def _heard(self, session: Session) -> Session:
        """Wait until other hosts can route requests to the session.

        The caller may pass the session's id on, and the next request may reach another host
        immediately.
        """
        if self.cluster_hooks is not None:
            await self.cluster_hooks.wait_heard(session)
        return session

    async def _open(
        self, spec: SessionSpec, name: str | None, on_question: OnQuestion | None, id: str | None
    ) -> Session:
        if name is None:
            return await self._add(spec, None, on_question, id=id)
        session: Session | None = None
        async with self._gate.alone("name", name):
            while session is None:
                known = self.store.find(name)
                if known is not None:
                    session = await self._open_known(known, name, spec, on_question)
                    continue
                # Another host created the session first. The next pass opens it.
                with suppress(NameTaken):
                    session = await self._add(spec, name, on_question, id=id)
        return session

    async def _open_known(
        self, known: KnownSession, name: str, spec: SessionSpec, on_question: OnQuestion | None
    ) -> Session | None:
        """Open a known session; None if it was deleted or renamed meanwhile."""
        # A concurrent ask may claim the session by its id, so the session is locked too.
        async with self._gate.alone("session", known.id):
            again = self.store.find(name)
            if again is None or again.id != known.id:
                return None
            here = self._table.here(known.id)
            if here is not None and here.is_open:
                here.name = known.name
                return await self._open_again(here, spec, on_question)
            if here is not None and here.is_leaving and not here.is_closed:
                raise Moving(
                    "the session is leaving this host",
                    hint="try again in a moment",
                    session=known.id,
                )
            if here is not None and not here.is_closed:
                # The session is closing, or its ownership was lost. Its log is opened again after
                # the close.
                await here.close()
            try:
                return await self._reopen(known, spec, on_question)
            except UsageError:
                if self.store.find(known.id) is None:
                    return None  # Another host deleted the session at the same time.
                raise

    async def _add(
        self,
        spec: SessionSpec,
        name: str | None,
        on_question: OnQuestion | None,
        settings: tuple[tuple[str, str], ...] = (),
        id: str | None = None,
    ) -> Session:
        if id is None:
            id = f"s-{os.urandom(8).hex()}"
        elif (known := self.store.find(id)) is not None:
            if known.seq:
                message = f"session {id!r} already exists"
                raise UsageError(message, hint="choose another id", session=id)
            # An earlier open claimed the id and died, or lost the store, before it wrote the spec.
            # No caller was given that session.
            return await self._reopen(known, spec, on_question)
        session = self._table.new(id, name, spec.profile)
        # Read before the claim, so that `check` notices a loss of ownership during the claim.
        losses = self._guard.losses
        epoch = await recovery.create(self.store, id, name, spec.profile.name)
        try:
            await self._begin(
                session, epoch, spec, on_question, losses, resume=spec.resume, settings=settings
            )
        except BaseException:
            with suppress(BanksmanError):  # The first error is the one to report.
                await self.store.delete(id)  # The session is empty and has no caller.
            raise
        return session

    async def _reopen(
        self, known: KnownSession, spec: SessionSpec, on_question: OnQuestion | None
    ) -> Session:
        if spec.profile.name != known.agent:
            raise _of_another_agent(known.name, known.agent, known.id)
        session = self._table.to_open(known, spec.profile)
        await self._take(session, spec, on_question)
        return session

    async def _take(
        self, session: Session, spec: SessionSpec, on_question: OnQuestion | None
    ) -> None:
        """Claim a session that has a past."""
        # Read before the claim, so that `check` notices a loss of ownership during the claim.
        losses = self._guard.losses
        epoch = await recovery.claim(self.store, session.id)
        try:
            if spec.resume is not None:
                past = await recovery.load(self.store, session.id, spec.config)
                first = fallback.state_of(past.session, spec.profile.name)
                if spec.forks or first.conversation != spec.resume:
                    message = f"the session {session.name!r} has another conversation"
                    raise UsageError(message, hint="choose another name")
            await self._begin(session, epoch, spec, on_question, losses)
        except BaseException:
            self.store.release(session.id, epoch)
            raise

    async def _begin(
        self,
        session: Session,
        epoch: int,
        spec: SessionSpec,
        on_question: OnQuestion | None,
        losses: int,
        *,
        resume: str | None = None,
        settings: tuple[tuple[str, str], ...] = (),
    ) -> None:

        def then(past: SessionHistory) -> Sequence[Entry]:
            opened = entry(None, SESSION_OPENED, **spec.record(), resume=resume, fork=spec.forks)
            # A setting that the new spec changes overrides the value that was set since the last
            # open. Both are of the first agent, which may not be the one that serves now.
            dropped = [(name, None) for name in spec.settings_asked_anew(past.opened)]
            changed = [(name, value, "fork") for name, value in settings] + [
                (*pair, "open") for pair in dropped
            ]
            first = spec.profile.name
            agent = None if fallback.current(past.session) == first else first
            told = [
                entry(None, SESSION_SETTING, name=name, value=value, by=by, agent=agent)
                for name, value, by in changed
            ]
            return (
                [opened, *told] if self.redactor is None else self.redactor.entries([opened, *told])
            )

        hooks = self.cluster_hooks
        self._share_budgets(spec)
        past = await recovery.take_over(
            self.store,
            session.id,
            epoch,
            spec.config,
            then,
            resumes=spec.resumes if resume else None,
            brings=None if hooks is None else functools.partial(hooks.bring, session.id, spec),
        )
        # Checked again after the last await. The host's close has already ended all registered
        # sessions, and this session would never be closed.
        self._gate.check_open()
        # A loss of ownership has already ended all registered sessions. This session was claimed
        # before the loss and is not registered, so it must fail here.
        self._guard.check(losses)
        accounts = SessionAccounts(self._accounts, spec.accounts)
        startup = Startup(spec, self._guard.lease, self.permit, accounts)
        owned = OwnedSession(
            session.id,
            past,
            epoch=epoch,
            store=self.store,
            spawn=startup.spawn,
            on_question=on_question,
            pool=self._pool,
            frame_bytes_max=spec.frame_bytes_max,
            redactor=self.redactor,
            accounts=accounts,
            budgets=self.budgets,
        )
        owned.limits.on_limit = spec.on_limit
        startup.callbacks = owned.callbacks
        owned.futures.on_resolved = functools.partial(self._on_turn_over, session)
        self.totals.follow(owned.futures.finished, owned.counted._replace(agent=session.agent))
        self._guard.watch(session.id, owned)
        self._table.add(session)
        self._startups[session.id] = startup
        session.opened_with(spec)
        session.attach(owned)
        session.when_closed(functools.partial(self._close_startup, session, startup))
        if self.cluster_hooks is not None:
            self.cluster_hooks.on_open(session)
        await self._table.forget_closed()

    def _share_budgets(self, spec: SessionSpec) -> None:
        spec.config = replace(spec.config, shares_budget=self.budgets is not None)

    def _on_turn_over(self, session: Session, turn: str) -> None:
        if self.cluster_hooks is not None:
            self.cluster_hooks.on_turn_over(session, turn)

    def _close_startup(self, session: Session, startup: Startup) -> None:
        startup.next.close()
        if self._startups.get(session.id) is startup:
            del self._startups[session.id]
            if self.cluster_hooks is not None:
                self.cluster_hooks.on_closed(session)

    async def _open_again(
        self, session: Session, spec: SessionSpec, on_question: OnQuestion | None
    ) -> Session:
        startup = self._startups[session.id]
        self._share_budgets(spec)
        before = startup.next
        if spec.profile.name != before.profile.name:
            raise _of_another_agent(session.name, before.profile.name, session.id)
        if spec.forks or (spec.resumes and spec.resumes != session.first_conversation):
            message = f"the session {session.name!r} has another conversation"
            raise UsageError(message, hint="choose another name")
        # The spec decides the answers and the next process, here and on a host that takes over. So
        # a changed spec is recorded in the log.
        record = spec.record()
        opened = None if record == startup.record else {**record, "resume": None, "fork": False}
        if opened is not None:
            session.check_log()
        drops = spec.settings_unlike(before)
        replaces = startup.replace(spec)
        # Set before the wait. A cancelled caller only stops waiting, and the log gets the record in
        # any case.
        logged, startup.record = startup.record, record
        try:
            await session.reconfigure(
                spec,
                replaces=replaces,
                drops=drops,
                opened=opened,
                on_question=on_question,
                # The new configuration decides whether a limit of the account concerns the session.
                on_applied=functools.partial(startup.accounts.renew, spec.accounts),
            )
        except BanksmanError:
            startup.record = logged
            raise
        return session

    async def fork(
        self, session: Session, name: str | None, on_question: OnQuestion | None
    ) -> Session:
        """Open a new session whose conversation is a copy of this session's conversation.

        If this session is itself a fork that has not started, the copy is made from its origin.
        """
        checked_name(name, self.redactor)
        startup = self._startups.get(session.id)
        if startup is None:
            hint = "open it, or use open(resume=…)"
            raise UsageError(f"cannot fork session {session.id}: it is not open here", hint=hint)
        startup.next.check_fork()
        conversation = session.origin
        if conversation is None:
            message = f"cannot fork session {session.id}: it has no conversation yet"
            raise UsageError(message, hint="ask first, or open another session")
        forked = startup.next.forked(conversation)
        try:
            async with self._at_work():
                added = await self._add(
                    forked, name, on_question or session.on_question, settings=session.settings
                )
        except NameTaken as exc:
            forked.close()
            raise UsageError(
                f"session {name!r} already exists", hint="choose another name"
            ) from exc
        return await self._heard(added)

    # -- finding and reading ----------------------------------------------------------------------
    def find(self, id_or_name: str) -> Session:
        """Return any session of the store by its id or its name."""
        return self._table.find(id_or_name)

    def all(self, after: str | None = None, limit: int | None = None) -> list[Session]:
        """Return the sessions of the store, oldest first, or a page of them.

        After the close, only the sessions that this host had.
        """
        return self._table.all(after, limit)

    def ours(self) -> list[Session]:
        """Return the open sessions of this host and the kept closed sessions, oldest first."""
        return self._table.ours()

    async def read_many(
        self, after: str | None, limit: int, sessions: Collection[str] | None
    ) -> MultiSessionPage:
        """Return events of many sessions in the order of their commits."""
        return await self._table.read_many(after, limit, sessions)

    async def wait_past(self, position: str) -> None:
        await self.store.ready()
        await self.store.wait_past_position(position)

    # -- claiming ---------------------------------------------------------------------------------
    async def _claim(self, session: Session) -> None:
        """Claim a session for a caller's request, with the spec that its log records."""
        async with self._at_work(), self._gate.alone("session", session.id):
            if session.is_ours:
                return
            here = self._table.here(session.id)
            if here is not None and self._guard.is_ending(session.id):
                # The remaining parts of the lost session must end first. Otherwise two processes
                # would drive one conversation.
                await here.wait_closed()
            if here is not None and not here.is_closed:
                message = f"session {session.id} is already open on this host by another handle"
                hint = f"use host.session({session.id!r})"
                raise NotOwner(message, hint=hint, session=session.id)
            profile = known_agents.load(session.agent)
            past = await recovery.load(self.store, session.id, Config(dialect=profile.dialect))
            if self.permit is not None and past.opened is not None:
                self.permit(past.opened)
            spec = SessionSpec.from_record(session.agent, past.opened)
            try:
                await self._take(session, spec, None)
            except BaseException:
                spec.close()
                raise

    async def take_over(self, id: str) -> Session:
        """Claim a session of the store with its recorded spec.

        A session that is already open here is returned unchanged.
        """
        await self.store.ready()
        session = self.find(id)
        if not session.is_ours:
            await self._claim(session)
        return await self._heard(session)

    async def take_up(self) -> None:
        """Resume every session without an owner in which an ask is queued.

        See `has_waiting_asks` in recovery.py.
        """
        await self.settle()
        for known in self.store.sessions():
            try:
                waits = await has_waiting_asks(self.store, known)
                here = self._table.here(known.id)
                # A session that was opened meanwhile already serves its queue.
                if waits and (here is None or here.is_closed):
                    await self._claim(self._table.handle(known))
            except BanksmanError as exc:
                # A caller that opens the session gets the same error. The queued asks stay in the
                # log.
                log.warning("cannot resume session %s, its asks stay queued: %s", known.id, exc)

    # -- forgetting -------------------------------------------------------------------------------
    async def delete(self, session: Session) -> None:
        """Delete a session with all of its history."""
        async with self._at_work(), self._gate.alone("session", session.id):
            here = self._table.here(session.id)
            if here is not None:
                await here.close()
            await self.store.delete(session.id)
            self._table.forget(session.id)

    async def delete_remains(self, id: str) -> None:
        """Delete the remains of a session without a record.

        Its host died, or lost the store, during the deletion.
        """
        checked_id(id)
        async with self._at_work(), self._gate.alone("session", id):
            await self.store.delete(id)

    def open_no_more(self) -> None:
        """Reject new opens and claims, because the host has begun to close."""
        self._gate.is_closing = True

    async def settle(self) -> None:
        """Settle the sessions of dead hosts. See recovery.py."""
        await self.store.ready()
        if self._cleanup is not None:
            await self._cleanup.wait()

    async def close(self) -> None:
        """Stop the cleanup and the readers, before the log is closed.

        Waits for opens and claims in progress, and buffers the unread events of followers.
        """
        self.open_no_more()
        self._table.end()
        if self._cleanup is not None:
            await self._cleanup.stop()
        if self.budgets is not None:
            await self.budgets.close()
        await self._gate.wait_idle()
        await self._table.keep_rest()
        self._guard.close()


def _of_another_agent(name: str | None, agent: str, session: str) -> UsageError:
    """Build the error for an open of a session with another agent than its own."""
    hint = (
        f"use another name, or run `banksman close {shlex.quote(name or session)} --forget`, "
        "which deletes its log"
    )
    return UsageError(
        f"the session {name!r} belongs to the agent {agent}", hint=hint, session=session
    )
