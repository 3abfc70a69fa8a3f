"""Take over sessions: find those that lost their owner, and perform the jobs that this host has pulled."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import time
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from typing import NamedTuple

from banksman.cluster.interfaces import Cluster, Hosts, Job
from banksman.core.session.event import SESSION_LEFT
from banksman.core.session.session_config import Config
from banksman.errors import (
    BanksmanError,
    NotFound,
    NotOwner,
    Refused,
    StoreDamaged,
    StoreError,
    Unreachable,
    UsageError,
)
from banksman.runtime.base_host import Host
from banksman.sessions import known_agents, recovery, session_spec
from banksman.sessions.recovery import is_unsettled
from banksman.store.log import KnownSession, Log

# What becomes of sessions whose host is dead: each is offered to whoever can take it.
#
# That a host is dead is heard by all of them at about the same time. Not all of them need to say so: of those that
# live, each session has `SPEAKERS` that are to speak for it, by a draw that needs no word between them. All of them
# look again once in a lease, since somebody may have died before it spoke, and a job may have been lost with its queue.
# What nobody has is looked for beside it (`UnownedScan`), so that no death waits for that.

log = logging.getLogger("banksman")

SPEAKERS = 3
# How often all of them look again, in leases.
LOOK_LEASES = 1.0
# Sessions that are offered at a time.
OFFERS_MAX = 16
# Where the cluster did not answer, the dead are spoken for again after this time.
AGAIN_SECONDS = 1.0

# "Lately": with room for clocks that differ, and for three looks.
LATELY_SECONDS = 60.0
LATELY_LEASES = 3
# Of those that are older, with each look.
LOOKS_MAX = 200
# The longest that an opening takes: patience with the cluster for the claim, the fence and the lease of its
# conversation; processes of its last host that are waited for; a transcript that is brought along.
GRACE_SECONDS = 180.0
# How often it is said that we are at it: several times in the ten seconds after which a job is offered to others.
WORKING_SECONDS = 2.5
# A job that is not for us, or not now, comes back after this time, twice as long each time, up to a bound.
RETRY_SECONDS = 0.2
RETRY_SECONDS_MAX = 15.0
# One whose owner lives after all, so often: whoever said otherwise was wrong.
ALIVE_MAX = 20
# One that is refused here more often than that is refused for good, as by the policy of this host.
REFUSALS_MAX = 5
# A new one that fails here so often fails everywhere.
OPEN_TRIES_MAX = 5
# A label of a session's own: see `_check_workspace`.
ANY_WORKSPACE = "workspace=any"


class LossAnnouncer:
    """For as long as `run` runs. `is_on` False: this host has nothing to say, for it is leaving."""

    def __init__(self, store: Log, cluster: Cluster, is_on: Callable[[], bool]) -> None:
        self._store = store
        self._cluster = cluster
        self._is_on = is_on
        self._gone: set[str] = set()
        self._woken = asyncio.Event()
        cluster.hosts.on_gone(self._on_gone)

    def _on_gone(self, host: str) -> None:
        self._gone.add(host)
        self._woken.set()

    async def run(self) -> None:
        between = LOOK_LEASES * self._cluster.hosts.lease_seconds
        look_at = time.monotonic() + between
        while True:
            seconds = AGAIN_SECONDS if self._gone else look_at - time.monotonic()
            try:
                async with asyncio.timeout(max(0.0, seconds)):
                    await self._woken.wait()
            except TimeoutError:
                pass
            self._woken.clear()
            gone, self._gone = self._gone, set()
            is_due = time.monotonic() >= look_at
            if is_due:
                look_at = time.monotonic() + between
            if not self._is_on():
                continue
            try:
                speaks_for = speaker(self._cluster.hosts)
                await self._offer([known for known in self._lost(gone, is_due) if speaks_for(known.id)])
            except Unreachable as exc:
                log.debug("! the sessions of dead hosts cannot be offered now: %s", exc)
                self._gone |= gone
            except BanksmanError as exc:
                log.warning("! the sessions of dead hosts cannot be offered: %s", exc)
            except Exception:
                # A bug of ours, with one of them. Nobody else looks for the others.
                log.exception("! the sessions of dead hosts cannot be offered")

    def _lost(self, gone: set[str], is_due: bool) -> list[KnownSession]:
        """Those whose host has just died; or all whose host is dead, if there is any."""
        dead = [owner for owner, _ in self._store.owned() if owner is not None and not owner.is_alive]
        if not dead or not (gone or is_due):
            return []
        lost = [known for known in self._store.sessions() if known.owner is not None and not known.owner.is_alive]
        return lost if is_due else [known for known in lost if known.owner and host_of(known.owner.address) in gone]

    async def _offer(self, lost: list[KnownSession]) -> None:
        places = asyncio.Semaphore(OFFERS_MAX)
        failures: list[Unreachable] = []

        async def offer(known: KnownSession) -> None:
            async with places:
                try:
                    await offer_one(self._store, self._cluster, known)
                except Unreachable as exc:
                    failures.append(exc)
                except BanksmanError as exc:
                    # One that cannot be read must not keep the others from being found.
                    log.warning("! session %s lost its host, and cannot be offered to another: %s", known.id, exc)

        async with asyncio.TaskGroup() as group:
            for known in lost:
                group.create_task(offer(known))
        if failures:
            raise failures[0]


def speaker(hosts: Hosts) -> Callable[[str], bool]:
    """Whether this host is to speak for a session, as of now."""
    # Who has no room may be no member at all, but somebody who only reads; who leaves says nothing more, however long
    # its last turn takes. Of ourselves we know.
    ours = hosts.id
    living = {ours, *(host.id for host in hosts.all() if host.room and not host.is_draining)}

    def speaks_for(session: str) -> bool:
        draw = sorted(living, key=lambda host: hashlib.sha256(f"{session} {host}".encode()).digest())
        return ours in draw[:SPEAKERS]

    return speaks_for


async def is_to_go_on(store: Log, known: KnownSession) -> bool:
    """Of one that nobody has: it has left its host, somebody waits in it, or it was never settled. One that was closed
    is let be."""
    page = await store.read(known.id, max(0, known.seq - 1), 1)
    has_left = bool(page.events) and page.events[-1].kind == SESSION_LEFT
    return has_left or await is_unsettled(store, known)


async def offer_one(store: Log, cluster: Cluster, known: KnownSession) -> None:
    """To whoever has what it needs. It is said if nobody has, and it is offered all the same: somebody may come."""
    need = await session_spec.read(store, known)
    await cluster.placement.resume(known.id, need, known.epoch)
    hosts = [host for host in cluster.hosts.all() if host.room]
    lacks = {host.name: session_spec.lacking(need, host.labels, host.agents) for host in hosts}
    if hosts and all(lacks.values()) and cluster.records.stuck_of(known.id) is None:
        told = "; ".join(f"{name} has no {', '.join(missing)}" for name, missing in sorted(lacks.items()))
        await cluster.records.note_stuck(known.id, f"no host has what it needs: {told}")


def host_of(address: str) -> str:
    """As owners are addressed: `<host id>@<hostname>`."""
    return address.partition("@")[0]


# What no death tells of, looked for once in a lease: sessions that nobody has though they are to go on, and sessions
# that this host has by their record alone.
#
# **Left.** Whoever leaves a session offers it. It may die before it does, its job may be lost with its queue, or nobody
# have room for hours. So each that nobody has is looked at once, by those that are to speak for it; what was found
# holds for as long as nobody claims it, and is remembered. One that is to go on is offered again with every look, which
# costs a message that is not stored if the job is there; the others cost nothing more. Those that changed lately come
# first, and of the older ones so many with each look: a store of many years is known after an hour, and is not read at
# once.
#
# **Stray.** A host that lives is not taken over from. A session that is its own by the record, and that it has not,
# would be nobody's for as long as it lives: a release was not heard for longer than it was tried, or it is a bug of
# ours. A claim, an opening and a release on their way look just so, and therefore one is let go of only when it has
# looked so for `GRACE_SECONDS`, under one epoch. If that is too early after all, nothing is harmed: a release stands in
# the session's line behind all that was asked before it, and whoever still opens it is told `NotOwner`.


class SeenSession(NamedTuple):
    """What was found of one that nobody has, as of its epoch and seq. `need` None: it is let be."""

    epoch: int
    seq: int
    need: Sequence[str] | None

    def holds_for(self, known: KnownSession | None) -> bool:
        return known is not None and (known.epoch, known.seq) == (self.epoch, self.seq)


class UnownedSince:
    """Since when each has been seen, and under which epoch."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, float]] = {}

    def look(self, sessions: Collection[KnownSession], here: Collection[str], now: float) -> list[KnownSession]:
        """Those to let go of. `here`: the ids of those that are open here."""
        ours = {known.id: known for known in sessions if known.owner is not None and known.owner.is_here}
        before, self._since = self._since, {}
        for known in ours.values():
            if known.id not in here:
                epoch, since = before.get(known.id, (0, now))
                self._since[known.id] = known.epoch, since if epoch == known.epoch else now
        return [ours[id] for id, (_, since) in self._since.items() if now - since >= GRACE_SECONDS]


