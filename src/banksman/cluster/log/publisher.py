"""The items of a session's write queue, and how they are published to JetStream."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from banksman.cluster.jetstream import WrongLastSequence
from banksman.cluster.log import message_codec
from banksman.cluster.log.journal import JournalRow
from banksman.cluster.log.message_codec import MessagePart
from banksman.cluster.log.session_ownership import OwnedEpoch, SessionOwnership
from banksman.cluster.log.streams import NatsStreams
from banksman.cluster.nats import ID, Nats
from banksman.errors import NotOwner, StoreDamaged, StoreError, Unreachable
from banksman.store.log import Done

log = logging.getLogger("banksman")
RETRY_SECONDS = 0.05
RETRY_SECONDS_MAX = 1.0
# For so long the servers may be behind what they have acknowledged: as long as it takes to choose a leader, and more.
SHORT_SECONDS_MAX = 20.0


@dataclass(slots=True, eq=False)
class WriterCall:
    """A call of a writer's. `told`: the last failure that its writer had been told of when it called: what rests on one
    that it does not know of yet must fail too."""

    epoch: int
    told: int
    done: Done | None
    # Decided already: the log was closed when it came.
    error: StoreError | NotOwner | None = None


@dataclass(slots=True, eq=False)
class QueuedAppend(WriterCall):
    expected_seq: int = 0
    part: MessagePart = field(default_factory=lambda: MessagePart(0.0, ()))
    snapshot: bytes | None = None

    @property
    def size(self) -> int:
        return sum(len(data) for _, _, data in self.part.entries) + len(self.snapshot or b"")


@dataclass(slots=True, eq=False)
class Advance(WriterCall):
    pass


@dataclass(slots=True, eq=False)
class QueuedLease(WriterCall):
    name: str | None = None


@dataclass(slots=True, eq=False)
class QueuedRelease(WriterCall):
    pass


@dataclass(slots=True, eq=False)
class QueuedCall:
    """A call that somebody waits for."""

    answer: asyncio.Future[Any]


@dataclass(slots=True, eq=False)
class Claim(QueuedCall):
    name: str | None
    agent: str | None


@dataclass(slots=True, eq=False)
class Delete(QueuedCall):
    pass


Call = QueuedAppend | Advance | QueuedLease | QueuedRelease | WriterCall | Claim | Delete


# One message on its way: published again and again under one id and one expected sequence, until it is known what
# became of it.
#
# What was not answered may have been stored, may still be, or never was. The message that is last in the session tells
# which: it is this one; or the one that this was to follow, and then it is sent again; or another writer's, and then
# the session is that one's. Or it is older than what we were told is stored: a leader that was just chosen may not have
# got to it yet, and if it never does, the servers have lost it.


class Publisher(Struct, frozen=True):
    nats: Nats
    streams: NatsStreams
    ownership: SessionOwnership

    async def until_known(self, owned_epoch: OwnedEpoch, row: JournalRow, is_ours: Callable[[], bool]) -> int:
        """The sequence under which it is stored. `NotOwner`: it is not ours to say any more. `StoreError`: the servers
        have refused it, and it is not there. `StoreDamaged`: nor is what it was to follow."""
        session = owned_epoch.record.id
        wait, is_put, is_sent = RETRY_SECONDS, False, False
        short_since: float | None = None
        is_blob = message_codec.place(0, row.header).blob_name == row.id
        blobs = self.streams.names.blobs
        while True:
            if not is_ours():
                raise NotOwner("this host has lost its lease", session=session, epoch=owned_epoch.epoch)
            try:
                if is_blob and not is_put:
                    await self.streams.ensure(blobs)
                    await self.nats.put_blob(blobs, row.id, row.body)
                    is_put = True
                body = b"" if is_blob else row.body
                headers = {message_codec.HEADER: row.header}
                return await self.nats.publish(row.subject, body, expected=row.expected, id=row.id, headers=headers)
            except WrongLastSequence as exc:
                with suppress(Unreachable):
                    stored, is_short = await self._look_back(owned_epoch, row)
                    if stored is not None:
                        return stored
                    short_since = (short_since or time.monotonic()) if is_short else None
                    if short_since is not None and time.monotonic() > short_since + SHORT_SECONDS_MAX:
                        raise _shortened(session, row) from exc
            except Unreachable as exc:
                log.debug("session %s waits for its cluster: %s", session, exc)
                is_sent, short_since = True, None
            except StoreError as exc:
                if not is_sent:
                    raise
                # An attempt before this one may have been stored, or may still be. Whoever claims it next sees which.
                message = f"what became of the last append is not known: {exc}"
                raise NotOwner(message, hint="claim it anew", session=session) from exc
            await asyncio.sleep(wait)
            wait = min(wait * 2, RETRY_SECONDS_MAX)

    async def _look_back(self, owned_epoch: OwnedEpoch, row: JournalRow) -> tuple[int | None, bool]:
        """Where it is stored, though nobody told us; None: it is not, and what is last is what it was to follow, or
        older (True). `NotOwner`: it is another's."""
        last = await self.nats.last(self.streams.names.events, row.subject)
        if last is not None and last.headers.get(ID) == row.id:
            return last.seq, False
        seq = 0 if last is None else last.seq
        if seq <= row.expected and await self._is_known_still(owned_epoch):
            return None, seq < row.expected
        if last is not None:
            message_codec.place_of(last)  # No writer's at all, and who mends that is not us: `StoreDamaged`.
        session = owned_epoch.record.id
        raise NotOwner("another writer has the session", hint="claim it anew", session=session, seq=seq)

    async def _is_known_still(self, owned_epoch: OwnedEpoch) -> bool:
        """Whether it was not deleted meanwhile, with all its messages."""
        found = await self.ownership.find(owned_epoch.record.id)
        return found is not None and found.tenure == owned_epoch.record.tenure


def _shortened(session: str, row: JournalRow) -> StoreDamaged:
    hint = "restore the stream from a backup, or delete the session; what it said last is kept as a report by its host"
    message = f"the servers have lost events that they had acknowledged: the message {row.expected} of {row.subject}"
    return StoreDamaged(message, hint=hint, session=session)
