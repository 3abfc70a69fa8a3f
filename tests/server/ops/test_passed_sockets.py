"""Sockets that are passed to a server: it uses them, keeps them from its children, and refuses unusable ones."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from tests.server import passing

from banksman.server.ops import passed_sockets

TAKE = """
import os, socket, subprocess, sys
from banksman.server.ops import passed_sockets
from banksman.errors import UsageError
try:
    passed = passed_sockets.take()
except UsageError as exc:
    sys.exit(f"{exc}")
left = sorted(name for name in os.environ if name.startswith("LISTEN_"))
fds = subprocess.check_output(["ls", "/proc/self/fd"], text=True, close_fds=False).split()
port = passed.port and passed.port.getsockname()[1]
print(port, passed.user_path, left, "3" in fds[:-1] and len(fds) > 4)
"""


def taken(listeners: Sequence[socket.socket]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        passing.words(listeners, [sys.executable, "-c", TAKE]),
        pass_fds=[listener.fileno() for listener in listeners],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_passed_sockets_are_taken_and_no_child_gets_them(tmp_path: Path) -> None:
    path = tmp_path / "user.sock"
    with passing.tcp() as port, passing.unix(path) as user:
        done = taken([user, port])
        assert done.stdout.split() == [str(port.getsockname()[1]), str(path), "[]", "False"], done.stderr
        assert taken([port]).stdout.split()[:2] == [str(port.getsockname()[1]), "None"]
        assert taken([]).stdout.split()[:2] == ["None", "None"]


def test_passed_sockets_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    with passing.tcp() as one, passing.tcp() as other, socket.socket() as deaf, socket.socket(socket.AF_UNIX) as named:
        named.bind(f"\0{tmp_path.name}-{os.getpid()}")
        named.listen()
        for listeners, reason in (
            ([one, other], "cannot use 2 passed sockets"),
            ([deaf], "cannot use the passed fd 3: it is no listening stream socket"),
            ([named], "it has no path"),
        ):
            done = taken(listeners)
            assert done.returncode == 1
            assert reason in done.stderr


@pytest.mark.parametrize("pid", ["", "1", "x"])
def test_passed_sockets_of_another_process_are_ignored(pid: str) -> None:
    environ = {"LISTEN_FDS": "1", "LISTEN_PID": pid, "LISTEN_FDNAMES": "x"}
    assert passed_sockets.take(environ) == passed_sockets.PassedSockets()
    assert environ == {}


def test_passed_fd_that_is_no_socket_is_refused() -> None:
    with Path(os.devnull).open("rb") as file:
        argv = [sys.executable, "-S", "-c", passing.ACTIVATE, str(file.fileno()), sys.executable, "-c", TAKE]
        done = subprocess.run(argv, pass_fds=[file.fileno()], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "cannot use the passed fd 3: Socket operation on non-socket" in done.stderr
