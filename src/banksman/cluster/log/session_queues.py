"""Write queues of this host's sessions, and waiters for new events.

`SessionQueues` has one `SessionQueue` (`session_queue.py`) per session, and passes their callbacks
on to readers, counters and retention. `AppendWaiters` has the readers that wait for events of any
host.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from typing import TypeAlias

from banksman.cluster.log.event_reader import EventReader
from banksman.cluster.log.host_leases import HostLeases
from banksman.cluster.log.journal import Journal
from banksman.cluster.log.maintenance import ClusterRetention, HistoryTrim
from banksman.cluster.log.message_codec import ClusterTranscripts, MessageBody, MessagePlace
from banksman.cluster.log.publisher import QueuedRelease
from banksman.cluster.log.queue_context import QueueContext, start_queues
from banksman.cluster.log.session_ownership import OwnedEpoch, SessionOwnership
from banksman.cluster.log.session_queue import SessionQueue
from banksman.cluster.log.stream_mirror import StreamHeads
from banksman.cluster.log.streams import NatsStreams
from banksman.cluster.log.usage_records import UsageRecords
from banksman.cluster.nats import Nats
from banksman.errors import StoreError
from banksman.histogram import Histogram
from banksman.store.log_values import COMMIT_BOUNDS
from banksman.store.operation_batch import OperationBatch
from banksman.store.tails import Tails

# The result is the error to raise. An exception set on a future would be lost if its task was
# cancelled.
Waiter: TypeAlias = "asyncio.Future[StoreError | None]"

log = logging.getLogger("banksman")
# How long a lease waits for the release of its current holder on this host. Two sessions could wait
# for each other, so the wait has a limit.
SETTLE_SECONDS_MAX = 1.0


# Frames of the agent wait at most this long for others. It is longer than for a file: a message
# costs the host and the servers several times the CPU of a commit.
MESSAGE_COALESCE_SECONDS = 0.01


class AppendWaiters:
    """Futures of readers that wait for events behind a seq or a stream sequence."""

    def __init__(self) -> None:
        self._waiters: dict[str, dict[Waiter, int]] = {}
        self._of_all: dict[Waiter, int] = {}
        self._closed: StoreError | None = None

    def __len__(self) -> int:
        return sum(map(len, self._waiters.values())) + len(self._of_all)

    def sessions(self) -> set[str]:
        """Return the sessions with waiters."""
        return set(self._waiters)

    @property
    def is_any(self) -> bool:
        """True if a reader waits for all sessions."""
        return bool(self._of_all)

    @asynccontextmanager
    async def past(self, session: str, seq: int) -> AsyncGenerator[Waiter]:
        """Yield a waiter for `outcome` that finishes when an event after `seq` is committed.

        The waiter is registered on entry, so no event between here and `outcome` is missed.
        """
        waiters = self._waiters.setdefault(session, {})
        waiter: Waiter = asyncio.get_running_loop().create_future()
        waiters[waiter] = seq
        try:
            yield waiter
        finally:
            waiters.pop(waiter, None)
            # A deletion may have emptied this set, and a later waiter created another one in its
            # place.
            if not waiters and self._waiters.get(session) is waiters:
                del self._waiters[session]

    async def past_all(self, seq: int) -> None:
        """Wait until a message with events is stored behind this sequence, in any session."""
        waiter: Waiter = asyncio.get_running_loop().create_future()
        self._of_all[waiter] = seq
        try:
            await outcome(waiter)
        finally:
            self._of_all.pop(waiter, None)

    def on_moved(self, session: str, place: MessagePlace) -> None:
        """Wake the waiters that the session's new place satisfies."""
        for waiter, seq in self._waiters.get(session, {}).items():
            if seq < place.last and not waiter.done():
                waiter.set_result(None)
        if place.held:
            self.on_newest(place.seq)

    def on_newest(self, seq: int) -> None:
        """Wake the waiters for all sessions that wait behind an older sequence."""
        for waiter, behind in self._of_all.items():
            if behind < seq and not waiter.done():
                waiter.set_result(None)

    def give_up(self, session: str, error: StoreError) -> None:
        """Fail the waiters of one session."""
        for waiter in self._waiters.pop(session, {}):
            if not waiter.done():
                waiter.set_result(error)

    def close(self, error: StoreError) -> None:
        """Fail all waiters."""
        for session in list(self._waiters):
            self.give_up(session, error)
        for waiter in self._of_all:
            if not waiter.done():
                waiter.set_result(error)


async def outcome(waiter: Waiter) -> None:
    """Wait for a waiter, and raise the error that it may hold."""
    error = await waiter
    if error is not None:
        raise error


# The queues of a log, one per session that this host owns or that has waiting calls. Their
# callbacks feed readers, counters and retention.


