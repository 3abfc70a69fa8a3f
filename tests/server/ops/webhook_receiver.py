"""Real HTTP receiver of webhooks on loopback. A test decides its answers and waits for its messages."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

SECONDS_MAX = 60.0


class Received(NamedTuple):
    """One request. `path`: as it was sent; `status`: what the receiver answered."""

    path: str
    headers: Mapping[str, str]
    body: bytes
    status: int

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def id(self) -> str:
        return self.headers["banksman-delivery"]


class Receiver:
    """Receives webhooks. `answer`: returns the status of a request, and may wait; a test replaces it."""

    def __init__(self, port: int = 0, answer: Callable[[Received], int] = lambda _: 204) -> None:
        self.answer = answer
        self._all: list[Received] = []
        self._changed = threading.Condition()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                receiver._on_post(self)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    def url(self, path: str = "/hook") -> str:
        return f"http://127.0.0.1:{self.port}{path}"

    @property
    def all(self) -> list[Received]:
        """Every request, in the order of their ends."""
        with self._changed:
            return [*self._all]

    @property
    def accepted(self) -> list[Received]:
        return [one for one in self.all if 200 <= one.status < 300]

    def wait(self, condition: Callable[[list[Received]], bool]) -> list[Received]:
        """Wait until the requests satisfy the condition, and return them."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self._all), SECONDS_MAX), [one.json for one in self._all]
            return [*self._all]

    def wait_accepted(self, count: int) -> list[Received]:
        """Wait for so many different accepted messages."""
        self.wait(lambda found: len({one.id for one in found if 200 <= one.status < 300}) >= count)
        return self.accepted

    def _on_post(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in request.headers.items()}
        received = Received(request.path, headers, body, 0)
        status = self.answer(received)
        try:
            request.send_response(status)
            if 300 <= status < 400:
                request.send_header("Location", "/elsewhere")
            request.send_header("Content-Length", "0")
            request.end_headers()
        except OSError:
            # The server was killed, or has given up.
            status = 0
        with self._changed:
            self._all.append(received._replace(status=status))
            self._changed.notify_all()
