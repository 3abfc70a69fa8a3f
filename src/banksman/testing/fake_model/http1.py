"""As much of HTTP/1.1 (RFC 9112) as an agent's client needs: requests in, replies out, connections kept.

Strict: what is not understood is answered with an error and the connection is closed, so nothing is ever guessed.
"""

from __future__ import annotations

import http
import json
from dataclasses import dataclass
from typing import Any

from banksman.testing.fake_model.apis.api import Api, ModelEvent, new_id
from banksman.testing.fake_model.wire import ModelConnection, TooLong

HEAD_BYTES_MAX = 1 << 16
# The real API's own limit; beyond it the answer is 413, there as here.
BODY_BYTES_MAX = 32 << 20
# An agent keeps a connection for its next call. Nobody waits for this to end: the server's end is heard at once.
IDLE_SECONDS_MAX = 600.0


class HttpRefusal(Exception):
    """Answer with an error instead, in the shape that the API has for it; `kind` is the API's name of the error."""

    def __init__(self, status: int, message: str, *, kind: str | None = None) -> None:
        super().__init__(message)
        assert 400 <= status <= 599
        self.status = status
        self.message = message
        self.kind = kind

    def body(self, api: Api) -> dict[str, Any]:
        return api.error(self.status, self.kind or api.kind_of(self.status), self.message)


@dataclass(frozen=True, slots=True)
class HttpHead:
    """A request without its body."""

    method: str
    path: str
    headers: dict[str, str]

    @property
    def is_last(self) -> bool:
        return "close" in self.headers.get("connection", "").lower()


def read_head(connection: ModelConnection) -> HttpHead | None:
    """The next request, or None if there is none. After a Refusal the connection must be closed."""
    if not connection.has_bytes(IDLE_SECONDS_MAX):
        return None
    try:
        raw = connection.read_until(b"\r\n\r\n", bytes_max=HEAD_BYTES_MAX)
    except TooLong as exc:
        raise HttpRefusal(431, f"the head is longer than {HEAD_BYTES_MAX} bytes") from exc
    # A header may hold any byte; Latin-1 has a character for each.
    first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    match first.split(" "):
        case [method, target, "HTTP/1.1"] if method and target:
            pass
        case [_, _, version] if version.startswith("HTTP/"):
            raise HttpRefusal(505, "only HTTP/1.1 is spoken here")
        case _:
            raise HttpRefusal(400, "this is no request of HTTP")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        key = name.lower()
        # Twice the same header would leave open which one counts, and no agent sends one twice.
        if not colon or not name or name != name.strip() or key in headers:
            raise HttpRefusal(400, f"this header is malformed or a second one of its name: {name[:100]!r}")
        headers[key] = value.strip()
    return HttpHead(method, target.partition("?")[0], headers)


def read_body(connection: ModelConnection, head: HttpHead) -> bytes:
    """The body. After a Refusal the connection must be closed, for the body is still on its way."""
    if "transfer-encoding" in head.headers:
        raise HttpRefusal(411, "a body must come with its Content-Length")
    spelled = head.headers.get("content-length", "0")
    if not (spelled.isascii() and spelled.isdigit()):
        raise HttpRefusal(400, f"this is no Content-Length: {spelled[:100]!r}")
    if len(spelled) > 12 or int(spelled) > BODY_BYTES_MAX:
        raise HttpRefusal(413, f"Request exceeds the maximum size of {BODY_BYTES_MAX} bytes")
    if head.headers.get("expect", "").lower() == "100-continue":
        connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    return connection.read_exactly(int(spelled))


class HttpReply:
    """The answer to one request, in one piece or as a stream of events."""

    def __init__(self, connection: ModelConnection, head: HttpHead | None) -> None:
        self._connection = connection
        self._is_head_only = head is not None and head.method == "HEAD"
        self.is_last = head is None or head.is_last
        self.is_begun = False

    def send(self, status: int, body: dict[str, Any]) -> None:
        """All of it."""
        data = json.dumps(body).encode()
        head = self._head(status, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        self._connection.write(head if self._is_head_only else head + data)

    def send_part(self, body: dict[str, Any]) -> None:
        """The first half of an answer; the rest must never come."""
        data = json.dumps(body).encode()
        head = self._head(200, {"Content-Type": "application/json", "Content-Length": str(len(data))})
        self._connection.write(head + data[: len(data) // 2])

    def begin_stream(self) -> None:
        fields = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        self._connection.write(self._head(200, {**fields, "Transfer-Encoding": "chunked"}))

    def send_events(self, events: list[ModelEvent]) -> None:
        assert self.is_begun
        data = b"".join(event.encode() for event in events)
        # A chunk of no bytes is the end of the stream.
        assert data
        self._connection.write(b"%x\r\n%b\r\n" % (len(data), data))

    def end_stream(self) -> None:
        assert self.is_begun
        self._connection.write(b"0\r\n\r\n")

    def _head(self, status: int, fields: dict[str, str]) -> bytes:
        assert not self.is_begun
        self.is_begun = True
        try:
            reason = http.HTTPStatus(status).phrase
        except ValueError:
            reason = "Overloaded" if status == 529 else "Error"
        fields = {**fields, "request-id": new_id("req"), "Connection": "close" if self.is_last else "keep-alive"}
        lines = [f"HTTP/1.1 {status} {reason}", *(f"{name}: {value}" for name, value in fields.items())]
        return "\r\n".join([*lines, "", ""]).encode("ascii")
