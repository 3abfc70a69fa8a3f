"""Agents' transcripts among the blobs: one for each session, under its name."""

from __future__ import annotations

from banksman.store.cluster.streams import Streams
from banksman.store.cluster.tokens import token
from banksman.store.nats import Nats


class ClusterTranscripts:
    def __init__(self, nats: Nats, streams: Streams) -> None:
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
