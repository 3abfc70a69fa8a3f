"""What is known of a session besides its events: one record, changed by whoever says which one it has read.

The record says who owns the session, and under which epoch; the events say the rest. A claim changes the record first
and fences the events second (`session_ownership.py`). Names and leases are records of their own that point to a
session, and a change of several is one (`Nats.publish_all`): nothing is ever half done.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec

from banksman.cluster.jetstream import BatchMessage, StreamMessage
from banksman.cluster.log import message_codec
from banksman.cluster.log.stream_mirror import StreamMirror
from banksman.cluster.log.streams import TOMBSTONE_SECONDS, StreamNames, token
from banksman.cluster.nats import Nats
from banksman.errors import StoreDamaged

log = logging.getLogger("banksman")

# A record that is deleted stands as an empty message for a while.
TOMBSTONE = {"Nats-TTL": f"{TOMBSTONE_SECONDS}s"}


class OwnerRecord(msgspec.Struct, frozen=True):
    host: str
    pid: int
    address: str


class SessionRecord(msgspec.Struct, frozen=True):
    """`tenure`: the epoch that its last claim gave, by which a lease knows whose it is. `first`: the first seq that is
    kept, and `dropped` the sequence of the last message that is not. `seq` and `changed` are as of the last change of
    this record. `stuck`: why nobody can take it over."""

    id: str
    agent: str
    created: float
    epoch: int
    tenure: int
    name: str | None = None
    owner: OwnerRecord | None = None
    seq: int = 0
    changed: float = 0.0
    first: int = 1
    dropped: int = 0
    stuck: str | None = None
    # The epoch of its first claim: a message of an older one is of another session that had its id.
    born: int = 0
    # Its history is being restored, by the owner: as long as that goes on it is not there.
    is_hidden: bool = False

    @property
    def epoch_past(self) -> int:
        """The highest epoch that anybody may believe to have: an owner that is fenced off and does not know it yet may
        have advanced once."""
        return self.epoch if self.owner is None else self.epoch + 1


class LeaseRecord(msgspec.Struct, frozen=True):
    session: str
    tenure: int


def encode(value: Any) -> bytes:
    return msgspec.json.encode(value)


T = TypeVar("T")


def _decoded(message: StreamMessage, kind: type[T]) -> T | None:
    """None: it was deleted. `StoreDamaged`."""
    try:
        return msgspec.json.decode(message.data, type=kind) if message.data else None
    except msgspec.DecodeError as exc:
        raise message_codec.record(message.subject, message.seq) from exc


class FoundRecord(msgspec.Struct, frozen=True):
    """A record and the sequence under which it was found: what a change expects to be there. `record` None: there is
    none, or it was deleted."""

    record: SessionRecord | None
    seq: int


class SessionRecords:
    """The records of a store: as the leader has them, for who changes one; and as they were last heard of, for who only
    looks."""

    def __init__(self, nats: Nats, names: StreamNames, on_change: Callable[[str, SessionRecord | None], None]) -> None:
        self._nats = nats
        self._names = names
        self._tell = on_change
        self.all: dict[str, SessionRecord] = {}
        self._ids: dict[str, str] = {}
        # By the part of the subject that stands for the session, which nobody may have known before.
        self._damaged: dict[str, StoreDamaged] = {}
        self.named: dict[str, str] = {}
        self._subjects = f"{names.prefix}.rec.session."
        self._mirror = StreamMirror(
            nats,
            names.records,
            f"{names.prefix}.rec.session.*",
            f"{names.prefix}.live.rec.session.*",
            self._on_change,
        )
        self.start = self._mirror.start
        self.stop = self._mirror.stop
        self.reload_soon = self._mirror.reload_soon

    def damage_of(self, session: str) -> StoreDamaged | None:
        """If its record, as it was last heard of, cannot be understood."""
        return self._damaged.get(token(session))

    def id_of(self, part: str) -> str | None:
        """The session that a part of a subject stands for."""
        return self._ids.get(part)

    def _on_change(self, subject: str, message: StreamMessage | None) -> None:
        part = subject.removeprefix(self._subjects)
        try:
            record = None if message is None else _decoded(message, SessionRecord)
        except StoreDamaged as exc:
            # What was known of it stands, for who looks. Whoever would change it is told.
            log.warning("! %s (%s)", exc.args[0], exc.hint)
            self._damaged[part] = exc
            return
        self._damaged.pop(part, None)
        id = self._ids.get(part) if record is None else record.id
        if id is None:
            return
        before = self.all.get(id)
        if before is not None and before.name is not None and self.named.get(before.name) == id:
            del self.named[before.name]
        if record is None:
            self._ids.pop(part, None)
            self.all.pop(id, None)
        else:
            self._ids[part] = id
            self.all[id] = record
            if record.name is not None:
                self.named[record.name] = id
        self._tell(id, record)

    # -- as the leader has it ----------------------------------------------------------------------------------------
    async def find(self, session: str) -> FoundRecord:
        message = await self._nats.last(self._names.records, self._names.record("session", session))
        if message is None:
            return FoundRecord(None, 0)
        self._mirror.put(message)
        return FoundRecord(_decoded(message, SessionRecord), message.seq)

    async def find_name(self, name: str) -> tuple[str | None, int]:
        """The session that has a name, and the sequence of that."""
        message = await self._nats.last(self._names.records, self._names.record("name", name))
        if message is None:
            return None, 0
        try:
            return (message.data.decode() or None), message.seq
        except UnicodeDecodeError as exc:
            raise message_codec.record(message.subject, message.seq) from exc

    async def find_lease(self, name: str) -> tuple[LeaseRecord | None, int]:
        message = await self._nats.last(self._names.records, self._names.record("lease", name))
        if message is None:
            return None, 0
        return _decoded(message, LeaseRecord), message.seq

    async def epoch_deleted_max(self) -> tuple[int, int]:
        """The highest epoch of what was ever deleted: what is new begins past it."""
        message = await self._nats.last(self._names.records, self._names.record("meta", "deleted"))
        if message is None:
            return 0, 0
        try:
            return int(message.data), message.seq
        except ValueError as exc:
            raise message_codec.record(message.subject, message.seq) from exc

    # -- changes, each of which may be one of several ----------------------------------------------------------------
    def write(self, record: SessionRecord, expected: int) -> BatchMessage:
        return BatchMessage(self._names.record("session", record.id), encode(record), expected)

    def erase(self, session: str, expected: int) -> BatchMessage:
        return BatchMessage(self._names.record("session", session), b"", expected, TOMBSTONE)

    def write_name(self, name: str, session: str, expected: int) -> BatchMessage:
        return BatchMessage(self._names.record("name", name), session.encode(), expected)

    def erase_name(self, name: str, expected: int | None = None) -> BatchMessage:
        return BatchMessage(self._names.record("name", name), b"", expected, TOMBSTONE)

    def write_lease(self, name: str, lease: LeaseRecord | None, expected: int) -> BatchMessage:
        data = b"" if lease is None else encode(lease)
        return BatchMessage(self._names.record("lease", name), data, expected, TOMBSTONE if lease is None else {})

    def write_deleted(self, epoch: int, expected: int) -> BatchMessage:
        return BatchMessage(self._names.record("meta", "deleted"), b"%d" % epoch, expected)

    async def change(self, *writes: BatchMessage) -> None:
        """All of them or none; `WrongLastSequence`, `Unanswered`. What was changed is known here when it returns."""
        last = await self._nats.publish_all(writes)
        for number, write in enumerate(writes, last - len(writes) + 1):
            if write.subject.startswith(self._subjects):
                self._mirror.put(StreamMessage(write.subject, write.data, write.headers, number))
