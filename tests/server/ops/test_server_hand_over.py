"""A planned restart: the next server continues what runs, and no client is refused in between."""

from __future__ import annotations

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import wait_until
from tests.server import passing
from tests.server.api.test_session_routes import wait_for
from tests.server.kit import AT_THE_END_SECONDS, TOKEN, Served

from banksman.folders import held_folder
from banksman.process import hold_record
from banksman.server.ops.server_hand_over import LOOK_SECONDS

LINES = 3_000
# Longer than any test: the start of the next server may take a while.
HOLD_SECONDS = 3000.0
# Writes lines, then a line for each line that it reads, and what it reads at the end of its input.
ECHO = f"""
import sys
for number in range({LINES}):
    print("line", number)
print("ready", flush=True)
for line in sys.stdin:
    print("heard", line.strip(), flush=True)
print("end", flush=True)
sys.exit(7)
"""
START = "".join(f"line {number}\n" for number in range(LINES)) + "ready\n"


@contextlib.contextmanager
def serving(folder: Path, **more: Any) -> Generator[Served]:
    """Run a server that hands over at each TERM. Its last end is a drain: nothing is held after it."""
    settings: dict[str, Any] = {"hand_over": True, "hold_seconds": HOLD_SECONDS, **more}
    with Served(folder, **settings) as served:
        yield served
        if served.process is None:
            served.start()
        served.post("/v1/drain", {"timeout": AT_THE_END_SECONDS})
        reap(served)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "server") as served:
        yield served


def restart(served: Served) -> None:
    """Restart as a service manager does: TERM, and the next server after the exit."""
    end(served)
    served.start()


def end(served: Served) -> None:
    os.kill(served.pid, signal.SIGTERM)
    reap(served)


def reap(served: Served) -> None:
    """Wait until the server has ended by itself."""
    assert served.process is not None
    assert served.process.stdout is not None
    assert served.process.wait(60) == 0, served.log.read_text(encoding="utf-8")
    served.process.stdout.close()
    served.process = None


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def echo(served: Served, **more: Any) -> str:
    """Start the command that echoes, and wait until it does. Return its id."""
    body = {"argv": [sys.executable, "-S", "-c", ECHO], "stdin": "pipe", "output_bytes_max": 4096, **more}
    id = served.post("/v1/commands", body)["id"]
    assert served.get(f"/v1/commands/{id}/watch?pattern=ready&wait=60")["matched"]
    return id


def say(served: Served, id: str, word: str) -> None:
    served.post(f"/v1/commands/{id}/stdin", {"text": f"{word}\n"})
    assert served.get(f"/v1/commands/{id}/watch?pattern=heard+{word}&wait=60")["matched"]


def output(served: Served, id: str) -> str:
    """Read the whole output of a command from its first byte. Nothing is missing."""
    text, after, is_end = "", 0, False
    while not is_end:
        piece = served.get(f"/v1/commands/{id}/output?after={after}&wait=60")
        assert piece["missed"] == 0
        text, after, is_end = text + piece["text"], piece["next"], piece["end"]
    return text


def test_command_continues_in_the_next_server(served: Served) -> None:
    id = echo(served)
    pid = served.get(f"/v1/commands/{id}")["pid"]
    for number in range(2):
        say(served, id, f"before-{number}")
        restart(served)
        shown = served.get(f"/v1/commands/{id}")
        assert (shown["state"], shown["pid"]) == ("running", pid)
        say(served, id, f"after-{number}")
    served.post(f"/v1/commands/{id}/stdin", {"end": True})
    (ended,) = served.post("/v1/commands/ended", {"wait": 60})["commands"]
    assert (ended["id"], ended["finished"]["code"], ended["finished"]["ended"]) == (id, 7, "exited")
    said = "".join(f"heard {when}-{number}\n" for number in range(2) for when in ("before", "after"))
    assert output(served, id) == f"{START}{said}end\n"
    assert hold_record_names(served) == []


def hold_record_names(served: Served) -> list[str]:
    folder = served.folder / "state" / "banksman" / held_folder().name
    return [path.name for path in folder.iterdir() if path.suffix == hold_record.SUFFIX]


