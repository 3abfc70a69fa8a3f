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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from banksman.cluster.log import maintenance
from banksman.cluster.log.cluster_parts import ClusterParts
from banksman.cluster.log.message_codec import MessagePart, MessagePlace
from banksman.cluster.log.publisher import (
    Advance,
    Call,
    Claim,
    Delete,
    QueuedAppend,
    QueuedLease,
    QueuedRelease,
)
from banksman.cluster.log.session_queues import outcome
from banksman.cluster.log.session_record import SessionRecord
from banksman.cluster.store_address import StoreAddress
from banksman.core.session.event import Entry, Event, Project
from banksman.errors import StoreError
from banksman.histogram import Histogram
from banksman.store.log import LogPhase, LogTail
from banksman.store.log_values import (
    NUMBER_MAX,
    READ_EVENTS_MAX,
    Chunk,
    Done,
    Head,
    KnownSession,
    MultiSessionPage,
    Owner,
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
from banksman.store.usage_sums import checked_query

# How long a claim waits for this host's own messages to be recovered. A claim before that would
# fence them off, and they would end as a report.
SALVAGE_SECONDS_MAX = 3.0


class ClusterLog(ClusterParts):
    """A `Log` on NATS at an address.

    It is created inside an event loop and belongs to that loop; `ready` connects it. `folder`: the
    folder of its journal. `bytes_max`: how much is kept of each session, approximately, beside the
    events that its last snapshot does not cover.
    """

    is_durable: bool = True
    # No process waits for the next host of a cluster: sessions continue on any machine.
    identity: str = "cluster"

    def __init__(
        self, address: StoreAddress, folder: Path, *, bytes_max: int | None = None
    ) -> None:
        super().__init__(address, folder, read=self.read, bytes_max=bytes_max)
        self._turns = TurnIndexes(self.read)

    @property
    def cluster(self) -> ClusterLog:
        """The cluster protocol of this store: see `cluster/interfaces.py`."""
        return self

    @property
    def records(self) -> ClusterLog:
        """The records protocol, which this class implements."""
        return self

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

    @property
    def commit_times(self) -> Histogram:
        return self._lines.commit_times
