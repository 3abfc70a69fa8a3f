"""An upgrade between the last commit and this one, in both directions: it continues the turn, or it is refused.

A version that cannot take over says so before anything happens. So a commit may change what is handed over, but it must
lose no turn.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from tests.process.helpers import wait_until
from tests.server.api.test_session_routes import wait_for
from tests.server.ops.test_server_hand_over import echo, say, serving
from tests.server.ops.test_upgrade import is_new, started
from tests.thorough import thorough

pytestmark = thorough

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture
def last(tmp_path: Path) -> Path:
    """Return the sources of the last commit; of this tree if that commit is not here."""
    folder = tmp_path / "last"
    words = ["git", "-C", str(REPOSITORY), "archive", "HEAD~1", "src"]
    packed = subprocess.run(words, capture_output=True, check=False)
    if packed.returncode == 0:
        with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
    else:
        shutil.copytree(REPOSITORY / "src", folder / "src")
    return folder / "src"


@pytest.mark.parametrize("direction", ["from the last commit", "to the last commit"])
def test_upgrade_between_two_commits_loses_nothing(last: Path, tmp_path: Path, direction: str) -> None:
    go, path = tmp_path / "go", f"PYTHONPATH={last}"
    program = [sys.executable, "-m", "banksman"]
    loaded = [sys.executable, "-c", "import banksman; print(banksman.__file__)"]
    assert str(last) in subprocess.run(["env", path, *loaded], capture_output=True, text=True, check=True).stdout
    is_from_last = direction == "from the last commit"
    command = ["env", "-u", "PYTHONPATH", *program] if is_from_last else ["env", path, *program]
    with serving(tmp_path / "server", variables={"PYTHONPATH": str(last)} if is_from_last else {}) as served:
        session = served.open({"prompt work": ["say one", f"wait {go}", "say two"], "prompt next": ["say three"]})
        turns = [served.ask(session, "work"), served.ask(session, "next")]
        wait_for(served, session, "update", turn=turns[0])
        id, before = echo(served), started(served)
        answer = served.request("POST", "/v1/upgrade", {"command": command})
        if answer.status == 202:
            wait_until(lambda: is_new(served, before), "the new version")
        else:
            assert (answer.status, "cannot take over" in answer.json["detail"]) == (409, True), answer
        print(f"{direction}: {answer.json}")
        go.touch()
        assert [served.outcome(session, turn)["text"] for turn in turns] == ["two", "three"]
        say(served, id, "still")
        events = served.get(f"/v1/sessions/{session}/events?limit=1000")["events"]
        assert [event["kind"] for event in events].count("process.started") == 1