@pytest.mark.thorough
def test_command_that_exits_while_it_is_held_keeps_its_result(served: Served, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    code = f"print('begin', flush=True); open({str(go)!r}).read(); print('late'); raise SystemExit(5)"
    id = served.post("/v1/commands", {"argv": [sys.executable, "-S", "-c", code]})["id"]
    pid = served.get(f"/v1/commands/{id}/watch?pattern=begin&wait=60") and served.get(f"/v1/commands/{id}")["pid"]
    end(served)
    assert is_there(pid)
    go.write_text("now")
    wait_until(lambda: not is_there(pid), "the end of the command")
    served.start()
    done = served.get(f"/v1/commands/{id}?wait=60")["finished"]
    assert (done["code"], done["survivors"]) == (5, [])
    assert output(served, id) == "begin\nlate\n"


@pytest.mark.thorough
def test_command_is_stopped_by_the_next_server(served: Served) -> None:
    id = echo(served, grace=0.1)
    restart(served)
    done = served.post(f"/v1/commands/{id}/stop", {})["finished"]
    assert (done["ended"], done["survivors"]) == ("stopped", [])
    # Its end was reported by the stop.
    assert served.post("/v1/commands/ended", {"wait": 0})["commands"] == []


@pytest.mark.thorough
def test_command_without_a_next_server_ends_after_the_hold(tmp_path: Path) -> None:
    with Served(tmp_path / "server", hand_over=True, hold_seconds=0.3) as served:
        pid = served.get(f"/v1/commands/{echo(served)}")["pid"]
        end(served)
        wait_until(lambda: not is_there(pid), "the end of the command")
        served.start()
        assert served.get("/v1/commands")["commands"] == []


@pytest.mark.thorough
def test_server_of_another_store_leaves_the_commands_alone(served: Served, tmp_path: Path) -> None:
    id = echo(served)
    end(served)
    # The same user, with the same state folder.
    variables = {"XDG_STATE_HOME": str(served.folder / "state")}
    store = f"sqlite:{tmp_path / 'other.db'}"
    with serving(served.folder, variables=variables, store=store) as other:
        assert other.get("/v1/commands")["commands"] == []
    served.start()
    say(served, id, "still")


@pytest.mark.thorough
def test_command_is_not_taken_over_from_an_unknown_version(served: Served) -> None:
    id = echo(served)
    end(served)
    folder = served.folder / "state" / "banksman" / held_folder().name
    (record,) = folder.glob(f"*{hold_record.SUFFIX}")
    known = record.read_bytes()
    record.write_bytes(known.replace(b"banksman-command-1\n", b"banksman-command-99\n", 1))
    served.start()
    assert served.request("GET", f"/v1/commands/{id}").status == 404
    assert "cannot take over a command" in served.log.read_text(encoding="utf-8")
    end(served)
    # The hold continues, and the right version gets the command.
    record.write_bytes(known)
    served.start()
    say(served, id, "still")


@pytest.mark.thorough
def test_drain_with_hand_over_keeps_commands_and_without_ends_them(served: Served) -> None:
    id = echo(served)
    assert served.post("/v1/drain", {"hand_over": True, "hold_seconds": 2000}) == {"draining": True}
    reap(served)
    served.start()
    say(served, id, "still")
    served.post("/v1/drain", {"timeout": 0.1})
    reap(served)
    served.start()
    assert served.request("GET", f"/v1/commands/{id}").status == 404


def test_hand_over_that_is_impossible_is_refused(tmp_path: Path) -> None:
    with Served(tmp_path / "server", store="memory:", hand_over=True) as served:
        answer = served.request("POST", "/v1/drain", {"hand_over": True})
        assert (answer.status, answer.json["detail"]) == (422, "cannot hand over: the store is in memory")
        assert served.get("/v1/server")["draining"] is False
        assert "the server drains when it gets TERM" in served.log.read_text(encoding="utf-8")


@pytest.mark.thorough
def test_waiting_asks_are_kept_for_the_next_server(tmp_path: Path) -> None:
    with Served(tmp_path / "server") as served:
        go = tmp_path / "go"
        os.mkfifo(go)
        session = served.open({"prompt first": [f"wait {go}", "say one"], "prompt second": ["say two"]})
        first = served.ask(session, "first")
        wait_for(served, session, "turn.started", turn=first)
        second = served.ask(session, "second")
        os.kill(served.pid, signal.SIGTERM)
        while not served.get("/v1/server")["draining"]:
            pass
        go.write_text("now")
        reap(served)
        served.start()
        assert served.outcome(session, first)["text"] == "one"
        assert (served.outcome(session, second)["kind"], served.outcome(session, second)["text"]) == ("done", "two")


class Count:
    """A number that one thread raises, and another one waits for."""

    def __init__(self) -> None:
        self._number = 0

    def add(self) -> None:
        self._number += 1

    def wait_more(self) -> None:
        before = self._number
        wait_until(lambda: self._number > before, "more answers")


def test_restart_behind_a_passed_socket_refuses_no_connection(tmp_path: Path) -> None:
    with passing.tcp() as listener, serving(tmp_path / "server", listeners=[listener]) as served:
        assert served.port == listener.getsockname()[1]
        answers = Count()
        failures: list[str] = []
        is_over = threading.Event()

        def connect() -> None:
            while not is_over.is_set():
                connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=60)
                try:
                    connection.connect()
                except OSError as exc:
                    failures.append(repr(exc))
                    continue
                try:
                    connection.request("GET", "/v1/server", headers={"Authorization": f"Bearer {TOKEN}"})
                    connection.getresponse().read()
                    answers.add()
                except (OSError, http.client.HTTPException):
                    pass  # The old server has accepted the connection, and ends.
                finally:
                    connection.close()

        client = threading.Thread(target=connect)
        client.start()
        try:
            for _ in range(2):
                answers.wait_more()
                restart(served)
            answers.wait_more()
        finally:
            is_over.set()
            client.join()
        assert failures == []


