"""Types of the calls in a session's write queue, and the publisher that stores one message once.

`session_queue.py` has the queue. `Publisher` repeats a message until it is stored, is refused, or
this host has lost the session or gives it up. In the last case the result may stay unknown.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from banksman.cluster.jetstream import ID, WrongLastSequence
from banksman.cluster.log import message_codec
from banksman.cluster.log.journal_file import JournalRow
from banksman.cluster.log.message_codec import MessagePart
from banksman.cluster.log.session_ownership import OwnedEpoch, SessionOwnership
from banksman.cluster.log.streams import NatsStreams
from banksman.cluster.nats import Nats
from banksman.core.session.event import OUTPUT
from banksman.errors import NotOwner, StoreDamaged, StoreError, Unreachable
from banksman.store.log_values import Done

log = logging.getLogger("banksman")
RETRY_SECONDS = 0.05
RETRY_SECONDS_MAX = 1.0
# How long the servers may lack a message that they acknowledged. A leader election takes less.
SHORT_SECONDS_MAX = 20.0


@dataclass(slots=True, eq=False)
class WriterCall:
    """A call of the session's writer.

    `told`: the number of the last failure that the writer knew of when it made the call. A call
    that builds on an unknown failure must fail too.
    """

    epoch: int
    told: int
    done: Done | None
    # Set if the result is already decided: the log was closed when the call came.
    error: StoreError | NotOwner | None = None


@dataclass(slots=True, eq=False)
class QueuedAppend(WriterCall):
    """An append of events behind `expected_seq`, with an optional snapshot."""

    expected_seq: int = 0
    part: MessagePart = field(default_factory=lambda: MessagePart(0.0, ()))
    snapshot: bytes | None = None
    # The approximate size in bytes.
    size: int = field(init=False)
    # Whether all entries are frames of the agent. A caller waits for every other kind of event.
    can_wait: bool = field(init=False)

    def __post_init__(self) -> None:
        entries = self.part.entries
        self.size = sum(len(data) for _, _, data in entries) + len(self.snapshot or b"")
        self.can_wait = OUTPUT.issuperset(kind for _, kind, _ in entries)


@dataclass(slots=True, eq=False)
class Advance(WriterCall):
    """A call that raises the epoch."""


@dataclass(slots=True, eq=False)
class QueuedLease(WriterCall):
    """A call that takes a conversation lease; `name` None gives it back."""

    name: str | None = None


@dataclass(slots=True, eq=False)
class QueuedRelease(WriterCall):
    """A call that releases the session."""


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call with a caller that awaits its answer."""

    answer: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class Claim(QueuedCall):
    """A claim of the session. `agent` None: the session must exist."""

    name: str | None
    agent: str | None


@dataclass(slots=True, eq=False)
class Delete(QueuedCall):
    """A deletion of the session."""


Call = QueuedAppend | Advance | QueuedLease | QueuedRelease | WriterCall | Claim | Delete


class Publisher(Struct, frozen=True):
    """Publish one message again and again, until its result is known.

    Each attempt has the same id and the same expected sequence.

    A publish without an answer may be stored, may be stored later, or may be lost. The last message
    of the session tells which:

    - It is this message: the publish succeeded.
    - It is the message that this one expects to follow: send this one again.
    - It belongs to another writer: that writer owns the session.
    - It is older than a message that the servers acknowledged. A newly elected leader may not have
      caught up yet. If it never does, the servers have lost the message.
    """

    nats: Nats
    streams: NatsStreams
    ownership: SessionOwnership

    async def until_known(
        self, owned_epoch: OwnedEpoch, row: JournalRow, is_ours: Callable[[], bool]
    ) -> int:
        """Return the sequence at which the message is stored.

        Raises `NotOwner` if the session has another owner or the lease is lost. Raises `StoreError`
        if the servers refused the message and it is not stored. Raises `StoreDamaged` if the
        message that it follows is gone. `is_ours`: whether this host still owns the session.
        """
        session = owned_epoch.record.id
        wait, is_put, is_sent = RETRY_SECONDS, False, False
        short_since: float | None = None
        is_blob = message_codec.is_blob_of(row.header, row.id)
        blobs = self.streams.names.blobs
        while True:
            # Check before every attempt. After the fence another host may own the session, and a
            # message that this host still sends would then only be refused.
            if not is_ours():
                raise NotOwner(
                    "this host has lost its lease", session=session, epoch=owned_epoch.epoch
                )
            try:
                if is_blob and not is_put:
                    await self.streams.ensure(blobs)
                    await self.nats.put_blob(blobs, row.id, row.body)
                    is_put = True
                body = b"" if is_blob else row.body
                headers = {message_codec.HEADER: row.header}
                return await self.nats.publish(
                    row.subject, body, expected=row.expected, id=row.id, headers=headers
                )
            except WrongLastSequence as exc:
                with suppress(Unreachable):
                    stored, is_short = await self._look_back(owned_epoch, row)
                    if stored is not None:
                        return stored
                    short_since = (short_since or time.monotonic()) if is_short else None
                    if (
                        short_since is not None
                        and time.monotonic() > short_since + SHORT_SECONDS_MAX
                    ):
                        raise _shortened(session, row) from exc
            except Unreachable as exc:
                log.debug("session %s: append waits for the cluster: %s", session, exc)
                # From now on an attempt may be stored without an answer. A lag that was seen before
                # says nothing about the servers that answer next.
                is_sent, short_since = True, None
            except StoreError as exc:
                if not is_sent:
                    raise
                # An earlier attempt may be stored, or may still get stored, so this refusal does
                # not prove that the message is absent. Give the session up: the next claim fences
                # the events and sees the result.
                message = f"the result of the last append is unknown: {exc}"
                raise NotOwner(
                    message, hint="open the session again, or use it at its owner", session=session
                ) from exc
            await asyncio.sleep(wait)
            wait = min(wait * 2, RETRY_SECONDS_MAX)

    async def _look_back(self, owned_epoch: OwnedEpoch, row: JournalRow) -> tuple[int | None, bool]:
        """Look up the result of a publish whose compare-and-set failed.

        Returns the sequence if the message is stored. Otherwise returns None, and True if the
        servers lack the message that it follows. Raises `NotOwner` if another writer's message is
        last.
        """
        last = await self.nats.last(self.streams.names.events, row.subject)
        if last is not None and last.headers.get(ID) == row.id:
            return last.seq, False
        seq = 0 if last is None else last.seq
        if seq <= row.expected and await self._is_known_still(owned_epoch):
            return None, seq < row.expected
        if last is not None:
            # Raises `StoreDamaged` if no writer of this program stored it.
            message_codec.place_of(last)
        session = owned_epoch.record.id
        message = f"cannot write session {session}: another writer owns it"
        raise NotOwner(
            message, hint="open the session again, or use it at its owner", session=session, seq=seq
        )

    async def _is_known_still(self, owned_epoch: OwnedEpoch) -> bool:
        """Return whether the session was not deleted, or claimed again, since this host's claim.

        A deletion purges all messages. Without this check that would look like servers that lag.
        """
        found = await self.ownership.find(owned_epoch.record.id)
        return found is not None and found.tenure == owned_epoch.record.tenure


def _shortened(session: str, row: JournalRow) -> StoreDamaged:
    """Build the error for acknowledged messages that the servers have lost."""
    hint = (
        "restore the stream from a backup, or delete the session; "
        "a report on its host has its last events"
    )
    message = f"the servers have lost acknowledged events: message {row.expected} of {row.subject}"
    return StoreDamaged(message, hint=hint, session=session)
