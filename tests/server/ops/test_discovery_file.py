"""Discovery file of a server: written atomically, and removed only by its writer."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from banksman.errors import BanksmanError
from banksman.server.ops import discovery_file

SERVER = """
import sys
from pathlib import Path
from banksman.server.ops import discovery_file as whereabouts
folder = Path(sys.argv[1])
for number in range(int(sys.argv[2])):
    whereabouts.announce(folder, f"http://{sys.argv[3]}/{number}")
    whereabouts.withdraw(folder)
whereabouts.announce(folder, f"http://{sys.argv[3]}/last")
"""


def test_discovery_file_names_url_and_process(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    discovery_file.announce(folder, "http://127.0.0.1:4380/")
    found = json.loads((folder / "server.json").read_text())
    assert sorted(found) == ["pid", "started", "url"]
    assert (found["url"], found["pid"]) == ("http://127.0.0.1:4380/", os.getpid())
    assert abs(found["started"] - (folder / "server.json").stat().st_mtime) < 60
    assert stat.S_IMODE((folder / "server.json").stat().st_mode) == 0o600
    assert [entry.name for entry in folder.iterdir()] == ["server.json"]
    discovery_file.withdraw(folder)
    assert list(folder.iterdir()) == []
    discovery_file.withdraw(folder)


def test_discovery_file_of_another_server_is_not_withdrawn(tmp_path: Path) -> None:
    discovery_file.announce(tmp_path, "http://one")
    # The same pid, as two containers may have it, and another server.
    other = json.dumps({"url": "http://two", "pid": os.getpid(), "started": 0})
    (tmp_path / "server.json").write_text(other)
    discovery_file.withdraw(tmp_path)
    assert (tmp_path / "server.json").read_text() == other


def test_discovery_file_already_removed_is_not_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    discovery_file.announce(tmp_path, "http://one")
    (tmp_path / "server.json").unlink()
    discovery_file.withdraw(tmp_path)
    assert caplog.records == []


def test_discovery_file_never_announced_here_is_not_withdrawn(tmp_path: Path) -> None:
    (tmp_path / "server.json").write_text("{}")
    discovery_file.withdraw(tmp_path)
    assert (tmp_path / "server.json").exists()


def test_discovery_file_withdraw_waits_for_the_folder_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Withdraw removes nothing while another process holds the folder lock, although the file is still its own."""
    monkeypatch.setattr(discovery_file, "LOCK_SECONDS_MAX", 0.05)
    discovery_file.announce(tmp_path, "http://one")
    fd = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        discovery_file.withdraw(tmp_path)
        assert (tmp_path / "server.json").exists()
        # Announcing is safe without the lock.
        discovery_file.announce(tmp_path, "http://two")
        assert json.loads((tmp_path / "server.json").read_text())["url"] == "http://two"
    finally:
        os.close(fd)
    discovery_file.withdraw(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_discovery_file_of_the_last_server_survives_races(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    servers = [
        subprocess.Popen([sys.executable, "-c", SERVER, str(folder), "100", name]) for name in ("one", "two", "three")
    ]
    assert [server.wait() for server in servers] == [0, 0, 0]
    # The last server announced itself after all removals, except removals of another server's file.
    assert json.loads((folder / "server.json").read_text())["url"].endswith("/last")
    assert [entry.name for entry in folder.iterdir()] == ["server.json"]


def test_discovery_file_in_unwritable_folder_raises(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BanksmanError, match=r"server\.json"):
        discovery_file.announce(tmp_path / "file", "http://one")
    discovery_file.withdraw(tmp_path / "file")


def test_discovery_file_of_a_live_server_is_kept_by_a_second(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as first:
        url = f"http://127.0.0.1:{first.getsockname()[1]}"
        said = json.dumps({"url": url, "pid": os.getppid(), "started": 0})
        (tmp_path / "server.json").write_text(said)
        discovery_file.announce(tmp_path, "http://127.0.0.1:1")
        assert (tmp_path / "server.json").read_text() == said
        assert url in caplog.text
        discovery_file.withdraw(tmp_path)
        assert (tmp_path / "server.json").read_text() == said
    # No server answers there now. A process with that pid lives, but it is another program.
    discovery_file.announce(tmp_path, "http://127.0.0.1:1")
    assert json.loads((tmp_path / "server.json").read_text())["url"] == "http://127.0.0.1:1"
    discovery_file.withdraw(tmp_path)
