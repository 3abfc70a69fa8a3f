"""What a host does with a job that it has pulled: a session that is new, or one that lost its owner.

A job is in our hands until it is done or given back, and meanwhile we say now and then that we are at it. It may have
been begun by another that died over it, so what is there already is looked at first. Whatever keeps *us* from doing it
is no reason to drop it: it is given back, later each time, and another may have what we lack.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

from banksman.cluster.host.unowned_sessions import is_to_go_on
from banksman.cluster.interfaces import Cluster, Job
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
from banksman.sessions import known_agents, recovery

log = logging.getLogger("banksman")

Application = Callable[[bytes], Awaitable[bytes]]

# How often it is said that we are at it: several times in the ten seconds after which a job is offered to others.
WORKING_SECONDS = 2.5
# A job that is not for us, or not now, comes back after this time, twice as long each time, up to a bound.
AGAIN_SECONDS = 0.2
AGAIN_SECONDS_MAX = 15.0
# One whose owner lives after all, so often: whoever said otherwise was wrong.
ALIVE_MAX = 20
# One that is refused here more often than that is refused for good, as by the policy of this host.
REFUSALS_MAX = 5
# A new one that fails here so often fails everywhere.
OPEN_TRIES_MAX = 5
# A label of a session's own: see `_check_workspace`.
ANY_WORKSPACE = "workspace=any"


class StuckTakeover(Exception):
    """This host cannot go on with it, and why. Another may."""


class Taking:
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
    return min(AGAIN_SECONDS * 2 ** min(deliveries - 1, 10), AGAIN_SECONDS_MAX)


async def _say_working(job: Job) -> None:
    while True:
        await asyncio.sleep(WORKING_SECONDS)
        with suppress(StoreError):
            await job.working()
