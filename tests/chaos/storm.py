"""Storm over one server: clients lose their connections again and again, and the server is killed and restarted.

The server comes back at the same address. Meanwhile agents work, and clients send each ask until it is answered.

The seed decides the actions; the machine decides the timing. A seed that failed once may therefore pass the next time,
but it is the same storm.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.server.kit import Answer, Served
from tests.server.streams.stream_clients import NDJSON, SSE, Client, Received, walk

from banksman.testing import checks, fake_agent
from banksman.testing.checks import Message, View

# Limit for the whole storm. A longer one hangs.
SECONDS_MAX = 300.0
# Time that a client waits after a retryable refusal.
RETRY_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Size:
    clients: int = 50
    cuts: int = 1_000
    kills: int = 3
    sessions: int = 4


@dataclass(slots=True)
class Toll:
    """Counts of the storm."""

    cuts: int = 0
    kills: int = 0
    lost: int = 0
    refused: int = 0
    asks: int = 0
    events: int = 0


class Storm:
    def __init__(self, folder: Path, seed: int, size: Size) -> None:
        self._dice = random.Random(seed)
        self._seed = seed
        self._size = size
        self._served = Served(folder, heartbeat_seconds=0.3)
        self._lock = threading.Lock()  # Protects the toll and the faults. The holder calls nothing.
        self.toll = Toll()
        self._faults: list[BaseException] = []
        self._cut_left = size.cuts
        # Set while the server answers; when the cuts are over; when every client knows where the end is.
        self._is_up = threading.Event()
        self._is_calm = threading.Event()
        self._is_told = threading.Event()
        self._deadline = time.monotonic() + SECONDS_MAX
        self._accepted: dict[str, dict[str, str]] = {}
        self._heads: dict[str, int] = {}

    def rage(self) -> Toll:
        """Run the storm and judge it.

        `AssertionError`: a client's view or the outcome of an ask is wrong.
        """
        with self._served as served:
            self._is_up.set()
            # The agent remembers its conversation, so that the next server can resume it.
            command = fake_agent.command(memory=served.folder / "memory")
            sessions = [served.open(name=f"storm-{number}", command=command) for number in range(self._size.sessions)]
            self._accepted = {session: {} for session in sessions}
            clients = [self._client(number, sessions) for number in range(self._size.clients)]
            askers = [self._thread(self._ask, session, self._dice.random()) for session in sessions]
            followers = [self._thread(self._follow, client, self._dice.random()) for client in clients]
            thresholds = sorted(self._dice.randrange(self._size.cuts) for _ in range(self._size.kills))
            try:
                self._kill(thresholds)
                for thread in askers:
                    thread.join(SECONDS_MAX)
                if not self._faults:
                    self._heads = {session: walk(served, session).heads()[session] for session in sessions}
            except BaseException as exc:
                self._faults.append(exc)
                self._is_calm.set()
                raise
            finally:
                self._is_told.set()
                for thread in (*askers, *followers):
                    thread.join(SECONDS_MAX)
            if self._faults:
                raise self._faults[0]
            self._check(clients, sessions)
        return self.toll

    def _thread(self, run: Callable[..., None], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                run(*arguments)
            except BaseException as exc:
                with self._lock:
                    self._faults.append(exc)
                self._is_calm.set()

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    # -- the server --------------------------------------------------------------------------------------------------
    def _kill(self, thresholds: list[int]) -> None:
        for threshold in thresholds:
            while self.toll.cuts < threshold and not self._is_calm.is_set():
                self._is_calm.wait(self._dice.random() * 0.1)
                self._check_time()
            self._is_up.clear()
            self._served.kill()
            self._served.start()
            self.toll.kills += 1
            self._is_up.set()
        while not self._is_calm.wait(0.1):
            self._check_time()

    def _check_time(self) -> None:
        """Raise when another thread has failed or the deadline has passed. Every loop calls this in each round."""
        if self._faults:
            raise RuntimeError("somebody else has failed")
        assert time.monotonic() < self._deadline, f"seed {self._seed}: it takes too long: {self.toll}"

    # -- clients that follow -----------------------------------------------------------------------------------------
    def _client(self, number: int, sessions: list[str]) -> Client:
        """Return a client. Every fourth follows all sessions, the others one; every third reads NDJSON."""
        path = "/v1/events" if number % 4 == 0 else f"/v1/sessions/{sessions[number % len(sessions)]}/events"
        accept = NDJSON if number % 3 == 0 else SSE
        return Client(self._served.port, path, accept=accept, uses_query=number % 2 == 0)

    def _follow(self, client: Client, seed: float) -> None:
        dice = random.Random(seed)
        while not self._is_calm.is_set():
            self._check_time()
            self._is_up.wait(1.0)
            # A limit in bytes cuts inside a message; a limit in time cuts between two events.
            count = dice.choice((dice.randrange(600), dice.randrange(6_000), dice.randrange(30_000)))
            bytes_max = count if dice.random() < 0.7 else None
            seconds_max = dice.random() * 0.8
            received = self._visit(client, bytes_max=bytes_max, seconds_max=seconds_max, resets=dice.random() < 0.5)
            # A cut by the dying server does not count.
            if received is not None and received.is_left:
                self._count_cut()
        while not self._is_told.wait(1.0):
            self._check_time()

        def is_complete(_: Message | None = None) -> bool:
            return self._is_complete(client)

        while self._heads and not is_complete():
            self._check_time()
            self._visit(client, until=is_complete, seconds_max=5.0)

    def _visit(self, client: Client, **how: Any) -> Received | None:
        try:
            received = client.visit(**how)
        except OSError:
            with self._lock:
                self.toll.lost += 1
            return None
        if received.status not in (None, 200):
            assert received.status == 503, (received.status, received.body)
            with self._lock:
                self.toll.refused += 1
            self._is_calm.wait(RETRY_SECONDS)
        return received

    def _count_cut(self) -> None:
        with self._lock:
            self.toll.cuts += 1
            self._cut_left -= 1
            if not self._cut_left:
                self._is_calm.set()

    def _is_complete(self, client: Client) -> bool:
        heads = client.seqs
        return all(heads.get(name) == seq for name, seq in self._heads.items() if client.is_many or name in client.path)

    # -- clients that ask --------------------------------------------------------------------------------------------
    def _ask(self, session: str, seed: float) -> None:
        dice = random.Random(seed)
        number = 0
        # Each session gets one more ask after the storm. By then every turn that a dead server left open is over.
        is_last = False
        while not is_last:
            is_last = self._is_calm.is_set()
            number += 1
            key = f"{session}-{number}"
            prompt = f"ask {number}\n@@stream {dice.randrange(5, 40)} {dice.choice((0, 0.01, 0.03))} é漢🙂"
            path = f"/v1/sessions/{session}/turns"
            turn = self._insist("POST", path, {"prompt": prompt}, key)["turn"]
            self._accepted[session][key] = turn
            if dice.random() < 0.3:
                assert self._insist("POST", path, {"prompt": prompt}, key)["turn"] == turn, key
            if is_last or dice.random() < 0.7:
                while self._insist("GET", f"{path}/{turn}?wait=5")["outcome"] is None:
                    self._check_time()
            with self._lock:
                self.toll.asks += 1

    def _insist(self, method: str, path: str, sent: Any = None, key: str | None = None) -> Any:
        """Send a request until some server answers it."""
        headers = {} if key is None else {"Idempotency-Key": key}
        while True:
            self._check_time()
            self._is_up.wait(1.0)
            try:
                answer: Answer = self._served.request(method, path, sent, headers=headers)
            except (OSError, HTTPException):
                continue
            if answer.status in (200, 202):
                return answer.json
            # The queue is full, or the host is not yet sure that the other host is dead.
            assert answer.status in (409, 429, 503), answer
            time.sleep(RETRY_SECONDS)  # A client that gets a retryable refusal waits before it retries.

    # -- afterwards --------------------------------------------------------------------------------------------------
    def _check(self, clients: list[Client], sessions: list[str]) -> None:
        known = {session: walk(self._served, session, limit=73) for session in sessions}
        views = [client.view() for client in clients]
        checks.views_agree(*known.values(), *views)
        for client, view in zip(clients, views, strict=True):
            assert not view.gaps
            wanted = {name: seq for name, seq in self._heads.items() if client.is_many or name in client.path}
            assert view.heads() == wanted
        for session, view in known.items():
            assert view.heads() == {session: self._heads[session]}, "something was added when all was over"
            _check_asks(view, self._accepted[session])
        self.toll.events = sum(len(view.events) for view in known.values())


def _check_asks(view: View, accepted: dict[str, str]) -> None:
    """Check that the log has each accepted ask once, with one end."""
    shown = [json.loads(message.data) for message in view.events.values()]
    queued = {event["turn"]: event["body"]["key"] for event in shown if event["kind"] == "turn.queued"}
    ended = Counter(event["turn"] for event in shown if event["kind"] == "turn.ended")
    assert sorted(key for key in queued.values()) == sorted(accepted), "each key is there once"
    for key, turn in accepted.items():
        assert queued[turn] == key
        assert ended[turn] == 1, f"{key} ended {ended[turn]} times"
    assert set(ended) == set(queued), [event for event in shown if event["turn"] in set(ended) ^ set(queued)]
