"""Minimal HTTP client of the fake model: one connection, with access to every byte."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any, Self

SECONDS_MAX = 20.0
Json = dict[str, Any]


class Client:
    def __init__(self, url: str) -> None:
        host, port = url.removeprefix("http://").split(":")
        self.sock = socket.create_connection((host, int(port)), timeout=SECONDS_MAX)
        self.buffer = b""
        self.headers: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def send(self, method: str, path: str, body: object = None, **headers: str) -> None:
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"Host": "x", "Content-Length": str(len(data)), **headers}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        self.sock.sendall("\r\n".join(lines).encode() + data)

    def head(self) -> int:
        """Read the status line and the headers."""
        first, *lines = self._until(b"\r\n\r\n").decode().removesuffix("\r\n\r\n").split("\r\n")
        # No bytes of an earlier answer come before it.
        assert first.startswith("HTTP/1.1 ")
        self.headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(first.split(" ")[1])

    def answer(self) -> tuple[int, Json]:
        """Read an answer with a content length."""
        status = self.head()
        size = int(self.headers["content-length"])
        while len(self.buffer) < size:
            self._receive()
        data, self.buffer = self.buffer[:size], self.buffer[size:]
        return status, json.loads(data)

    def events(self) -> Iterator[Json]:
        """Read the events of a stream to its end, after its head. The name of each event equals its type."""
        for event in self.raw_events():
            kind, data = event.split(b"\n")
            decoded = json.loads(data.removeprefix(b"data: "))
            assert kind.decode() == f"event: {decoded['type']}"
            yield decoded

    def chunks(self) -> Iterator[Json | str]:
        """Read events without a name; return an event that is not JSON as text."""
        for event in self.raw_events():
            assert event.startswith(b"data: ")
            data = event.removeprefix(b"data: ").decode()
            yield json.loads(data) if data.startswith("{") else data

    def raw_events(self) -> Iterator[bytes]:
        assert self.headers["transfer-encoding"] == "chunked"
        text = b""
        while size := int(self._until(b"\r\n"), 16):
            while len(self.buffer) < size + 2:
                self._receive()
            text += self.buffer[:size]
            self.buffer = self.buffer[size + 2 :]
            *events, text = text.split(b"\n\n")
            yield from events
        assert not text
        assert self._until(b"\r\n") == b"\r\n"

    def stream(self) -> list[Json]:
        assert self.head() == 200
        return list(self.events())

    def is_over(self) -> bool:
        """Whether the server has closed the connection and sent no further bytes."""
        return not self.buffer and not self.sock.recv(1)

    def _until(self, end: bytes) -> bytes:
        while end not in self.buffer:
            self._receive()
        at = self.buffer.index(end) + len(end)
        data, self.buffer = self.buffer[:at], self.buffer[at:]
        return data

    def _receive(self) -> None:
        data = self.sock.recv(1 << 16)
        if not data:
            raise EOFError(f"the server closed after {self.buffer!r}")
        self.buffer += data
