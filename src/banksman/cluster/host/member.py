"""A host as one of many: it says what it has room for, takes what others offer, answers for what it has, and leaves.

It adds no state of its own about sessions. What is open here is the host's; who owns what is the store's; this only
tells each of the other. It pulls while there is room, answers on the bus for every session from the moment that it is
ours to the moment that it is not, and offers what it leaves, or what a dead host left, to the others.

The order of a fence is kept by who calls: `on_lost` comes before any session is told, and from then on nothing is
answered. What was lost is closed by the host, as always, and pulled again by whoever is first.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from banksman.cluster.host.takeover import Application, JobRunner, LossAnnouncer, UnownedScan, is_to_go_on, offer_one
from banksman.cluster.host.transcript_copies import TranscriptCopies
from banksman.cluster.interfaces import Cluster, HostReport
from banksman.errors import BanksmanError, StoreError
from banksman.runtime.base_host import Host
from banksman.sessions import session_spec
from banksman.tasks import OwnedTasks

if TYPE_CHECKING:
    from banksman.core.session.event import Entry
    from banksman.core.session.history import SessionHistory
    from banksman.sessions.session import Session
    from banksman.sessions.session_spec import SessionSpec

log = logging.getLogger("banksman")

# Jobs at a time. To take one over is mostly waiting: for the store, and for what is left of its last process.
JOBS_MAX = 16
# Where nothing can be taken now, it is tried again after this time.
AGAIN_SECONDS = 1.0
# How often one that was left is offered before it is left to those who look: once in a lease somebody does.
OFFERS_MAX = 5

CLOSE_SECONDS_MAX = 5.0


class MemberPhase(enum.Enum):
    NEW, UP, DRAINING, CLOSED = range(4)


class Member:
    """`async with Member(…)`, inside of the host's own. The host must be one on the store that the cluster is of.

    `room`: how many sessions it takes; 0: none, it only asks others. `agents`: whose programs are here. `application`
    answers what was asked of us elsewhere, as if it had been asked here. `mirrors_transcripts`: see
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
        self._offered = session_spec.offered(labels, agents)
        self._application = application
        self._taking = JobRunner(host, cluster, application, name)
        self._transcripts: TranscriptCopies | None = None
        if mirrors_transcripts:
            self._transcripts = TranscriptCopies(host.log, cluster.transcripts, host.redactor)
        self._phase = MemberPhase.NEW
        self._chores = OwnedTasks()
        self._jobs = OwnedTasks()
        self._loops = OwnedTasks()
        self._pulling: asyncio.Task[None] | None = None
        # Until others can ask us for them.
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def used(self) -> int:
        """The sessions that are here."""
        return len(self._here())

    @property
    def is_draining(self) -> bool:
        return self._phase is not MemberPhase.UP

    @property
    def has_room(self) -> bool:
        return self._phase is MemberPhase.UP and self.used + len(self._jobs) < self._card.room

    def _is_up(self) -> bool:
        return self._phase is MemberPhase.UP

    def _here(self) -> list[Session]:
        return [session for session in self._host.our_sessions() if not session.is_closed]

    async def start(self) -> None:
        assert self._phase is MemberPhase.NEW
        await self._host.log.ready()
        self._phase = MemberPhase.UP
        self._host.set_cluster_hooks(self)
        self._cluster.hosts.on_lost(self._on_lost)
        for session in self._here():
            self.on_open(session)
        await self._answer_for_host()
        self._announce()
        watching = LossAnnouncer(self._host.log, self._cluster, self._is_up)
        self._loops.start(watching.run())
        looking = UnownedScan(
            self._host.log, self._cluster, lambda: {session.id for session in self._here()}, self._is_up
        )
        self._loops.start(looking.run())
        if self._card.room:
            self._pulling = self._loops.start(self._pull())

    def _announce(self) -> None:
        self._cluster.hosts.announce(self._card._replace(used=self.used, is_draining=self._phase is not MemberPhase.UP))

    # -- what is here ------------------------------------------------------------------------------------------------
    def on_open(self, session: Session) -> None:
        if self._phase is not MemberPhase.CLOSED:
            self._heard[session.id] = self._chores.start(self._answer_for(session.id))
            self._on_change()

    def on_closed(self, session: Session) -> None:
        if self._phase is not MemberPhase.CLOSED:
            self._heard.pop(session.id, None)
            self._chores.start(self._cluster.bus.leave(session.id))
            if self._transcripts is not None:
                self._transcripts.finish(session.id)
            self._on_change()

    def on_turn_over(self, session: Session, turn: str) -> None:
        if self._transcripts is not None and self._phase is not MemberPhase.CLOSED:
            self._transcripts.mirror(session, turn)

    async def bring(self, session: str, spec: SessionSpec, past: SessionHistory) -> Sequence[Entry]:
        return () if self._transcripts is None else await self._transcripts.bring(session, spec, past)

    async def wait_heard(self, session: Session) -> None:
        heard = self._heard.get(session.id)
        if heard is not None:
            await asyncio.wait((heard,))

    def _on_change(self) -> None:
        self._change.set()
        self._announce()

    async def _answer_for(self, session: str) -> None:
        try:
            await self._cluster.bus.answer_for(session, self._application)
        except StoreError as exc:
            # The next fence is near, or the end.
            log.warning("! session %s is here, and others cannot ask for it: %s", session, exc)

    async def _answer_for_host(self) -> None:
        await self._answer_for(f"host:{self._cluster.hosts.id}")

    def _on_lost(self) -> None:
        """Nothing here is ours any more. Under another id we begin anew, as soon as the cluster can be reached."""
        if self._phase is not MemberPhase.CLOSED:
            self._cluster.bus.fall_silent_nowait()
            self._heard.clear()
            if self._transcripts is not None:
                self._transcripts.stop()
            self._chores.start(self._answer_for_host())

    # -- what others offer -------------------------------------------------------------------------------------------
    async def _pull(self) -> None:
        while True:
            self._change.clear()
            if not self.has_room or len(self._jobs) >= JOBS_MAX:
                await self._change.wait()
                continue
            try:
                job = await self._cluster.placement.next(self._offered)
            except StoreError as exc:
                log.warning("! no session can be taken now: %s", exc)
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            except Exception:
                # A bug of ours. A host that says that it has room, and takes nothing, would be worse.
                log.exception("! no session can be taken now")
                await asyncio.sleep(AGAIN_SECONDS)
                continue
            if not self.has_room:
                await job.again(0.0)  # Somebody opened one here meanwhile.
                continue
            self._jobs.start(self._taking.take(job)).add_done_callback(lambda _: self._change.set())

    # -- leaving -----------------------------------------------------------------------------------------------------
    async def drain(self, *, timeout: float | None = None) -> None:
        """Take nothing more, let each turn that runs come to its end, and pass every session on. Past `timeout` seconds
        what still runs is stopped; of several deadlines the first one counts. Returns when none is left here.

        Cancelled, it only stops waiting: the draining goes on.
        """
        if self._phase is MemberPhase.CLOSED:
            return
        if self._phase is not MemberPhase.DRAINING:
            self._phase = MemberPhase.DRAINING
            self._announce()
        if self._draining is None:
            self._draining = self._loops.start(self._leave_all())
        # Before any of them is told to leave: one that has left is not here any more, and is still to be offered.
        self._move_all()
        if timeout is not None:
            for session in self._here():
                session.leave_nowait(timeout)
            until = asyncio.get_running_loop().time() + timeout
            self._leave_by = until if self._leave_by is None else min(until, self._leave_by)
        await asyncio.wait((self._draining,))

    async def _leave_all(self) -> None:
        if self._pulling is not None:
            self._pulling.cancel()
            await asyncio.wait((self._pulling,))
        await self._jobs.wait()
        while self._here() or self._moves:
            self._move_all()
            await self._moves.wait()

    def _move_all(self) -> None:
        for session in self._here():
            if session.id not in self._moving:
                self._moving.add(session.id)
                self._moves.start(self._move(session))

    async def _move(self, session: Session) -> None:
        try:
            await self._leave(session)
            await self._offer(session.id)
        finally:
            self._moving.discard(session.id)

    async def _leave(self, session: Session) -> None:
        until, now = self._leave_by, asyncio.get_running_loop().time()
        try:
            await session.leave(None if until is None else max(0.0, until - now))
        except BanksmanError as exc:
            # Lost in this moment, say. The others leave all the same, and this one is offered.
            log.warning("! session %s has not left in good order: %s", session.id, exc)
        if self._transcripts is not None:
            await self._transcripts.wait_mirrored(session.id)

    async def _offer(self, session: str) -> None:
        for _ in range(OFFERS_MAX):
            known = self._host.log.find(session)
            if known is None or (known.owner is not None and known.owner.is_alive and not known.owner.is_here):
                return  # Deleted, or somebody has it.
            try:
                # That it is let go of may be news to others: whoever takes it waits for that.
                if await is_to_go_on(self._host.log, known._replace(owner=None)):
                    await offer_one(self._host.log, self._cluster, known)
            except BanksmanError as exc:
                log.warning("! session %s has left, and cannot be offered now: %s", session, exc)
                await asyncio.sleep(AGAIN_SECONDS)
            else:
                return

    async def close(self) -> None:
        """Others are answered no more. What is here stays open: it is the host's to close."""
        if self._phase is MemberPhase.CLOSED:
            return
        if self._draining is not None:
            # Those that have left are still to be offered. One that does not leave is the host's to end.
            await asyncio.wait((self._draining,), timeout=CLOSE_SECONDS_MAX)
        self._phase = MemberPhase.CLOSED
        await self._loops.end()
        await self._moves.end()
        await self._jobs.end()
        await self._chores.wait()
        if self._transcripts is not None:
            await self._transcripts.close()
        self._host.set_cluster_hooks(None)
        for session in (f"host:{self._cluster.hosts.id}", *self._heard):
            await self._cluster.bus.leave(session)
        self._heard.clear()
