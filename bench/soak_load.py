"""Load of the soak test: threads that ask, look up turns, and read event streams of a server."""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import random
import threading
import time
from typing import Any

from bench.serving import AUTHORIZATION, Server

SECONDS_MAX = 60.0
# One ask in REPEATED is sent twice with the same key. Two lookups follow one ask in LOOKED_UP.
REPEATED, LOOKED_UP = 20, 5


class Load:
    """Measurements of all threads. `take` returns the lists and empties them."""

    def __init__(self, server: Server, prompt: str) -> None:
        self.server = server
        self.prompt = prompt
        self.is_over = threading.Event()
        self.errors: list[str] = []
        self.turns = 0
        # Asks that were skipped because the previous turn took longer than a second.
        self.missed = 0
        self._lock = threading.Lock()
        self._seconds: dict[str, list[float]] = {}

    def take(self) -> dict[str, list[float]]:
        """Return the seconds of each kind of request since the last call."""
        with self._lock:
            taken, self._seconds = self._seconds, {}
        return taken

    def add(self, kind: str, seconds: float) -> None:
        with self._lock:
            self._seconds.setdefault(kind, []).append(seconds)
            self.turns += kind == "outcome"

    def run(self, work: Any, *args: Any) -> None:
        """Run `work` in a thread. An exception is recorded, and fails the soak test."""
        try:
            work(self, *args)
        except Exception as exc:
            if not self.is_over.is_set():
                self.errors.append(repr(exc))


class Client:
    """One persistent HTTP connection."""

    def __init__(self, port: int) -> None:
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS_MAX)

    def request(
        self, method: str, path: str, body: Any = None, *, key: str | None = None
    ) -> tuple[int, Any]:
        headers = {**AUTHORIZATION, "Content-Type": "application/json"}
        if key is not None:
            headers["Idempotency-Key"] = key
        self._connection.request(method, path, None if body is None else json.dumps(body), headers)
        response = self._connection.getresponse()
        data = response.read()
        return response.status, json.loads(data) if data else None

    def close(self) -> None:
        self._connection.close()


def ask(load: Load, session: str, offset: float) -> None:
    """Ask for one turn per second, wait for each outcome, and sometimes look a turn up."""
    with contextlib.closing(Client(load.server.port)) as client:
        path = f"/v1/sessions/{session}/turns"
        turns: list[str] = []
        due = time.monotonic() + offset
        for number in itertools.count():
            if load.is_over.wait(max(0.0, due - time.monotonic())):
                return
            late = max(0.0, time.monotonic() - due)
            load.missed += int(late)
            due += 1 + int(late)
            turns.append(_turn(load, client, path, f"{session}-{number}", number))
            if number % LOOKED_UP == 0:
                # A turn that retention may have removed, and a turn that never existed.
                for turn in (turns[0], "t-0000000000000000"):
                    began = time.monotonic()
                    status, _ = client.request("GET", f"{path}/{turn}")
                    load.add("lookup", time.monotonic() - began)
                    assert status in (200, 404), status
            del turns[:-30]


def _turn(load: Load, client: Client, path: str, key: str, number: int) -> str:
    began = time.monotonic()
    status, accepted = client.request("POST", path, {"prompt": load.prompt}, key=key)
    load.add("accept", time.monotonic() - began)
    assert status == 202, (status, accepted)
    if number % REPEATED == 0:
        status, again = client.request("POST", path, {"prompt": load.prompt}, key=key)
        assert (status, again["turn"]) == (202, accepted["turn"]), (status, again)
    status, shown = client.request("GET", f"{path}/{accepted['turn']}?wait=60")
    load.add("outcome", time.monotonic() - began)
    assert status == 200, (status, shown)
    assert shown["outcome"]["kind"] == "done", shown
    return accepted["turn"]


def read(load: Load, sessions: list[str], seed: int) -> None:
    """Follow a random session for some seconds, disconnect, and follow another one."""
    dice = random.Random(seed)
    while not load.is_over.is_set():
        connection = http.client.HTTPConnection("127.0.0.1", load.server.port, timeout=SECONDS_MAX)
        try:
            headers = {**AUTHORIZATION, "Accept": "text/event-stream"}
            session = dice.choice(sessions)
            # Not from the last event: it may not be committed yet, so it is no valid cursor.
            after = max(0, load.server.seq(session) - 100)
            connection.request("GET", f"/v1/sessions/{session}/events?after={after}", None, headers)
            response = connection.getresponse()
            assert response.status == 200, (response.status, response.read())
            until = time.monotonic() + dice.uniform(1, 8)
            while time.monotonic() < until and not load.is_over.is_set():
                assert response.readline(), "the stream has ended"
        finally:
            connection.close()
