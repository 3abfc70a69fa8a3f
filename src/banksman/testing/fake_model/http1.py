"""Server side of one HTTP/1.1 connection (RFC 9112), limited to the needs of agent clients.

A blocking recv() notices neither that the client disconnects nor that the server stops. So the
socket is non-blocking, and each wait is a poll() of three things: the awaited event, the hang-up of
the client, and an eventfd. The server writes the eventfd once, when it ends. No thread reads it, so
it stays readable for every thread.

The parser is strict: the server answers any other input with an error and closes the connection, so
it never guesses.
"""

from __future__ import annotations

import enum
import http
import json
import select
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from banksman.testing.fake_model.apis import Api, ModelEvent, new_id

# The client is on the same machine. A client that sends half a request, or reads nothing, for this
# time is stuck.
READ_SECONDS_MAX = 60.0
WRITE_SECONDS_MAX = 300.0
# Maximum of one recv() call.
CHUNK_BYTES = 1 << 16
HEAD_BYTES_MAX = 1 << 16
# The limit of the real API. Both answer a larger body with 413.
BODY_BYTES_MAX = 32 << 20
# An agent keeps a connection for its next call. This timeout delays no shutdown, because the end of
# the server interrupts the wait.
IDLE_SECONDS_MAX = 600.0


class ClientGone(Exception):
    """The client closed or reset its end."""


class Stopped(Exception):
    """The server is ending."""


class Stuck(Exception):
    """The client stopped in the middle of a request or a reply, and the deadline passed."""


class TooLong(Exception):
    """The limit of bytes was reached before the delimiter."""


class Ending(enum.Enum):
    """How to close a connection: deliver all sent bytes, or send a reset."""

    ORDERLY, RESET = range(2)