@pytest.mark.thorough
def test_passed_user_socket_serves_the_user_and_stays(tmp_path: Path) -> None:
    path = tmp_path / "user.sock"
    with passing.tcp() as listener, passing.unix(path) as user:
        with serving(tmp_path / "server", listeners=[listener, user]) as served:
            for _ in range(2):
                with socket.socket(socket.AF_UNIX) as peer:
                    peer.connect(str(path))
                    peer.sendall(b"GET /v1/server HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    assert peer.recv(12) == b"HTTP/1.1 200"
                restart(served)
        assert path.exists()


def test_passed_variables_reach_no_command(tmp_path: Path) -> None:
    with passing.tcp() as listener, Served(tmp_path / "server", listeners=[listener]) as served:
        id = served.post("/v1/commands", {"argv": ["sh", "-c", "env; ls -l /proc/$$/fd"]})["id"]
        served.get(f"/v1/commands/{id}?wait=60")
        text = output(served, id)
        assert "LISTEN_" not in text
        assert "PATH=" in text
        inode = os.fstat(listener.fileno()).st_ino
        assert f"socket:[{inode}]" not in text


# -- sessions --------------------------------------------------------------------------------------------------------
def test_turn_continues_in_the_next_server_and_its_stream_by_cursor(served: Served, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    session = served.open(
        {"prompt work": ["say one", f"wait {go}", "say two"], **{f"prompt {n}": [f"say done {n}"] for n in range(3)}}
    )
    turn = served.ask(session, "work")
    wait_for(served, session, "turn.started", turn=turn)
    waiting = [served.ask(session, str(number)) for number in range(3)]
    pids = processes(served, session)
    seen: list[Any] = []
    with served.stream(f"/v1/sessions/{session}/events") as stream:
        stream.until_live()
        os.kill(served.pid, signal.SIGTERM)
        seen.extend(stream.messages())
    assert seen[-1].event == "stream.closing"
    reap(served)
    served.start()
    assert processes(served, session) == pids
    go.write_text("now")
    outcome = served.outcome(session, turn)
    assert (outcome["kind"], outcome["text"]) == ("done", "two")
    for number, ask in enumerate(waiting):
        assert (served.outcome(session, ask)["kind"], served.outcome(session, ask)["text"]) == (
            "done",
            f"done {number}",
        )
    events = served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    ends = [event["turn"] for event in events if event["kind"] == "turn.ended"]
    assert sorted(ends) == sorted([turn, *waiting])


# The import of the HTTP part, and the start of the HTTP server.
BROKEN = {
    "import": "sys.modules['uvicorn.config'] = None",
    "start": "import banksman.server.http_service as it; it.HttpServer.start = lambda _: 1 / 0",
}


@pytest.mark.thorough
@pytest.mark.parametrize("broken", BROKEN)
def test_version_whose_http_part_cannot_start_leaves_everything_for_the_next_one(
    served: Served, tmp_path: Path, broken: str
) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    session = served.open({"prompt work": ["say one", f"wait {go}", "say two"], "prompt next": ["say three"]})
    turns = [served.ask(session, "work"), served.ask(session, "next")]
    wait_for(served, session, "turn.started", turn=turns[0])
    id = echo(served)
    pids = processes(served, session)
    end(served)
    code = f"import sys; {BROKEN[broken]}; from banksman.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "serve", "--config", str(served.folder / "config.toml")]
    env = {**os.environ, "XDG_STATE_HOME": str(served.folder / "state")}
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode != 0
    assert "cannot start: handing over, the next server has 3000 s" in done.stderr
    served.start()
    assert processes(served, session) == pids
    say(served, id, "still")
    go.write_text("now")
    assert [served.outcome(session, turn)["text"] for turn in turns] == ["two", "three"]
    events = served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
    # The broken one had it, too.
    assert [event["kind"] for event in events].count("process.adopted") == 2


def processes(served: Served, session: str) -> list[int]:
    return [process["pid"] for process in served.get(f"/v1/sessions/{session}/why")["tree"]]


@pytest.mark.thorough
def test_server_that_runs_already_takes_over(served: Served, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    session = served.open({"prompt work": [f"wait {go}", "say two"]})
    turn = served.ask(session, "work")
    wait_for(served, session, "turn.started", turn=turn)
    id = echo(served)
    with serving(served.folder, store=served.settings["store"]) as other:
        end(served)
        # No request claims the session: reading its events does not.
        wait_until(lambda: is_adopted(other, session), "the take-over of the session")
        wait_until(lambda: other.request("GET", f"/v1/commands/{id}").status == 200, "the take-over of the command")
        say(other, id, "still")
        go.write_text("now")
        assert other.outcome(session, turn)["text"] == "two"


@pytest.mark.thorough
def test_server_that_runs_already_takes_over_from_a_killed_one(tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    with serving(tmp_path / "server", survive="crash") as killed:
        session = killed.open({"prompt work": ["say one", f"wait {go}", "say two"]})
        turn = killed.ask(session, "work")
        wait_until(lambda: "update" in kinds_of(killed, session), "the first words")
        with serving(killed.folder, store=killed.settings["store"], survive="crash") as other:
            # The record is not new for this server when its host dies.
            time.sleep(2 * LOOK_SECONDS)
            killed.kill()
            wait_until(lambda: is_adopted(other, session), "the take-over of the session")
            go.write_text("now")
            assert other.outcome(session, turn)["text"] == "two"


def is_adopted(served: Served, session: str) -> bool:
    return "process.adopted" in kinds_of(served, session)


def kinds_of(served: Served, session: str) -> set[str]:
    return {event["kind"] for event in served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]}


def test_question_that_is_open_is_answered_on_the_next_server(served: Served) -> None:
    session = served.open({"prompt work": ['ask Bash {"command": "ls"}', "say allowed"]})
    turn = served.ask(session, "work")
    event = wait_for(served, session, "question.asked", turn=turn)
    question = event["body"]["question"]
    restart(served)
    served.post(f"/v1/sessions/{session}/questions/{question}", {"decision": "allow"})
    assert served.outcome(session, turn)["text"] == "allowed"
