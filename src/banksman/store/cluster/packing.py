"""One message of a session's events: what was appended since the last one, packed, and its place in one header.

The header says all that a reader needs to know before it opens the body: `epoch first count snapshot at blob`.
`snapshot` is the sequence of the message that has the last snapshot, this one included ("." stands for this one, whose
own sequence nobody knows before it is stored). `blob` names where the body is if it was too large; else it says whether
a message before this one has such a name ("+") or none has ("-"), for who deletes them all.

A message with no events is a mark: the first of a new owner, or a snapshot alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from banksman.core.event import Event, Project
from banksman.store.cluster import damage
from banksman.store.jetstream import Message

HEADER = "Banksman"
# A message that is larger goes to the blobs: far below what a server takes (1 MiB), so that a page of them is small.
MESSAGE_BYTES_MAX = 256 << 10
# More events than that are two messages: a reader decodes a message as a whole.
EVENTS_MAX = 200
HERE = "."
NO_BLOB, EARLIER_BLOB = "-", "+"


class Part(msgspec.Struct, frozen=True, array_like=True):
    """What one append held."""

    at: float
    entries: Sequence[tuple[str | None, str, bytes]]


class Body(msgspec.Struct, frozen=True, array_like=True):
    """`snapshot` is of all events up to `snapshot_seq`."""

    parts: Sequence[Part]
    snapshot: bytes | None = None
    snapshot_seq: int = 0


class Place(NamedTuple):
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
_decoder = msgspec.msgpack.Decoder(Body)


def encode(body: Body) -> bytes:
    return _encoder.encode(body)


def decode(data: bytes) -> Body:
    return _decoder.decode(data)


BEGINNING = Place(0, 0, 1, 0, 0, 0.0, NO_BLOB)


def header(*, epoch: int, first: int, held: int, snapshot: int | None, at: float, blob: str) -> str:
    """`snapshot` None: it is in this very message."""
    return f"{epoch} {first} {held} {HERE if snapshot is None else snapshot} {at!r} {blob}"


def place(seq: int, text: str) -> Place:
    epoch, first, count, snapshot, at, blob = text.split(" ", 5)
    return Place(
        seq,
        int(epoch),
        int(first),
        int(count),
        seq if snapshot == HERE else int(snapshot),
        float(at),
        blob,
    )


def place_of(message: Message) -> Place:
    """Of a stored one, whoever stored it. `StoreDamaged`: it is none of ours."""
    try:
        return place(message.seq, message.headers[HEADER])
    except (KeyError, ValueError) as exc:
        raise damage.event(message.subject, message.seq) from exc


def body_of(message: Message, data: bytes) -> Body:
    """`data`: its own, or of where it says that it is. `StoreDamaged`."""
    try:
        return decode(data) if data else Body(())
    except msgspec.DecodeError as exc:
        raise damage.event(message.subject, message.seq) from exc


def events(session: str, epoch: int, first: int, body: Body, project: Project | None) -> list[Event]:
    made: list[Event] = []
    seq = first
    for part in body.parts:
        for turn, kind, data in part.entries:
            made.append(Event(session, epoch, seq, part.at, turn, kind, data, project))
            seq += 1
    return made
