"""Start and end of a server: signals, drain, its deadline, a second signal, systemd, PID 1, a taken port."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.server.api.test_session_routes import wait_for
from tests.server.kit import TOKEN, Served, port_of, terminate
from tests.thorough import thorough

from banksman.server import http_service as servers
from banksman.server import main as server_main
from banksman.server.graceful_shutdown import GracefulShutdown
from banksman.server.problems import CLOSING_HINT

HANGS = {"prompt work": ["hang"]}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with Served(tmp_path / "server") as served:
        yield served


def ended(served: Served) -> int:
    """Wait for the exit and return its code."""
    assert served.process is not None
    code = served.process.wait(60)
    assert served.process.stdout is not None
    served.process.stdout.close()
    served.process = None
    return code


def log_of(served: Served) -> str:
    return served.log.read_text(encoding="utf-8")


# -- the end ---------------------------------------------------------------------------------------------------------
def test_sigterm_lets_turns_finish_and_refuses_new_work(served: Served, tmp_path: Path) -> None:
    go = tmp_path / "go"
    os.mkfifo(go)
    session = served.open({"prompt work": [f"wait {go}", "say finished"]})
    turn = served.ask(session, "work")
    wait_for(served, session, "turn.started", turn=turn)
    with served.stream(f"/v1/sessions/{session}/events") as stream:
        stream.until_live()
        os.kill(served.pid, signal.SIGTERM)
        late = {"name": "late", "command": ["true"]}
        while (refused := served.request("POST", "/v1/sessions", late)).status != 503:
            assert refused.status == 201  # The server has not received the signal yet.
            assert served.request("DELETE", "/v1/sessions/late?forget=1").status == 204
        assert refused.headers["retry-after"] == "1"
        # For clients of HTTP, which cannot open another Host.
        assert refused.json["hint"] == CLOSING_HINT
        assert served.request("POST", f"/v1/sessions/{session}/turns", {"prompt": "late"}).status in (409, 503)
        # Readers are served to the end.
        assert served.get("/v1/server")["draining"] is True
        go.write_text("now")
        messages = list(stream.messages())
    kinds = [message.data["kind"] for message in messages]
    assert "turn.ended" in kinds
    assert (messages[-1].event, messages[-1].id) == ("stream.closing", None)
    assert ended(served) == 0
    served.start()
    assert served.outcome(session, turn) == {**served.outcome(session, turn), "kind": "done", "text": "finished"}


@pytest.mark.thorough
def test_sigterm_stops_turns_at_the_drain_deadline(tmp_path: Path) -> None:
    with Served(tmp_path / "server", drain_seconds=0.2) as served:
        session = served.open(HANGS)
        turn = served.ask(session, "work")
        wait_for(served, session, "turn.started", turn=turn)
        os.kill(served.pid, signal.SIGTERM)
        assert ended(served) == 0
        served.start()
        assert served.outcome(session, turn)["kind"] in ("interrupted", "failed")


def test_sigterm_repeated_does_not_change_the_exit_code(served: Served) -> None:
    """A service manager may repeat the signal when the server has done everything but exit."""
    assert served.process is not None
    terminate(served.process, 0.005)
    assert ended(served) == 0


async def test_server_never_restores_the_default_action_of_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    actions: list[object] = []
    change = signal.signal

    def recorded(number: int, action: Any) -> object:
        actions.append(action)
        return change(number, action)

    monkeypatch.setattr(signal, "signal", recorded)
    try:
        with server_main._hearing_signals(GracefulShutdown(1.0)):  # pyright: ignore[reportPrivateUsage]
            os.kill(os.getpid(), signal.SIGTERM)
        assert actions[-2:] == [signal.SIG_IGN, signal.SIG_IGN]
        assert signal.SIG_DFL not in actions
    finally:
        for number, action in before.items():
            change(number, action)


@pytest.mark.thorough
def test_second_signal_ends_the_drain_at_once(served: Served) -> None:
    session = served.open(HANGS)
    turn = served.ask(session, "work")
    wait_for(served, session, "turn.started", turn=turn)
    os.kill(served.pid, signal.SIGINT)
    while not served.get("/v1/server")["draining"]:
        pass
    os.kill(served.pid, signal.SIGINT)
    assert ended(served) == 0
    assert "again" in log_of(served)


def test_drain_over_http_ends_the_server_like_a_signal(served: Served) -> None:
    session = served.open(HANGS)
    served.ask(session, "work")
    answer = served.request("POST", "/v1/drain", {"timeout": 0.1})
    assert (answer.status, answer.json) == (202, {"draining": True})
    assert ended(served) == 0


def test_killed_server_leaves_no_process(served: Served, tmp_path: Path) -> None:
    session = served.open(HANGS)
    turn = served.ask(session, "work")
    wait_for(served, session, "turn.started", turn=turn)
    pids = [process["pid"] for process in served.get(f"/v1/sessions/{session}/why")["tree"]]
    command = served.post("/v1/commands", {"argv": ["sleep", "1000"]})
    served.kill()
    # The keepers end the trees before the next host gets the session.
    served.start()
    served.outcome(session, turn)
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert command["pid"]


# -- the beginning ---------------------------------------------------------------------------------------------------
@pytest.mark.thorough
def test_serve_on_a_taken_port_says_what_to_do(served: Served, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "banksman", "serve", "--port", str(served.port), "--store", f"sqlite:{tmp_path / 's'}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert f"cannot listen at 127.0.0.1:{served.port}: the address is in use" in done.stderr
    assert "--port" in done.stderr
    assert "Traceback" not in done.stderr


def test_serve_announces_itself_and_keeps_a_private_token(tmp_path: Path) -> None:
    with Served(tmp_path / "server", token=None) as served:
        folder = tmp_path / "server" / "state" / "banksman"
        assert json.loads((folder / "server.json").read_text())["url"] == served.url
        assert (folder / "token").stat().st_mode & 0o777 == 0o600
        token = (folder / "token").read_text().strip()
        headers = {"Authorization": f"Bearer {token}"}
        assert served.request("GET", "/v1/server", headers=headers, token=False).status == 200
        served.stop()
        assert not (folder / "server.json").exists()
        served.start()
        assert (folder / "token").read_text().strip() == token


@pytest.mark.thorough
def test_serve_prints_a_one_time_code_but_not_into_a_journal(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "banksman", "serve", "--port", "0", "--store", "memory:"]
    for is_journal in (False, True):
        out = tmp_path / f"out-{is_journal}"
        with out.open("wb") as file:
            stat = os.fstat(file.fileno())
            journal = {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"} if is_journal else {}
            with _Notified(tmp_path / f"n-{is_journal}") as notified:
                process = subprocess.Popen(
                    argv, stdout=file, stderr=subprocess.DEVNULL, env={**os.environ, **journal, **notified.env}
                )
                try:
                    assert "READY=1" in notified.next()
                finally:
                    process.terminate()
                    assert process.wait(60) == 0
        line = out.read_text()
        url = urlsplit(line[line.index("http://") :].strip())
        assert url.query == ""
        assert url.fragment.startswith("code=") is not is_journal


class _Notified:
    """A service manager's end of the socket."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.env = {"NOTIFY_SOCKET": str(path)}

    def __enter__(self) -> _Notified:
        self._socket.bind(str(self._path))
        self._socket.settimeout(60)
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def next(self) -> list[str]:
        return self._socket.recv(4096).decode().splitlines()


