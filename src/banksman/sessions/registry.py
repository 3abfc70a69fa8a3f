"""Session registry of a host: create, claim, find, share and hand over sessions.

All sessions share one log and one pool. To open a session, the host claims it and takes it over
(recovery.py). A new session has no past. `session_opener.py` has the calls that open a session for
a caller. `session_table.py` finds session objects, `session_spec.py` checks the arguments of an
open, and `spec_record.py` keeps them in the log.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress

from msgspec.structs import replace

from banksman.core.redaction.redactor import Redactor
from banksman.core.session import fallback
from banksman.core.session.event import Entry
from banksman.core.session.history import SessionHistory
from banksman.core.session.session_config import Config
from banksman.errors import BanksmanError, NotOwner, UsageError
from banksman.sessions import held_session, known_agents, recovery, session_access, spec_record
from banksman.sessions.accounts import AccountLimits, SessionAccounts
from banksman.sessions.budget_ledger import SharedBudgets
from banksman.sessions.budgets import HostBudgets
from banksman.sessions.cluster_hooks import ClusterHooks
from banksman.sessions.diagnostics import CountTotals
from banksman.sessions.held_session import Adopted
from banksman.sessions.ownership import (
    HAS_KEEPERS,
    ClaimGate,
    OwnedSession,
    OwnershipGuard,
    Startup,
)
from banksman.sessions.pool import Pool
from banksman.sessions.questions import OnQuestion
from banksman.sessions.session import Session
from banksman.sessions.session_hooks import SessionHooks
from banksman.sessions.session_spec import NotPermitted, Permit, SessionSpec
from banksman.sessions.session_table import SessionTable
from banksman.store.log import Log
from banksman.store.log_values import KnownSession, MultiSessionPage
from banksman.tasks import for_each

log = logging.getLogger("banksman")


class SessionRegistry:
    """Creates and claims the sessions of one host.

    Belongs to one event loop. It closes only its readers. The host closes sessions and log.
    """

    def __init__(
        self,
        store: Log,
        pool: Pool,
        redactor: Redactor | None = None,
        permit: Permit | None = None,
        budgets: SharedBudgets | None = None,
        *,
        user_helper: Sequence[str] = (),
        survive: str | None = None,
        hold_seconds: float = 0.0,
    ) -> None:
        """Create a registry for a log.

        `permit`: raises if a session may not be opened again with the spec that its log records. It
        is also called before each start of a process. `budgets`: budgets that all sessions share.
        `user_helper`: see `process/attributes.py`. `survive`: of sessions that do not say it: see
        `Host.open`. `hold_seconds`: how long a process that survives this host waits for the next.
        """
        self._user_helper = user_helper
        self.store = store
        self.permit = permit
        self.redactor = redactor
        self.totals = CountTotals()
        # Set on a cluster member: announces its sessions to the other hosts.
        self.cluster_hooks: ClusterHooks | None = None
        # The budgets that all sessions of the host share; None: there are none.
        self.budgets = None if budgets is None else HostBudgets(store, budgets)
        self._survive = survive
        self._hold_seconds = hold_seconds
        self._guard = OwnershipGuard()
        store.guard(self._guard)
        self._pool = pool
        self._accounts = AccountLimits()
        # The specs of the open sessions.
        self._startups: dict[str, Startup] = {}
        self._gate = ClaimGate()
        # In a store that many hosts share, another host resumes the sessions of a dead one.
        alone = functools.partial(self._gate.alone, "session")
        self._hooks = SessionHooks(self._guard, redactor, permit, user_helper)
        cleanup = recovery.DeadHostCleanup(store, alone, self._hooks.close_recorded)
        self._cleanup = cleanup if getattr(store, "cluster", None) is None else None
        self._table = SessionTable(store, self._guard, self._claim, self._share, redactor)

    # -- the start of an owned session -----------------------------------------------------------
    @asynccontextmanager
    async def _at_work(self) -> AsyncGenerator[None]:
        """Enter a call that claims: the store is ready and the host is not closing."""
        # Before the gate, because a close waits for the calls inside the gate, and the store may be
        # unavailable for a long time.
        await self.store.ready()
        async with self._gate.at_work():
            yield

    async def _heard(self, session: Session) -> Session:
        """Wait until other hosts can route requests to the session.

        The caller may pass the session's id on, and the next request may reach another host
        immediately.
        """
        if self.cluster_hooks is not None:
            await self.cluster_hooks.wait_heard(session)
        return session

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
            raise spec_record.of_another_agent(known.name, known.agent, known.id)
        session = self._table.to_open(known, spec.profile)
        await self._take(session, spec, on_question, is_recorded=False)
        return session

    async def _take(
        self,
        session: Session,
        spec: SessionSpec,
        on_question: OnQuestion | None,
        *,
        is_recorded: bool,
    ) -> None:
        """Claim a session that has a past. `is_recorded`: the spec is that of its log."""
        # Read before the claim, so that `check` notices a loss of ownership during the claim.
        losses = self._guard.losses
        epoch = await recovery.claim(self.store, session.id)
        try:
            if not is_recorded:
                past = await recovery.load(self.store, session.id, spec.config)
                spec_record.check_owner(spec, past.opened, session.id)
                spec = spec_record.with_containment(spec, past.opened)
                self.check_survival(spec, on_question)
                if self.permit is not None and past.opened is not None:
                    # The parts that the caller has not stated are those of the log.
                    self.permit(spec.record())
                first = fallback.state_of(past.session, spec.profile.name)
                if spec.resume is not None and (spec.forks or first.conversation != spec.resume):
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
            opening = spec_record.entries(spec, past, resume=resume, settings=settings)
            return opening if self.redactor is None else self.redactor.entries(opening)

        hooks = self.cluster_hooks
        self._share_budgets(spec)
        adopted: Adopted | None = None

        async def adopts(past: SessionHistory, others: Sequence[Entry]) -> Sequence[Entry]:
            nonlocal adopted
            adopted = await held_session.claim(
                self.store.identity, session.id, past, spec.config, self._guard.lease
            )
            if adopted is None:
                return ()
            if not spec_record.is_equal(spec, past.opened):
                adopted = adopted.started_otherwise()
            return adopted.entries(past, others)

        brings = None if hooks is None else functools.partial(hooks.bring, session.id, spec)
        try:
            async with self._hooks.opening(spec, session.id, session.name) as prepares:
                past = await recovery.take_over(
                    self.store,
                    session.id,
                    epoch,
                    spec.config,
                    then,
                    resumes=spec.resumes if resume else None,
                    brings=brings,
                    adopts=adopts,
                    prepares=prepares,
                )
                self._begin_owned(session, epoch, spec, on_question, losses, past, adopted)
        except BaseException:
            if adopted is not None:
                adopted.claimed.close()
            raise
        await self._table.forget_closed()

    def _begin_owned(  # noqa: PLR0917
        self,
        session: Session,
        epoch: int,
        spec: SessionSpec,
        on_question: OnQuestion | None,
        losses: int,
        past: SessionHistory,
        adopted: Adopted | None,
    ) -> None:
        """Start the driver of a session that was taken over."""
        # Checked again after the last await. The host's close has already ended all registered
        # sessions, and this session would never be closed.
        self._gate.check_open()
        # A loss of ownership has already ended all registered sessions. This session was claimed
        # before the loss and is not registered, so it must fail here.
        self._guard.check(losses)
        accounts = SessionAccounts(self._accounts, spec.accounts)
        startup = Startup(spec, self._guard.lease, self.permit, accounts, session.id)
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
            adopted=adopted,
        )
        owned.limits.on_limit = spec.on_limit
        startup.callbacks = owned.callbacks
        process = owned.driver.process
        process.continue_claimed = functools.partial(startup.adopt, owned.driver)
        process.survive_seconds = functools.partial(self._survive_seconds, session, startup)
        startup.survival = lambda: process.survival
        owned.driver.on_closed = lambda release: self._hooks.close_soon(
            startup.next, session.id, session.name, release
        )
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
                # Its remaining parts end first, or two processes would drive one conversation.
                await here.wait_closed()
            if here is not None and not here.is_closed:
                message = f"session {session.id} is already open on this host by another handle"
                raise NotOwner(
                    message, hint=f"use host.session({session.id!r})", session=session.id
                )
            profile = known_agents.load(session.agent, is_recorded=True)
            past = await recovery.load(self.store, session.id, Config(dialect=profile.dialect))
            if self.permit is not None and past.opened is not None:
                self.permit(past.opened)
            spec = spec_record.rebuild(session.agent, past.opened, user_helper=self._user_helper)
            try:
                await self._take(session, spec, None, is_recorded=True)
            except BaseException:
                spec.close()
                raise

    async def _share(self, session: Session, shared: Entry) -> bool:
        """Append `session.shared` to a session that is not open here. False: open it for that."""
        async with self._at_work(), self._gate.alone("session", session.id):
            known = self.store.find(session.id)
            if known is None or self._table.is_open_here(session.id):
                return False
            told = [shared] if self.redactor is None else [*self.redactor.entries([shared])]
            return await session_access.share(self.store, known, told, self._hooks.close_recorded)

    async def take_over(self, id: str) -> Session:
        """Claim a session of the store with its recorded spec.

        A session that is already open here is returned unchanged.
        """
        await self.store.ready()
        session = self.find(id)
        if not session.is_ours:
            await self._claim_for_asks(session)
        return await self._heard(session)

    async def _claim_for_asks(self, session: Session) -> None:
        """Claim a session for the asks of another host, and measure how long that takes."""
        began = time.monotonic()
        await self._claim(session)
        self.totals.takeovers.add(time.monotonic() - began)

    async def take_up(self) -> None:
        """Resume every session without an owner in which an ask is queued.

        Those whose process waits for this host come first: see `has_waiting_asks` in recovery.py.
        """
        await self.take_up_held()
        await self.settle()
        await self._take_up(self.store.sessions(), recovery.has_waiting_asks)

    async def take_up_held(self) -> None:
        """Resume the sessions whose process waits for a host. Waits for no other session."""
        await self.store.ready()
        waiting = held_session.waiting(self.store.identity)
        found = (self.store.find(id) for id in waiting.handed_over | waiting.surviving)
        is_due = functools.partial(recovery.has_held_process, waiting)
        await self._take_up([known for known in found if known], is_due)

    async def _take_up(
        self,
        sessions: Iterable[KnownSession],
        is_due: Callable[[Log, KnownSession], Awaitable[bool]],
    ) -> None:
        async def take_up(known: KnownSession) -> None:
            owner = known.owner
            if owner is not None and owner.is_here and not self._table.is_open_here(known.id):
                # This host has settled it just now, and the release is not committed yet.
                known = known._replace(owner=None)
            try:
                waits = await is_due(self.store, known)
                # A session that was opened meanwhile already serves its queue.
                if waits and not self._table.is_open_here(known.id):
                    await self._claim_for_asks(self._table.handle(known))
            except (BanksmanError, NotPermitted) as exc:
                # A caller that opens the session gets the same error. Its asks stay in the log.
                if not self._table.is_open_here(known.id):  # Otherwise a caller has just opened it.
                    log.warning("cannot resume session %s, its asks stay queued: %s", known.id, exc)
            except Exception as exc:
                # A bug ends no claim of another session, because that may lose its process.
                log.exception("cannot resume session %s, its asks stay queued: %s", known.id, exc)

        await for_each(sessions, take_up, at_once=recovery.SETTLING_MAX)

    # -- moving -----------------------------------------------------------------------------------
    def hand_over(self, session: Session, seconds: float, hold_seconds: float) -> None:
        """Hand a session over to the next host of this machine, or let it leave by then.

        A session leaves if another host cannot open it from the log alone.
        """
        startup = self._startups.get(session.id)
        if startup is not None and self._can_move(startup.next, session.on_question):
            session.hand_over_nowait(seconds, hold_seconds)
        else:
            session.leave_nowait(seconds)

    def _can_move(self, spec: SessionSpec, on_question: OnQuestion | None) -> bool:
        """Whether another host of this machine can open a session from the log alone."""
        is_local = self.store.is_durable and getattr(self.store, "cluster", None) is None
        can_open = HAS_KEEPERS and is_local and on_question is None
        return can_open and spec_record.is_whole(spec, self.redactor)

    def check_survival(self, spec: SessionSpec, on_question: OnQuestion | None) -> None:
        """Raise `UsageError` if a session shall survive this host and no other could open it."""
        if spec.survive is not None and not self._can_move(spec, on_question):
            raise spec_record.cannot_survive()

    def _survive_seconds(self, session: Session, startup: Startup) -> float | None:
        """Return how long the next process of a session survives this host; None: it does not."""
        is_wanted = (startup.next.survive or self._survive) is not None
        can_move = is_wanted and self._can_move(startup.next, session.on_question)
        return self._hold_seconds if can_move else None

    def open_no_more(self) -> None:
        """Reject new opens and claims, because the host has begun to close."""
        self._gate.is_closing = True
        self._hooks.stop_opening()

    def abandon(self) -> None:
        """Give up the hooks and the log, because the event loop is closed."""
        self._hooks.abandon()
        self.store.abandon()

    async def settle(self) -> None:
        """Settle the sessions of dead hosts. See recovery.py."""
        await self.store.ready()
        if self.budgets is not None:
            self.budgets.read_soon()
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
        await self._hooks.wait_closed()
        await self._table.keep_rest()
        self._guard.close()
