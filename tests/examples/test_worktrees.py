"""Run examples/worktrees.py: each session has a worktree, and one with changes that are not committed stays."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from tests.examples.programs import EXAMPLES, SECONDS_MAX, environment

COMMIT = 'echo "$(basename "$PWD")" > work.txt && git add . && git commit --quiet -m work && exec "$@"'
LEAVE = 'echo half > half.txt && exec "$@"'


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit."""
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "test")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "test@example.com")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    folder = tmp_path / "house"
    folder.mkdir()
    git(folder, "init", "--quiet", "--initial-branch=main")
    (folder / "README.md").write_text("house\n")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "first")
    return folder


def git(folder: Path, *words: str) -> str:
    return subprocess.run(["git", *words], cwd=folder, check=True, capture_output=True, text=True).stdout


def run(folder: Path, script: str, *tasks: str) -> subprocess.CompletedProcess[str]:
    variables = environment(folder.parent)
    variables["AGENT"] = shlex.join(["sh", "-c", script, "agent", *shlex.split(variables["AGENT"])])
    program = [sys.executable, "-W", "error", str(EXAMPLES / "worktrees.py"), *tasks]
    return subprocess.run(
        program, cwd=folder, env=variables, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )


def test_worktrees_hold_the_work_of_each_session(repository: Path) -> None:
    done = run(repository, COMMIT, "one=hello", "two=hello")
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(line.split(":")[0] for line in done.stdout.splitlines()) == ["one", "two"]
    assert done.stdout.count("done") == 2
    for branch in ("one", "two"):
        assert git(repository, "show", f"{branch}:work.txt") == f"{branch}\n"
    assert len(git(repository, "worktree", "list").splitlines()) == 1


def test_worktrees_keep_changes_that_are_not_committed(repository: Path) -> None:
    done = run(repository, LEAVE, "one=hello")
    assert done.returncode == 0
    assert "on_close failed" in done.stderr
    half = repository.parent / "house.worktrees" / "one" / "half.txt"
    assert half.read_text() == "half\n"
    # The next run of the task continues there.
    assert run(repository, COMMIT, "one=go on").returncode == 0
    assert git(repository, "show", "one:half.txt") == "half\n"
    assert not half.exists()


def test_worktrees_report_what_git_says(tmp_path: Path) -> None:
    done = run(tmp_path, COMMIT, "one=hello")
    assert done.returncode == 1
    assert "on_open failed" in done.stderr
    assert "not a git repository" in done.stderr
