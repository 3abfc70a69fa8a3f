"""Shared parts of the write queues of a log: services, callbacks, and their common start.

`session_queue.py` has one queue, and `session_queues.py` has all queues of a log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from banksman.cluster.log.host_leases import HostLeases
from banksman.cluster.log.journal import Journal
from banksman.cluster.log.message_codec import MessageBody, MessagePlace
from banksman.cluster.log.session_ownership import OwnedEpoch, SessionOwnership
from banksman.cluster.log.streams import NatsStreams, StreamNames
from banksman.cluster.nats import Nats
from banksman.store.operation_batch import OperationBatch


class QueueListener(Protocol):
    """Callbacks of the log, called before the caller of an append gets its answer."""

    def on_stored(
        self, session: str, place: MessagePlace, size: int, body: MessageBody
    ) -> None: ...
    async def after_stored(self, session: str, place: MessagePlace, size: int) -> None: ...
    async def keep_usage(self, session: str) -> None: ...
    async def forget_blobs(self, session: str, before: int | None) -> None: ...
    async def settle(self, session: str) -> None:
        """Wait until another session of this log that is being released is released."""
        ...

    def on_owned_epoch(self, session: str, owned_epoch: OwnedEpoch | None) -> None: ...
    def on_deleted(self, session: str) -> None: ...
    def on_published(self, seconds: float) -> None: ...
    def on_idle(self, session: str) -> None: ...
    def on_failure(self) -> None: ...


class QueueStart(NamedTuple):
    """The start of a queue for a call, as an operation of a batch."""

    start: Callable[[], None]
    size: int
    can_wait: bool


def start_queues(starts: Sequence[QueueStart]) -> None:
    """Start the queues of a batch, in the order of the calls."""
    for each in starts:
        each.start()


class QueueContext(Struct, frozen=True, kw_only=True):
    """The parts that all queues of a log share.

    `starts`: calls `start_queues`. `nonces`: texts that no other message of any host has.
    """

    nats: Nats
    streams: NatsStreams
    ownership: SessionOwnership
    leases: HostLeases
    journal: Journal
    hears: QueueListener
    starts: OperationBatch[QueueStart]
    nonces: Iterator[str]

    @property
    def names(self) -> StreamNames:
        return self.streams.names