class ModelConnection:
    """Server side of one connection. Used by one thread only."""

    def __init__(self, sock: socket.socket, *, stop_fd: int) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        # The client must see each delta when it is sent, not when enough deltas fill a packet.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stop_fd = stop_fd
        self._buffer = bytearray()

    def has_bytes(self, timeout: float) -> bool:
        """Wait for the next byte; return False at the end of input or at the timeout."""
        if self._buffer:
            return True
        try:
            return self._fill(time.monotonic() + timeout)
        except (ClientGone, Stuck):
            return False

    def read_until(self, end: bytes, *, bytes_max: int) -> bytes:
        """Read up to and including `end`."""
        deadline = time.monotonic() + READ_SECONDS_MAX
        while (at := self._buffer.find(end)) < 0:
            if len(self._buffer) > bytes_max:
                raise TooLong
            if not self._fill(deadline):
                raise ClientGone
        if at + len(end) > bytes_max:
            raise TooLong
        return self._take(at + len(end))

    def read_exactly(self, size: int) -> bytes:
        deadline = time.monotonic() + READ_SECONDS_MAX
        while len(self._buffer) < size:
            if not self._fill(deadline):
                raise ClientGone
        return self._take(size)

    def write(self, data: bytes) -> None:
        """Pass all of `data` to the kernel."""
        deadline = time.monotonic() + WRITE_SECONDS_MAX
        view = memoryview(data)
        while view:
            self._poll(select.POLLOUT, deadline)
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                continue
            except OSError as exc:
                raise ClientGone from exc

    def wait(self, seconds: float) -> None:
        """Wait, unless the client disconnects (ClientGone) or the server ends (Stopped)."""
        try:
            self._poll(0, time.monotonic() + seconds)
        except Stuck:
            return
        raise AssertionError("a poll for nothing came true")

    def close(self, ending: Ending) -> None:
        """Close the connection immediately."""
        if ending is Ending.RESET:
            # With a linger time of zero, close() sends a reset instead of a FIN.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def drain(self, *, bytes_max: int, timeout: float) -> None:
        """Shut down the sending side and read the remaining input, up to a limit.

        Closing a socket with unread bytes resets it, and the reset may overtake the answer that
        explains it.
        """
        deadline = time.monotonic() + timeout
        try:
            self._sock.shutdown(socket.SHUT_WR)
            drained = len(self._take(len(self._buffer)))
            while drained < bytes_max and self._fill(deadline):
                drained += len(self._take(len(self._buffer)))
        except (ClientGone, Stopped, Stuck, OSError):
            pass  # The connection is closed in any case.

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return taken

    def _fill(self, deadline: float) -> bool:
        """Wait for more bytes; return False when the client has ended its side."""
        while True:
            self._poll(select.POLLIN, deadline)
            try:
                data = self._sock.recv(CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise ClientGone from exc
            self._buffer += data
            return bool(data)

    def _poll(self, wanted: int, deadline: float) -> None:
        """Return when the socket is ready for `wanted`; raise if another event ends the wait."""
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        # Poll for RDHUP instead of testing whether recv() returns nothing: bytes of a next request
        # may precede the end of input. A read does not poll for RDHUP, because bytes sent before
        # the end must still be read.
        is_reading = wanted == select.POLLIN
        poll.register(self._sock, wanted if is_reading else wanted | select.POLLRDHUP)
        left = max(0.0, deadline - time.monotonic())
        # Rounded up, so that a remainder below a millisecond does not become a busy loop.
        ready = dict(poll.poll(int(left * 1000) + 1))
        if self._stop_fd in ready:
            raise Stopped
        if not ready:
            raise Stuck
        (events,) = ready.values()
        if not is_reading and events & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
            raise ClientGone


# ── Requests and replies ──


class HttpRefusal(Exception):
    """Answer with an error in the format of the API.

    `kind`: the API's name of the error. `headers`: further headers of the answer. `fields`: further
    members of the error object.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        headers: Mapping[str, str] | None = None,
        fields: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        assert 400 <= status <= 599
        self.status = status
        self.message = message
        self.kind = kind
        self.headers = headers or {}
        self.fields = fields or {}

    def body(self, api: Api) -> dict[str, Any]:
        body = api.error(self.status, self.kind or api.kind_of(self.status), self.message)
        return {**body, "error": {**body["error"], **self.fields}}


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
    """Read the head of the next request; None if the client sends no other request.

    After an `HttpRefusal` the connection must be closed.
    """
    if not connection.has_bytes(IDLE_SECONDS_MAX):
        return None
    try:
        raw = connection.read_until(b"\r\n\r\n", bytes_max=HEAD_BYTES_MAX)
    except TooLong as exc:
        raise HttpRefusal(431, f"the head is longer than {HEAD_BYTES_MAX} bytes") from exc
    # A header may contain any byte, and Latin-1 has a character for each.
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
        # With a duplicate header it would be unclear which one counts, and no agent sends one.
        if not colon or not name or name != name.strip() or key in headers:
            raise HttpRefusal(
                400, f"this header is malformed or a second one of its name: {name[:100]!r}"
            )
        headers[key] = value.strip()
    return HttpHead(method, target.partition("?")[0], headers)


def read_body(connection: ModelConnection, head: HttpHead) -> bytes:
    """Read the body of a request.

    After an `HttpRefusal` the connection must be closed, because the client is still sending the
    body.
    """
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
    """Answer to one request, in one piece or as a stream of events."""

    def __init__(self, connection: ModelConnection, head: HttpHead | None) -> None:
        self._connection = connection
        self._is_head_only = head is not None and head.method == "HEAD"
        self.is_last = head is None or head.is_last
        self.is_begun = False
        # Headers that the script adds.
        self.fields: dict[str, str] = {}

    def send(self, status: int, body: dict[str, Any]) -> None:
        """Send a complete answer."""
        data = json.dumps(body).encode()
        head = self._head(
            status, {"Content-Type": "application/json", "Content-Length": str(len(data))}
        )
        self._connection.write(head if self._is_head_only else head + data)

    def send_part(self, body: dict[str, Any]) -> None:
        """Send the first half of an answer; the rest must never follow."""
        data = json.dumps(body).encode()
        head = self._head(
            200, {"Content-Type": "application/json", "Content-Length": str(len(data))}
        )
        self._connection.write(head + data[: len(data) // 2])

    def begin_stream(self) -> None:
        fields = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
        self._connection.write(self._head(200, {**fields, "Transfer-Encoding": "chunked"}))

    def send_events(self, events: list[ModelEvent]) -> None:
        assert self.is_begun
        data = b"".join(event.encode() for event in events)
        # An empty chunk would end the stream.
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
        fields = {
            **fields,
            **self.fields,
            "request-id": new_id("req"),
            "Connection": "close" if self.is_last else "keep-alive",
        }
        lines = [
            f"HTTP/1.1 {status} {reason}",
            *(f"{name}: {value}" for name, value in fields.items()),
        ]
        return "\r\n".join([*lines, "", ""]).encode("ascii")