class UnownedScan:
    """For as long as `run` runs. `here`: the ids of the sessions that are open here. `is_on` False: this host has
    nothing to say, for it is leaving."""

    def __init__(
        self, store: Log, cluster: Cluster, here: Callable[[], Collection[str]], is_on: Callable[[], bool]
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._here = here
        self._is_on = is_on
        self._strays = UnownedSince()
        self._seen: dict[str, SeenSession] = {}
        self._looked_at = ""

    async def run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_LEASES * self._cluster.hosts.lease_seconds)
            try:
                if self._is_on():
                    await self._look()
            except Unreachable as exc:
                log.debug("! sessions that nobody has cannot be looked for now: %s", exc)
            except BanksmanError as exc:
                log.warning("! sessions that nobody has cannot be looked for: %s", exc)
            except Exception:
                # A bug of ours. Nobody else looks for them.
                log.exception("! sessions that nobody has cannot be looked for")

    async def _look(self) -> None:
        sessions = self._store.sessions()
        for known in self._strays.look(sessions, self._here(), time.monotonic()):
            log.warning("! session %s is this host's by its record, and is not here: it is let go of", known.id)
            self._store.release(known.id, known.epoch)
        await self._offer_left({known.id: known for known in sessions if known.owner is None})

    # -- those that nobody has ---------------------------------------------------------------------------------------
    async def _offer_left(self, free: dict[str, KnownSession]) -> None:
        self._seen = {id: seen for id, seen in self._seen.items() if seen.holds_for(free.get(id))}
        speaks_for = speaker(self._cluster.hosts)
        for known in self._next_of([known for known in free.values() if known.id not in self._seen]):
            if speaks_for(known.id):
                self._seen[known.id] = SeenSession(known.epoch, known.seq, await self._need_of(known))
        for id, seen in self._seen.items():
            if seen.need is None or not speaks_for(id):
                continue
            try:
                await self._cluster.placement.resume(id, seen.need, seen.epoch)
            except Unreachable:
                raise
            except BanksmanError as exc:
                # One that cannot be offered must not keep the others from it.
                log.warning("! session %s has no host, and cannot be offered to one: %s", id, exc)

    def _next_of(self, unseen: list[KnownSession]) -> list[KnownSession]:
        """Those that changed lately, and some of the older ones; the next time those that come after."""
        since = time.time() - LATELY_SECONDS - LATELY_LEASES * self._cluster.hosts.lease_seconds
        older = sorted((known for known in unseen if known.changed < since), key=lambda known: known.id)
        begin = bisect_right(older, self._looked_at, key=lambda known: known.id)
        some = (older[begin:] + older[:begin])[:LOOKS_MAX]
        if some:
            self._looked_at = some[-1].id
        return [known for known in unseen if known.changed >= since] + some

    async def _need_of(self, known: KnownSession) -> Sequence[str] | None:
        """What it needs to go on; None: it is let be. So is one that cannot be read: another host could not either."""
        try:
            if await is_to_go_on(self._store, known):
                return await session_spec.read(self._store, known)
        except Unreachable:
            raise
        except BanksmanError as exc:
            log.warning("! session %s has no host, and who waits in it is not known: %s", known.id, exc)
        return None


