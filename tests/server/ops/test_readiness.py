"""`/readyz` in each condition that makes a server unready, made for real.

tests/server/test_problems.py has the drain, and tests/server/api/test_admin_routes_health.py the cluster.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.server.kit import SECONDS_MAX, Served
from tests.thorough import thorough

pytestmark = thorough

MEBIBYTE = 1 << 20
# The server starts on an own, small disk. `exec` keeps the pid.
MOUNT = 'mount -t tmpfs -o size=32m none "$0" && exec "$@"'


def gauges(served: Served) -> set[str]:
    """Return the reasons whose metric is 1."""
    text = served.request("GET", "/metrics").body.decode()
    found = re.findall(r'^banksman_unready{reason="(\w+)"} ([01]).0$', text, re.MULTILINE)
    assert len(found) == 5
    return {reason for reason, value in found if value == "1"}


def reason(served: Served, path: str = "/readyz") -> str | None:
    """Return the reason why the server is not ready; None if it is ready."""
    answer = served.request("GET", path, token=False)
    if path == "/readyz":
        found = str(answer.json.get("type", "")).removeprefix("urn:banksman:").replace("-", "_")
        assert gauges(served) == ({found} if found else set())
    if answer.status == 200:
        assert answer.json == {"status": "ok"}
        return None
    assert answer.status == 503
    assert answer.headers["retry-after"]
    # The answer names no file.
    assert str(served.folder) not in answer.body.decode()
    return str(answer.json["type"]).removeprefix("urn:banksman:")


def test_readyz_fails_while_the_disk_of_the_store_is_nearly_full(tmp_path: Path) -> None:
    flags = ("--mount", *(() if os.geteuid() == 0 else ("--user", "--map-root-user")))
    disk = tmp_path / "disk"
    disk.mkdir()
    mounting = ("unshare", *flags, "sh", "-c", MOUNT, str(disk))
    probe = subprocess.run([*mounting, "true"], capture_output=True, text=True, timeout=60, check=False)
    if probe.returncode != 0:
        pytest.skip(f"NOT TESTED: nothing can be mounted here: {probe.stderr}")
    server = Served(
        tmp_path / "server", prefix=mounting, store=f"sqlite:{disk / 'store.db'}", disk_free_bytes_min=8 * MEBIBYTE
    )
    with server as served:
        assert reason(served) is None
        filler = Path(f"/proc/{served.pid}/root{disk}/filler")
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 25 * MEBIBYTE)
        assert reason(served) == "disk-nearly-full"
        # It still does what it can do.
        assert reason(served, "/healthz") is None
        served.open()
        filler.unlink()
        assert reason(served) is None


def test_readyz_fails_while_the_store_is_another_file(tmp_path: Path) -> None:
    with Served(tmp_path / "server", disk_free_bytes_min=0) as served:
        served.open()
        assert reason(served) is None
        files = [*served.folder.glob("store.db*")]
        away = tmp_path / "away"
        away.mkdir()
        for file in files:
            file.rename(away / file.name)
        shutil.copy(away / "store.db", served.folder / "store.db")
        assert reason(served) == "store-broken"
        for file in files:
            (away / file.name).rename(file)
        assert reason(served) is None


def test_readyz_fails_while_the_server_hands_over(tmp_path: Path) -> None:
    with Served(tmp_path / "server", env=["KEY"], programs=None) as served:
        # A session with variables of its caller ends here: the next server cannot open it from the store.
        session = served.open({"prompt": ["hang"]}, env={"KEY": "value"})
        served.ask(session, "runs")
        assert reason(served) is None
        served.post("/v1/drain", {"hand_over": True})
        while (found := reason(served)) is None:
            pass
        assert (found, reason(served, "/healthz")) == ("handing-over", "draining")
        served.post(f"/v1/sessions/{session}/interrupt")
        assert served.process is not None
        assert served.process.wait(SECONDS_MAX) == 0
