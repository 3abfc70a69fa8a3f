"""What stands under a subject of ours and is not what was written there: whose it is to mend, and how.

Anybody whom the account lets in can publish there: an operator by mistake, another program by the same words. One such
message must cost the one session that it is about, and nobody else. So who parses raises `StoreDamaged`, which names
the subject; who reads many passes it by, and says so once.
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
# A message that is larger goes to the blobs: far below what a server takes (1 MiB), so that a page of them is small.
MESSAGE_BYTES_MAX = 256 << 10
# More events than that are two messages: a reader decodes a message as a whole.
EVENTS_MAX = 200
HERE = "."
INLINE_BYTES_MAX = 512 << 10


def event(subject: str, seq: int) -> StoreDamaged:
    """Of a session's events. What is behind the last good message is refused until it is taken out: nothing can follow
    what has no place."""
    stream = f"{subject.partition('.ev.')[0]}-events"
    return StoreDamaged(
        f"message {seq} of {stream}, under {subject}, was not written by Banksman, or not by a whole one",
        hint=f"`nats stream rmm {stream} {seq}` takes it out, and the session goes on; or delete the session",
        subject=subject,
        seq=seq,
    )


def record(subject: str, seq: int) -> StoreDamaged:
    prefix, _, key = subject.partition(".rec.")
    remove = f"`nats stream rmm {prefix}-records {seq}`"
    hints = {
        "session": f"put it back from a backup of {prefix}-records; {remove} forgets the session",
        "name": f"{remove} takes it out: then nobody has the name",
        "lease": f"{remove} takes it out: then nobody drives the conversation, so see that no process does",
        "meta": f"write a number there that is past the epoch of every deleted session: `nats pub {subject} 1000000`",
    }
    return StoreDamaged(
        f"the record under {subject} cannot be understood",
        hint=hints.get(key.partition(".")[0]) or f"{remove} takes it out",
        subject=subject,
        seq=seq,
    )


# One message of a session's events: what was appended since the last one, packed, and its place in one header.
#
# The header says all that a reader needs to know before it opens the body: `epoch first count snapshot at blob`.
# `snapshot` is the sequence of the message that has the last snapshot, this one included ("." stands for this one,
# whose own sequence nobody knows before it is stored). `blob` names where the body is if it was too large; else it says
# whether a message before this one has such a name ("+") or none has ("-"), for who deletes them all.
#
# A message with no events is a mark: the first of a new owner, or a snapshot alone.

NO_BLOB, EARLIER_BLOB = "-", "+"


class MessagePart(msgspec.Struct, frozen=True, array_like=True):
    """What one append held."""

    at: float
    entries: Sequence[tuple[str | None, str, bytes]]


class MessageBody(msgspec.Struct, frozen=True, array_like=True):
    """`snapshot` is of all events up to `snapshot_seq`."""

    parts: Sequence[MessagePart]
    snapshot: bytes | None = None
    snapshot_seq: int = 0


class MessagePlace(NamedTuple):
    """What the header of a stored message says. `seq`: of the message; `held`: how many events it has; `snapshot`: the
    seq of the message with the last snapshot, 0: there is none."""

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
        """What the next message says, if it has none."""
        return NO_BLOB if self.blob == NO_BLOB else EARLIER_BLOB

    @property
    def last(self) -> int:
        """The last event, of this message or before it."""
        return self.first + self.held - 1


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(MessageBody)


def encode(body: MessageBody) -> bytes:
    return _encoder.encode(body)


def decode(data: bytes) -> MessageBody:
    return _decoder.decode(data)


BEGINNING = MessagePlace(0, 0, 1, 0, 0, 0.0, NO_BLOB)


def header(*, epoch: int, first: int, held: int, snapshot: int | None, at: float, blob: str) -> str:
    """`snapshot` None: it is in this very message."""
    return f"{epoch} {first} {held} {HERE if snapshot is None else snapshot} {at!r} {blob}"


def place(seq: int, text: str) -> MessagePlace:
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


def place_of(message: StreamMessage) -> MessagePlace:
    """Of a stored one, whoever stored it. `StoreDamaged`: it is none of ours."""
    try:
        return place(message.seq, message.headers[HEADER])
    except (KeyError, ValueError) as exc:
        raise event(message.subject, message.seq) from exc


def body_of(message: StreamMessage, data: bytes) -> MessageBody:
    """`data`: its own, or of where it says that it is. `StoreDamaged`."""
    try:
        return decode(data) if data else MessageBody(())
    except msgspec.DecodeError as exc:
        raise event(message.subject, message.seq) from exc


def events(session: str, epoch: int, first: int, body: MessageBody, project: Project | None) -> list[Event]:
    made: list[Event] = []
    seq = first
    for part in body.parts:
        for turn, kind, data in part.entries:
            made.append(Event(session, epoch, seq, part.at, turn, kind, data, project))
            seq += 1
    return made


# What is sent from one to the other, however large: in the message, or beside it as a blob that the message names.
#
# A server takes a message of 1 MiB at most, as it comes out of the box. A request or an answer may hold a picture.


# The first byte of every message: what the rest of it is.
INLINE, BLOB, REFUSED, FAILED, WORKING, WANTED = b"\x00", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"


class LargePayloads:
    """`ensure` makes the bucket, if it is not there yet."""

    def __init__(self, nats: Nats, prefix: str, ensure: Callable[[str], Awaitable[None]] | None = None) -> None:
        self._nats = nats
        self._bucket = f"{prefix}-blobs"
        self._ensure = ensure

    async def pack(self, data: bytes) -> bytes:
        """What to send. Whoever sends it, or gets it, deletes what lies beside it (`drop`)."""
        if len(data) <= INLINE_BYTES_MAX:
            return INLINE + data
        if self._ensure is not None:
            await self._ensure(self._bucket)
        name = f"parcel-{os.urandom(12).hex()}"
        await self._nats.put_blob(self._bucket, name, data)
        return BLOB + name.encode()

    async def unpack(self, message: bytes) -> bytes:
        """`NoOwner`: it was not taken, and nothing was done. `Unanswered`: it was, and nobody knows what came of it."""
        kind, rest = message[:1], message[1:]
        if kind == INLINE:
            return rest
        if kind == BLOB:
            data = await self._nats.get_blob(self._bucket, rest.decode())
            if data is None:
                raise Unanswered("what was sent is not there any more")
            return data
        if kind == REFUSED:
            raise NoOwner(rest.decode(errors="replace"))
        raise Unanswered(rest.decode(errors="replace") or "what was sent cannot be understood")

    def is_beside(self, message: bytes) -> bool:
        return message[:1] == BLOB

    async def drop(self, message: bytes) -> None:
        """What is not deleted now stays, and does no harm but for its room."""
        if self.is_beside(message):
            with suppress(StoreError):
                await self._nats.delete_blob(self._bucket, message[1:].decode())


# Agents' transcripts among the blobs: one for each session, under its name.


class ClusterTranscripts:
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
    # One dot: what is too large for a message has the session's token in front, and more of them.
    return f"transcript.{token(session)}"