# What a host does with a job that it has pulled: a session that is new, or one that lost its owner.
#
# A job is in our hands until it is done or given back, and meanwhile we say now and then that we are at it. It may have
# been begun by another that died over it, so what is there already is looked at first. Whatever keeps *us* from doing
# it is no reason to drop it: it is given back, later each time, and another may have what we lack.


Application = Callable[[bytes], Awaitable[bytes]]


class StuckTakeover(Exception):
    """This host cannot go on with it, and why. Another may."""


class JobRunner:
    """`name` is this host's, for people."""

    def __init__(self, host: Host, cluster: Cluster, application: Application, name: str) -> None:
        self._host = host
        self._cluster = cluster
        self._application = application
        self._name = name

    async def take(self, job: Job) -> None:
        """Cancelled, it is given back at once; what was opened by then is ours, and stays."""
        working = asyncio.get_running_loop().create_task(_say_working(job))
        try:
            await (self._open(job) if job.kind == "open" else self._resume(job))
        except asyncio.CancelledError:
            with suppress(StoreError):
                await job.again(0.0)
            raise
        except Exception:
            # A bug of ours: others may be of another version.
            log.exception("! session %s: a job failed (%s)", job.session, job.kind)
            await job.again(again_seconds(job.deliveries))
        finally:
            working.cancel()
            await asyncio.wait((working,))

    # -- new ones ----------------------------------------------------------------------------------------------------
    async def _open(self, job: Job) -> None:
        try:
            if not await job.is_wanted():
                await job.done()
                return
        except Unreachable:
            await job.again(again_seconds(job.deliveries))
            return
        known = self._host.log.find(job.session)
        if job.deliveries > 1 and known is not None and known.seq:
            # Whoever had it before us has made it, and did not come to say so.
            await self._resume(job)
            return
        try:
            answer = await self._application(job.request)
        except Exception:
            log.exception("! session %s could not be opened here", job.session)
            if job.deliveries < OPEN_TRIES_MAX:
                await job.again(again_seconds(job.deliveries))
                return
            answer = b""
        await job.done(answer)

    # -- those that lost their owner ---------------------------------------------------------------------------------
    async def _resume(self, job: Job) -> None:
        """The loser of a claim forgets it: whoever has it goes on with it."""
        known = self._host.log.find(job.session)
        if known is None:
            await job.done()  # Deleted.
            return
        if known.owner is not None and known.owner.is_alive:
            # Under the epoch that was to be lost: it is just leaving, or that its host is dead is news to us.
            is_old = known.epoch <= job.epoch and not known.owner.is_here
            if is_old and job.deliveries <= ALIVE_MAX:
                await job.again(again_seconds(job.deliveries))
            else:
                await job.done()
            return
        try:
            if known.owner is None and known.epoch > job.epoch and not await is_to_go_on(self._host.log, known):
                # Somebody has had it since, and has closed it in good order.
                await job.done()
                return
            await self._check_workspace(job.session)
            await self._host.take_over(job.session)
        except NotFound:
            await job.done()
        except (StuckTakeover, UsageError, StoreDamaged) as exc:
            await self._say_stuck(job, str(exc))
        except (NotOwner, StoreError, Refused) as exc:
            # Another was faster, which the next look will show; what its last host left is still being ended; or the
            # cluster has a bad moment.
            log.info("session %s cannot be taken over now: %s", job.session, exc)
            if isinstance(exc, NotOwner | StoreError) or job.deliveries <= REFUSALS_MAX:
                await job.again(again_seconds(job.deliveries))
            else:
                await self._say_stuck(job, str(exc))
        else:
            log.info("session %s is taken over from its epoch %d", job.session, job.epoch)
            await job.done()

    async def _check_workspace(self, session: str) -> None:
        """Its folder is here. For one that does not mind what is in it, an empty one is made."""
        known = self._host.log.find(session)
        if known is None:
            raise NotFound(f"there is no session {session!r}")
        config = Config(dialect=known_agents.load_or_plain(known.agent).dialect)
        opened = (await recovery.load(self._host.log, session, config)).opened or {}
        cwd = opened.get("cwd")
        if not isinstance(cwd, str) or await asyncio.to_thread(os.path.isdir, cwd):
            return
        if ANY_WORKSPACE not in (opened.get("labels") or ()):
            raise StuckTakeover(f"its folder {cwd} is not there")
        try:
            await asyncio.to_thread(os.makedirs, cwd, exist_ok=True)
        except OSError as exc:
            raise StuckTakeover(f"its folder {cwd} cannot be made: {exc.strerror}") from exc

    async def _say_stuck(self, job: Job, why: str) -> None:
        said = f"{self._name}: {why}"
        # It comes back now and then: what was said stands.
        if self._cluster.records.stuck_of(job.session) != said:
            log.warning("! session %s cannot be gone on with here: %s", job.session, why)
            with suppress(BanksmanError):
                await self._cluster.records.note_stuck(job.session, said)
        await job.again(again_seconds(job.deliveries))


def again_seconds(deliveries: int) -> float:
    return min(RETRY_SECONDS * 2 ** min(deliveries - 1, 10), RETRY_SECONDS_MAX)


async def _say_working(job: Job) -> None:
    while True:
        await asyncio.sleep(WORKING_SECONDS)
        with suppress(StoreError):
            await job.working()
