"""The sessions of a host: opened, opened again, forked, found, forgotten. They share one log and one pool.

A session is in the store, and here is whoever of them this host has in its hands. To open one is to claim it and to
take it over (recovery.py); a new one is one that has no past. Two callers that open the same one at the same time get
the same: the second waits for the first.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from banksman.core.session.effects import StartProcess
from banksman.core.session.event import SESSION_OPENED, SESSION_SETTING, Entry, Project, entry
from banksman.core.session.history import Past
from banksman.core.session.session_config import Config
from banksman.core.wire.redaction import Redactor
from banksman.errors import BanksmanError, Moving, NameTaken, NotFound, NotOwner, Refused, UsageError
from banksman.process.lease_page import LeasePage
from banksman.sessions import profiles, recovery
from banksman.sessions.agent_process import AgentProcess, OnEvent
from banksman.sessions.cluster_hooks import Herald
from banksman.sessions.leftovers import Cleaning, is_waited_in, opening_of
from banksman.sessions.life import Life, Totals
from banksman.sessions.log_reader import REST_BYTES_MAX, Readers
from banksman.sessions.names import checked_id, checked_name
from banksman.sessions.open_gate import Gate
from banksman.sessions.opening import Opening
from banksman.sessions.ownership_guard import Fence
from banksman.sessions.pool import Pool
from banksman.sessions.questions import OnQuestion
from banksman.sessions.session import Session
from banksman.store.log import Known, Log, ManyPage

log = logging.getLogger("banksman")

# Closed sessions that can still be asked for. Each may hold its whole history in memory.
SESSIONS_KEPT_MAX = 32

# What a `session.opened` of the log says.
Permit = Callable[[Mapping[str, Any]], None]


class Startup:
    """How one session's processes are started: the one that runs, and the next one.

    They differ from the moment the session is opened again to the moment its process is replaced. Until then the hooks
    and tools that are called are those that the running one was told of: its names for them mean others in the next.
    """

    def __init__(
        self, session: Session, opening: Opening, lease: LeasePage | None = None, permit: Permit | None = None
    ) -> None:
        """`lease`: of the claim that it is opened under, whatever is claimed after it. `permit`: of the host."""
        self.session = session
        self._permit = permit
        self.next = opening
        # What the log says of how it was opened.
        self.record = opening.record()
        self._lease = lease
        self.running: Opening | None = None

    def spawn(self, effect: StartProcess, on_event: OnEvent) -> AgentProcess:
        self._check()
        self.running = self.next
        self._call_its_own()
        workspace = self.next.workspace(self._lease)
        self.session.work_in(workspace)
        return self.next.spawn(effect, on_event if workspace is None else workspace.ending_with(on_event), self._lease)

    def _check(self) -> None:
        """Each process is started only as the session could be opened now: its folder may be a link elsewhere since."""
        if self._permit is None:
            return
        try:
            self._permit(self.next.record())
        except BanksmanError:
            raise
        except Exception as exc:
            hint = "close the session, and open it in a folder that is allowed"
            raise Refused(f"cannot start a process of the session: {exc}", hint=hint) from exc

    def replace(self, opening: Opening) -> bool:
        """Whether the process that runs is not the one that is wanted now."""
        before, self.next = self.next, opening
        before.close()
        if self.running is None or self.running.fingerprint != opening.fingerprint:
            return self.running is not None
        self.running = opening
        self._call_its_own()
        return False

    def _call_its_own(self) -> None:
        assert self.running is not None
        self.session.call_these(self.running.hooks, self.running.server)


class Sessions:
    """For one loop. It closes nothing but its own readers: sessions are the host's to close, and so is the log."""

    def __init__(self, store: Log, pool: Pool, redactor: Redactor | None = None, permit: Permit | None = None) -> None:
        """`permit` raises if a session may not be opened again as its log says it was opened the last time. It is asked
        before each start of a process, too."""
        self.store = store
        self.permit = permit
        self.redactor = redactor
        self.totals = Totals()
        # Where a host is one of many: who tells the others what it has.
        self.herald: Herald | None = None
        self._fence = Fence()
        store.guard(self._fence)
        self._pool = pool
        # Those that we have, or had until they were closed, oldest first; and how those that are open were opened.
        self._known: dict[str, Session] = {}
        self._startups: dict[str, Startup] = {}
        self._gate = Gate()
        # Of a store that many hosts share by a network, what a dead one had is gone on with by one of the others. To
        # settle it beside that would only keep them from it.
        self._cleaning = None if getattr(store, "cluster", None) is not None else Cleaning(store, self._gate)
        self._ends: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Handles on sessions that are not ours, as long as somebody has one.
        self._others: weakref.WeakValueDictionary[str, Session] = weakref.WeakValueDictionary()
        # Whoever reads keeps its own alive, and not the session that it had it from.
        self._readers: weakref.WeakSet[Readers] = weakref.WeakSet()
        # By agent, for a store may have thousands of sessions with few of them.
        self._profile = functools.cache(profiles.load_or_plain)

    # -- opening -----------------------------------------------------------------------------------------------------
    @asynccontextmanager
    async def _at_work(self) -> AsyncGenerator[None]:
        """The one way in for all that claims: the store can be asked, and the host does not close."""
        # Before the gate: a close waits for whoever is inside, and the store may take as long as it is away.
        await self.store.ready()
        async with self._gate.at_work():
            yield

    async def open(
        self, opening: Opening, *, name: str | None, on_question: OnQuestion | None, id: str | None = None
    ) -> Session:
        """A new one, under the `id` if one is given; or, under the name of one that is known, that one: as it is, if it
        is open here, which from its next turn on is as asked for; else it is claimed, and goes on where it was."""
        checked_name(name, self.redactor)
        async with self._at_work():
            if self._cleaning is not None:
                self._cleaning.begin()
            session = await self._open(opening, name, on_question, id)
        return await self._heard(session)

    async def _heard(self, session: Session) -> Session:
        """Whoever opened it may tell others of it, and they may ask in the next moment."""
        if self.herald is not None:
            await self.herald.wait_heard(session)
        return session

    async def _open(
        self, opening: Opening, name: str | None, on_question: OnQuestion | None, id: str | None
    ) -> Session:
        if name is None:
            return await self._add(opening, None, on_question, id=id)
        session: Session | None = None
        async with self._gate.alone("name", name):
            while session is None:
                known = self.store.find(name)
                if known is not None:
                    session = await self._open_known(known, name, opening, on_question)
                    continue
                with suppress(NameTaken):  # Another host was faster: it is that one, then.
                    session = await self._add(opening, name, on_question, id=id)
        return session

    async def _open_known(
        self, known: Known, name: str, opening: Opening, on_question: OnQuestion | None
    ) -> Session | None:
        """None: it is not there any more, or no longer by this name."""
        # Whoever asks in it at this moment opens it as well, by its id.
        async with self._gate.alone("session", known.id):
            again = self.store.find(name)
            if again is None or again.id != known.id:
                return None
            here = self._known.get(known.id)
            if here is not None and here.is_open:
                here.name = known.name
                return await self._open_again(here, opening, on_question)
            if here is not None and here.is_leaving and not here.is_closed:
                raise Moving("the session is leaving this host", hint="try again in a moment", session=known.id)
            if here is not None and not here.is_closed:
                await here.close()  # It is on its way out, or fenced off: what it leaves is what is opened.
            try:
                return await self._reopen(known, opening, on_question)
            except UsageError:
                if self.store.find(known.id) is None:
                    return None  # Another host has deleted it in this very moment.
                raise

    async def _add(
        self,
        opening: Opening,
        name: str | None,
        on_question: OnQuestion | None,
        settings: tuple[tuple[str, str], ...] = (),
        id: str | None = None,
    ) -> Session:
        if id is None:
            id = f"s-{os.urandom(8).hex()}"
        elif (known := self.store.find(id)) is not None:
            if known.seq:
                raise UsageError(f"there is a session {id!r} already", hint="another id", session=id)
            # Whoever was to open it died, or was cut off, before it could say how: nobody was told that it is there.
            return await self._reopen(known, opening, on_question)
        session = self._face(id, name, opening.profile)
        losses = self._fence.losses
        epoch = await recovery.create(self.store, id, name, opening.profile.name)
        try:
            await self._begin(session, epoch, opening, on_question, losses, resume=opening.resume, settings=settings)
        except BaseException:
            with suppress(BanksmanError):  # What went wrong first is what is told.
                await self.store.delete(id)  # Nothing was said in it, and nobody has it.
            raise
        return session

    async def _reopen(self, known: Known, opening: Opening, on_question: OnQuestion | None) -> Session:
        if opening.profile.name != known.agent:
            hint = "another name, or delete that one first"
            raise UsageError(f"the session {known.name!r} is one with {known.agent}", hint=hint, session=known.id)
        # Whoever has a handle on it has the one that is opened.
        session = self._others.get(known.id) or self._face(known.id, known.name, opening.profile)
        await self._take(session, opening, on_question)
        return session

    async def _take(self, session: Session, opening: Opening, on_question: OnQuestion | None) -> None:
        """Claim one that has a past."""
        losses = self._fence.losses
        epoch = await recovery.claim(self.store, session.id)
        try:
            if opening.resume is not None:
                past = await recovery.load(self.store, session.id, opening.config)
                if opening.forks or past.session.conversation != opening.resume:
                    raise UsageError(f"the session {session.name!r} has another conversation", hint="another name")
            await self._begin(session, epoch, opening, on_question, losses)
        except BaseException:
            self.store.release(session.id, epoch)
            raise

    async def _begin(
        self,
        session: Session,
        epoch: int,
        opening: Opening,
        on_question: OnQuestion | None,
        losses: int,
        *,
        resume: str | None = None,
        settings: tuple[tuple[str, str], ...] = (),
    ) -> None:

        def then(past: Past) -> Sequence[Entry]:
            opened = entry(None, SESSION_OPENED, **opening.record(), resume=resume, fork=opening.forks)
            # What is asked for now, and was not the last time, is meant: also where it was set to something since.
            dropped = [(name, None) for name in opening.settings_asked_anew(past.opened)]
            changed = [(name, value, "fork") for name, value in settings] + [(*pair, "open") for pair in dropped]
            told = [entry(None, SESSION_SETTING, name=name, value=value, by=by) for name, value, by in changed]
            return [opened, *told] if self.redactor is None else self.redactor.entries([opened, *told])

        herald = self.herald
        past = await recovery.take_over(
            self.store,
            session.id,
            epoch,
            opening.config,
            then,
            resumes=opening.resumes if resume else None,
            brings=None if herald is None else functools.partial(herald.bring, session.id, opening),
        )
        # Else nobody would ever close it: all that are to be closed have been told so.
        self._gate.check_open()
        # And all that was to be let go of has been: this was claimed before that, and is not in the list.
        self._fence.check(losses)
        startup = Startup(session, opening, self._fence.lease, self.permit)
        life = Life(
            session.id,
            past,
            epoch=epoch,
            store=self.store,
            spawn=startup.spawn,
            on_question=on_question,
            pool=self._pool,
            frame_bytes_max=opening.frame_bytes_max,
            redactor=self.redactor,
        )
        life.promises.on_resolved = functools.partial(self._on_turn_over, session)
        self.totals.follow(life)
        self._fence.watch(session.id, life)
        self._others.pop(session.id, None)
        self._known[session.id] = session
        self._startups[session.id] = startup
        session.opened_with(opening)
        session.live(life)
        session.when_closed(functools.partial(self._close_startup, session, startup))
        if self.herald is not None:
            self.herald.on_open(session)
        await self._forget()

    def _on_turn_over(self, session: Session, turn: str) -> None:
        if self.herald is not None:
            self.herald.on_turn_over(session, turn)

    def _close_startup(self, session: Session, startup: Startup) -> None:
        startup.next.close()
        if self._startups.get(session.id) is startup:
            del self._startups[session.id]
            if self.herald is not None:
                self.herald.on_closed(session)

    async def _open_again(self, session: Session, opening: Opening, on_question: OnQuestion | None) -> Session:
        startup = self._startups[session.id]
        before = startup.next
        if opening.profile.name != before.profile.name:
            hint = "another name, or close that one first"
            raise UsageError(f"the session {session.name!r} is one with {before.profile.name}", hint=hint)
        if opening.forks or (opening.resumes and opening.resumes != session.status().conversation):
            raise UsageError(f"the session {session.name!r} has another conversation", hint="another name")
        # What is answered, what is started and what another host would start are one: so the log has it, too.
        record = opening.record()
        opened = None if record == startup.record else {**record, "resume": None, "fork": False}
        if opened is not None:
            session.check_log()
        drops = opening.settings_unlike(before)
        replaces = startup.replace(opening)
        # At once: who is cancelled only stops waiting, and the log has it all the same.
        logged, startup.record = startup.record, record
        try:
            await session.reconfigure(opening, replaces=replaces, drops=drops, opened=opened, on_question=on_question)
        except BanksmanError:
            startup.record = logged
            raise
        return session

    async def fork(self, session: Session, name: str | None, on_question: OnQuestion | None) -> Session:
        """Another session that begins as a copy of this one's conversation, or of the one that this is to be a copy
        of."""
        checked_name(name, self.redactor)
        startup = self._startups.get(session.id)
        if startup is None:
            raise UsageError("a session that is not open here cannot be forked", hint="open it, or open(resume=…)")
        startup.next.check_fork()
        conversation = session.origin
        if conversation is None:
            raise UsageError("there is nothing to fork: nothing was said in it yet", hint="ask first, or open another")
        forked = startup.next.forked(conversation)
        try:
            async with self._at_work():
                added = await self._add(forked, name, on_question or session.on_question, settings=session.settings)
        except NameTaken as exc:
            forked.close()
            raise UsageError(f"there is a session {name!r} already", hint="another name") from exc
        return await self._heard(added)

    # -- finding -----------------------------------------------------------------------------------------------------
    def find(self, id_or_name: str) -> Session:
        """Any session of the store, by its id or its name."""
        checked_id(id_or_name)
        if self._ends.done():
            found = [session for session in self.ours() if id_or_name in (session.id, session.name)]
            if found:
                return found[-1]
        elif (known := self.store.find(id_or_name)) is not None:
            return self._handle(known)
        raise NotFound(f"there is no session {id_or_name!r}", hint="see sessions()")

    def all(self, after: str | None = None, limit: int | None = None) -> list[Session]:
        """Every session of the store, oldest first, or a page of them; of one that is closed, those that we had."""
        if self._ends.done():
            return self.ours()
        return [self._handle(known) for known in self.store.sessions(after, limit)]

    def ours(self) -> list[Session]:
        """Those that are open here, and those that were closed and are still kept, oldest first."""
        return list(self._known.values())

    # -- reading many ------------------------------------------------------------------------------------------------
    async def read_many(self, after: str | None, limit: int, sessions: Collection[str] | None) -> ManyPage:
        """Events of many sessions, in the order in which they were committed."""
        await self.store.ready()
        return await self.store.read_many(after, limit, sessions=sessions, project_of=self._project_of)

    async def wait_past(self, position: str) -> None:
        await self.store.ready()
        await self.store.wait_past_position(position)

    def _project_of(self, session: str) -> Project | None:
        known = self.store.find(session)
        if known is None:
            return None
        dialect = self._profile(known.agent).dialect
        return Project(dialect.project, dialect.partial)

    def _handle(self, known: Known) -> Session:
        """One that was closed here is asked anew by a handle of its own: it may be claimed again, by whomever."""
        here = self._known.get(known.id)
        if here is not None and not here.is_closed and not self._fence.is_ending(known.id):
            here.name, here.seen = known.name, known
            return here
        other = self._others.get(known.id)
        if other is None:
            other = self._others[known.id] = self._face(known.id, known.name, self._profile(known.agent))
        other.name, other.seen = known.name, known
        return other

    def _face(self, id: str, name: str | None, profile: profiles.Profile) -> Session:
        return Session(
            id,
            name=name,
            agent=profile.name,
            dialect=profile.dialect,
            store=self.store,
            ends=self._ends,
            readers=self._readers,
            capabilities=profile.capabilities,
            claim=self._claim,
            redactor=self.redactor,
        )

    async def _claim(self, session: Session) -> None:
        """Somebody asks in a session that is not ours: take it, as it was opened the last time."""
        async with self._at_work(), self._gate.alone("session", session.id):
            if session.is_ours:
                return
            here = self._known.get(session.id)
            if here is not None and self._fence.is_ending(session.id):
                await here.wait_closed()  # What we had of it goes first: two processes would drive one conversation.
            if here is not None and not here.is_closed:
                hint = f"host.session({session.id!r}) gives the one that is open here"
                raise NotOwner("the session is open here already, by another handle", hint=hint, session=session.id)
            profile = profiles.load(session.agent)
            past = await recovery.load(self.store, session.id, Config(dialect=profile.dialect))
            if self.permit is not None and past.opened is not None:
                self.permit(past.opened)
            opening = opening_of(session.agent, past.opened)
            try:
                await self._take(session, opening, None)
            except BaseException:
                opening.close()
                raise

    async def take_over(self, id: str) -> Session:
        """Claim one that is in the store, as it was opened the last time; or the one that is open here."""
        await self.store.ready()
        session = self.find(id)
        if not session.is_ours:
            await self._claim(session)
        return await self._heard(session)

    async def take_up(self) -> None:
        """Go on with every session that nobody has, and in which somebody waits: see leftovers.py."""
        await self.settle()
        for known in self.store.sessions():
            try:
                waits = await is_waited_in(self.store, known)
                here = self._known.get(known.id)
                # Whoever has opened it meanwhile has gone on with it.
                if waits and (here is None or here.is_closed):
                    await self._claim(self._handle(known))
            except BanksmanError as exc:
                # Who opens it is told the same. Those who wait there are still kept.
                log.warning("! session %s: somebody waits in it, and it cannot be gone on with: %s", known.id, exc)

    # -- forgetting --------------------------------------------------------------------------------------------------
    async def delete(self, session: Session) -> None:
        """For good, with all its history."""
        async with self._at_work(), self._gate.alone("session", session.id):
            here = self._known.get(session.id)
            if here is not None:
                await here.close()
            await self.store.delete(session.id)
            self._known.pop(session.id, None)
            self._others.pop(session.id, None)

    async def delete_remains(self, id: str) -> None:
        """Of a session that has no record any more: its host died, or lost the store, while it deleted it."""
        checked_id(id)
        async with self._at_work(), self._gate.alone("session", id):
            await self.store.delete(id)

    def open_no_more(self) -> None:
        """The host has begun to close."""
        self._gate.is_closing = True

    async def settle(self) -> None:
        """What was open under hosts that are dead is settled: see leftovers.py."""
        await self.store.ready()
        if self._cleaning is not None:
            await self._cleaning.wait()

    async def close(self) -> None:
        """Nobody is to read any more: the log is about to be closed."""
        self.open_no_more()
        if not self._ends.done():
            self._ends.set_result(None)
        if self._cleaning is not None:
            await self._cleaning.stop()
        await self._gate.wait_idle()
        left = REST_BYTES_MAX
        for readers in list(self._readers):
            left -= await readers.keep_rest(left)
        self._fence.close()

    async def _forget(self) -> None:
        closed = [session for session in self.ours() if session.is_closed]
        for session in closed[: max(0, len(closed) - SESSIONS_KEPT_MAX)]:
            self._known.pop(session.id, None)
            # In one that has left somebody may wait, and whoever comes next is to find them.
            has_waiting = session.is_leaving and bool(session.status().queue)
            if not self.store.is_durable and not has_waiting:
                await self.store.delete(session.id)
