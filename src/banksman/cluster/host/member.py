"""Cluster member: announce this host, pull sessions, answer for its sessions, and drain.

The host knows which sessions are open here, and the store knows which host owns what. The member
decides neither, and connects the two:

- It pulls jobs while the host has room, and runs them (`takeover.py`).
- It answers requests of other hosts for a session while this host owns it.
- It offers the sessions that this host leaves, or that a dead host left (`session_offers.py`).
- It copies the transcripts of agents to the store (`transcript_copies.py`).

The caller keeps the order of a fence: `on_lost` comes before any session learns of the loss, and
from then on nothing is answered. The host closes the lost sessions as usual. The first host that
pulls one of them resumes it.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from banksman.cluster.host.session_offers import LossAnnouncer, UnownedScan, is_to_go_on, offer_one
from banksman.cluster.host.takeover import Application, JobRunner
from banksman.cluster.host.transcript_copies import TranscriptCopies
from banksman.cluster.interfaces import Cluster, HostReport
from banksman.errors import BanksmanError, StoreError
from banksman.runtime.base_host import Host
from banksman.sessions import host_needs
from banksman.tasks import OwnedTasks

if TYPE_CHECKING:
    from banksman.core.session.event import Entry
    from banksman.core.session.history import SessionHistory
    from banksman.sessions.session import Session
    from banksman.sessions.session_spec import SessionSpec

log = logging.getLogger("banksman")

# Concurrent jobs. A take-over mostly waits: for the store, and for the end of the last process.
JOBS_MAX = 16
# The retry interval while no job can be pulled.
AGAIN_SECONDS = 1.0
# How often a session that left is offered. After that the scan of some host finds it, once per
# lease.
OFFERS_MAX = 5

CLOSE_SECONDS_MAX = 5.0


class MemberPhase(enum.Enum):
    """The phases of a member, in order."""

    NEW, UP, DRAINING, CLOSED = range(4)


class Member:
    """The membership of a host in a cluster: `async with Member(…)`, inside that of the host.

    The host must use the cluster's store. `room`: how many sessions it accepts; 0: none, it only
    sends requests. `agents`: the agents whose programs are installed here. `application`: answers
    requests that other hosts forward, like local ones. `mirrors_transcripts`: see
    transcript_copies.py.
    """

    def __init__(
        self,
        host: Host,
        cluster: Cluster,
        *,
        name: str,
        labels: Sequence[str] = (),
        agents: Sequence[str] = (),
        room: int = 0,
        application: Application,
        mirrors_transcripts: bool = True,
    ) -> None:
        self._host = host
        self._cluster = cluster
        self._card = HostReport(name, tuple(labels), tuple(agents), room)
        self._offered = host_needs.offered(labels, agents)
        self._application = application
        self._taking = JobRunner(host, cluster, application, name)
        self._transcripts: TranscriptCopies | None = None
        if mirrors_transcripts:
            self._transcripts = TranscriptCopies(host.log, cluster.transcripts, host.redactor)
        self._phase = MemberPhase.NEW
        # Groups, because `close` needs an order: first the loops, then the moves and jobs that they
        # start, then the chores of all.
        self._chores = OwnedTasks()
        self._jobs = OwnedTasks()
        self._loops = OwnedTasks()
        self._pulling: asyncio.Task[None] | None = None
        # By session: the task that makes it reachable for other hosts.
        self._heard: dict[str, asyncio.Task[None]] = {}
        self._change = asyncio.Event()
        self._draining: asyncio.Task[None] | None = None
        self._moves = OwnedTasks()
        self._moving: set[str] = set()
        self._leave_by: float | None = None

    def __repr__(self) -> str:
        return f"<Member {self._card.name} {self._phase.name} {self.used}/{self._card.room}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def used(self) -> int:
        """The number of open sessions on this host."""
        return len(self._here())

    @property
    def is_draining(self) -> bool:
        """True unless the member accepts sessions."""
        return self._phase is not MemberPhase.UP

    @property
    def has_room(self) -> bool:
        """True if another job may be pulled. Jobs in progress count as sessions."""
        # A job whose session is open already counts twice for a moment. That only delays a pull. To
        # count it too little would put more sessions on this host than it announced.
        return self._phase is MemberPhase.UP and self.used + len(self._jobs) < self._card.room

    def _is_up(self) -> bool:
        return self._phase is MemberPhase.UP

    def _here(self) -> list[Session]:
        return [session for session in self._host.our_sessions() if not session.is_closed]

    async def start(self) -> None:
        """Announce the host, answer for its sessions, and start to pull."""
        assert self._phase is MemberPhase.NEW
        # The store first: without a lease this host may not answer for any session.
        await self._host.log.ready()
        self._phase = MemberPhase.UP
        self._host.set_cluster_hooks(self)
        self._cluster.hosts.on_lost(self._on_lost)
        # Sessions that were opened before the membership. The hooks are set already, and nothing
        # was awaited since, so no session falls between the two.
        for session in self._here():
            self.on_open(session)
        # Answer before the announcement: another host may send a request as soon as it sees this
        # one.
        await self._answer_for_host()
        self._announce()
        watching = LossAnnouncer(self._host.log, self._cluster, self._is_up)
        self._loops.start(watching.run())
        looking = UnownedScan(
            self._host.log,
            self._cluster,
            lambda: {session.id for session in self._here()},
            self._is_up,
        )
        self._loops.start(looking.run())
        if self._card.room:
            self._pulling = self._loops.start(self._pull())

    def _announce(self) -> None:
        # The report is a hint for other hosts. It limits nothing: this host itself decides whether
        # it pulls (`has_room`).
        self._cluster.hosts.announce(
            self._card._replace(used=self.used, is_draining=self._phase is not MemberPhase.UP)
        )

    # -- sessions on this host --------------------------------------------------------------------
    def on_open(self, session: Session) -> None:
        """Answer for a session from now on."""
        if self._phase is not MemberPhase.CLOSED:
            self._heard[session.id] = self._chores.start(self._answer_for(session.id))
            self._on_change()

    def on_closed(self, session: Session) -> None:
        """Stop answering for a session: it is closed, left or lost."""
        if self._phase is not MemberPhase.CLOSED:
            # Unsubscribe in a task: this hook is called inside a step of the session and must not
            # wait. Until then the application answers that the session is not here.
            self._heard.pop(session.id, None)
            self._chores.start(self._cluster.bus.leave(session.id))
            if self._transcripts is not None:
                self._transcripts.finish(session.id)
            self._on_change()

    def on_turn_over(self, session: Session, turn: str) -> None:
        """Copy the transcript after a turn."""
        if self._transcripts is not None and self._phase is not MemberPhase.CLOSED:
            self._transcripts.mirror(session, turn)

    async def bring(self, session: str, spec: SessionSpec, past: SessionHistory) -> Sequence[Entry]:
        """Restore the transcript of a session that this host is about to start."""
        return (
            () if self._transcripts is None else await self._transcripts.bring(session, spec, past)
        )

    async def wait_heard(self, session: Session) -> None:
        """Wait until other hosts can reach the session here."""
        # Wait for the task and do not await it. It belongs to `_chores`, and a cancelled caller
        # must not cancel it.
        heard = self._heard.get(session.id)
        if heard is not None:
            await asyncio.wait((heard,))

    def _on_change(self) -> None:
        """Announce the new state, and wake the pull loop."""
        self._change.set()
        self._announce()

    async def _answer_for(self, session: str) -> None:
        try:
            await self._cluster.bus.answer_for(session, self._application)
        except StoreError as exc:
            # The cluster is silent, so either a fence or a reconnect follows.
            log.warning("session %s: cannot receive forwarded requests: %s", session, exc)

    async def _answer_for_host(self) -> None:
        await self._answer_for(f"host:{self._cluster.hosts.id}")

    def _on_lost(self) -> None:
        """Fall silent: this host lost its lease and every session.

        It continues under a new id as soon as the cluster is reachable. Falling silent is
        synchronous, so no answer leaves this host after the loss.
        """
        if self._phase is not MemberPhase.CLOSED:
            # First the answers. Another host may own a session from here on, and a caller that got
            # an answer of this host would believe that it reached the owner.
            self._cluster.bus.fall_silent_nowait()
            self._heard.clear()
            # Then the copies: the store does not compare their writers, so a late copy of this host
            # would replace a newer one of the next owner.
            if self._transcripts is not None:
                self._transcripts.stop()
            # The host id has changed (`HostLeases`), so subscribe to the subject of the new one.
            self._chores.start(self._answer_for_host())

    # -- jobs -------------------------------------------------------------------------------------
    async def _pull(self) -> None:
        """Pull jobs while there is room, until cancelled."""
        while True:
            # Clear before the check. A change between the check and the wait sets the event, so the
            # wait returns immediately.
            self._change.clear()
            if not self.has_room or len(self._jobs) >= JOBS_MAX:
                await self._change.wait()
                continue
            try:
                job = await self._cluster.placement.next(self._offered)
            except StoreError as exc:
                log.warning("cannot take sessions: %s, retrying in %g s", exc, AGAIN_SECONDS)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            except Exception:
                # A bug in this program. A host that announces room and takes nothing would be
                # worse.
                log.exception("cannot take sessions, retrying in %g s", AGAIN_SECONDS)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if not self.has_room:
                await job.again(0.0)  # A session was opened here during the pull.
                continue
            # Only this loop starts jobs, so their number did not grow during the pull.
            assert len(self._jobs) < JOBS_MAX
            self._jobs.start(self._taking.take(job)).add_done_callback(lambda _: self._change.set())

    # -- draining ---------------------------------------------------------------------------------
    async def drain(self, *, timeout: float | None = None) -> None:
        """Accept no session, let each running turn end, and hand every session over.

        After `timeout` seconds running turns are stopped; the earliest of several deadlines counts.
        Returns when no session is left here. A cancelled call only stops waiting: the drain
        continues.
        """
        if self._phase is MemberPhase.CLOSED:
            return
        if self._phase is not MemberPhase.DRAINING:
            # Set the phase before the first session leaves. A draining host is no speaker and pulls
            # no job, so it does not get back a session that it has just left.
            self._phase = MemberPhase.DRAINING
            self._announce()
        if self._draining is None:
            self._draining = self._loops.start(self._leave_all())
        # Start the moves before any session leaves. A session that has left is not listed here, and
        # would not be offered.
        self._move_all()
        if timeout is not None:
            for session in self._here():
                session.leave_nowait(timeout)
            until = asyncio.get_running_loop().time() + timeout
            self._leave_by = until if self._leave_by is None else min(until, self._leave_by)
        await asyncio.wait((self._draining,))

    async def _leave_all(self) -> None:
        """Stop pulling, finish the jobs in progress, and move all sessions."""
        assert self._phase is not MemberPhase.UP
        # Finish the jobs and do not cancel them: a job may have claimed its session already. Such a
        # session then appears here and leaves like the others.
        if self._pulling is not None:
            self._pulling.cancel()
            await asyncio.wait((self._pulling,))
        await self._jobs.wait()
        # Repeat: a job may have opened a session, and a session whose move failed is still here.
        while self._here() or self._moves:
            self._move_all()
            await self._moves.wait()

    def _move_all(self) -> None:
        for session in self._here():
            if session.id not in self._moving:
                self._moving.add(session.id)
                self._moves.start(self._move(session))

    async def _move(self, session: Session) -> None:
        """Leave a session, then offer it."""
        assert session.id in self._moving
        # Offer after the leave. A taker of an earlier offer would find a live owner, and would have
        # to return the job until the release is stored.
        try:
            await self._leave(session)
            await self._offer(session.id)
        finally:
            self._moving.discard(session.id)

    async def _leave(self, session: Session) -> None:
        # Read the deadline now and not when the move was queued: a later `drain` may have set an
        # earlier one.
        until, now = self._leave_by, asyncio.get_running_loop().time()
        try:
            await session.leave(None if until is None else max(0.0, until - now))
        except BanksmanError as exc:
            # For example, the session was lost just now. The others leave all the same, and this
            # one is offered.
            log.warning("session %s: did not leave cleanly: %s", session.id, exc)
        # The next host restores the transcript before it starts the agent. So wait for the last
        # copy before the session is offered.
        if self._transcripts is not None:
            await self._transcripts.wait_mirrored(session.id)

    async def _offer(self, session: str) -> None:
        """Offer a session that left this host, unless it is deleted or another host has it."""
        for _ in range(OFFERS_MAX):
            # Look again before each attempt: another host may have found the session by its scan.
            known = self._host.log.find(session)
            if known is None or (
                known.owner is not None and known.owner.is_alive and not known.owner.is_here
            ):
                return  # It is deleted, or another host has it.
            try:
                # The release may not have reached other hosts yet. The taker waits for that.
                if await is_to_go_on(self._host.log, known._replace(owner=None)):
                    await offer_one(self._host.log, self._cluster, known)
            except BanksmanError as exc:
                log.warning(
                    "session %s: has left, cannot offer it to other hosts: %s",
                    session,
                    exc,
                )
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                return

    async def close(self) -> None:
        """Stop answering other hosts. The open sessions stay open: the host closes them."""
        if self._phase is MemberPhase.CLOSED:
            return
        if self._draining is not None:
            # Sessions that left still have to be offered. The host ends a session that does not
            # leave.
            await asyncio.wait((self._draining,), timeout=CLOSE_SECONDS_MAX)
        # Set the phase first: from here on the hooks ignore sessions, so `_heard` does not change
        # until the loop below has left all of them.
        self._phase = MemberPhase.CLOSED
        # Loops first: they start moves and jobs. A cancelled job goes back to its queue, and a
        # session that it opened stays on this host, which closes it.
        await self._loops.end()
        assert self._draining is None or self._draining.done()
        await self._moves.end()
        await self._jobs.end()
        # Chores are short and are not cancelled: an unsubscribe that is cut off would leave a
        # subject that this host seems to answer.
        await self._chores.wait()
        if self._transcripts is not None:
            await self._transcripts.close()
        self._host.set_cluster_hooks(None)
        for session in (f"host:{self._cluster.hosts.id}", *self._heard):
            await self._cluster.bus.leave(session)
        self._heard.clear()
