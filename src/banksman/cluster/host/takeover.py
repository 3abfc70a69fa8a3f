"""Take over sessions: find those that lost their owner, and run the jobs that this host pulled."""

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

# Sessions of dead hosts: each is offered to the hosts that can take it.
#
# All hosts learn of a death at about the same time, but not all need to offer its sessions. For
# each session, `SPEAKERS` of the live hosts make the offer. A rendezvous hash selects them, without
# any communication. Every host repeats the search once per lease: a speaker may die before it
# offers, and a job may be lost with its queue. `UnownedScan` searches for sessions without an owner
# separately, so that an offer after a death never waits for that search.

log = logging.getLogger("banksman")

SPEAKERS = 3
# The interval of the repeated search, in leases.
LOOK_LEASES = 1.0
# Concurrent offers.
OFFERS_MAX = 16
# The retry interval of offers while the cluster does not answer.
AGAIN_SECONDS = 1.0

# A session changed recently if it changed within this time. It leaves room for clocks that differ
# and for three searches.
LATELY_SECONDS = 60.0
LATELY_LEASES = 3
# Sessions per search that did not change recently.
LOOKS_MAX = 200
# The longest time that an opening takes. It includes the steps on a slow cluster: the claim, the
# fence and the conversation lease. It also includes the end of processes of the last host, and the
# copy of a transcript.
GRACE_SECONDS = 180.0
# The interval of progress reports: several within the ten seconds after which a job is delivered to
# another host.
WORKING_SECONDS = 2.5
# The delay before a job that this host returned is delivered again. It doubles each time, up to a
# limit.
RETRY_SECONDS = 0.2
RETRY_SECONDS_MAX = 15.0
# How often a job with a live owner is returned. After that the offer was wrong.
ALIVE_MAX = 20
# How often a refused take-over is retried. After that the refusal is permanent, as by this host's
# policy.
REFUSALS_MAX = 5
# How often the opening of a new session is tried. After that it would fail everywhere.
OPEN_TRIES_MAX = 5
# A label of a session: see `_check_workspace`.
ANY_WORKSPACE = "workspace=any"


class LossAnnouncer:
    """Offer the sessions of dead hosts, while `run` runs.

    `is_on`: False while this host is leaving, and makes no offers.
    """

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
        """Offer sessions after each death, and search again once per lease, until cancelled."""
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
            # The dead hosts are dropped here without an offer. A leaving host is not among the
            # speakers, so other hosts offer their sessions.
            if not self._is_on():
                continue
            try:
                speaks_for = speaker(self._cluster.hosts)
                await self._offer(
                    [known for known in self._lost(gone, is_due) if speaks_for(known.id)]
                )
            except Unreachable as exc:
                log.debug("cannot offer the sessions of dead hosts: %s, retrying", exc)
                # Keep the dead hosts: their deaths are not announced a second time.
                self._gone |= gone
            except BanksmanError as exc:
                log.warning("cannot offer the sessions of dead hosts: %s", exc)
            except Exception:
                # A bug in this program with one session. No other task searches for the others.
                log.exception("cannot offer the sessions of dead hosts")

    def _lost(self, gone: set[str], is_due: bool) -> list[KnownSession]:
        """Return the sessions of hosts in `gone`, or of all dead hosts if the search is due."""
        dead = [
            owner for owner, _ in self._store.owned() if owner is not None and not owner.is_alive
        ]
        if not dead or not (gone or is_due):
            return []
        lost = [
            known
            for known in self._store.sessions()
            if known.owner is not None and not known.owner.is_alive
        ]
        return (
            lost
            if is_due
            else [known for known in lost if known.owner and host_of(known.owner.address) in gone]
        )

    async def _offer(self, lost: list[KnownSession]) -> None:
        """Offer sessions concurrently. Raises `Unreachable` after all were tried."""
        places = asyncio.Semaphore(OFFERS_MAX)
        failures: list[Unreachable] = []

        async def offer(known: KnownSession) -> None:
            async with places:
                try:
                    await offer_one(self._store, self._cluster, known)
                except Unreachable as exc:
                    failures.append(exc)
                except BanksmanError as exc:
                    # An unreadable session must not keep the others from being offered.
                    log.warning(
                        "session %s: its host died, cannot offer it to other hosts: %s",
                        known.id,
                        exc,
                    )

        async with asyncio.TaskGroup() as group:
            for known in lost:
                group.create_task(offer(known))
        if failures:
            raise failures[0]


