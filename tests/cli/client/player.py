"""Misbehaving server for client tests: it sends given bytes and closes the connection."""

from __future__ import annotations

import json
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

SSE = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"


class Silence(bytes):
    """Bytes after which the player falls silent and keeps the connection open."""


# Returns the bytes for a request. None: the player sends nothing and resets the connection.
Answer = Callable[[str], bytes | None]


def answer(status: int, body: Any, *, kind: str = "application/json", headers: str = "") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(content)}\r\n{headers}\r\n"
    return head.encode() + content


class Player:
    """A listener for the `with` block.

    `requests`: the received requests, in order.
    """

    def __init__(self, play: Answer) -> None:
        self.requests: list[str] = []
        self._play = play
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._held: list[socket.socket] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Player:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        # This wakes the thread in accept. A close alone would not.
        self._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._socket.close()
        for connection in self._held:
            connection.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            request = _read(connection)
            self.requests.append(request)
            said = self._play(request)
            if said is None:
                # A reset instead of a normal end.
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            else:
                connection.sendall(said)
            if isinstance(said, Silence):
                self._held.append(connection)
            else:
                connection.close()


def _read(connection: socket.socket) -> str:
    data = b""
    while b"\r\n\r\n" not in data:
        piece = connection.recv(65536)
        if not piece:
            return data.decode()
        data += piece
    head, _, body = data.partition(b"\r\n\r\n")
    sizes = [line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
    while len(body) < int(sizes[0] if sizes else 0):
        body += connection.recv(65536)
    return f"{head.decode()}\r\n\r\n{body.decode()}"
