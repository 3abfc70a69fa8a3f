"""A planned restart that is disturbed: by more signals, by the next restart, by clients in the middle of an answer."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path
from typing import Any

import pytest
from tests.server.api.test_session_routes import wait_for
from tests.server.kit import SECONDS_MAX, Answer, Served
from tests.server.ops.test_server_hand_over import echo, end, processes, reap, restart, say, serving
from tests.thorough import thorough

pytestmark = thorough

SESSIONS = 4
# Some of them come before the first session is handed over.
SIGNALS = 20
SIGNAL_SECONDS = 0.001
# How long a client tries to answer, so that a server that does not come back leaves no thread behind.
RETRY_SECONDS_MAX = 120.0


# Writes numbers until a file is there.
COUNTING = """
import os, sys, time
number = 0
while not os.path.exists(sys.argv[1]):
    print(number, flush=True)
    number += 1
    time.sleep(0.001)
"""


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "server") as served:
        yield served


class Work:
    """Sessions in the middle of a turn."""

    def __init__(self, served: Served, folder: Path) -> None:
        self._served = served
        self._go = folder / "go"
        script = {"prompt work": ["say one", f"wait {self._go}", "say two"], "prompt next": ["say next"]}
        self.turns = [(session := served.open(script), served.ask(session, "work")) for _ in range(SESSIONS)]
        for session, turn in self.turns:
            wait_for(served, session, "update", turn=turn)
        self.waiting = [(session, served.ask(session, "next")) for session, _ in self.turns]
        self.pids = [processes(served, session) for session, _ in self.turns]

    def check(self) -> None:
        """Check that all processes continue, and that they finish what they have begun."""
        assert [processes(self._served, session) for session, _ in self.turns] == self.pids
        self._go.touch()
        for text, turns in (("two", self.turns), ("next", self.waiting)):
            outcomes = [self._served.outcome(*turn) for turn in turns]
            assert [(each["kind"], each["text"]) for each in outcomes] == [("done", text)] * SESSIONS


def test_more_signals_take_nothing_from_the_next_server(served: Served, tmp_path: Path) -> None:
    work = Work(served, tmp_path)
    id = echo(served)
    assert served.process is not None
    with contextlib.suppress(ProcessLookupError):
        for _ in range(SIGNALS):
            served.process.send_signal(signal.SIGTERM)
            time.sleep(SIGNAL_SECONDS)
    reap(served)
    served.start()
    work.check()
    say(served, id, "still")


def test_client_reads_the_output_of_a_command_across_restarts(served: Served, tmp_path: Path) -> None:
    """The command writes all the time, and the client asks with its last offset until a server answers."""
    go = tmp_path / "go"
    id = served.post("/v1/commands", {"argv": [sys.executable, "-S", "-c", COUNTING, str(go)]})["id"]
    text: list[str] = []
    failures: list[Any] = []
    has_read = threading.Event()

    def read() -> None:
        after, is_end = 0, False
        while not is_end and not failures:
            try:
                answer = served.request("GET", f"/v1/commands/{id}/output?after={after}&wait=60")
            except (OSError, HTTPException):
                continue
            if answer.status == 200 and answer.json["missed"] == 0:
                text.append(answer.json["text"])
                after, is_end = answer.json["next"], answer.json["end"]
                has_read.set()
            elif answer.status != 503:
                failures.append(answer)
                has_read.set()

    client = threading.Thread(target=read)
    client.start()
    try:
        for _ in range(2):
            has_read.clear()
            assert has_read.wait(SECONDS_MAX)
            restart(served)
        go.touch()
    except BaseException as exc:
        failures.append(exc)
        raise
    finally:
        client.join()
    assert failures == []
    lines = "".join(text).splitlines()
    assert lines == [str(number) for number in range(len(lines))]


def test_answer_in_the_middle_of_a_restart_is_given_once(served: Served) -> None:
    """A person answers while the server hands over. The client repeats the answer until a server takes it."""
    script = {"prompt work": ['ask Bash {"command": "ls"}', "say allowed"]}
    turns = [(session := served.open(script), served.ask(session, "work")) for _ in range(SESSIONS)]
    asked = [wait_for(served, session, "question.asked", turn=turn)["body"]["question"] for session, turn in turns]
    refused: list[Answer] = []

    # A client that gives up leaves its question unanswered, which the end of the test finds.
    gives_up = time.monotonic() + RETRY_SECONDS_MAX

    def answer(session: str, question: str) -> None:
        while time.monotonic() < gives_up:
            try:
                path = f"/v1/sessions/{session}/questions/{question}"
                given = served.request("POST", path, {"decision": "allow"})
            except (OSError, HTTPException):
                time.sleep(SIGNAL_SECONDS)
                continue
            if given.status == 200:
                return
            refused.append(given)
            if given.status != 503:
                return
            time.sleep(SIGNAL_SECONDS)

    threads = [
        threading.Thread(target=answer, args=(session, question))
        for (session, _), question in zip(turns, asked, strict=True)
    ]
    assert served.process is not None
    served.process.send_signal(signal.SIGTERM)
    for thread in threads:
        thread.start()
    reap(served)
    served.start()
    for thread in threads:
        thread.join()
    assert {given.status for given in refused} <= {503}, refused
    for (session, turn), question in zip(turns, asked, strict=True):
        assert served.outcome(session, turn)["text"] == "allowed"
        events = served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
        of_question = [event for event in events if event["body"].get("question") == question]
        assert [event["kind"] for event in of_question] == ["question.asked", "question.answered"]
        assert of_question[1]["body"]["answer"] == "allow"


# Kills itself or gets TERM before, in or after its take-over.
EARLY = """
import os, signal, sys
from banksman.server.ops import server_hand_over
take = server_hand_over.take
async def disturbed(*words):
    if sys.argv[1] == "before":
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
    await take(*words)
    if sys.argv[1] == "after":
        os.kill(os.getpid(), getattr(signal, sys.argv[2]))
server_hand_over.take = disturbed
from banksman.cli import main
sys.exit(main(sys.argv[3:]))
"""


@pytest.mark.parametrize("moment", ["before", "after"])
def test_server_that_gets_term_in_its_take_over_hands_over_again(served: Served, tmp_path: Path, moment: str) -> None:
    work = Work(served, tmp_path)
    id = echo(served)
    end(served)
    words = [sys.executable, "-c", EARLY, moment, "SIGTERM", "serve", "--config", str(served.folder / "config.toml")]
    env = {**os.environ, "XDG_STATE_HOME": str(served.folder / "state")}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=SECONDS_MAX, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr
    served.start()
    work.check()
    say(served, id, "still")


def test_server_that_is_killed_before_its_take_over_loses_nothing(served: Served, tmp_path: Path) -> None:
    work = Work(served, tmp_path)
    end(served)
    words = [sys.executable, "-c", EARLY, "before", "SIGKILL", "serve", "--config", str(served.folder / "config.toml")]
    env = {**os.environ, "XDG_STATE_HOME": str(served.folder / "state")}
    done = subprocess.run(words, env=env, capture_output=True, timeout=SECONDS_MAX, check=False)
    assert done.returncode == -signal.SIGKILL
    served.start()
    work.check()