def speaker(hosts: Hosts) -> Callable[[str], bool]:
    """Return a function that tells whether this host offers a session.

    The choice is as of now: it uses the hosts that live at the time of this call.
    """
    # A host without room may not be a member at all, only a reader. A draining host makes no
    # offers, however long its last turn takes. This host always counts itself.
    ours = hosts.id
    living = {ours, *(host.id for host in hosts.all() if host.room and not host.is_draining)}

    def speaks_for(session: str) -> bool:
        draw = sorted(
            living, key=lambda host: hashlib.sha256(f"{session} {host}".encode()).digest()
        )
        # Every host computes the same order for the same set of hosts. Where views differ for a
        # moment, several hosts offer, and the queue stores one job.
        return ours in draw[:SPEAKERS]

    return speaks_for


async def is_to_go_on(store: Log, known: KnownSession) -> bool:
    """Return whether a session without an owner has to be resumed.

    It has to if it left its host, if an ask waits in it, or if it was never settled. A session that
    was closed stays closed.
    """
    page = await store.read(known.id, max(0, known.seq - 1), 1)
    has_left = bool(page.events) and page.events[-1].kind == SESSION_LEFT
    return has_left or await is_unsettled(store, known)


async def offer_one(store: Log, cluster: Cluster, known: KnownSession) -> None:
    """Offer a session to the hosts that have what it needs.

    If no host has that, the session is recorded as stuck. It is offered all the same, because such
    a host may start later.
    """
    need = await session_spec.read(store, known)
    await cluster.placement.resume(known.id, need, known.epoch)
    hosts = [host for host in cluster.hosts.all() if host.room]
    lacks = {host.name: session_spec.lacking(need, host.labels, host.agents) for host in hosts}
    if hosts and all(lacks.values()) and cluster.records.stuck_of(known.id) is None:
        told = "; ".join(
            f"{name} has no {', '.join(missing)}" for name, missing in sorted(lacks.items())
        )
        await cluster.records.note_stuck(known.id, f"no host has what it needs: {told}")


def host_of(address: str) -> str:
    """Return the host id of an owner's address, `<host id>@<hostname>`."""
    return address.partition("@")[0]


# The periodic search, once per lease, for sessions that no death announces: sessions without an
# owner that have to be resumed, and sessions that this host owns by their record only.
#
# **Left sessions.** A host offers the sessions that it leaves. It may die before it does. The job
# may be lost with its queue, or no host may have room for hours. So each session without an owner
# is examined once, by its speakers. The finding holds until a host claims the session, and is
# remembered. A session that has to be resumed is offered again in every search, which costs one
# message that is not stored if the job exists. The others cost nothing. Recently changed sessions
# come first, and a limited number of older ones per search. So a store of many years is known after
# an hour, and is not read in one go.
#
# **Stray sessions.** No host takes a session over from a live host. A session that is recorded for
# a live host that does not have it would have no owner for as long as that host lives. Either a
# release got no ack for as long as it was retried, or this is a bug. A claim, an opening and a
# release in progress look the same. Therefore a session is released only after it looked so for
# `GRACE_SECONDS` under one epoch. If that is still too early, nothing is harmed. The release waits
# in the session's queue behind all earlier calls, and an opening in progress then fails with
# `NotOwner`.


class SeenSession(NamedTuple):
    """The finding about a session without an owner, as of its epoch and seq.

    `need`: the labels that it needs; None: it does not have to be resumed.
    """

    epoch: int
    seq: int
    need: Sequence[str] | None

    def holds_for(self, known: KnownSession | None) -> bool:
        """Return whether the session is unchanged since the finding."""
        return known is not None and (known.epoch, known.seq) == (self.epoch, self.seq)


class UnownedSince:
    """Since when each stray session has been seen, and under which epoch."""

    def __init__(self) -> None:
        self._since: dict[str, tuple[int, float]] = {}

    def look(
        self, sessions: Collection[KnownSession], here: Collection[str], now: float
    ) -> list[KnownSession]:
        """Return the stray sessions to release. `here`: the ids of the sessions open here."""
        ours = {
            known.id: known for known in sessions if known.owner is not None and known.owner.is_here
        }
        before, self._since = self._since, {}
        for known in ours.values():
            if known.id not in here:
                epoch, since = before.get(known.id, (0, now))
                # A new epoch is a new claim, so its grace starts over.
                self._since[known.id] = known.epoch, since if epoch == known.epoch else now
        return [ours[id] for id, (_, since) in self._since.items() if now - since >= GRACE_SECONDS]


