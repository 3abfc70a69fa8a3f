"""Response that sends a file while it is made, to one client.

It counts as an event stream: the limit of streams of a client includes it, and it ends when its
token is revoked. A failure in the middle aborts the connection, so that no client takes a part of
the file for the whole.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator
from typing import Any

from starlette.types import Receive, Scope, Send

from banksman.errors import BanksmanError
from banksman.server.http.connection import Connection, send_slices
from banksman.server.problems import Problem
from banksman.server.streams.follower import Allowed, EventStreams

log = logging.getLogger("banksman.serve")

# Small pieces, such as lines, are sent together.
PIECE_BYTES = 64 << 10


class Download:
    """ASGI response whose body comes in pieces."""

    def __init__(
        self,
        streams: EventStreams,
        first: bytes,
        pieces: AsyncGenerator[bytes],
        *,
        media_type: str,
        name: str,
        is_allowed: Allowed | None,
    ) -> None:
        """Prepare a response. `first`: the piece before `pieces`. `name`: the suggested file name.

        `is_allowed`: see `Follower`.
        """
        self._streams = streams
        self._first = first
        self._pieces = pieces
        self._is_allowed = is_allowed
        self._headers = [
            (b"content-type", media_type.encode()),
            (b"content-disposition", f'attachment; filename="{name}"'.encode()),
            (b"cache-control", b"no-store"),
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        connection: Connection = scope["state"]["connection"]
        try:
            async with contextlib.aclosing(self._pieces):
                with self._streams.opened(scope):
                    async with self._streams.guarded(connection, self._is_allowed):
                        await self._answer(connection, send, has_body=scope["method"] != "HEAD")
        except Problem as problem:
            await problem.response()(scope, receive, send)

    async def _answer(self, connection: Connection, send: Send, *, has_body: bool) -> None:
        start: dict[str, Any] = {"type": "http.response.start", "status": 200}
        await send({**start, "headers": self._headers})
        try:
            if has_body:
                waiting = bytearray(self._first)
                async for piece in self._pieces:
                    waiting += piece
                    if len(waiting) < PIECE_BYTES:
                        continue
                    if connection.lost.done():
                        return
                    await send_slices(send, bytes(waiting))
                    waiting.clear()
                    # The pieces may come from memory, and the kernel may take all: let others run.
                    await asyncio.sleep(0)
                await send_slices(send, bytes(waiting))
        except (BanksmanError, OSError) as exc:
            log.error("a download was cut: %s", exc)
            connection.abort()
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})
