"""Socket of a server's user: admission, location and removal, with real sockets and users."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import SECONDS_MAX, TOKEN, Answer, Served

from banksman import sockets
from banksman.errors import UsageError

NOBODY = 65534
# Connects to a socket as a user, and prints the answer of the kernel or of the server.
KNOCK = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as peer:
    try:
        peer.connect(sys.argv[1])
        peer.sendall(b"GET /v1/server HTTP/1.1\\r\\nHost: localhost\\r\\nConnection: close\\r\\n\\r\\n")
        print(peer.recv(12).decode())
    except OSError as exc:
        print(type(exc).__name__)
"""
LISTENS = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
with socket.socket(socket.AF_UNIX) as listener:
    listener.bind(sys.argv[1])
    listener.listen()
    print("listens", flush=True)
    sys.stdin.read()
"""
# Listens in a folder until it is killed.
DIES = """
import os, signal, sys
from pathlib import Path
from banksman import sockets
_, path = sockets.listen_in(Path(sys.argv[1]))
print(path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def folder_of(served: Served) -> Path:
    return served.folder / "state" / "banksman"


def socket_of(served: Served) -> Path:
    return Path(json.loads((folder_of(served) / "server.json").read_text())["socket"])


def ask(path: Path, method: str, target: str, *, headers: Mapping[str, str] | None = None) -> Answer:
    connection = http.client.HTTPConnection("localhost", timeout=SECONDS_MAX)
    connection.sock = sockets.connect(path, SECONDS_MAX)
    with contextlib.closing(connection):
        connection.request(method, target, headers=dict(headers or {}))
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())


def knock(path: Path, uid: int) -> str:
    done = subprocess.run(
        [sys.executable, "-c", KNOCK, str(path), str(uid)], capture_output=True, text=True, check=True, timeout=60
    )
    return done.stdout.strip()


