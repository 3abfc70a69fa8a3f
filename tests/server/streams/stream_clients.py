"""Clients that lose their connection and resume, and the events that each has seen, for `testing.checks` to join.

A client is a socket and a cursor. It reads a number of bytes, drops the connection in the middle of a message, and
resumes from the last id that it received completely. The format decides what is complete: in SSE a message ends with a
blank line, in NDJSON with the end of its line.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import msgspec
from tests.server.kit import AUTHORIZATION, SECONDS_MAX, Served

from banksman.testing import checks
from banksman.testing.checks import Message, View, Visit

SSE = "text/event-stream"
NDJSON = "application/x-ndjson"
# A close with this option resets the connection, so the sender gets an error immediately.
RESET = struct.pack("ii", 1, 0)


class Received:
    """The received bytes of one answer, and the complete messages among them."""

    def __init__(self, accept: str = SSE) -> None:
        self._is_sse = accept == SSE
        self._head = b""
        self._raw = b""
        # Missing bytes of the current chunk and the line end behind it. None: the size line comes next.
        self._missing: int | None = None
        self._text = b""
        self.status: int | None = None
        self.bytes = 0
        self.body = b""
        self.messages: list[Message] = []
        self.is_ended = False
        # Whether the client ended the connection.
        self.is_left = False

    def feed(self, data: bytes) -> None:
        self.bytes += len(data)
        if self.status is None:
            head, found, data = (self._head + data).partition(b"\r\n\r\n")
            self._head = head
            if not found:
                return
            self.status = int(head.split(b" ", 2)[1])
        if self.status != 200:
            self.body += data
            return
        self._raw += data
        for piece in self._chunks():
            self._text += piece
        self._take_whole()

    def _chunks(self) -> Iterator[bytes]:
        while self._raw:
            if self._missing is None:
                line, found, rest = self._raw.partition(b"\r\n")
                if not found:
                    return
                self._raw = rest
                size = int(line, 16)
                self.is_ended = not size
                self._missing = size + 2
            taken, self._raw = self._raw[: self._missing], self._raw[self._missing :]
            # The received part of a chunk counts, whether its end has come or not.
            yield taken[: max(0, self._missing - 2)]
            self._missing -= len(taken)
            if not self._missing:
                self._missing = None

    def _take_whole(self) -> None:
        *blocks, self._text = self._text.split(b"\n\n" if self._is_sse else b"\n")
        for block in blocks:
            message = _of_sse(block) if self._is_sse else _of_line(block)
            if message is not None:
                self.messages.append(message)


def _of_sse(block: bytes) -> Message | None:
    fields: dict[bytes, bytes] = {}
    for line in block.split(b"\n"):
        name, _, value = line.partition(b": ")
        assert name in (b"id", b"event", b"data", b"retry"), block
        assert name not in fields, block
        fields[name] = value
    if b"data" not in fields:
        return None
    id, event = (fields[name].decode() if name in fields else None for name in (b"id", b"event"))
    return Message(id, event, fields[b"data"])


def _of_line(line: bytes) -> Message:
    body = json.loads(line)
    if body["kind"].startswith("stream."):
        return Message(None, body["kind"], line)
    position = body.get("position")
    if position is None:
        return Message(body["cursor"], None, line)
    # The rest is the event as every client sees it.
    begin = b'{"position":"%b",' % position.encode()
    assert line.startswith(begin), line
    return Message(position, None, b"{" + line[len(begin) :])


class Client:
    """A client that follows one session or many, over many connections.

    `uses_query`: it resumes by `?after=` and not by `Last-Event-ID`.
    """

    def __init__(
        self, port: int, path: str, *, accept: str = SSE, uses_query: bool = False, after: str | None = None
    ) -> None:
        self.port = port
        self.path = path
        self.accept = accept
        self.uses_query = uses_query
        self.is_many = path.startswith("/v1/events")
        self.place = after
        self.visits: list[Visit] = []
        # The last complete seq of each session.
        self.seqs: dict[str, int] = {}

    def request(self) -> bytes:
        headers = {"Host": f"127.0.0.1:{self.port}", "Accept": self.accept, **AUTHORIZATION}
        path = self.path
        if self.place is not None and self.uses_query:
            path += f"{'&' if '?' in path else '?'}after={quote(self.place)}"
        elif self.place is not None:
            headers["Last-Event-ID"] = self.place
        head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        return f"GET {path} HTTP/1.1\r\n{head}\r\n".encode()

    def visit(
        self,
        *,
        bytes_max: int | None = None,
        until: Callable[[Message], bool] | None = None,
        resets: bool = False,
        seconds_max: float = SECONDS_MAX,
    ) -> Received:
        """Connect, read, and drop the connection.

        The visit ends after `bytes_max` bytes, at the message that `until` accepts, after `seconds_max`, or when the
        server ends the stream. Complete messages count, however it ended. `OSError`: no server answers.
        """
        received = Received(self.accept)
        after = self.place
        with socket.create_connection(("127.0.0.1", self.port), SECONDS_MAX) as peer:
            try:
                peer.sendall(self.request())
                self._read(peer, received, bytes_max, until, time.monotonic() + seconds_max)
            finally:
                if resets:
                    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                self.visits.append(Visit(after, received.messages))
        return received

    def _read(
        self,
        peer: socket.socket,
        received: Received,
        bytes_max: int | None,
        until: Callable[[Message], bool] | None,
        deadline: float,
    ) -> None:
        looked_at = 0
        while not received.is_ended and (bytes_max is None or received.bytes < bytes_max):
            peer.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                data = peer.recv(1 << 16 if bytes_max is None else min(1 << 16, bytes_max - received.bytes))
            except TimeoutError:
                received.is_left = True
                return
            if not data:
                return
            received.feed(data)
            for number, message in enumerate(received.messages[looked_at:], looked_at):
                self._see(message)
                if until is not None and until(message):
                    # The client drops the connection here: it does not see the bytes behind this message.
                    del received.messages[number + 1 :]
                    received.is_left = True
                    return
            looked_at = len(received.messages)
        received.is_left = not received.is_ended

    def _see(self, message: Message) -> None:
        if message.id is not None:
            self.place = message.id
            shown = body(message)
            if "seq" in shown:  # Otherwise the message should have no id, and the checks report it.
                self.seqs[shown["session"]] = shown["seq"]

    def view(self) -> View:
        return checks.joined_many(self.visits) if self.is_many else checks.joined(self.visits)


def is_live(message: Message) -> bool:
    return message.event == "stream.live"


def body(message: Message) -> Any:
    return json.loads(message.data)


def walk(served: Served, session: str, limit: int = 100) -> View:
    """Read the whole session by pages, to compare it with streams."""
    visits: list[Visit] = []
    after: str | None = None
    while True:
        query = f"?limit={limit}" + ("" if after is None else f"&after={after}")
        answer = served.request("GET", f"/v1/sessions/{session}/events{query}")
        assert answer.status == 200, answer
        page = msgspec.json.decode(answer.body, type=dict[str, msgspec.Raw])
        messages: list[Message] = []
        if "gap" in page:
            told = {"kind": "stream.gap", "session": session, **json.loads(bytes(page["gap"]))}
            messages.append(Message(None, "stream.gap", json.dumps(told).encode()))
        for raw in msgspec.json.decode(page["events"], type=list[msgspec.Raw]):
            data = bytes(raw)
            messages.append(Message(json.loads(data)["cursor"], None, data))
        visits.append(Visit(after, messages))
        if not messages:
            assert json.loads(bytes(page["next"])) == after
            return checks.joined(visits)
        after = json.loads(bytes(page["next"]))
