"""Storm over a cluster: clients ask and follow through two front ends while hosts and nodes are killed and stopped.

Run it with `toll = Storm(folder, seed, size).rage()`.

At the end every process is up again and every session gets one more ask. Then the storm is judged: first by the history
that the clients wrote, then by the logs and by the prompts of the agents (`invariants`).
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

from tests.chaos.cluster import invariants
from tests.chaos.cluster.history import Ask, History, Reader
from tests.chaos.cluster.nemesis import Nemesis, Plan
from tests.chaos.cluster.world import RETRY_SECONDS, World, until
from tests.server.kit import Answer
from tests.server.streams.stream_clients import NDJSON, SSE, Client, walk

from banksman.testing import checks
from banksman.testing.checks import Message, View

# Time after the storm until every ask has its outcome and every reader has reached the end.
CALM_SECONDS_MAX = 150.0
# Statuses that mean "not now" and never "not at all": a full queue, a session that moves, an owner that does not
# answer.
AGAIN = (409, 429, 503, 504)
# Number of times that the last ask of a session may be lost with its host.
CALM_MAX = 5


@dataclass(frozen=True, slots=True)
class Size:
    """Dimensions of a storm.

    `seconds`: duration of the trouble. `think`: longest pause between two asks in a session.
    """

    sessions: int
    seconds: float
    lease: float
    think: float
    plan: Plan
    manies: int = 2


class Storm:
    def __init__(self, folder: Path, seed: int, size: Size) -> None:
        self._seed = seed
        self._size = size
        self.world = World(folder, sessions=size.sessions, lease=size.lease)
        self.history = History()
        self.nemesis: Nemesis | None = None
        self._clients: list[Client] = []
        # Set when no new trouble begins; when every process is up again; when readers know where the end is.
        self._is_over = threading.Event()
        self._is_calm = threading.Event()
        self._is_told = threading.Event()
        self._lock = threading.Lock()  # Protects the faults. The holder calls nothing.
        self._faults: list[BaseException] = []
        self._deadline = time.monotonic() + size.seconds + 2 * CALM_SECONDS_MAX
        self._heads: dict[str, int] = {}

    def rage(self) -> dict[str, Any]:
        """Run the storm and judge it.

        `AssertionError`: an invariant does not hold. The history and the logs are in the folder.
        """
        with self.world:
            try:
                return self._rage()
            except BaseException as exc:
                self._dump()
                exc.add_note(f"seed {self._seed}: {self.history.summed_up()}; see {self.world.folder}")
                raise
            finally:
                self.history.write(self.world.folder / "history.ndjson")

    def _dump(self) -> None:
        """Write the events that readers received, one file per session, for the analysis of a failure."""
        folder = self.world.folder / "seen"
        folder.mkdir(exist_ok=True)
        for session, client in zip(self.world.ids, self._clients, strict=False):
            lines = [message.data + b"\n" for visit in client.visits for message in visit.messages]
            (folder / f"{session}.ndjson").write_bytes(b"".join(lines))

    def _rage(self) -> dict[str, Any]:
        dice = random.Random(f"clients {self._seed}")
        self.history.notes("it is up")
        self.world.open_all()
        self.history.notes("all are open")
        clients = self._clients = [self._client(number) for number in range(self._size.sessions + self._size.manies)]
        nemesis = self.nemesis = Nemesis(self.world, self.history, self._size.plan, self._seed, self._is_over)
        followers = [self._thread(self._follow, client, dice.random()) for client in clients]
        askers = [self._thread(self._ask, session, dice.random()) for session in self.world.sessions]
        troubles = [self._thread(nemesis.trouble_host, name) for name in self.world.hosts]
        troubles.append(self._thread(nemesis.trouble_nodes))
        try:
            self._is_over.wait(self._size.seconds)
            self._is_over.set()
            self._join(troubles)
            if not self._faults:
                self.world.wait_all_up()
                self.history.notes("all is up again")
            self._is_calm.set()
            self._join(askers)
            if not self._faults:
                walks = self._walk_all(0)
                self._heads = {session: view.heads()[session] for session, view in walks.items()}
                self._is_told.set()
                self._join(followers)
                if not self._faults:
                    return self._judge(walks, clients)
        except BaseException as exc:
            with self._lock:
                self._faults.append(exc)
        finally:
            for event in (self._is_over, self._is_calm, self._is_told):
                event.set()
            self._join((*troubles, *askers, *followers))
        raise self._faults[0]

    def _thread(self, run: Callable[..., None], *arguments: Any) -> threading.Thread:
        def guarded() -> None:
            try:
                run(*arguments)
            except BaseException as exc:
                with self._lock:
                    self._faults.append(exc)
                self._is_over.set()

        thread = threading.Thread(target=guarded)
        thread.start()
        return thread

    def _join(self, threads: Any) -> None:
        for thread in threads:
            thread.join()

    def _check_time(self) -> None:
        """Raise when another thread has failed or the deadline has passed. Every loop calls this in each round."""
        if self._faults:
            raise RuntimeError("somebody else has failed")
        assert time.monotonic() < self._deadline, f"it takes too long: {self.history.summed_up()}"

    # -- requests ------------------------------------------------------------------------------------------------------
    def _insist(
        self, dice: random.Random, method: str, path: str, sent: Any = None, key: str | None = None
    ) -> tuple[int, Any]:
        """Send a request until it is answered; return the number of the front end and its answer.

        Each attempt goes to a random front end.
        """
        headers = {} if key is None else {"Idempotency-Key": key}
        while True:
            self._check_time()
            front = dice.randrange(len(self.world.fronts))
            try:
                answer: Answer = self.world.fronts[front].request(method, path, sent, headers=headers)
            except (OSError, HTTPException) as exc:
                self.history.refuses(type(exc).__name__)
                time.sleep(RETRY_SECONDS)
                continue
            if answer.status in (200, 201, 202):
                return front, answer.json
            title = answer.json.get("title") if answer.body else None
            self.history.refuses(f"{answer.status} {title} {method}")
            # A front end never reports "gone" or "broken" for an accepted request.
            assert answer.status in AGAIN, (method, path, answer)
            time.sleep(RETRY_SECONDS)  # A client that gets a retryable refusal waits before it retries.

    # -- clients that ask ----------------------------------------------------------------------------------------------
    def _ask(self, session: int, seed: float) -> None:
        dice = random.Random(seed)
        path = f"/v1/sessions/{self.world.ids[session]}/turns"
        waiting: list[Ask] = []
        number = calm = 0
        # Each session gets one more ask after the storm, and that ask must be done: the session works, whatever
        # happened to it. A busy machine may still cost a host its lease. Then the session is asked again.
        is_last = False
        while not is_last:
            is_last = self._is_calm.is_set()
            number += 1
            ask = self._send(dice, session, number, path)
            waiting.append(ask)
            if is_last or dice.random() < 0.7:
                for each in waiting:
                    self._wait_outcome(dice, path, each)
                waiting.clear()
            if is_last and ask.told[-1].kind == "unknown" and calm < CALM_MAX:
                calm, is_last = calm + 1, False
            if is_last:
                assert ask.told[-1].kind == "done", f"{ask.key}, when all was calm: {ask.told}"
            self._is_calm.wait(dice.uniform(0.0, self._size.think))

    def _send(self, dice: random.Random, session: int, number: int, path: str) -> Ask:
        word = f"w{session}x{number}"
        answer = " ".join([word, *(f"{word}.{part}" for part in range(dice.randrange(2, 12)))])
        prompt = f"{word}\n@@speak {dice.choice((0, 0.01, 0.05, 0.1))} {answer}"
        ask = self.history.sends(session, f"k-{session}-{number}", word, answer)
        for _ in range(2 if dice.random() < 0.2 else 1):
            front, given = self._insist(dice, "POST", path, {"prompt": prompt}, ask.key)
            self.history.accepts(ask, front, given["turn"])
        return ask

    def _wait_outcome(self, dice: random.Random, path: str, ask: Ask) -> None:
        turn = ask.accepted[-1].turn
        for _ in range(2 if dice.random() < 0.2 else 1):
            while True:
                front, given = self._insist(dice, "GET", f"{path}/{turn}?wait=3")
                if given["outcome"] is not None:
                    break
            self.history.tells(ask, front, given["outcome"])

    # -- clients that follow -------------------------------------------------------------------------------------------
    def _client(self, number: int) -> Client:
        """Return a client: one for each session and some that follow all sessions. Every third reads NDJSON."""
        is_many = number >= self._size.sessions
        path = "/v1/events" if is_many else f"/v1/sessions/{self.world.ids[number]}/events"
        accept = NDJSON if number % 3 == 0 else SSE
        return Client(self.world.fronts[0].port, path, accept=accept, uses_query=number % 2 == 0)

    def _follow(self, client: Client, seed: float) -> None:
        dice = random.Random(seed)

        def is_complete(_: Message | None = None) -> bool:
            return self._is_told.is_set() and self._is_complete(client)

        while not is_complete():
            self._check_time()
            client.port = dice.choice(self.world.fronts).port
            bytes_max = None if self._is_told.is_set() or dice.random() < 0.7 else dice.randrange(200, 60_000)
            try:
                received = client.visit(bytes_max=bytes_max, seconds_max=dice.uniform(0.5, 6.0), until=is_complete)
            except OSError as exc:
                self.history.refuses(type(exc).__name__)
                time.sleep(RETRY_SECONDS)
                continue
            if received.status not in (None, 200):
                self.history.refuses(f"{received.status} to a reader")
                assert received.status in AGAIN, (received.status, received.body)
                time.sleep(RETRY_SECONDS)

    def _is_complete(self, client: Client) -> bool:
        if self._faults:
            return True
        mine = (name for name in self._heads if client.is_many or name in client.path)
        return all(client.seqs.get(name, 0) >= self._heads[name] for name in mine)

    # -- afterwards ----------------------------------------------------------------------------------------------------
    def _walk_all(self, front: int) -> dict[str, View]:
        return {session: walk(self.world.fronts[front], session, limit=200) for session in self.world.ids}

    def _judge(self, walks: dict[str, View], clients: list[Client]) -> dict[str, Any]:
        assert self.nemesis is not None
        last = self._walk_all(1)
        given = [Reader(f"reader {number} of {client.path}", client.view()) for number, client in enumerate(clients)]
        given += [Reader(f"the pages of {session}", view) for session, view in walks.items()]
        invariants.readers(given, last)
        invariants.answers(self.history.asks)
        events = 0
        for session, id in enumerate(self.world.ids):
            logged = invariants.events_of(last[id])
            events += len(logged)
            asked = [ask for ask in self.history.asks if ask.session == session]
            invariants.log(logged)
            invariants.asks(id, logged, asked)
            read = [prompts_of(process.stdin) for process in self.world.evidence(session).processes]
            invariants.prompts(id, read, logged, asked)
        assert not self.world.overlaps(), f"two agents of one session at once: {self.world.overlaps()}"
        self._check_processes()
        claims = sum(host.log.read_text(encoding="utf-8").count(": taken over (") for host in self.world.hosts.values())
        measured = {"stops_measured": self.nemesis.stops_measured, "deaths_measured": self.nemesis.deaths_measured}
        return {**self.history.summed_up(), "events": events, "take_overs": claims, **measured}

    def _check_processes(self) -> None:
        """Check that each live agent is on a live host that owns its session, and that no other process is left."""

        def strays() -> list[Any]:
            lives = {host.life: host.name for host in self.world.hosts.values()}
            found = self.world.processes()
            owners = {
                number: self.world.fronts[0].get(f"/v1/sessions/{id}").get("host")
                for number, id in enumerate(self.world.ids)
                if any(each.session == number for each in found)
            }
            return [
                each
                for each in found
                if each.life not in lives or (each.session is not None and owners[each.session] != lives[each.life])
            ]

        # An idle agent that is just being stopped counts as a stray for a moment.
        left: list[Any] = []
        until(lambda: not left.clear() and not left.extend(strays()) and not left, 30.0, f"nothing is left: {left}")


def prompts_of(data: bytes) -> list[str]:
    """Return the text of each prompt in the bytes that a process read."""
    return [
        content if isinstance(content, str) else "\n".join(part["text"] for part in content)
        for content in checks.prompts(data, may_be_cut=True)
    ]
