"""Base class of `ClusterLog`: its parts, and how they start, lose the lease and close.

The order of start and close is here. `cluster_log.py` has the calls of a log.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from banksman.cluster.log import maintenance
from banksman.cluster.log.event_reader import EventReader
from banksman.cluster.log.host_leases import HostLeases
from banksman.cluster.log.journal import Journal
from banksman.cluster.log.journal_recovery import JournalRecovery
from banksman.cluster.log.message_codec import ClusterTranscripts, MessagePlace
from banksman.cluster.log.owner_requests import ClusterOwnerRequests
from banksman.cluster.log.placement import ClusterPlacement
from banksman.cluster.log.session_directory import MultiReader, SessionDirectory
from banksman.cluster.log.session_ownership import SessionOwnership
from banksman.cluster.log.session_queues import AppendWaiters, SessionQueues
from banksman.cluster.log.session_record import SessionRecord, SessionRecords, patiently
from banksman.cluster.log.stream_mirror import StreamHeads
from banksman.cluster.log.streams import NatsStreams
from banksman.cluster.log.usage_records import UsageRecords
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import StoreAddress
from banksman.errors import StoreError, UsageError
from banksman.store.log import LogPhase, OwnershipListener
from banksman.store.usage_sums import ReadPage

log = logging.getLogger("banksman")

# How long a close waits for a silent cluster. Messages that are not stored then stay in the
# journal.
CLOSE_SECONDS_MAX = 5.0
# The hint for a call before `ready`: the connection is made in an awaited call.
_EARLY = "enter the host first (async with), or await one of its methods"


class ClusterParts:
    """The parts of a log on NATS, from their creation to the close.

    `read`: reads a page of a session.
    """

    def __init__(
        self, address: StoreAddress, folder: Path, *, read: ReadPage, bytes_max: int | None
    ) -> None:
        if bytes_max is not None and bytes_max < 1:
            message = f"bytes_max cannot be {bytes_max!r}"
            raise UsageError(message, hint="pass 1 or more", bytes_max=bytes_max)
        self._loop = asyncio.get_running_loop()
        self._address = address
        self._phase = LogPhase.NEW
        self._starting: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None
        self._nats = Nats(address, name="banksman", on_up=self._on_up)
        self._streams = NatsStreams(self._nats, address)
        names = self._streams.names
        self.hosts = HostLeases(self._nats, names, address.lease, self._streams.ensure_anew)
        self.hosts.on_lost(self._on_lost)
        self._records = SessionRecords(self._nats, names, self._on_record)
        self._ownership = SessionOwnership(self._nats, self._streams, self._records, self.hosts)
        self._reading = EventReader(self._nats, self._streams)
        self._waiting = AppendWaiters()
        self._heads = StreamHeads(self._nats, names, self._records.id_of, self._on_moved)
        self._many = MultiReader(self._reading, self._records, self._heads, self._waiting)
        self._usage = UsageRecords(self._nats, names, self._records, read)
        self._trimming = maintenance.HistoryTrim(
            self._nats, self._streams, self._reading, self._heads, self._records, usage=self._usage
        )
        self._journal = Journal(folder, self.hosts.id)
        self._journal_recovery = JournalRecovery(self._nats, self._streams, folder)
        self.transcripts = ClusterTranscripts(self._nats, self._streams)
        self._lines = SessionQueues(
            nats=self._nats,
            streams=self._streams,
            ownership=self._ownership,
            leases=self.hosts,
            journal=self._journal,
            reading=self._reading,
            heads=self._heads,
            waiting=self._waiting,
            retention=maintenance.ClusterRetention(bytes_max),
            trimming=self._trimming,
            transcripts=self.transcripts,
            usage=self._usage,
        )
        self._directory = SessionDirectory(
            self._records, self._heads, self._ownership, self._lines.owned_epoch_of
        )
        self.bus = ClusterOwnerRequests(self._nats, address.prefix, ensure=self._streams.ensure)
        self.placement = ClusterPlacement(
            self._nats,
            address.prefix,
            lease_seconds=address.lease,
            ensure=self._streams.ensure,
            ensure_anew=self._streams.ensure_anew,
        )
        self._tasks: set[asyncio.Task[Any]] = set()
        # The task that publishes messages from journals: after the start, and after a lost lease.
        self._salvaging: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        owned = self._lines.owned
        return f"<ClusterLog {self._address} {self._phase.name} host={self.hosts.id} owned={owned}>"

    # -- start and close --------------------------------------------------------------------------
    async def ready(self) -> None:
        """Connect, get a lease, and load the mirrors.

        Raises `Unreachable` if no server answers; a later call tries again.
        """
        if self._phase is LogPhase.NEW:
            if self._starting is None or (self._starting.done() and self._phase is LogPhase.NEW):
                self._starting = self._loop.create_task(self._start())
            await asyncio.shield(self._starting)
        self._check_open()

    async def _start(self) -> None:
        try:
            await self._nats.connect()
            for step in (self._streams.ensure_all, self.hosts.start, self._records.start):
                await patiently(step)
        except BaseException:
            await self.hosts.stop()
            await self._records.stop()
            await self._nats.close()
            self._nats.renew()
            raise
        self._heads.start(self._waiting.sessions)
        self._salvaging = self._spawn(self._journal_recovery.run(self._journal))
        if self._phase is LogPhase.NEW:
            self._phase = LogPhase.OPEN

    def guard(self, guard: OwnershipListener) -> None:
        """Register the listener that ends processes when ownership is lost."""
        self.hosts.guard(guard)

    def _on_up(self) -> None:
        """Reload after a reconnect: notifications during the gap were missed."""
        self.hosts.reload_soon()
        self._records.reload_soon()
        self._usage.reload_soon()
        self._heads.look_soon()
        self.placement.on_up()

    def _on_lost(self) -> None:
        """Give up all sessions and fall silent: the lease is lost.

        Both are synchronous. When this returns, no queue starts another publish, and no answer
        leaves as an owner's.
        """
        self._lines.lose()
        self.bus.fall_silent_nowait()
        # Messages in flight may still be stored in their place, once the cluster answers again.
        self._salvaging = self._spawn(self._journal_recovery.later(self._journal, self.hosts))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_ended)
        return task

    def _on_ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("background task of the log failed: %r", exc)

    async def close(self) -> None:
        """Release all sessions, and stop."""
        if self._closing is None:
            self._phase = LogPhase.CLOSING
            self._lines.release()
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._starting is not None:
            self._starting.cancel()
            await asyncio.wait((self._starting,))
        # The order matters. The queues publish and release first. The lease ends last among the
        # cluster parts, because it protects everything before it. The journal closes after all its
        # writers.
        await self._lines.stop(CLOSE_SECONDS_MAX)
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self.bus.close()
        await self.placement.close()
        await self._heads.stop()
        await self._records.stop()
        await self._usage.stop()
        await self.hosts.stop()
        await self._nats.close()
        await self._journal.close()
        self._lines.tails.end_all()
        self._waiting.close(StoreError("the log is closed"))
        self._phase = LogPhase.CLOSED

    def abandon(self) -> None:
        """Drop all resources without waiting: the event loop is already closed."""
        self._phase = LogPhase.CLOSED
        self.hosts.abandon()
        self._journal.abandon()
        self._nats.abandon()

    def _check_open(self) -> None:
        if self._phase is LogPhase.NEW:
            raise StoreError(f"{self._address} is not connected yet", hint=_EARLY)
        if self._phase is not LogPhase.OPEN:
            raise StoreError("the log is closed")

    # -- changes by other hosts -------------------------------------------------------------------
    def _on_record(self, session: str, record: SessionRecord | None) -> None:
        self._directory.on_change()
        if record is None:
            self._lines.on_deleted(session)
        elif (place := self._heads.known(session)) is not None:
            # The first event may have arrived before the record did.
            self._on_moved(session, place)

    def _on_moved(self, session: str, place: MessagePlace) -> None:
        record = self._directory.record(session)
        # An older epoch belongs to a deleted session of the same id.
        if record is not None and place.epoch >= record.born:
            self._waiting.on_moved(session, place)
