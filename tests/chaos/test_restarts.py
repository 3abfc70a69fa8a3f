"""Planned restarts and failed upgrades under load: agents stream, asks wait, and clients follow and ask.

Each server is a program of its own. `make chaos` makes fifty restarts in a row; `make prove` has time for a few.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Callable, Generator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import SECONDS_MAX, Served
from tests.server.ops.test_server_hand_over import restart, serving
from tests.server.streams.stream_clients import Client, walk
from tests.thorough import thorough

from banksman import Event, Host
from banksman.core.session import event as kinds
from banksman.testing import checks, fake_agent

pytestmark = thorough

RESTARTS = 50 if "BANKSMAN_CHAOS" in os.environ else 4
SESSIONS = 4
# With four sessions, twenty asks wait at each restart.
WAITING = 5
# One turn streams for two seconds.
DELTAS = 200
PROMPT = f"@@stream {DELTAS} 0.01 é漢🙂-{{}}-"
RETRY_SECONDS = 0.05
# A version that dies before it serves, and one that dies after it has passed the check.
BROKEN = "raise SystemExit('this version is broken')"
SERVE = "import sys\nfrom banksman.cli import main\nsys.exit(main())"
DECEPTIVE = f"import sys\nif '--check' not in sys.argv: {BROKEN}\n{SERVE}"


def expected(number: int) -> str:
    return "".join(f"é漢🙂-{number}-{delta} " for delta in range(DELTAS))


class Streaming:
    """A session with a streaming agent, the asks that wait in it, and a client that follows it."""

    def __init__(self, served: Served, folder: Path) -> None:
        self._served = served
        self.evidence = fake_agent.Evidence(folder)
        self.id = served.open(command=fake_agent.command(evidence=folder))
        self.turns: list[str] = []
        self.client = Client(served.port, f"/v1/sessions/{self.id}/events")

    def fill(self) -> None:
        """Ask until enough asks wait behind a turn that runs.

        A restart ends a process that still starts, and the next server starts another one.
        """
        while True:
            status = self._served.get(f"/v1/sessions/{self.id}")
            if len(status["queue"]) < WAITING:
                self.turns.append(self._served.ask(self.id, PROMPT.format(len(self.turns))))
            elif status.get("holder") is None:
                time.sleep(RETRY_SECONDS)
            else:
                break

    def check(self, events: list[Event], *, hand_overs: int) -> None:
        """Check the outcomes, the log and the view of the client."""
        for number, turn in enumerate(self.turns):
            outcome = self._served.outcome(self.id, turn)
            assert (outcome["kind"], outcome["text"]) == ("done", expected(number))
        checks.log(events)
        checks.turns(events, is_over=False)
        (process,) = self.evidence.processes
        checks.stdin(events, [process.stdin])
        ends = [event.turn for event in events if event.kind == kinds.TURN_ENDED]
        assert ends == self.turns
        found = [event.kind for event in events]
        assert found.count(kinds.SESSION_HANDED_OVER) == found.count(kinds.PROCESS_ADOPTED) == hand_overs
        assert found.count(kinds.PROCESS_STARTED) == 1


class Load:
    """The sessions of a server, and the threads of their clients."""

    def __init__(self, served: Served, folder: Path) -> None:
        self.served = served
        self.sessions = [Streaming(served, folder / f"evidence-{number}") for number in range(SESSIONS)]
        self._asked = served.open()
        self.answers = 0
        self._is_over = threading.Event()
        self._heads: dict[str, int] = {}
        self._faults: list[BaseException] = []
        self._threads = [threading.Thread(target=self._guarded, args=(self._ask,))]
        self._threads += [threading.Thread(target=self._guarded, args=(self._follow, it)) for it in self.sessions]
        for thread in self._threads:
            thread.start()

    def fill(self) -> None:
        for session in self.sessions:
            session.fill()

    def end(self) -> None:
        """Wait until all asks are answered and all clients have seen everything."""
        for session in self.sessions:
            self.served.outcome(session.id, session.turns[-1])
            self._heads[session.id] = walk(self.served, session.id).heads()[session.id]
        self.stop()
        assert not self._faults, self._faults

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def check(self, *, hand_overs: int) -> None:
        opened = 0
        for session in self.sessions:
            events = asyncio.run(read(self.served, session.id))
            session.check(events, hand_overs=hand_overs)
            checks.views_agree(walk(self.served, session.id), session.client.view())
            opened += sum(bool(event.body["open"]) for event in events if event.kind == kinds.SESSION_HANDED_OVER)
        assert opened >= hand_overs, "too few restarts came in the middle of a turn"

    def _guarded(self, run: Callable[..., None], *words: Any) -> None:
        try:
            run(*words)
        except BaseException as exc:
            self._faults.append(exc)

    def _follow(self, session: Streaming) -> None:
        """Follow the session to its end, by one connection after the other."""
        while not self._has_seen_all(session):
            try:
                session.client.visit(seconds_max=0.5)
            except OSError:
                self._is_over.wait(RETRY_SECONDS)

    def _has_seen_all(self, session: Streaming) -> bool:
        # No head is known if the test has failed.
        head = self._heads.get(session.id)
        return self._is_over.is_set() and head in (None, session.client.seqs.get(session.id))

    def _ask(self) -> None:
        """Ask all the time, also while a server ends or starts. Each ask is sent until a server answers it."""
        path = f"/v1/sessions/{self._asked}/turns"
        while not self._is_over.is_set():
            key = f"ask-{self.answers}"
            turn = self._insist("POST", path, {"prompt": f"{key}\n@@say so"}, {"Idempotency-Key": key})["turn"]
            outcome = None
            while outcome is None:
                outcome = self._insist("GET", f"{path}/{turn}?wait=5")["outcome"]
            assert (outcome["kind"], outcome["text"]) == ("done", "so"), outcome
            self.answers += 1

    def _insist(self, method: str, path: str, sent: Any = None, headers: dict[str, str] | None = None) -> Any:
        while True:
            try:
                answer = self.served.request(method, path, sent, headers=headers)
            except (OSError, HTTPException):
                answer = None
            if answer is not None and answer.status in (200, 202):
                return answer.json
            assert answer is None or answer.status == 503, answer
            assert not self._is_over.is_set(), "the test has ended without a server"
            self._is_over.wait(RETRY_SECONDS)


async def read(served: Served, session: str) -> list[Event]:
    async with Host(served.settings["store"]) as host:
        return [event async for event in host.session(session).events(0, waits=False)]


@pytest.fixture
def load(tmp_path: Path) -> Generator[Load]:
    with serving(tmp_path / "server") as served:
        load = Load(served, tmp_path)
        try:
            yield load
        finally:
            load.stop()


def test_nothing_is_lost_in_many_restarts_under_load(load: Load) -> None:
    for _ in range(RESTARTS):
        load.fill()
        restart(load.served)
    load.end()
    load.check(hand_overs=RESTARTS)
    assert load.answers >= 1


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (BROKEN, "this version is broken"),
        ("import banksman.of_another_time", "No module named 'banksman.of_another_time'"),
        (f"from banksman.process.keeper import messages\nmessages.WIRE = b'x'\n{SERVE}", "wire is"),
    ],
)
def test_nothing_is_lost_when_the_new_version_is_refused_under_load(
    load: Load, tmp_path: Path, program: str, reason: str
) -> None:
    load.fill()
    started = load.served.get("/v1/server")["started"]
    answer = load.served.request("POST", "/v1/upgrade", {"command": version(tmp_path, program)})
    assert answer.status == 409
    assert reason in answer.json["detail"]
    load.end()
    load.check(hand_overs=0)
    assert load.served.get("/v1/server")["started"] == started


def test_nothing_is_lost_when_the_new_version_cannot_start_under_load(load: Load, tmp_path: Path) -> None:
    """The service manager starts the old version again, and that takes over what the dead one has not."""
    load.fill()
    served = load.served
    served.post("/v1/upgrade", {"command": version(tmp_path, DECEPTIVE)})
    assert served.process is not None
    assert served.process.wait(SECONDS_MAX) == 1
    assert served.log.read_text(encoding="utf-8").endswith("this version is broken\n")
    served.kill()
    served.start()
    load.end()
    load.check(hand_overs=1)


def version(tmp_path: Path, program: str) -> list[str]:
    path = tmp_path / "version.py"
    path.write_text(program, encoding="utf-8")
    return [sys.executable, str(path)]
