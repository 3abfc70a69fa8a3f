"""The log on NATS JetStream: implementation of the `Log` protocol for many hosts.

`ClusterLog` is also the `Cluster` of `cluster/interfaces.py`, and implements its `Records`. As a
log it promises the same as every engine (`store/log.py`). An acknowledged append is stored by as
many servers as the store has replicas, as durably as those servers sync. The parts:

- A claim changes the session's record and fences its events (`session_ownership.py`).
- Appends go through the session's write queue, journal first (`session_queue.py`).
- Readers read from the servers, whichever host owns the session (`event_reader.py`).

Changes of other hosts arrive a moment later, and always in their order: `head`, `find` and
`sessions` answer from local mirrors. A decision (a claim, a rename) asks the leader.

A host owns its claims while its lease is valid (`host_leases.py`). After that every call is
refused, and messages in flight wait in the journal (`journal_recovery.py`).
"""

from __future__ import annotations

import asyncio
import datetime
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from banksman.cluster.log import maintenance
from banksman.cluster.log.event_reader import EventReader
from banksman.cluster.log.host_leases import HostLeases
from banksman.cluster.log.journal import Journal
from banksman.cluster.log.journal_recovery import JournalRecovery
from banksman.cluster.log.message_codec import ClusterTranscripts, MessagePart, MessagePlace
from banksman.cluster.log.owner_requests import ClusterOwnerRequests
from banksman.cluster.log.placement import ClusterPlacement
from banksman.cluster.log.publisher import (
    Advance,
    Call,
    Claim,
    Delete,
    QueuedAppend,
    QueuedLease,
    QueuedRelease,
)
from banksman.cluster.log.session_directory import MultiReader, SessionDirectory
from banksman.cluster.log.session_ownership import SessionOwnership
from banksman.cluster.log.session_queues import AppendWaiters, SessionQueues, outcome
from banksman.cluster.log.session_record import SessionRecord, SessionRecords, patiently
from banksman.cluster.log.stream_mirror import StreamHeads
from banksman.cluster.log.streams import NatsStreams
from banksman.cluster.log.usage_records import UsageRecords
from banksman.cluster.nats import Nats
from banksman.cluster.store_address import StoreAddress
from banksman.core.session.event import Entry, Event, Project
from banksman.errors import StoreError, UsageError
from banksman.store.log import (
    NUMBER_MAX,
    READ_EVENTS_MAX,
    Chunk,
    Done,
    Head,
    KnownSession,
    LogPhase,
    LogTail,
    MultiSessionPage,
    Owner,
    OwnershipListener,
    Page,
    ProjectOf,
    Snapshot,
    TurnPlace,
    UsageBy,
    UsageRow,
)
from banksman.store.memory_session import TurnIndexes
from banksman.store.preconditions import (
    check_after,
    check_no_host,
    check_seq,
    check_text,
    checked_limit,
)
from banksman.store.usage import checked_query

log = logging.getLogger("banksman")

# How long a close waits for a silent cluster. Messages that are not stored then stay in the
# journal.
CLOSE_SECONDS_MAX = 5.0
# How long a claim waits for this host's own messages to be recovered. A claim before that would
# fence them off, and they would end as a report.
SALVAGE_SECONDS_MAX = 3.0
# The hint for a call before `ready`: the connection is made in an awaited call.
_EARLY = "enter the host first (async with), or await one of its methods"


