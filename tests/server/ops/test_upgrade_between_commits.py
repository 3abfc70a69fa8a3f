"""An upgrade between this version and the one before, in both directions: it continues the turn, or it is refused.

A version that cannot take over says so before anything happens. So a commit may change what is handed over, but it must
lose no turn. The version before is the last commit with other sources, because a commit may change only documents.
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import NoReturn

import pytest
from tests.process.helpers import REPOSITORY, wait_until
from tests.server.api.test_session_routes import wait_for
from tests.server.ops.test_server_hand_over import echo, say, serving
from tests.server.ops.test_upgrade import is_new, started
from tests.thorough import thorough

AUTHOR = ("-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false")


def git(repository: Path, *words: str) -> bytes:
    # A hook of git sets variables that name its own repository.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return subprocess.run(["git", "-C", str(repository), *words], capture_output=True, check=True, env=env).stdout


def sources_before(repository: Path, folder: Path) -> Path:
    """Return the sources of the last commit that has other sources than HEAD.

    Skips the test if that commit is not here, as in a shallow clone. Fails in CI.
    """
    if shutil.which("git") is None:
        _not_tested("git is not installed")
    try:
        change = git(repository, "log", "-1", "--format=%H", "--", "src").decode().strip()
        packed = git(repository, "archive", f"{change}~1", "src")
    except subprocess.CalledProcessError as exc:
        _not_tested(f"the commit before this one is not here (git fetch --unshallow): {exc.stderr.decode().strip()}")
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def _not_tested(why: str) -> NoReturn:
    message = f"NOT TESTED: {why}"
    if "CI" in os.environ:
        pytest.fail(message)
    pytest.skip(message)


@pytest.fixture
def last(tmp_path: Path) -> Path:
    return sources_before(REPOSITORY, tmp_path / "last")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Return a repository with two versions of its sources, and a commit of documents after them."""
    folder = tmp_path / "repository"
    (folder / "src").mkdir(parents=True)
    git(folder, "init", "--quiet")
    for name, text in (("src/a.py", "1"), ("src/a.py", "2"), ("README.md", "words")):
        (folder / name).write_text(text)
        git(folder, "add", ".")
        git(folder, *AUTHOR, "commit", "--quiet", "-m", text)
    return folder


def test_version_before_has_other_sources_when_the_last_commit_has_the_same(repository: Path, tmp_path: Path) -> None:
    assert (sources_before(repository, tmp_path / "before") / "a.py").read_text() == "1"


@pytest.mark.parametrize(("is_ci", "ends"), [(True, pytest.fail.Exception), (False, pytest.skip.Exception)])
@pytest.mark.parametrize("kind", ["shallow clone", "archive"])
def test_upgrade_is_not_tested_silently_without_the_version_before(
    repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, is_ci: bool, ends: type[BaseException]
) -> None:
    copy = tmp_path / "copy"
    if kind == "archive":
        shutil.copytree(repository / "src", copy / "src")
    else:
        git(tmp_path, "clone", "--quiet", "--depth", "1", repository.as_uri(), str(copy))
    if is_ci:
        monkeypatch.setenv("CI", "true")
    else:
        monkeypatch.delenv("CI", raising=False)
    with pytest.raises(ends, match="NOT TESTED: the commit before this one is not here"):
        sources_before(copy, tmp_path / "before")


@thorough
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