def test_serve_under_systemd_sends_ready_watchdog_and_stopping(tmp_path: Path) -> None:
    with _Notified(tmp_path / "notify") as notified:
        env = {**os.environ, **notified.env, "WATCHDOG_USEC": "100000"}
        argv = [sys.executable, "-m", "banksman", "serve", "--port", "0", "--store", "memory:"]
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
        try:
            assert "READY=1" in notified.next()
            assert [notified.next() for _ in range(3)] == [["WATCHDOG=1"]] * 3
        finally:
            process.terminate()
        told = iter(notified.next, ["STOPPING=1"])
        assert all(line == ["WATCHDOG=1"] for line in told)
        assert process.wait(60) == 0


def test_sigusr1_dumps_tasks_of_the_server(served: Served) -> None:
    with served.stream("/v1/events") as stream:
        stream.until_live()
        os.kill(served.pid, signal.SIGUSR1)
        while "follower.py" not in log_of(served):
            served.get("/healthz")
    stacks = served.get("/v1/stacks")
    assert any("main.py" in place for task in stacks["tasks"] for place in task["stack"])
    assert any(thread["name"] == "MainThread" for thread in stacks["threads"])


@thorough
def test_serve_runs_as_process_1_of_a_container(tmp_path: Path) -> None:
    """PID 1 ignores signals without a handler, and must reap every orphan."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("a namespace of processes needs root")
    argv = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    argv += [sys.executable, "-m", "banksman", "serve", "--port", "0", "--store", "memory:", "--token", TOKEN]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    served = Served(tmp_path / "client")
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        served.port = port_of(line)
        assert served.get("/v1/server")["pid"] == 1
        # The command leaves an orphan that no process in the tree waits for.
        command = served.post("/v1/commands", {"argv": ["sh", "-c", "setsid sh -c 'exit 3' & exit 0"]})
        done = served.get(f"/v1/commands/{command['id']}?wait=30")["finished"]
        assert (done["ended"], done["code"], done["survivors"]) == ("exited", 0, [])
        listed = served.post("/v1/commands", {"argv": ["sh", "-c", "grep -l '^State:.Z' /proc/[0-9]*/status; true"]})
        served.get(f"/v1/commands/{listed['id']}?wait=30")
        assert served.get(f"/v1/commands/{listed['id']}/output")["text"] == ""
        assert served.post("/v1/drain", {"timeout": 5}) == {"draining": True}
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.thorough
def test_shutdown_is_bounded_with_a_client_that_reads_nothing(tmp_path: Path) -> None:
    """CLOSE_SECONDS_MAX bounds the shutdown, not the client. Half a minute is a generous deadline."""
    with Served(tmp_path / "server") as served:
        session = served.open({"prompt work": ["flood 2000 4000"]})
        with socket.create_connection(("127.0.0.1", served.port)) as peer:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            head = f"GET /v1/events HTTP/1.1\r\nHost: 127.0.0.1:{served.port}\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
            peer.sendall(head.encode())
            served.outcome(session, served.ask(session, "work"))
            os.kill(served.pid, signal.SIGTERM)
            assert served.process is not None
            assert served.process.wait(servers.CLOSE_SECONDS_MAX + 28) == 0
        ended(served)


@thorough
def test_shutdown_sends_closing_to_fifty_streams(served: Served) -> None:
    told: list[str | None] = []
    started = threading.Barrier(51)

    def follow() -> None:
        with served.stream("/v1/events") as stream:
            stream.until_live()
            started.wait()
            told.append([message.event for message in stream.messages()][-1])

    threads = [threading.Thread(target=follow) for _ in range(50)]
    for thread in threads:
        thread.start()
    started.wait()
    os.kill(served.pid, signal.SIGTERM)
    for thread in threads:
        thread.join()
    assert told == ["stream.closing"] * 50
    assert ended(served) == 0


def test_serve_warns_about_an_unknown_variable(tmp_path: Path) -> None:
    with Served(tmp_path / "server", variables={"BANKSMAN_PORT": "1", "BANKSMAN_NOPE": "1"}) as served:
        told = served.log.read_text(encoding="utf-8")
    assert "unknown variable BANKSMAN_PORT; did you mean BANKSMAN_SERVE_PORT?" in told
    assert "unknown variable BANKSMAN_NOPE; see docs/reference/configuration.md for all keys" in told
