"""Bytes to a client, in slices: the next one is made when the last has found room.

A transport keeps a copy of what it could not send. Of one answer, or one event, of thirty megabytes that would be a
copy for each client that does not read, and they may be a thousand. So each has at most a slice more than its buffer
takes, and the rest is the one object that all of them share.
"""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

SLICE_BYTES = 64 << 10


async def send_slices(send: Send, data: bytes) -> None:
    """More is to follow."""
    if len(data) <= SLICE_BYTES:
        await send({"type": "http.response.body", "body": data, "more_body": True})
        return
    begin = 0
    while begin < len(data):
        # Between two events, if there is a border: who looks at what comes, as it comes, then sees whole ones.
        border = data.rfind(b"\n\n", begin, begin + SLICE_BYTES)
        end = begin + SLICE_BYTES if border < 0 else border + 2
        await send({"type": "http.response.body", "body": data[begin:end], "more_body": True})
        begin = end


class Sliced(Response):
    """An answer whose body is sent so."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await send_slices(send, bytes(self.body))
        await send({"type": "http.response.body", "body": b"", "more_body": False})
