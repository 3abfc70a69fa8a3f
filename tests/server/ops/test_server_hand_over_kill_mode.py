"""The kill mode of the server's unit, as a fake `systemctl` shows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from banksman.server.ops import server_hand_over

SYSTEM = "0::/system.slice/banksman.service\n"
USER = "0::/user.slice/user-1000.slice/user@1000.service/app.slice/banksman.service\n"


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `systemctl` that notes its words, and prints the content of the file `mode`."""
    program = tmp_path / "systemctl"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\ncat {tmp_path}/mode\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("SYSTEMD_EXEC_PID", str(os.getpid()))
    monkeypatch.setattr(server_hand_over, "CGROUP", tmp_path / "cgroup")
    (tmp_path / "cgroup").write_text(SYSTEM)
    return tmp_path


@pytest.mark.parametrize(
    ("mode", "found"),
    [("control-group", "control-group"), ("mixed", "mixed"), ("process", None), ("none", None), ("", None)],
)
async def test_kill_mode_that_ends_other_processes_is_found(systemctl: Path, mode: str, found: str | None) -> None:
    (systemctl / "mode").write_text(f"{mode}\n")
    assert await server_hand_over.kill_mode() == found
    assert (systemctl / "words").read_text() == "show --property=KillMode --value banksman.service\n"


async def test_kill_mode_of_a_user_unit_is_asked_of_the_users_manager(systemctl: Path) -> None:
    (systemctl / "mode").write_text("mixed\n")
    (systemctl / "cgroup").write_text(USER)
    assert await server_hand_over.kill_mode() == "mixed"
    assert (systemctl / "words").read_text() == "--user show --property=KillMode --value banksman.service\n"


async def test_kill_mode_is_unknown_outside_of_systemd(systemctl: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (systemctl / "mode").write_text("mixed\n")
    (systemctl / "cgroup").write_text("0::/\n")
    assert await server_hand_over.kill_mode() is None
    monkeypatch.setenv("SYSTEMD_EXEC_PID", "1")
    (systemctl / "cgroup").write_text(SYSTEM)
    assert await server_hand_over.kill_mode() is None
    assert not (systemctl / "words").exists()
