"""Clients of the user's socket that belong to an agent are refused. Real servers, agents and sockets."""

from __future__ import annotations

import errno
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from starlette.datastructures import Headers
from tests.server.kit import SECONDS_MAX, Served

from banksman import Host, sockets
from banksman.process.keeper.proc_tree import read_stat
from banksman.server.http import peer_identity
from banksman.server.http.auth import AuthMiddleware
from banksman.server.http.connection import Connection
from banksman.server.problems import Problem

# Connects to the socket `argv[1]` as a descendant of kind `argv[2]`, and writes the answer to the file `argv[3]`.
KNOCK = """
import os, socket, sys
path, kind, answer = sys.argv[1:4]
if kind == "daemon":
    if os.fork():
        os._exit(0)
    os.setsid()
    if os.fork():
        os._exit(0)
    os.environ.clear()
os.chdir(os.path.dirname(path))
with socket.socket(socket.AF_UNIX) as peer:
    peer.connect(os.path.basename(path))
    peer.sendall(b"GET /v1/server HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
    heard = b""
    while data := peer.recv(65536):
        heard += data
with open(answer, "wb") as file:
    file.write(heard)
"""
# Starts a server, and then connects to it.
SERVES = """
import json, os, subprocess, sys
knock, state, answer = sys.argv[1:4]
env = {**os.environ, "XDG_STATE_HOME": state}
words = [sys.executable, "-m", "banksman", "serve", "--port", "0", "--store", "memory:"]
with subprocess.Popen(words, stdout=subprocess.PIPE, env=env) as server:
    server.stdout.readline()
    path = json.load(open(os.path.join(state, "banksman", "server.json")))["socket"]
    subprocess.run([sys.executable, "-c", knock, path, "plain", answer], check=True)
    server.terminate()
"""
# Connects, passes the connection on, and exits.
LEAVES = """
import os, socket, sys
os.chdir(os.path.dirname(sys.argv[1]))
with socket.socket(socket.AF_UNIX) as peer, socket.socket(fileno=0) as receiver:
    peer.connect(os.path.basename(sys.argv[1]))
    socket.send_fds(receiver, [b"x"], [peer.fileno()])
"""


def socket_of(served: Served) -> str:
    return json.loads((served.folder / "state" / "banksman" / "server.json").read_text())["socket"]


def knocks(served: Served, kind: str, answer: Path) -> list[str]:
    return [sys.executable, "-c", KNOCK, socket_of(served), kind, str(answer)]


def pipe(tmp_path: Path) -> Path:
    """Return a FIFO. A reader blocks until the other side has written and gone, so no test polls."""
    path = tmp_path / "answer"
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("kind", ["plain", "daemon"])
def test_agent_of_this_server_is_refused(served: Served, tmp_path: Path, kind: str) -> None:
    answer = pipe(tmp_path)
    session = served.post("/v1/sessions", {"agent": "custom", "command": knocks(served, kind, answer)})["id"]
    served.ask(session, "Answer your own question.")
    heard = answer.read_text()
    assert heard.startswith("HTTP/1.1 403 ")
    assert "AgentNotLetIn" in heard


def test_command_of_this_server_is_refused_with_a_clear_error(served: Served) -> None:
    command = served.post("/v1/commands", {"argv": [sys.executable, "-m", "banksman", "ps"]})["id"]
    shown = served.get(f"/v1/commands/{command}?wait=60")
    said = served.get(f"/v1/commands/{command}/output?stream=stderr")
    assert shown["finished"]["code"] == 4
    assert "belongs to an agent, or to a command of this server" in json.dumps(said)


async def test_agent_of_another_host_is_refused(served: Served, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    async with Host("memory:") as host:
        session = await host.open("custom", command=knocks(served, "plain", answer))
        await (await session.ask("Answer another's question.")).outcome()
    assert answer.read_text().startswith("HTTP/1.1 403 ")


def test_command_started_by_a_person_is_let_in(served: Served, tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    words = [sys.executable, "-m", "banksman", "exec", "--", *knocks(served, "plain", answer)]
    subprocess.run(words, check=True, timeout=SECONDS_MAX)
    assert answer.read_text().startswith("HTTP/1.1 200 ")


@pytest.mark.thorough
async def test_server_started_by_an_agent_lets_that_agent_in(tmp_path: Path) -> None:
    answer = tmp_path / "answer"
    words = [sys.executable, "-c", SERVES, KNOCK, str(tmp_path / "state"), str(answer)]
    async with Host("memory:") as host:
        session = await host.open("custom", command=words)
        await (await session.ask("Run the tests of a server.")).outcome()
    assert answer.read_text().startswith("HTTP/1.1 200 ")


def test_client_gone_before_it_is_accepted_is_refused(served: Served) -> None:
    """Another process may have its pid by then."""
    ours, theirs = socket.socketpair()
    os.kill(served.pid, signal.SIGSTOP)
    try:
        words = [sys.executable, "-c", LEAVES, socket_of(served)]
        subprocess.run(words, stdin=theirs.fileno(), check=True, timeout=SECONDS_MAX)
    finally:
        os.kill(served.pid, signal.SIGCONT)
    with ours, theirs:
        _, (fd,), _, _ = socket.recv_fds(ours, 1, 1)
    connection = http.client.HTTPConnection("localhost", timeout=SECONDS_MAX)
    connection.sock = socket.socket(fileno=fd)
    connection.request("GET", "/v1/server")
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())["title"]) == (403, "NotLetIn")
    connection.close()


def test_ancestor_walk_ends_at_a_process_hidden_by_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `hidepid`, the processes of other users are invisible: root may own the parent of the shell."""
    parent = os.getppid()

    def read(pid: int) -> tuple[int, str, int] | None:
        return None if pid == parent else read_stat(pid)

    monkeypatch.setattr(peer_identity, "read_stat", read)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert sockets.peer_pid(ours) == os.getpid()
        assert peer_identity.standing_of(ours) is peer_identity.PeerIdentity.FREE


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EACCES])
@pytest.mark.parametrize("reader", ["read_proc", "read_stat"])
def test_client_with_unreadable_ancestors_is_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, number: int, reader: str
) -> None:
    """The server cannot read the name of a keeper then, and must not treat it as another program."""

    def fails(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(peer_identity, reader, fails)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        standing = peer_identity.standing_of(ours)
    expected = peer_identity.PeerIdentity.UNCLEAR if number == errno.EACCES else peer_identity.PeerIdentity.NO_FDS
    assert standing is expected
    connection = cast("Connection", SimpleNamespace(uid=os.getuid(), standing=standing))
    with pytest.raises(Problem) as caught:
        AuthMiddleware._admit_local(connection, Headers())  # pyright: ignore[reportPrivateUsage]
    problem = caught.value
    assert (problem.status, problem.title) == (403, "NotLetIn")
    words = {
        peer_identity.PeerIdentity.NO_FDS: ("cannot identify the client process: Too many open files", "ulimit -n"),
        peer_identity.PeerIdentity.UNCLEAR: ("it is gone, or in another container", "the URL of the server"),
    }[standing]
    assert words[0] in problem.detail
    assert words[1] in problem.hint


def test_ancestor_that_is_unreadable_once_for_lack_of_fds_does_not_count_as_hidden(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = os.getppid()

    def read(pid: int) -> tuple[int, str, int] | None:
        if pid == parent:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return read_stat(pid)

    monkeypatch.setattr(peer_identity, "read_stat", read)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert peer_identity.standing_of(ours) is peer_identity.PeerIdentity.NO_FDS
