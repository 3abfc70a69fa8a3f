"""Offer sessions that need a host: those of dead hosts, and those that have no owner.

An offer is a job in a queue (`cluster/log/placement.py`), and its taker runs it (`takeover.py`).
`UnownedScan` also releases *stray* sessions: recorded for this host, but not open here.

**Sessions of dead hosts** (`LossAnnouncer`). All hosts learn of a death at about the same time, but
not all need to offer its sessions. For each session, `SPEAKERS` of the live hosts make the offer. A
rendezvous hash selects them, without any communication. Every host repeats the search once per
lease: a speaker may die before it offers, and a job may be lost with its queue.

**Left sessions** (`UnownedScan`). A host offers the sessions that it leaves. It may die before it
does. The job may be lost with its queue, or no host may have room for hours. So each session
without an owner is examined once, by its speakers. The finding holds until a host claims the
session, and is remembered. A session that has to be resumed is offered again in every search, which
costs one message that is not stored if the job exists. The others cost nothing. Recently changed
sessions come first, and a limited number of older ones per search. So a store of many years is
known after an hour, and is not read in one go. This search is a separate task, so that an offer
after a death never waits for it.

**Stray sessions** (`UnownedScan`). No host takes a session over from a live host. A session that is
recorded for a live host that does not have it would have no owner for as long as that host lives.
Either a release got no ack for as long as it was retried, or this is a bug. A claim, an opening and
a release in progress look the same. Therefore a session is released only after it looked so for
`GRACE_SECONDS` under one epoch. If that is still too early, nothing is harmed. The release waits in
the session's queue behind all earlier calls, and an opening in progress then fails with `NotOwner`.

**An offer decides nothing.** The claim of the taker does (`takeover.py`). So an offer that is
wrong, late or made twice costs a job, and never gives a session two owners.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from bisect import bisect_right
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from banksman.cluster.interfaces import Cluster, ClusterHosts
from banksman.core.session.event import SESSION_LEFT
from banksman.errors import BanksmanError, Unreachable
from banksman.sessions import host_needs
from banksman.sessions.recovery import is_unsettled
from banksman.store.log import Log
from banksman.store.log_values import KnownSession

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


class LossAnnouncer:
    """Offer the sessions of dead hosts, while `run` runs.

    `is_on`: False while this host is leaving, and makes no offers.
    """

    def __init__(self, store: Log, cluster: Cluster, is_on: Callable[[], bool]) -> None:
        self._store = store
        self._cluster = cluster
        self._is_on = is_on
        # Dead hosts whose sessions this host has not offered yet.
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
            # Take the set and clear the event in one step of the loop. A death that is announced
            # during the offers below sets both again, and the next pass handles it.
            self._woken.clear()
            gone, self._gone = self._gone, set()
            is_due = time.monotonic() >= look_at
            if is_due:
                # Count from now and not from the last time. If the offers took longer than a lease,
                # one search makes up for all that were missed.
                look_at = time.monotonic() + between
            # The dead hosts are dropped here without an offer. A leaving host is not among the
            # speakers, so other hosts offer their sessions.
            if not self._is_on():
                continue
            try:
                # Choose the speakers after the wait. The mirror removes a dead host before it
                # calls `_on_gone`, so the dead host is not among them.
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
        # Count the owners first. That is cheap, and most searches find that all of them live. A
        # list of all sessions would cost too much once per lease.
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
        # `is_alive` comes from the mirror. That may lag behind a host that has just started, and
        # then the offer is wrong. The taker asks the leader before it claims, so such an offer has
        # no effect.
        return (
            lost
            if is_due
            else [known for known in lost if known.owner and host_of(known.owner.address) in gone]
        )

    async def _offer(self, lost: list[KnownSession]) -> None:
        """Offer sessions concurrently. Raises `Unreachable` after all were tried."""
        # A leaving host must not offer: it is no speaker in the view of the others, and the job
        # could come back to it. `run` has checked this, and nothing was awaited since.
        assert self._is_on(), "a leaving host makes no offers"
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
        # Raise only now. One session that could not be offered must not cancel the offers of the
        # others, and the caller repeats all of them. An offer that was stored is not stored again.
        if failures:
            raise failures[0]


def speaker(hosts: ClusterHosts) -> Callable[[str], bool]:
    """Return a function that tells whether this host offers a session.

    The choice is as of now: it uses the hosts that live at the time of this call.
    """
    # A host without room may not be a member at all, only a reader. A draining host makes no
    # offers, however long its last turn takes. This host always counts itself.
    ours = hosts.id
    living = {ours, *(host.id for host in hosts.all() if host.room and not host.is_draining)}
    # Every session has a speaker, as long as one host lives. A host that left itself out because
    # its own heartbeat is missing in its mirror could leave a session without one.
    assert ours in living

    def speaks_for(session: str) -> bool:
        draw = sorted(
            living, key=lambda host: hashlib.sha256(f"{session} {host}".encode()).digest()
        )
        # Every host computes the same order for the same set of hosts. Where views differ for a
        # moment, several hosts offer, and the queue stores one job. Or no host offers: each one
        # believes that others are the speakers. The search of the next lease repairs that.
        return ours in draw[:SPEAKERS]

    return speaks_for


async def is_to_go_on(store: Log, known: KnownSession) -> bool:
    """Return whether a session without an owner has to be resumed.

    It has to if it left its host, if an ask waits in it, or if it was never settled. A session that
    was closed stays closed.
    """
    # The last event decides first, and one read is enough for it. A host that leaves a session
    # writes `session.left` last, and an idle session has nothing else that asks for a host.
    page = await store.read(known.id, max(0, known.seq - 1), 1)
    has_left = bool(page.events) and page.events[-1].kind == SESSION_LEFT
    return has_left or await is_unsettled(store, known)


async def offer_one(store: Log, cluster: Cluster, known: KnownSession) -> None:
    """Offer a session to the hosts that have what it needs.

    If no host has that, the session is recorded as stuck. It is offered all the same, because such
    a host may start later.
    """
    # The epoch belongs to the offer. A taker that finds a newer epoch knows that another host had
    # the session since, so the offer may be out of date.
    need = await host_needs.read(store, known)
    await cluster.placement.resume(known.id, need, known.epoch)
    # Record the reason after the offer. The record is only for the operator, and a failure to
    # write it must not prevent the offer.
    hosts = [host for host in cluster.hosts.all() if host.room]
    lacks = {host.name: host_needs.lacking(need, host.labels, host.agents) for host in hosts}
    if hosts and all(lacks.values()) and cluster.records.stuck_of(known.id) is None:
        told = "; ".join(
            f"{name} has no {', '.join(missing)}" for name, missing in sorted(lacks.items())
        )
        await cluster.records.note_stuck(known.id, f"no host has what it needs: {told}")


def host_of(address: str) -> str:
    """Return the host id of an owner's address, `<host id>@<hostname>`."""
    return address.partition("@")[0]


