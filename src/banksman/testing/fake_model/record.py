"""Records of the requests to the fake model and their outcomes.

The threads of the connections write them, and the test reads them.
"""

from __future__ import annotations

import collections
import json
import threading
import time
from pathlib import Path
from typing import Any

# Enough for any test. A server that runs for days drops the oldest records.
REQUESTS_KEPT_MAX = 10_000


class ModelRequest:
    """One HTTP request and its outcome.

    `number` counts all requests from 1. `play` counts the requests that play a script; None for the
    others (side calls without tools, GET, …). `step`: lines of the directives chosen for the
    request; empty when no step was left. `api`: the API of a model call ("anthropic", "responses",
    "chat", "gemini"), or None. `body`: the decoded JSON, or None. Thread-safe.
    """

    def __init__(
        self,
        *,
        number: int,
        method: str,
        path: str,
        headers: dict[str, str],
        api: str | None,
        body: Any,
        play: int | None,
        step: tuple[str, ...],
    ) -> None:
        self.number = number
        self.method = method
        self.path = path
        self.headers = headers
        self.api = api
        self.body = body
        self.play = play
        self.step = step
        self._outcome: str | None = None
        self._over = threading.Event()

    def __repr__(self) -> str:
        return (
            f"<ModelRequest {self.number} {self.method} "
            f"{self.path} play={self.play} {self.outcome or 'running'}>"
        )

    @property
    def outcome(self) -> str | None:
        """Outcome of the request; None while it runs.

        - `done`, `http_STATUS`, `sse_TYPE` (an error event was sent), `dropped`: the script asked
          for it.
        - `client_gone`: the client disconnected before the end. A test sees by this that an agent
          aborted its call.
        - `client_stuck`: the client read nothing for minutes.
        - `stopped`: the server was closed.
        - `hung_up`: a hang reached its time limit.
        """
        return self._outcome

    def wait_outcome(self, timeout: float) -> str:
        """Wait for the outcome. Blocks the thread; raises TimeoutError."""
        if not self._over.wait(timeout):
            raise TimeoutError(f"{self!r} was not over after {timeout:g} s")
        assert self._outcome is not None
        return self._outcome

    def set_outcome(self, outcome: str) -> None:
        """Set the outcome. Only the server calls this."""
        assert self._outcome is None
        self._outcome = outcome
        self._over.set()


class RequestRecords:
    """All requests, in the order in which they arrived completely."""

    def __init__(self, *, log: Path | None) -> None:
        # Protects all fields below. Only the log file is used while it is held.
        self._changed = threading.Condition()
        self._requests: collections.deque[ModelRequest] = collections.deque(
            maxlen=REQUESTS_KEPT_MAX
        )
        self._count = 0
        self._play_count = 0
        # Line-buffered, so that a reader of the file sees each line immediately.
        self._log = log.open("a", buffering=1, encoding="utf-8") if log else None

    def begin(
        self,
        *,
        method: str,
        path: str,
        headers: dict[str, str],
        api: str | None,
        body: Any,
        step: tuple[str, ...] | None,
    ) -> ModelRequest:
        """Record a request that has arrived. `step` is None if it plays no script."""
        with self._changed:
            self._count += 1
            self._play_count += step is not None
            request = ModelRequest(
                number=self._count,
                method=method,
                path=path,
                headers=headers,
                api=api,
                body=body,
                play=None if step is None else self._play_count,
                step=step or (),
            )
            self._requests.append(request)
            fields = {
                "method": method,
                "path": path,
                "api": api,
                "play": request.play,
                "step": step,
            }
            self._write({"request": request.number, **fields, "body": body})
            self._changed.notify_all()
        return request

    def end(self, request: ModelRequest, outcome: str) -> None:
        with self._changed:
            request.set_outcome(outcome)
            self._write({"request": request.number, "outcome": outcome})

    def all(self) -> list[ModelRequest]:
        with self._changed:
            return list(self._requests)

    def wait_play(self, play: int, timeout: float) -> ModelRequest:
        assert play >= 1
        with self._changed:
            if not self._changed.wait_for(lambda: self._play_count >= play, timeout):
                seen = (
                    "\n".join(f"  {request!r}" for request in list(self._requests)[-20:])
                    or "  none"
                )
                raise TimeoutError(
                    f"request {play} that plays a script did not come in {timeout:g} s; seen:\n"
                    f"{seen}"
                )
            for request in self._requests:
                if request.play == play:
                    return request
        raise LookupError(
            f"request {play} that plays a script is forgotten: {REQUESTS_KEPT_MAX} are kept"
        )

    def close(self) -> None:
        with self._changed:
            if self._log:
                self._log.close()
                self._log = None

    def _write(self, entry: dict[str, object]) -> None:
        if self._log:
            self._log.write(json.dumps({"at": time.time(), **entry}) + "\n")
