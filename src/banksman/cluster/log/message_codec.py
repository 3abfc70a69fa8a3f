"""Message format of the log, and two stores of blobs: large payloads and agents' transcripts.

Two thirds are a codec without I/O: headers and bodies of event messages, and errors for foreign
ones (`event`, `record`). The rest stores and fetches blobs. `LargePayloads` serves the requests and
jobs between hosts (`owner_requests.py`, `placement.py`). `ClusterTranscripts` serves the copies of
transcripts. The code that publishes a large event message stores its blob.

Every client of the NATS account can publish under these subjects: an operator by mistake, or
another program with the same prefix. A foreign message must only affect the one session that it is
about. So the parser raises `StoreDamaged`, which names the subject. A reader of many sessions skips
the message and logs it once.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

import msgspec

from banksman.cluster.jetstream import StreamMessage
from banksman.cluster.log.streams import NatsStreams, token
from banksman.cluster.nats import Nats
from banksman.core.session.event import Event, Project
from banksman.errors import NoOwner, StoreDamaged, StoreError, Unanswered

HEADER = "Banksman"
# A larger body goes to a blob. The limit is far below the servers' default of 1 MiB, so that a page
# of messages stays small.
MESSAGE_BYTES_MAX = 256 << 10
# The number of events per message is limited because a reader decodes a message as a whole.
EVENTS_MAX = 200
HERE = "."
INLINE_BYTES_MAX = 512 << 10


def event(subject: str, seq: int) -> StoreDamaged:
    """Build the error for a foreign or incomplete message among a session's events.

    Appends behind the last valid message fail until an operator removes it: a message without a
    valid place cannot be followed.
    """
    stream = f"{subject.partition('.ev.')[0]}-events"
    return StoreDamaged(
        f"cannot decode message {seq} of {stream} under {subject}: it is foreign or incomplete",
        hint=f"run `nats stream rmm {stream} {seq}` to remove it, or delete the session",
        subject=subject,
        seq=seq,
    )


def record(subject: str, seq: int) -> StoreDamaged:
    """Build the error for a record that cannot be decoded, with a hint for its kind."""
    prefix, _, key = subject.partition(".rec.")
    remove = f"`nats stream rmm {prefix}-records {seq}`"
    hints = {
        "session": (
            f"restore it from a backup of {prefix}-records, or run {remove} to forget the session"
        ),
        "name": f"run {remove} to remove it; the name is then free",
        "lease": f"check that no process drives the conversation, then run {remove} to remove it",
        "meta": (
            "publish a number above the epoch of every deleted session: "
            f"`nats pub {subject} 1000000`"
        ),
    }
    return StoreDamaged(
        f"cannot decode the record under {subject}",
        hint=hints.get(key.partition(".")[0]) or f"run {remove} to remove it",
        subject=subject,
        seq=seq,
    )


# A message of a session's events holds the appends since the previous one, and its place in one
# header.
#
# The header has everything a reader needs before it opens the body: `epoch first count snapshot at
# blob`. `snapshot` is the sequence of the message with the last snapshot, this one included. "."
# stands for this message, because its sequence is unknown before it is stored. `blob` names the
# blob of a body that was too large. Otherwise it says whether an earlier message has a blob ("+")
# or none has ("-"), for a deletion of all blobs.
#
# A message without events is a mark: the first message of a new owner, or a snapshot alone.

NO_BLOB, EARLIER_BLOB = "-", "+"


class MessagePart(msgspec.Struct, frozen=True, array_like=True):
    """The events of one append."""

    at: float
    entries: Sequence[tuple[str | None, str, bytes]]


class MessageBody(msgspec.Struct, frozen=True, array_like=True):
    """The body of a message. `snapshot` covers all events up to `snapshot_seq`."""

    parts: Sequence[MessagePart]
    snapshot: bytes | None = None
    snapshot_seq: int = 0


class MessagePlace(NamedTuple):
    """The header of a stored message, decoded.

    `seq`: the sequence of the message. `held`: its number of events. `snapshot`: the sequence of
    the message with the last snapshot; 0 without one.
    """

    seq: int
    epoch: int
    first: int
    held: int
    snapshot: int
    at: float
    blob: str

    @property
    def blob_name(self) -> str | None:
        return None if self.blob in (NO_BLOB, EARLIER_BLOB) else self.blob

    @property
    def blob_after(self) -> str:
        """The `blob` field of the next message, if that one has no blob."""
        return NO_BLOB if self.blob == NO_BLOB else EARLIER_BLOB

    @property
    def last(self) -> int:
        """The seq of the last event in this message or before it."""
        return self.first + self.held - 1


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MessageBody)


def encode(body: MessageBody) -> bytes:
    return _encoder.encode(body)


def decode(data: bytes) -> MessageBody:
    return _decoder.decode(data)


BEGINNING = MessagePlace(0, 0, 1, 0, 0, 0.0, NO_BLOB)


def header(*, epoch: int, first: int, held: int, snapshot: int | None, at: float, blob: str) -> str:
    """Encode a header. `snapshot` None: this message holds the snapshot."""
    return f"{epoch} {first} {held} {HERE if snapshot is None else snapshot} {at!r} {blob}"


def place(seq: int, text: str) -> MessagePlace:
    """Decode a header. Raises `ValueError` if it is invalid."""
    epoch, first, count, snapshot, at, blob = text.split(" ", 5)
    return MessagePlace(
        seq,
        int(epoch),
        int(first),
        int(count),
        seq if snapshot == HERE else int(snapshot),
        float(at),
        blob,
    )


def is_blob_of(text: str, id: str) -> bool:
    """Return whether a header names the blob of its own message, which has this id."""
    return text.rpartition(" ")[2] == id


def place_of(message: StreamMessage) -> MessagePlace:
    """Decode the header of a stored message. Raises `StoreDamaged` if the message is foreign."""
    try:
        return place(message.seq, message.headers[HEADER])
    except (KeyError, ValueError) as exc:
        raise event(message.subject, message.seq) from exc


def body_of(message: StreamMessage, data: bytes) -> MessageBody:
    """Decode a body. Raises `StoreDamaged` if it is invalid.

    `data`: the message's data, or that of its blob.
    """
    try:
        return decode(data) if data else MessageBody(())
    except msgspec.DecodeError as exc:
        raise event(message.subject, message.seq) from exc


def events(
    session: str, epoch: int, first: int, body: MessageBody, project: Project | None
) -> list[Event]:
    """Build the events of a body; the first has the seq `first`."""
    made: list[Event] = []
    seq = first
    for part in body.parts:
        for turn, kind, data in part.entries:
            made.append(Event(session, epoch, seq, part.at, turn, kind, data, project))
            seq += 1
    return made


# Payloads between hosts, of any size: inside the message, or in a blob that the message names.
#
# A server accepts messages of 1 MiB by default. A request or an answer may contain an image.


# The first byte of every message: the kind of the rest.
INLINE, BLOB, REFUSED, FAILED, WORKING, WANTED = (
    b"\x00",
    b"\x01",
    b"\x02",
    b"\x03",
    b"\x04",
    b"\x05",
)


class LargePayloads:
    """Pack payloads into messages, with a blob for large ones.

    `ensure`: creates the bucket if it is missing.
    """

    def __init__(
        self, nats: Nats, prefix: str, ensure: Callable[[str], Awaitable[None]] | None = None
    ) -> None:
        self._nats = nats
        self._bucket = f"{prefix}-blobs"
        self._ensure = ensure

    async def pack(self, data: bytes) -> bytes:
        """Return the message to send. Sender or receiver deletes its blob later (`drop`)."""
        if len(data) <= INLINE_BYTES_MAX:
            return INLINE + data
        if self._ensure is not None:
            await self._ensure(self._bucket)
        name = f"parcel-{os.urandom(12).hex()}"
        await self._nats.put_blob(self._bucket, name, data)
        return BLOB + name.encode()

    async def unpack(self, message: bytes) -> bytes:
        """Return the payload of a message.

        Raises `NoOwner` if the message is a refusal, so that nothing was done. Raises `Unanswered`
        if the result is unknown.
        """
        kind, rest = message[:1], message[1:]
        if kind == INLINE:
            return rest
        if kind == BLOB:
            data = await self._nats.get_blob(self._bucket, rest.decode())
            if data is None:
                raise Unanswered("the payload no longer exists")
            return data
        if kind == REFUSED:
            raise NoOwner(rest.decode(errors="replace"))
        raise Unanswered(rest.decode(errors="replace") or "cannot decode the message")

    def is_beside(self, message: bytes) -> bool:
        """Return whether the payload of a message is in a blob."""
        return message[:1] == BLOB

    async def drop(self, message: bytes) -> None:
        """Delete the blob of a message. A blob that stays costs only space."""
        if self.is_beside(message):
            with suppress(StoreError):
                await self._nats.delete_blob(self._bucket, message[1:].decode())


# Agents' transcripts: one blob per session, named after it.


class ClusterTranscripts:
    """The transcripts of agents, in the bucket of large payloads."""

    def __init__(self, nats: Nats, streams: NatsStreams) -> None:
        self._nats = nats
        self._streams = streams
        self._bucket = streams.names.blobs

    async def put(self, session: str, data: bytes) -> None:
        await self._streams.ensure(self._bucket)
        await self._nats.put_blob(self._bucket, _name(session), data)

    async def get(self, session: str) -> bytes | None:
        return await self._nats.get_blob(self._bucket, _name(session))

    async def forget(self, session: str) -> None:
        await self._nats.delete_blob(self._bucket, _name(session))


def _name(session: str) -> str:
    # One dot. The blob of a large message starts with the session's token and has more dots.
    return f"transcript.{token(session)}"
