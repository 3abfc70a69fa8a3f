"""The units of `deploy/systemd`: systemd accepts them, and the server starts by them with its settings."""

from __future__ import annotations

import configparser
import http.client
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from tests.deploy.files import DEPLOY, check_command, check_settings
from tests.server import passing

from banksman.config.keys import KEYS
from banksman.server.server_settings import load

UNITS = DEPLOY / "systemd"
# What makes the service able to use limits of trees and hand-overs, and what restricts it.
EXPECTED = {
    "Type": "notify",
    "KillMode": "process",
    "OOMPolicy": "continue",
    "Delegate": "yes",
    "RestartPreventExitStatus": "2",
    "ProtectSystem": "strict",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
}
# Each would break what the comment in the unit says.
ABSENT = ("PrivateTmp", "ProtectControlGroups", "RestrictNamespaces", "MemoryDenyWriteExecute", "ProtectProc")
# Keys that the systemd of Debian 12 does not know.
NEW = re.compile(r"Unknown key(?: name)? 'DelegateSubgroup'")
# Of `systemd-analyze security`: 0 is closed, 10 is open.
EXPOSURE_MAX = 5.0
ANALYZE = shutil.which("systemd-analyze")


def unit(name: str) -> configparser.RawConfigParser:
    parser = configparser.RawConfigParser(strict=True, delimiters=("=",))
    parser.optionxform = str  # pyright: ignore[reportAttributeAccessIssue]
    parser.read_string((UNITS / name).read_text(encoding="utf-8"))
    return parser


def test_service_unit_hands_over_and_is_restricted() -> None:
    service = unit("banksman.service")["Service"]
    assert {name: service.get(name) for name in EXPECTED} == EXPECTED
    assert not [name for name in ABSENT if name in service]
    assert int(service["TimeoutStopSec"]) > KEYS["serve.drain_seconds"].default
    # The state folder of the server is the one that systemd makes.
    assert service["Environment"] == "XDG_STATE_HOME=/var/lib"
    assert service["StateDirectory"] == "banksman"
    roots = load(UNITS / "config.toml").roots or []
    # ProtectSystem=strict makes everything else read-only, the temporary folders too.
    assert service["ReadWritePaths"].split() == [*(f"-{root}" for root in roots), "/tmp", "/var/tmp"]


def test_socket_unit_passes_the_default_port() -> None:
    passed = unit("banksman.socket")["Socket"]
    assert passed["ListenStream"] == f"{KEYS['serve.bind'].default}:{KEYS['serve.port'].default}"
    assert passed["Accept"] == "no"


@pytest.mark.skipif(ANALYZE is None, reason="needs systemd-analyze")
def test_units_pass_systemd_analyze(tmp_path: Path) -> None:
    analyze: str = ANALYZE or ""
    for name in ("banksman.service", "banksman.socket"):
        text = (UNITS / name).read_text(encoding="utf-8")
        (tmp_path / name).write_text(text.replace("/opt/banksman/bin/banksman", "/bin/true"), encoding="utf-8")
    paths = [str(tmp_path / name) for name in ("banksman.service", "banksman.socket")]
    done = subprocess.run(
        [analyze, "verify", "--recursive-errors=no", *paths],
        env={**os.environ, "SYSTEMD_LOG_LEVEL": "notice"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    # The verifier loads other units of the machine. Only its words about these count.
    assert not [line for line in done.stderr.splitlines() if "banksman." in line and not NEW.search(line)]
    security = [analyze, "security", "--offline=true", f"--threshold={EXPOSURE_MAX * 10:.0f}", paths[0]]
    done = subprocess.run(security, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_service_starts_by_its_unit(tmp_path: Path) -> None:
    program, *words = shlex.split(unit("banksman.service")["Service"]["ExecStart"])
    assert Path(program).name == "banksman"
    given = check_command(words)
    config = UNITS / Path(given["config"]).name
    assert check_settings(config)
    argv = [sys.executable, "-m", "banksman", *(word.replace(given["config"], str(config)) for word in words)]
    manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    manager.bind(str(tmp_path / "notify"))
    manager.settimeout(60)
    log = tmp_path / "log.txt"
    with closing(manager), closing(passing.tcp()) as listener, log.open("wb") as stderr:
        process = subprocess.Popen(
            passing.words([listener], argv),
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env={**os.environ, "XDG_STATE_HOME": str(tmp_path), "NOTIFY_SOCKET": str(tmp_path / "notify")},
        )
        try:
            assert manager.recv(4096).startswith(b"READY=1"), log.read_text(encoding="utf-8")
            connection = http.client.HTTPConnection(*listener.getsockname(), timeout=60)
            with closing(connection):
                connection.request("GET", "/readyz")
                assert connection.getresponse().status == 200
        finally:
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
    assert code == 0
    assert (tmp_path / "banksman" / "store.db").exists()