class UnownedScan:
    """Search for sessions without an owner, while `run` runs.

    `here`: the ids of the sessions open here. `is_on`: False while this host is leaving, and makes
    no offers.
    """

    def __init__(
        self,
        store: Log,
        cluster: Cluster,
        here: Callable[[], Collection[str]],
        is_on: Callable[[], bool],
    ) -> None:
        self._store = store
        self._cluster = cluster
        self._here = here
        self._is_on = is_on
        self._strays = UnownedSince()
        self._seen: dict[str, SeenSession] = {}
        self._looked_at = ""

    async def run(self) -> None:
        """Search once per lease, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_LEASES * self._cluster.hosts.lease_seconds)
            try:
                if self._is_on():
                    await self._look()
            except Unreachable as exc:
                log.debug("cannot search for sessions without an owner: %s, retrying", exc)
            except BanksmanError as exc:
                log.warning("cannot search for sessions without an owner: %s", exc)
            except Exception:
                # A bug in this program. No other task searches for these sessions.
                log.exception("cannot search for sessions without an owner")

    async def _look(self) -> None:
        """Release stray sessions, and offer the sessions without an owner."""
        sessions = self._store.sessions()
        for known in self._strays.look(sessions, self._here(), time.monotonic()):
            log.warning(
                "session %s: its record names this host as owner, but it is not open here: releasing it",
                known.id,
            )
            self._store.release(known.id, known.epoch)
        await self._offer_left({known.id: known for known in sessions if known.owner is None})

    # -- sessions without an owner ----------------------------------------------------------------
    async def _offer_left(self, free: dict[str, KnownSession]) -> None:
        """Examine new sessions without an owner, and offer those that have to be resumed."""
        self._seen = {id: seen for id, seen in self._seen.items() if seen.holds_for(free.get(id))}
        speaks_for = speaker(self._cluster.hosts)
        for known in self._next_of(
            [known for known in free.values() if known.id not in self._seen]
        ):
            if speaks_for(known.id):
                self._seen[known.id] = SeenSession(
                    known.epoch, known.seq, await self._need_of(known)
                )
        for id, seen in self._seen.items():
            if seen.need is None or not speaks_for(id):
                continue
            try:
                await self._cluster.placement.resume(id, seen.need, seen.epoch)
            except Unreachable:
                raise
            except BanksmanError as exc:
                # A session that cannot be offered must not keep the others from it.
                log.warning("session %s: has no owner, cannot offer it to other hosts: %s", id, exc)

    def _next_of(self, unseen: list[KnownSession]) -> list[KnownSession]:
        """Return the recently changed sessions, and the next `LOOKS_MAX` older ones in turns."""
        since = time.time() - LATELY_SECONDS - LATELY_LEASES * self._cluster.hosts.lease_seconds
        older = sorted(
            (known for known in unseen if known.changed < since), key=lambda known: known.id
        )
        begin = bisect_right(older, self._looked_at, key=lambda known: known.id)
        some = (older[begin:] + older[:begin])[:LOOKS_MAX]
        if some:
            self._looked_at = some[-1].id
        return [known for known in unseen if known.changed >= since] + some

    async def _need_of(self, known: KnownSession) -> Sequence[str] | None:
        """Return the labels that a session needs; None: it does not have to be resumed.

        An unreadable session is not resumed either: another host could not read it.
        """
        try:
            if await is_to_go_on(self._store, known):
                return await session_spec.read(self._store, known)
        except Unreachable:
            raise
        except BanksmanError as exc:
            log.warning(
                "session %s: has no owner, cannot read whether asks wait in it: %s",
                known.id,
                exc,
            )
        return None


# Execution of a pulled job: a new session, or one that lost its owner.
#
# This host holds the job until it is done or returned, and reports progress now and then. Another
# host may have started the job and died, so the current state is read first. A reason that keeps
# *this* host from the job never drops it. The job is returned with a growing delay, and another
# host may have what this one lacks.


Application = Callable[[bytes], Awaitable[bytes]]


class StuckTakeover(Exception):
    """This host cannot resume the session, for the given reason. Another host may."""


class JobRunner:
    """Execute pulled jobs. `name`: the name of this host, for messages."""

    def __init__(self, host: Host, cluster: Cluster, application: Application, name: str) -> None:
        self._host = host
        self._cluster = cluster
        self._application = application
        self._name = name

    async def take(self, job: Job) -> None:
        """Execute one job.

        A cancelled call returns the job immediately. A session that it has opened stays on this
        host.
        """
        working = asyncio.get_running_loop().create_task(_say_working(job))
        try:
            await (self._open(job) if job.kind == "open" else self._resume(job))
        except asyncio.CancelledError:
            with suppress(StoreError):
                await job.again(0.0)
            raise
        except Exception:
            # A bug in this program. Another host may run another version, so return the job.
            log.exception("session %s: job failed (kind=%s)", job.session, job.kind)
            await job.again(again_seconds(job.deliveries))
        finally:
            working.cancel()
            await asyncio.wait((working,))

    # -- new sessions -----------------------------------------------------------------------------
    async def _open(self, job: Job) -> None:
        """Open a new session, if its caller still waits."""
        try:
            if not await job.is_wanted():
                await job.done()
                return
        except Unreachable:
            await job.again(again_seconds(job.deliveries))
            return
        known = self._host.log.find(job.session)
        if job.deliveries > 1 and known is not None and known.seq:
            # The previous host of this job created the session, and died before it reported that.
            await self._resume(job)
            return
        try:
            answer = await self._application(job.request)
        except Exception:
            log.exception("session %s: cannot open it on this host", job.session)
            if job.deliveries < OPEN_TRIES_MAX:
                await job.again(again_seconds(job.deliveries))
                return
            # An empty answer sends the caller to the session's owner. It finds none, and fails by
            # its deadline.
            answer = b""
        await job.done(answer)

    # -- sessions that lost their owner -----------------------------------------------------------
    async def _resume(self, job: Job) -> None:
        """Take a session over.

        If another host wins the claim, the next delivery of the job finds that owner and drops the
        job.
        """
        known = self._host.log.find(job.session)
        if known is None:
            await job.done()  # The session was deleted.
            return
        if known.owner is not None and known.owner.is_alive:
            # The owner lives under the old epoch. Either it is just leaving, or this host has not
            # learned of its death yet. So try again later. A newer epoch means that another host
            # has already taken over.
            is_old = known.epoch <= job.epoch and not known.owner.is_here
            if is_old and job.deliveries <= ALIVE_MAX:
                await job.again(again_seconds(job.deliveries))
            else:
                await job.done()
            return
        try:
            if (
                known.owner is None
                and known.epoch > job.epoch
                and not await is_to_go_on(self._host.log, known)
            ):
                # Another host had the session since, and closed it in good order.
                await job.done()
                return
            # Check the folder before the claim: a claim that then fails would raise the epoch and
            # fence for nothing.
            await self._check_workspace(job.session)
            await self._host.take_over(job.session)
        except NotFound:
            await job.done()
        except (StuckTakeover, UsageError, StoreDamaged) as exc:
            await self._say_stuck(job, str(exc))
        except (NotOwner, StoreError, Refused) as exc:
            # Another host was faster, which the next delivery shows. Or processes of the last host
            # are still being ended. Or the cluster does not answer at the moment.
            log.info("session %s: cannot take it over now: %s", job.session, exc)
            if isinstance(exc, NotOwner | StoreError) or job.deliveries <= REFUSALS_MAX:
                await job.again(again_seconds(job.deliveries))
            else:
                await self._say_stuck(job, str(exc))
        else:
            log.info("session %s: taken over (former_epoch=%d)", job.session, job.epoch)
            await job.done()

    async def _check_workspace(self, session: str) -> None:
        """Check that the session's folder exists here.

        For a session with the label `workspace=any` an empty folder is created.
        """
        known = self._host.log.find(session)
        if known is None:
            raise NotFound(f"there is no session {session!r}")
        config = Config(dialect=known_agents.load_or_plain(known.agent).dialect)
        opened = (await recovery.load(self._host.log, session, config)).opened or {}
        cwd = opened.get("cwd")
        if not isinstance(cwd, str) or await asyncio.to_thread(os.path.isdir, cwd):
            return
        if ANY_WORKSPACE not in (opened.get("labels") or ()):
            raise StuckTakeover(f"its folder {cwd} does not exist")
        try:
            await asyncio.to_thread(os.makedirs, cwd, exist_ok=True)
        except OSError as exc:
            raise StuckTakeover(f"cannot create its folder {cwd}: {exc.strerror}") from exc

    async def _say_stuck(self, job: Job, why: str) -> None:
        """Record why this host cannot resume the session, and return the job."""
        said = f"{self._name}: {why}"
        # The job comes back now and then. Do not record the same reason again.
        if self._cluster.records.stuck_of(job.session) != said:
            log.warning("session %s: cannot resume it on this host: %s", job.session, why)
            with suppress(BanksmanError):
                await self._cluster.records.note_stuck(job.session, said)
        await job.again(again_seconds(job.deliveries))


def again_seconds(deliveries: int) -> float:
    """Return the delay before the next delivery, after this many."""
    return min(RETRY_SECONDS * 2 ** min(deliveries - 1, 10), RETRY_SECONDS_MAX)


async def _say_working(job: Job) -> None:
    """Report progress until cancelled."""
    while True:
        await asyncio.sleep(WORKING_SECONDS)
        with suppress(StoreError):
            await job.working()
