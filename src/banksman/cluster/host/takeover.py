"""Run the jobs that this host pulled: open new sessions, take over sessions without an owner.

A job is a new session, or one that lost its owner (`session_offers.py`). `member.py` pulls the
jobs. This host holds the job until it is done or returned, and reports progress now and then.
Another host may have started the job and died, so the current state is read first. A reason that
keeps *this* host from the job never drops it. The job is returned with a growing delay, and another
host may have what this one lacks.

**Two takers.** A job may be delivered twice: its first taker was slow, or was taken for dead. Both
takers then try to claim the session. The claim selects one of them, and the other gets `NotOwner`
before it has started a process. So no check in this file has to be exclusive. Each one only avoids
a claim that would fence another host for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

from banksman.cluster.host.session_offers import is_to_go_on
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
        # The reports are a task of this call, which ends it on every path. Otherwise a job that
        # failed here would be kept from all other hosts for as long as this host lives.
        working = asyncio.get_running_loop().create_task(_say_working(job))
        try:
            await (self._open(job) if job.kind == "open" else self._resume(job))
        except asyncio.CancelledError:
            # Without a delay: this host is closing, and another one can start immediately. If this
            # message is lost, the queue delivers the job after its ack timeout.
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
        assert job.kind == "open"
        # Ask before anything is started. A caller that has given up would never learn the id of the
        # session, and no other code would close it.
        try:
            if not await job.is_wanted():
                await job.done()
                return
        except Unreachable:
            await job.again(again_seconds(job.deliveries))
            return
        # A first delivery has no previous host, so an existing session is no leftover. The
        # application answers that case itself.
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
        # This reads the mirror. A stale answer costs a delivery or a refused claim. It cannot give
        # the session a second owner, because the claim asks the leader.
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
            # Here the session has no live owner by this host's view. A session of a live host is
            # never taken over: its processes may still run, and two agents would write into one
            # folder.
            assert known.owner is None or not known.owner.is_alive
            # Check the folder before the claim: a claim that then fails would raise the epoch and
            # fence for nothing.
            await self._check_workspace(job.session)
            await self._host.take_over(job.session)
        except NotFound:
            await job.done()  # The session was deleted since `find`.
        except (StuckTakeover, UsageError, StoreDamaged) as exc:
            # A retry on this host gives the same error. But the session is not lost: another host
            # may have the folder, or a version that reads the log. This clause comes first,
            # because `StoreDamaged` is a `StoreError`.
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
            # Ack the job last. If this host dies before the ack, the next delivery finds a live
            # owner under a newer epoch, or a dead one and takes the session over again.
            log.info("session %s: taken over (former_epoch=%d)", job.session, job.epoch)
            await job.done()

    async def _check_workspace(self, session: str) -> None:
        """Check that the session's folder exists here.

        For a session with the label `workspace=any` an empty folder is created.
        """
        known = self._host.log.find(session)
        if known is None:
            raise NotFound(f"there is no session {session!r}")
        # This read needs no claim and changes nothing. Without a live owner the log does not grow,
        # so the folder is still right when the claim follows.
        config = Config(dialect=known_agents.load_or_plain(known.agent).dialect)
        opened = (await recovery.load(self._host.log, session, config)).opened or {}
        cwd = opened.get("cwd")
        # A folder on a network file system may block, so the check runs in a thread.
        if not isinstance(cwd, str) or await asyncio.to_thread(os.path.isdir, cwd):
            return
        # Without that label an empty folder would be wrong: the agent would continue a conversation
        # about files that are not there.
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
            # The note is for the operator. If it cannot be written, the job still goes back.
            with suppress(BanksmanError):
                await self._cluster.records.note_stuck(job.session, said)
        await job.again(again_seconds(job.deliveries))


def again_seconds(deliveries: int) -> float:
    """Return the delay before the next delivery, after this many."""
    # The exponent has a limit: the number of deliveries has none, and a float overflows.
    seconds = min(RETRY_SECONDS * 2 ** min(deliveries - 1, 10), RETRY_SECONDS_MAX)
    # A delay of 0 would let one job circle between hosts that cannot run it, as fast as they pull.
    assert 0 < seconds <= RETRY_SECONDS_MAX
    return seconds


async def _say_working(job: Job) -> None:
    """Report progress until cancelled."""
    while True:
        await asyncio.sleep(WORKING_SECONDS)
        # A missed report is repeated well before the ack timeout. If the cluster is away for
        # longer, the job is delivered again, and the claim selects one of the two hosts.
        with suppress(StoreError):
            await job.working()