def leave_dead(folder: Path) -> Path:
    """Return a socket whose process was killed."""
    done = subprocess.run(
        [sys.executable, "-c", DIES, str(folder)], stdout=subprocess.PIPE, text=True, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    path = Path(done.stdout.strip())
    assert path.exists()
    return path


# -- admission --------------------------------------------------------------------------------------------------------
def test_user_socket_admits_its_user_without_a_token(served: Served) -> None:
    path = socket_of(served)
    answer = ask(path, "GET", "/v1/server")
    assert (answer.status, answer.json["pid"]) == (200, served.pid)
    # The server ignores a token and a Host header here: the socket itself admits the client.
    assert ask(path, "GET", "/v1/server", headers={"Authorization": "Bearer wrong", "Host": "x.example"}).status == 200
    # The socket makes the difference, not the request.
    assert served.request("GET", "/v1/server", token=False).status == 401


@pytest.mark.thorough
@pytest.mark.parametrize(
    "header",
    [
        {"Origin": "http://localhost"},
        {"Origin": "null"},
        {"Cookie": "a=b"},
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Mode": "cors"},
        {"Forwarded": "for=10.0.0.1"},
        {"X-Forwarded-For": "10.0.0.1"},
        {"Via": "1.1 proxy"},
    ],
)
def test_user_socket_refuses_a_browser_behind_a_proxy(served: Served, header: dict[str, str]) -> None:
    """Whatever else the request carries: the token is for the URL."""
    for more in ({}, {"Authorization": f"Bearer {TOKEN}"}):
        answer = ask(socket_of(served), "GET", "/v1/server", headers={**header, **more})
        assert (answer.status, answer.json["title"]) == (403, "ForeignOrigin")


@pytest.fixture
def passable() -> Iterator[Served]:
    """A server whose folders every user may enter, except the one that is private on purpose."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    with tempfile.TemporaryDirectory() as name, Served(Path(name) / "s") as served:
        for folder in (Path(name), served.folder, served.folder / "state", folder_of(served)):
            os.chmod(folder, 0o755)
        yield served


def test_user_socket_refuses_another_user_even_when_opened_to_all(passable: Served) -> None:
    path = socket_of(passable)
    assert knock(path, 0) == "HTTP/1.1 200"
    assert knock(path, NOBODY) == "PermissionError"
    # With the folder open, the mode of the socket still refuses them.
    os.chmod(path.parent, 0o755)
    assert knock(path, NOBODY) == "PermissionError"
    # The socket is open to all by mistake. The kernel still reports the user of the client.
    os.chmod(path, 0o666)
    assert knock(path, NOBODY) == "HTTP/1.1 403"


def test_client_refuses_a_socket_of_another_user() -> None:
    """A client has something to protect too: its request."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        path = Path(folder) / "a.sock"
        words = [sys.executable, "-c", LISTENS, str(path), str(NOBODY)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
            assert other.stdout is not None
            assert other.stdout.readline() == "listens\n"
            with pytest.raises(PermissionError, match=f"the server belongs to user {NOBODY}"):
                sockets.connect(path, 1.0)
            other.communicate("", timeout=60)


# -- location ---------------------------------------------------------------------------------------------------------
def test_user_socket_and_its_folder_are_private(served: Served) -> None:
    path = socket_of(served)
    assert stat.S_ISSOCK(path.stat().st_mode)
    assert (stat.S_IMODE(path.stat().st_mode), stat.S_IMODE(path.parent.stat().st_mode)) == (0o600, 0o700)


@pytest.mark.parametrize("umask", [0o000, 0o777])
def test_user_socket_mode_ignores_the_umask(tmp_path: Path, umask: int) -> None:
    (tmp_path / "sockets").mkdir(0o700)
    before = os.umask(umask)
    try:
        listener, path = sockets.listen_in(tmp_path / "sockets")
    finally:
        os.umask(before)
    with listener:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    sockets.remove(path)


@pytest.mark.thorough
def test_user_socket_works_in_a_path_longer_than_an_address(tmp_path: Path) -> None:
    deep = tmp_path / ("a" * 100) / ("b" * 100)
    deep.mkdir(parents=True)
    with Served(deep) as served:
        path = socket_of(served)
        assert len(str(path)) > 250
        assert ask(path, "GET", "/v1/server").json["pid"] == served.pid
        done = verb(served, "ps", "--json")
        assert (done.returncode, json.loads(done.stdout)["sessions"]) == (0, []), done
    assert not path.exists()


@pytest.mark.thorough
def test_two_servers_have_separate_user_sockets(tmp_path: Path) -> None:
    with Served(tmp_path / "one") as one:
        first = socket_of(one)
        # The same state folder, and another port.
        with Served(tmp_path / "one", store=f"sqlite:{tmp_path / 'two.db'}", port=0) as two:
            found = sorted(first.parent.iterdir())
            assert len(found) == 2
            assert first in found
            [second] = [path for path in found if path != first]
            assert ask(first, "GET", "/v1/server").json["pid"] == one.pid
            assert ask(second, "GET", "/v1/server").json["pid"] == two.pid
            # Clients keep their socket.
            assert socket_of(one) == first
        assert list(first.parent.iterdir()) == [first]


def test_server_without_a_socket_folder_serves_and_warns_once(tmp_path: Path) -> None:
    folder = tmp_path / "server" / "state" / "banksman"
    folder.mkdir(parents=True, mode=0o700)
    (folder / "sockets").write_text("no folder")
    with Served(tmp_path / "server") as served:
        assert served.get("/v1/sessions") == {"sessions": [], "next": None}
        assert "socket" not in json.loads((folder / "server.json").read_text())
        assert served.log.read_text().count("cannot create the user socket") == 1
        # Verbs then find the server by its URL.
        done = verb(served, "ps", "--json", BANKSMAN_TOKEN=TOKEN)
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("mode", [0o770, 0o707])
def test_user_socket_folder_writable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "sockets").mkdir()
    os.chmod(tmp_path / "sockets", mode)
    with pytest.raises(UsageError, match="other users may change its content"):
        sockets.listen_in(tmp_path / "sockets")
    assert list((tmp_path / "sockets").iterdir()) == []


def test_user_socket_folder_readable_by_others_is_made_private(tmp_path: Path) -> None:
    (tmp_path / "sockets").mkdir(0o755)
    listener, path = sockets.listen_in(tmp_path / "sockets")
    listener.close()
    sockets.remove(path)
    assert stat.S_IMODE((tmp_path / "sockets").stat().st_mode) == 0o700


# -- removal ----------------------------------------------------------------------------------------------------------
def test_sigterm_removes_the_user_socket(fresh: Served) -> None:
    path = socket_of(fresh)
    assert fresh.process is not None
    fresh.process.send_signal(signal.SIGTERM)
    assert fresh.process.wait(SECONDS_MAX) == 0
    assert not path.exists()
    assert list(path.parent.iterdir()) == []


def test_user_socket_of_killed_server_is_removed_by_the_next(fresh: Served) -> None:
    path = socket_of(fresh)
    fresh.kill()
    assert path.exists()
    fresh.start()
    assert list(path.parent.iterdir()) == [socket_of(fresh)]


def test_socket_sweep_removes_dead_sockets_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sockets"
    dead = leave_dead(folder)
    listener, path = sockets.listen_in(folder)
    with listener:
        assert not dead.exists(), "whoever makes one sweeps"
        dead = leave_dead(folder)
        # A full backlog does not count as dead. From inside the folder, because the whole path may be too long for a
        # socket.
        monkeypatch.chdir(folder)
        with contextlib.ExitStack() as stack:
            listener.listen(0)
            for _ in range(3):
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                with contextlib.suppress(BlockingIOError):
                    waiting.connect(path.name)
            assert sockets.sweep(folder) == [dead.name]
        assert list(folder.iterdir()) == [path]
    assert sockets.sweep(folder) == [path.name]


def test_socket_sweep_keeps_sockets_of_another_machine(tmp_path: Path) -> None:
    """Two machines share a home folder: the sockets of the other machine look dead from here."""
    folder = tmp_path / "sockets"
    dead = leave_dead(folder)
    elsewhere = folder / f"00000000-{dead.name.partition('-')[2]}"
    dead.rename(elsewhere)
    (folder / "a file").write_text("")
    assert sockets.sweep(folder) == []
    assert sorted(folder.iterdir()) == sorted([elsewhere, folder / "a file"])


def test_socket_sweep_waits_for_a_socket_being_made(tmp_path: Path) -> None:
    """Between its bind and its listen a socket looks dead. So a sweep waits for the folder lock, or does nothing."""
    folder = tmp_path / "sockets"
    dead = leave_dead(folder)
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert sockets.sweep(folder) == []
        assert dead.exists()
    finally:
        os.close(fd)
    assert sockets.sweep(folder) == [dead.name]


def verb(served: Served, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("BANKSMAN_")}
    variables: dict[str, Any] = {**kept, "XDG_STATE_HOME": str(served.folder / "state"), **more}
    return subprocess.run(
        [sys.executable, "-m", "banksman", *words],
        capture_output=True,
        text=True,
        timeout=SECONDS_MAX,
        check=False,
        env=variables,
    )
