"""What becomes of sessions whose host is dead: each is offered to whoever can take it.

That a host is dead is heard by all of them at about the same time. Not all of them need to say so: of those that live,
each session has `SPEAKERS` that are to speak for it, by a draw that needs no word between them. All of them look again
once in a lease, since somebody may have died before it spoke, and a job may have been lost with its queue. What nobody
has is looked for beside it (`looking.py`), so that no death waits for that.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable

from banksman.core.event import SESSION_LEFT
from banksman.errors import BanksmanError, Unreachable
from banksman.run.sessions import needs
from banksman.run.sessions.abandoned import is_unsettled
from banksman.store.bus import Cluster, Hosts
from banksman.store.log import Known, Log

log = logging.getLogger("banksman")

SPEAKERS = 3
# How often all of them look again, in leases.
LOOK_LEASES = 1.0
# Sessions that are offered at a time.
OFFERS_MAX = 16
# Where the cluster did not answer, the dead are spoken for again after this time.
AGAIN_SECONDS = 1.0


class Watching:
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

    def _lost(self, gone: set[str], is_due: bool) -> list[Known]:
        """Those whose host has just died; or all whose host is dead, if there is any."""
        dead = [owner for owner, _ in self._store.owned() if owner is not None and not owner.is_alive]
        if not dead or not (gone or is_due):
            return []
        lost = [known for known in self._store.sessions() if known.owner is not None and not known.owner.is_alive]
        return lost if is_due else [known for known in lost if known.owner and host_of(known.owner.address) in gone]

    async def _offer(self, lost: list[Known]) -> None:
        places = asyncio.Semaphore(OFFERS_MAX)
        failures: list[Unreachable] = []

        async def offer(known: Known) -> None:
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


async def is_to_go_on(store: Log, known: Known) -> bool:
    """Of one that nobody has: it has left its host, somebody waits in it, or it was never settled. One that was closed
    is let be."""
    page = await store.read(known.id, max(0, known.seq - 1), 1)
    has_left = bool(page.events) and page.events[-1].kind == SESSION_LEFT
    return has_left or await is_unsettled(store, known)


async def offer_one(store: Log, cluster: Cluster, known: Known) -> None:
    """To whoever has what it needs. It is said if nobody has, and it is offered all the same: somebody may come."""
    need = await needs.read(store, known)
    await cluster.placement.resume(known.id, need, known.epoch)
    hosts = [host for host in cluster.hosts.all() if host.room]
    lacks = {host.name: needs.lacking(need, host.labels, host.agents) for host in hosts}
    if hosts and all(lacks.values()) and cluster.records.stuck_of(known.id) is None:
        told = "; ".join(f"{name} has no {', '.join(missing)}" for name, missing in sorted(lacks.items()))
        await cluster.records.note_stuck(known.id, f"no host has what it needs: {told}")


def host_of(address: str) -> str:
    """As owners are addressed: `<host id>@<hostname>`."""
    return address.partition("@")[0]
