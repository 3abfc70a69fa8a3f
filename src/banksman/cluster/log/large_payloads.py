"""What is sent from one to the other, however large: in the message, or beside it as a blob that the message names.

A server takes a message of 1 MiB at most, as it comes out of the box. A request or an answer may hold a picture.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from contextlib import suppress

from banksman.cluster.log.streams import NatsStreams, token
from banksman.cluster.nats import Nats
from banksman.errors import NoOwner, StoreError, Unanswered

INLINE_BYTES_MAX = 512 << 10

# The first byte of every message: what the rest of it is.
INLINE, BLOB, REFUSED, FAILED, WORKING, WANTED = b"\x00", b"\x01", b"\x02", b"\x03", b"\x04", b"\x05"


class Parcels:
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
