"""Session records: owner, epoch, name and retention of each session, changed by compare-and-set.

A record says which host owns the session and under which epoch. The events say everything else. A
claim changes the record first and fences the events second (`session_ownership.py`). Names and
conversation leases are separate records that point to a session. A change of several records is one
atomic batch (`Nats.publish_all`), so no change is ever half done.

A change without an answer is unknown: the servers may store it now, later or never. A read decides
it. So every operation is an attempt that reads the records, decides and writes, and `patiently`
repeats the attempt until its result is known.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec

from banksman.cluster.jetstream import BatchMessage, StreamMessage, WrongLastSequence
from banksman.cluster.log import message_codec
from banksman.cluster.log.stream_mirror import StreamMirror
from banksman.cluster.log.streams import TOMBSTONE_SECONDS, StreamNames, token
from banksman.cluster.nats import Nats
from banksman.errors import NameTaken, StoreDamaged, Unanswered, Unreachable, UsageError

log = logging.getLogger("banksman")

# How long a change is retried, and the first interval of the retries.
PATIENCE_SECONDS = 12.0
RETRY_SECONDS = 0.05
# A deleted record remains as an empty message for a while.
TOMBSTONE = {"Nats-TTL": f"{TOMBSTONE_SECONDS}s"}
T = TypeVar("T")


class OwnerRecord(msgspec.Struct, frozen=True):
    """The host that has claimed a session."""

    host: str
    pid: int
    address: str


class SessionRecord(msgspec.Struct, frozen=True):
    """The record of one session.

    - `tenure`: the epoch that the last claim gave. A conversation lease is valid while its tenure
      equals this one.
    - `first`: the first seq that is kept.
    - `dropped`: the stream sequence of the last message that retention dropped.
    - `seq`, `changed`: state of the log as of the last change of this record.
    - `stuck`: why no host can take the session over.
    """

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
    # The epoch of the first claim. A message of an older epoch belongs to a deleted session of the
    # same id.
    born: int = 0
    # Its owner is still restoring its history. Until that is done the session does not exist for
    # readers.
    is_hidden: bool = False

    @property
    def epoch_past(self) -> int:
        """The highest epoch that any writer may believe to have.

        A fenced owner that has not noticed it yet may have advanced once, by a change that never
        got into this record. The next claim has to give an epoch beyond that one.
        """
        return self.epoch if self.owner is None else self.epoch + 1


class LeaseRecord(msgspec.Struct, frozen=True):
    """The conversation lease of a session: only its holder drives that conversation."""

    session: str
    tenure: int


def encode(value: Any) -> bytes:
    """Encode a record as JSON."""
    return msgspec.json.encode(value)


def _decoded(message: StreamMessage, kind: type[T]) -> T | None:
    """Decode a record; None if it was deleted. Raises `StoreDamaged` if it is invalid."""
    try:
        return msgspec.json.decode(message.data, type=kind) if message.data else None
    except msgspec.DecodeError as exc:
        raise message_codec.record(message.subject, message.seq) from exc


async def patiently(attempt: Callable[[], Awaitable[T]], seconds_min: float = 0.0) -> T:
    """Retry an attempt while its compare-and-set fails or the servers do not answer.

    Each attempt must read the current state itself, and must recognise an earlier attempt of this
    call that was stored without an answer. Then a retry after an unknown result is safe.

    The last error is raised after `PATIENCE_SECONDS`, or after `seconds_min` if that is longer.
    """
    give_up = time.monotonic() + max(PATIENCE_SECONDS, seconds_min)
    wait = RETRY_SECONDS
    while True:
        try:
            return await attempt()
        except WrongLastSequence as exc:
            if time.monotonic() > give_up:
                raise Unanswered(
                    "cannot change the record: other hosts keep changing it", hint="try again"
                ) from exc
            # Another writer made progress, or an earlier attempt of this call was stored. Read the
            # change and try again without a pause.
            continue
        except Unreachable:
            if time.monotonic() + wait > give_up:
                raise
        await asyncio.sleep(wait)
        wait = min(wait * 2, 1.0)


class FoundRecord(msgspec.Struct, frozen=True):
    """A record and the sequence at which it was read: the expected sequence of a change.

    `record` None: the record does not exist, or it was deleted.
    """

    record: SessionRecord | None
    seq: int


class SessionRecords:
    """The records of a store.

    Reads before a change go to the stream's leader. Other reads use a local mirror, which may lag.
    """

    def __init__(
        self, nats: Nats, names: StreamNames, on_change: Callable[[str, SessionRecord | None], None]
    ) -> None:
        self._nats = nats
        self._names = names
        self._tell = on_change
        self.all: dict[str, SessionRecord] = {}
        self._ids: dict[str, str] = {}
        # By subject token, because the session id of an unreadable record may be unknown.
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
        """Return the damage of the session's record if its last known version is invalid."""
        return self._damaged.get(token(session))

    def id_of(self, part: str) -> str | None:
        """Return the session that a subject token stands for."""
        return self._ids.get(part)

    def _on_change(self, subject: str, message: StreamMessage | None) -> None:
        """Update the local records, and the index of names, after a change."""
        part = subject.removeprefix(self._subjects)
        try:
            record = None if message is None else _decoded(message, SessionRecord)
        except StoreDamaged as exc:
            # Readers keep the last valid version. A change of the record raises the damage.
            log.warning("session record ignored: %s (%s)", exc.args[0], exc.hint)
            self._damaged[part] = exc
            return
        self._damaged.pop(part, None)
        id = self._ids.get(part) if record is None else record.id
        if id is None:
            return
        before = self.all.get(id)
        # A name may already belong to another session, whose record arrived first. Then it must
        # stay there.
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

    # -- reads from the leader --------------------------------------------------------------------
    async def find(self, session: str) -> FoundRecord:
        """Read a record from the leader, and update the mirror with it."""
        message = await self._nats.last(self._names.records, self._names.record("session", session))
        if message is None:
            return FoundRecord(None, 0)
        self._mirror.put(message)
        return FoundRecord(_decoded(message, SessionRecord), message.seq)

    async def find_name(self, name: str) -> tuple[str | None, int]:
        """Return the session that has a name, and the sequence of the name's record."""
        message = await self._nats.last(self._names.records, self._names.record("name", name))
        if message is None:
            return None, 0
        try:
            return (message.data.decode() or None), message.seq
        except UnicodeDecodeError as exc:
            raise message_codec.record(message.subject, message.seq) from exc

    async def find_lease(self, name: str) -> tuple[LeaseRecord | None, int]:
        """Return the conversation lease of this name, and the sequence of its record."""
        message = await self._nats.last(self._names.records, self._names.record("lease", name))
        if message is None:
            return None, 0
        return _decoded(message, LeaseRecord), message.seq

    async def epoch_deleted_max(self) -> tuple[int, int]:
        """Return the highest epoch of any deleted session, and the sequence of that record.

        New sessions start above it, so a writer of a deleted session never has a valid epoch.
        """
        message = await self._nats.last(self._names.records, self._names.record("meta", "deleted"))
        if message is None:
            return 0, 0
        try:
            return int(message.data), message.seq
        except ValueError as exc:
            raise message_codec.record(message.subject, message.seq) from exc

    # -- changes, to be combined in a batch -------------------------------------------------------
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
        return BatchMessage(
            self._names.record("lease", name), data, expected, TOMBSTONE if lease is None else {}
        )

    def write_deleted(self, epoch: int, expected: int) -> BatchMessage:
        return BatchMessage(self._names.record("meta", "deleted"), b"%d" % epoch, expected)

    async def change(self, *writes: BatchMessage) -> None:
        """Write all changes or none. Raises `WrongLastSequence` or `Unanswered`.

        On return the mirror has the changes too.
        """
        last = await self._nats.publish_all(writes)
        for number, write in enumerate(writes, last - len(writes) + 1):
            if write.subject.startswith(self._subjects):
                self._mirror.put(StreamMessage(write.subject, write.data, write.headers, number))

    # -- changes by any host, retried until their result is known ----------------------------------
    async def new(
        self, session: str, name: str | None, agent: str, owner: OwnerRecord | None
    ) -> SessionRecord:
        """Build the record of a new session, above the epoch of every deleted session."""
        # Not above the deleted session of this id alone: the store keeps one number for all, and
        # the records of deleted sessions vanish after a while.
        deleted, _ = await self.epoch_deleted_max()
        now = time.time()
        return SessionRecord(
            id=session,
            agent=agent,
            created=now,
            changed=now,
            epoch=deleted + 1,
            tenure=deleted + 1,
            born=deleted + 1,
            name=name,
            owner=owner,
        )

    async def free_name(self, name: str, session: str) -> int:
        """Return the sequence that the name's record must have for the session to take the name.

        Raises `NameTaken` if another session has the name. Raises `WrongLastSequence` if this
        session has it: an earlier attempt without an answer took effect after its record was read.
        The retry then reads the new record.
        """
        holder, seq = await self.find_name(name)
        if holder is not None:
            found = (await self.find(holder)).record
            if found is None and await self.find_name(name) == (holder, seq):
                # A name and its session are written and deleted in one batch. A name without a
                # session was not written by this program.
                raise message_codec.record(self._names.record("name", name), seq)
            if holder == session:
                raise WrongLastSequence(f"session {session} already has the name {name}")
            hint = "use another name"
            raise NameTaken(f"another session has the name {name}", hint=hint, session=holder)
        return seq

    async def rename(self, session: str, name: str | None, expected: str | None) -> None:
        """Change the name from `expected` to `name`; None is no name."""
        is_unknown = False

        async def rename() -> None:
            nonlocal is_unknown
            found = await self.find(session)
            record = found.record
            if record is None or record.is_hidden:
                message = f"cannot rename session {session}: there is no such session"
                raise UsageError(message, session=session)
            if is_unknown and record.name == name:
                return  # An earlier attempt was stored without an answer.
            if record.name != expected:
                message = f"cannot rename session {session}: its name has changed meanwhile"
                raise UsageError(message, session=session, name=record.name, expected=expected)
            if name == expected:
                return
            writes = [self.write(msgspec.structs.replace(record, name=name), found.seq)]
            if name is not None:
                writes.append(self.write_name(name, session, await self.free_name(name, session)))
            if expected is not None:
                writes.append(self.erase_name(expected))
            try:
                await self.change(*writes)
            except Unanswered:
                is_unknown = True
                raise

        await patiently(rename)

    async def update(
        self, session: str, change: Callable[[SessionRecord], SessionRecord]
    ) -> SessionRecord | None:
        """Change fields of the record, whichever host owns it. Returns None without a record."""

        async def update() -> SessionRecord | None:
            found = await self.find(session)
            if found.record is None:
                return None
            record = change(found.record)
            if record != found.record:
                await self.change(self.write(record, found.seq))
            return record

        return await patiently(update)