class SeenSession(NamedTuple):
    """The finding about a session without an owner, as of its epoch and seq.

    `need`: the labels that it needs; None: it does not have to be resumed.
    """

    epoch: int
    seq: int
    need: Sequence[str] | None

    def holds_for(self, known: KnownSession | None) -> bool:
        """Return whether the session is unchanged since the finding."""
        # Every claim raises the epoch. The seq is compared too: the mirror may learn of the last
        # events after it learned of the release, and a journal may be recovered in between.
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
        # The grace is a difference of two readings of one monotonic clock. A reading from another
        # clock, or an older one, would shorten it.
        assert all(since <= now for _, since in before.values()), "time went backwards"
        # Sessions that are open here, or released, drop out of `_since`. If such a session looks
        # stray later, its grace starts over.
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
        # One list for both parts, as of one moment. A session that is released here still has its
        # owner in this list, so it is offered by the next search and not twice in this one.
        sessions = self._store.sessions()
        for known in self._strays.look(sessions, self._here(), time.monotonic()):
            # The release must never hit the session of another host. `release` compares the epoch
            # and the host with the record too, but a wrong call here is a bug of this search.
            assert known.owner is not None
            assert known.owner.is_here
            log.warning(
                "session %s: its record names this host as owner, but it is not open here: "
                "releasing it",
                known.id,
            )
            self._store.release(known.id, known.epoch)
        await self._offer_left({known.id: known for known in sessions if known.owner is None})

    # -- sessions without an owner ----------------------------------------------------------------
    async def _offer_left(self, free: dict[str, KnownSession]) -> None:
        """Examine new sessions without an owner, and offer those that have to be resumed."""
        # A session with a live owner is never examined: its log is still being written.
        assert all(known.owner is None for known in free.values())
        self._seen = {id: seen for id, seen in self._seen.items() if seen.holds_for(free.get(id))}
        speaks_for = speaker(self._cluster.hosts)
        for known in self._next_of(
            [known for known in free.values() if known.id not in self._seen]
        ):
            # Only the speakers read the log and remember the finding. If the hosts change, a new
            # speaker has no finding, and examines the session itself.
            if speaks_for(known.id):
                self._seen[known.id] = SeenSession(
                    known.epoch, known.seq, await self._need_of(known)
                )
        for id, seen in self._seen.items():
            # Ask again whether this host is a speaker: a finding may be many leases old.
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
        # The clocks of two machines are compared here. That is allowed: a wrong clock only changes
        # the order in which sessions are examined.
        older = sorted(
            (known for known in unseen if known.changed < since), key=lambda known: known.id
        )
        # Continue behind the last examined id. The list changes between two searches, so an index
        # would skip sessions, and an id does not.
        begin = bisect_right(older, self._looked_at, key=lambda known: known.id)
        some = (older[begin:] + older[:begin])[:LOOKS_MAX]
        assert len(some) <= LOOKS_MAX
        if some:
            self._looked_at = some[-1].id
        return [known for known in unseen if known.changed >= since] + some

    async def _need_of(self, known: KnownSession) -> Sequence[str] | None:
        """Return the labels that a session needs; None: it does not have to be resumed.

        An unreadable session is not resumed either: another host could not read it.
        """
        try:
            if await is_to_go_on(self._store, known):
                return await host_needs.read(self._store, known)
        except Unreachable:
            raise  # Nothing is known about the session, so the caller must not remember a finding.
        except BanksmanError as exc:
            log.warning(
                "session %s: has no owner, cannot read whether asks wait in it: %s",
                known.id,
                exc,
            )
        return None