class ClusterLog:
    """A `Log` on NATS at an address.

    It is created inside an event loop and belongs to that loop; `ready` connects it. `folder`: the
    folder of its journal. `bytes_max`: how much is kept of each session, approximately, beside the
    events that its last snapshot does not cover.
    """

    is_durable: bool = True

    def __init__(
        self, address: StoreAddress, folder: Path, *, bytes_max: int | None = None
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
        self._turns = TurnIndexes(self.read)
        self._heads = StreamHeads(self._nats, names, self._records.id_of, self._on_moved)
        self._many = MultiReader(self._reading, self._records, self._heads, self._waiting)
        self._usage = UsageRecords(self._nats, names, self._records, self.read)
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

    @property
    def cluster(self) -> ClusterLog:
        """The cluster protocol of this store: see `cluster/interfaces.py`."""
        return self

    @property
    def records(self) -> ClusterLog:
        """The records protocol, which this class implements."""
        return self

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

    # -- ownership --------------------------------------------------------------------------------
    async def claim(
        self, session: str, *, name: str | None = None, agent: str | None = None
    ) -> int:
        """Claim the session and return its epoch.

        A cancelled claim claims nothing: a claim that took effect is released.
        """
        await self.ready()
        check_text(session, name, agent)
        check_no_host(session)
        if self._salvaging is not None:
            # Let this host's recovered messages be stored first. Its own claim would fence them
            # off.
            await asyncio.wait((self._salvaging,), timeout=SALVAGE_SECONDS_MAX)
        return await self._ask(session, Claim(self._loop.create_future(), name, agent))

    def advance(self, session: str, epoch: int, done: Done) -> None:
        line = self._lines.of(session)
        line.put(Advance(epoch, line.told, done, self._late(session)))

    def release(self, session: str, epoch: int) -> None:
        if self._phase is LogPhase.OPEN:
            line = self._lines.of(session)
            line.put(QueuedRelease(epoch, line.told, None))

    def lease(self, session: str, epoch: int, name: str | None, done: Done) -> None:
        check_text(name)
        line = self._lines.of(session)
        line.put(QueuedLease(epoch, line.told, done, self._late(session), name=name))

    # -- writes -----------------------------------------------------------------------------------
    def append(  # noqa: PLR0917  The protocol's own signature, called once per chunk: names would cost.
        self,
        session: str,
        epoch: int,
        expected_seq: int,
        at: float,
        entries: Sequence[Entry],
        done: Done,
        snapshot: bytes | None = None,
    ) -> None:
        line = self._lines.of(session)
        # Copy the entries: the caller may reuse its list.
        part = MessagePart(at, tuple(entries))
        line.put(
            QueuedAppend(
                epoch,
                line.told,
                done,
                self._late(session),
                expected_seq=expected_seq,
                part=part,
                snapshot=snapshot,
            )
        )

    async def restore(
        self,
        session: str,
        *,
        name: str | None,
        agent: str,
        chunks: Callable[[], Iterable[Chunk]],
        snapshot: Snapshot | None = None,
    ) -> None:
        await self.ready()
        check_text(session, name, agent)
        check_no_host(session)
        restored = maintenance.HistoryRestore(
            self._nats, self._streams, self._ownership, self._records, self.hosts, usage=self._usage
        )
        await restored.restore(session, name, agent, chunks, snapshot)

    def _late(self, session: str) -> StoreError | None:
        """Return the error of a call that came after the close began."""
        if self._phase in (LogPhase.OPEN, LogPhase.NEW):
            return None
        return StoreError("the log is closed", session=session)

    async def _ask(self, session: str, call: Call) -> Any:
        assert isinstance(call, Claim | Delete)
        self._lines.of(session).put(call)
        return await call.answer

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

    # -- reads ------------------------------------------------------------------------------------
    def head(self, session: str) -> Head:
        self._check_open()
        return self._directory.head(session)

    async def read(
        self, session: str, after: int, limit: int = READ_EVENTS_MAX, project: Project | None = None
    ) -> Page:
        check_after(session, after)
        limit = checked_limit(limit)
        await self.ready()
        record, place = await self._look(session, after)
        if record is None or place is None or after >= place.last:
            return Page((), None)
        seq = max(after + 1, record.first)
        events = await self._reading.read(session, seq, limit, place, project)
        if events and events[0].seq > seq:
            seq = events[0].seq  # It was trimmed during the read.
        return Page(events, (after + 1, seq - 1) if after + 1 < seq else None)

    async def _look(
        self, session: str, after: int
    ) -> tuple[SessionRecord | None, MessagePlace | None]:
        """Return the session's record and its last place, fresh enough for this reader.

        A client that learned of an event on another host must find it here. So if nothing is known
        behind `after`, this asks the leader.
        """
        place = await self._heads.look(session)
        if self._directory.record(session) is None:
            await self._records.find(session)
        if self._lines.owned_epoch_of(session) is None and (place is None or after >= place.last):
            place = await self._heads.look_closer(session)
        return self._directory.record(session), place

    def recent(
        self, session: str, after: int, limit: int, project: Project | None = None
    ) -> list[Event] | None:
        owned_epoch, record = self._lines.owned_epoch_of(session), self._directory.record(session)
        if owned_epoch is None or record is None or after + 1 < record.first:
            return None
        return self._reading.recent.events(session, after + 1, limit, project) or None

    def tail(self, session: str, wake: Callable[[], None]) -> LogTail | None:
        owned_epoch = self._lines.owned_epoch_of(session)
        if owned_epoch is None:
            return None
        return self._lines.tails.open(session, owned_epoch.seq, wake)

    async def find_turn(self, session: str, turn: str) -> TurnPlace | None:
        """Find where a turn is in the log.

        The servers have no index of turns. The first lookup in a session reads its history once.
        Later lookups read only newer events, while this process remembers the index
        (`store/memory_session.py`).
        """
        await self.ready()
        record, _ = await self._look(session, NUMBER_MAX)
        if record is None:
            return None
        return await self._turns.find(session, turn, identity=record.born, first=record.first)

    async def snapshot(self, session: str) -> Snapshot | None:
        await self.ready()
        record, place = await self._look(session, NUMBER_MAX)
        if record is None or place is None or not place.snapshot:
            return None
        stored = await self._reading.one(session, place.snapshot)
        if stored is None or stored.body.snapshot is None:
            return None
        return Snapshot(stored.body.snapshot_seq, stored.body.snapshot)

    async def wait_past(self, session: str, seq: int, *, is_known: bool = False) -> None:
        check_seq(session, seq)
        await self.ready()
        # Register before the look, so that an event in between finishes the wait.
        async with self._waiting.past(session, seq) as moved:
            await self._heads.look(session)
            head = self.head(session)
            if is_known and not head.epoch:
                message = f"cannot wait for events of session {session}: it was deleted"
                raise StoreError(message, session=session)
            if head.seq <= seq:
                await outcome(moved)

    async def read_many(
        self,
        after: str | None,
        limit: int = READ_EVENTS_MAX,
        *,
        sessions: Collection[str] | None = None,
        project_of: ProjectOf | None = None,
    ) -> MultiSessionPage:
        limit = checked_limit(limit)
        await self.ready()
        return await self._many.read(after, limit, sessions, project_of)

    async def wait_past_position(self, position: str) -> None:
        await self.ready()
        await self._many.wait_past(position)

    # -- sessions of the store --------------------------------------------------------------------
    def sessions(self, after: str | None = None, limit: int | None = None) -> list[KnownSession]:
        self._check_open()
        return self._directory.sessions(after, limit)

    def owned(self) -> list[tuple[Owner | None, int]]:
        self._check_open()
        return self._directory.owned()

    def find(self, id_or_name: str) -> KnownSession | None:
        self._check_open()
        return self._directory.find(id_or_name)

    async def usage(
        self,
        by: UsageBy = "day",
        *,
        since: datetime.date | str | None = None,
        until: datetime.date | str | None = None,
    ) -> list[UsageRow]:
        """Return the usage of the store, see `Log.usage`.

        The first call reads all histories, page by page. Later calls read only new events. Events
        that another host has stored a moment ago may be missing.
        """
        query = checked_query(by, since, until)
        await self.ready()
        # One subscription tells the heads of all sessions that other hosts write from now on.
        await self._heads.hear_all()
        for known in self._directory.sessions(None, None):
            is_elsewhere = known.owner is not None and not known.owner.is_here
            if is_elsewhere and self._heads.known(known.id) is None:
                await self._heads.look_closer(known.id)
        table = await self._usage.table(self._directory.sessions(None, None))
        return table.rows(query)

    async def rename(self, session: str, name: str | None, *, expected: str | None) -> None:
        await self.ready()
        check_text(session, name)
        await self._records.rename(session, name, expected)

    async def trim(self, session: str, before: int) -> int:
        await self.ready()
        await self._trimming.trim(session, before)
        record = self._directory.record(session)
        return 1 if record is None else record.first

    async def delete(self, session: str) -> None:
        await self.ready()
        await self._ask(session, Delete(self._loop.create_future()))

    # -- shared records ---------------------------------------------------------------------------
    async def look_for(self, id_or_name: str) -> None:
        """Fetch a session's record from the leader: the local mirror may be a moment old."""
        await self.ready()
        if (await self._records.find(id_or_name)).record is None:
            id, _ = await self._records.find_name(id_or_name)
            if id is not None:
                await self._records.find(id)

    async def note_stuck(self, session: str, why: str | None) -> None:
        """Record why no host can take the session over. None or the next claim clears it."""
        await self.ready()
        await self._records.update(
            session, lambda record: msgspec.structs.replace(record, stuck=why)
        )

    def stuck_of(self, session: str) -> str | None:
        record, damaged = self._directory.record(session), self._records.damage_of(session)
        if damaged is not None:
            return str(damaged)  # A damaged record cannot hold a note.
        return None if record is None else record.stuck

    # -- checks and counters ----------------------------------------------------------------------
    def check(self) -> None:
        self.head("")

    def counters(self) -> Mapping[str, float]:
        return dict(self._lines.counters)
