"""Notifications to systemd over a real socket, which no child process can send."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from banksman.server.ops import service_manager

NAMES = ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The service manager's end of the socket, which the environment names."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@banksman-{uuid.uuid4().hex}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(name.replace("@", "\0", 1))
        manager.settimeout(10)
        monkeypatch.setenv("NOTIFY_SOCKET", name)
        monkeypatch.delenv("WATCHDOG_PID", raising=False)
        monkeypatch.setenv("WATCHDOG_USEC", "30000000")
        yield manager


def said(manager: socket.socket) -> list[str]:
    return manager.recv(4096).decode().split("\n")


def test_notifier_sends_ready_status_watchdog_and_stopping(manager: socket.socket) -> None:
    notifier = service_manager.take()
    notifier.ready("at http://127.0.0.1:4380/")
    assert said(manager) == ["READY=1", "STATUS=at http://127.0.0.1:4380/"]
    notifier.status("draining\nMAINPID=1\r\n2 left")
    assert said(manager) == ["STATUS=draining MAINPID=1 2 left"]
    assert notifier.watchdog_seconds() == 30.0
    notifier.beat()
    assert said(manager) == ["WATCHDOG=1"]
    notifier.stopping()
    assert said(manager) == ["STOPPING=1"]


def test_notifier_variables_are_removed_from_environ(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    del manager
    monkeypatch.setenv("WATCHDOG_PID", str(os.getpid()))
    assert service_manager.take().watchdog_seconds() == 30.0
    code = f"import os; print([name for name in {NAMES} if name in os.environ])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
    # Nor can a second notifier of this process.
    notifier = service_manager.take()
    notifier.ready("twice")
    assert repr(notifier) == "<Notifier None watchdog=None>"


@pytest.mark.parametrize(
    ("microseconds", "pid", "seconds"),
    [
        ("1500000", "", 1.5),
        ("1500000", "us", 1.5),
        ("1500000", "1", None),
        ("1500000", "x", None),
        ("0", "", None),
        ("", "", None),
        ("-5", "", None),
        ("1e6", "", None),
        ("٣", "", None),
        pytest.param("9" * 5000, "", None, id="long"),
    ],
)
def test_notifier_watchdog_applies_only_to_this_pid(microseconds: str, pid: str, seconds: float | None) -> None:
    environ = {
        "NOTIFY_SOCKET": "@x",
        "WATCHDOG_USEC": microseconds,
        "WATCHDOG_PID": pid.replace("us", str(os.getpid())),
    }
    assert service_manager.take(environ).watchdog_seconds() == seconds
    assert environ == {}


def test_notifier_sends_no_watchdog_when_unconfigured(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WATCHDOG_USEC")
    notifier = service_manager.take()
    notifier.beat()
    notifier.stopping()
    assert said(manager) == ["STOPPING=1"]


@pytest.mark.parametrize(
    "address",
    [
        "",
        "/",
        "@",
        "relative",
        "vsock:2:1",
        "/nowhere/at/all",
        "@nobody",
        pytest.param("/" + "x" * 500, id="long"),
        "/a\0b",
        "/\ud800",
    ],
)
def test_notifier_ignores_a_missing_manager(address: str) -> None:
    notifier = service_manager.take({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000"} if address else {})
    notifier.ready("\ud800")
    notifier.status("")
    notifier.beat()
    notifier.stopping()


def test_notifier_does_not_block_on_a_slow_manager(manager: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_manager, "SEND_SECONDS_MAX", 0.05)
    notifier = service_manager.take()
    for _ in range(2000):
        notifier.beat()
    notifier.ready("late")
    manager.settimeout(0)
    heard: list[list[str]] = []
    with contextlib.suppress(BlockingIOError):
        while True:
            heard.append(said(manager))
    # The queue was full, or the machine's queue is longer than the messages. The notifier blocked in neither case.
    assert heard
    assert all(message in (["WATCHDOG=1"], ["READY=1", "STATUS=late"]) for message in heard)
    assert len(heard) < 2001