class SessionQueues:
    """All write queues of a log, and the listener of each of them."""

    def __init__(
        self,
        *,
        nats: Nats,
        streams: NatsStreams,
        ownership: SessionOwnership,
        leases: HostLeases,
        journal: Journal,
        reading: EventReader,
        heads: StreamHeads,
        waiting: AppendWaiters,
        retention: ClusterRetention,
        trimming: HistoryTrim,
        transcripts: ClusterTranscripts,
        usage: UsageRecords,
    ) -> None:
        # Random once for a log: a call of the kernel for each message costs more than its number.
        nonce = os.urandom(4).hex()
        self._writing = QueueContext(
            nats=nats,
            streams=streams,
            ownership=ownership,
            leases=leases,
            journal=journal,
            hears=self,
            starts=OperationBatch(
                asyncio.get_running_loop(), start_queues, seconds=MESSAGE_COALESCE_SECONDS
            ),
            nonces=(f"{nonce}{number:x}" for number in itertools.count()),
        )
        self._reading = reading
        self._heads = heads
        self._waiting = waiting
        self.tails = Tails()
        self._retention = retention
        self._trimming = trimming
        self._transcripts = transcripts
        self._usage = usage
        self._all: dict[str, SessionQueue] = {}
        self.counters: dict[str, float] = dict.fromkeys(
            ("commits", "events", "bytes", "failures"), 0.0
        )
        self.commit_times = Histogram(COMMIT_BOUNDS)

    def of(self, session: str) -> SessionQueue:
        """Return the queue of a session. Creates it if needed."""
        line = self._all.get(session)
        if line is None:
            line = self._all[session] = SessionQueue(session, self._writing)
        return line

    def owned_epoch_of(self, session: str) -> OwnedEpoch | None:
        """Return this host's ownership of a session; None if it does not own it."""
        line = self._all.get(session)
        return None if line is None else line.owned_epoch

    @property
    def owned(self) -> int:
        return sum(line.owned_epoch is not None for line in list(self._all.values()))

    def lose(self) -> None:
        """Give up the ownership of every session."""
        for line in list(self._all.values()):
            line.lose()

    def release(self) -> None:
        """Release every owned session, behind its waiting calls."""
        for line in list(self._all.values()):
            if line.owned_epoch is not None:
                line.put(QueuedRelease(line.last_epoch, line.told, None))

    async def stop(self, seconds: float) -> None:
        """Stop when all queues are empty, or after `seconds`. Calls that still wait then fail."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(line.wait_idle() for line in list(self._all.values())))
        for line in list(self._all.values()):
            await line.stop(StoreError("the log is closed"))

    # -- callbacks of the queues ------------------------------------------------------------------
    def on_stored(self, session: str, place: MessagePlace, size: int, body: MessageBody) -> None:
        if size:
            self.counters["commits"] += 1
            self.counters["events"] += place.held
            self.counters["bytes"] += size
        self._reading.note(session, place)
        self._reading.recent.keep(session, place, body)
        self._heads.put(session, place)
        self.tails.advance(session, place.last)
        self.tails.wake()

    async def after_stored(self, session: str, place: MessagePlace, size: int) -> None:
        before = self._retention.weigh(session, place, size)
        if before is not None:
            try:
                await self._trimming.trim(session, before)
            except StoreError as exc:
                log.debug("session %s: cannot trim its log now: %s", session, exc)

    async def settle(self, session: str) -> None:
        line = self._all.get(session)
        if line is not None and line.is_leaving:
            with suppress(TimeoutError):
                async with asyncio.timeout(SETTLE_SECONDS_MAX):
                    await line.wait_idle()

    def on_published(self, seconds: float) -> None:
        self.commit_times.add(seconds)

    def on_idle(self, session: str) -> None:
        """Forget an empty queue of a session that this host does not own."""
        line = self._all.get(session)
        if line is not None and line.is_idle and line.owned_epoch is None:
            del self._all[session]

    def on_failure(self) -> None:
        self.counters["failures"] += 1

    def on_owned_epoch(self, session: str, owned_epoch: OwnedEpoch | None) -> None:
        if owned_epoch is None:
            self.tails.end(session)
            self._heads.give(session)
            self._retention.forget(session)
        else:
            self._heads.take(session)

    async def keep_usage(self, session: str) -> None:
        """Record the usage of a session before it is deleted."""
        await self._usage.keep(session)

    async def forget_blobs(self, session: str, before: int | None) -> None:
        await self._trimming.forget_blobs(session, before)
        if before is None:
            await self._transcripts.forget(session)

    def on_deleted(self, session: str) -> None:
        self.tails.end(session)
        self._heads.forget(session)
        self._reading.forget(session)
        self._retention.forget(session)
        message = f"cannot wait for events of session {session}: it was deleted"
        self._waiting.give_up(session, StoreError(message, session=session))
