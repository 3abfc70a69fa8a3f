"""`banksman-guard.pyz`: one file that runs on a bare Python, and holds only what a guard needs."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.guard.running import SECONDS_MAX
from tests.thorough import thorough
from tools import guard_file


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("guard") / "banksman-guard.pyz"
    guard_file.build(path)
    yield path
    path.unlink()


def run(file: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the file without packages, without the environment of the test, and in another folder."""
    argv = [sys.executable, "-I", "-S", str(file), *words]
    env = {"PATH": "/usr/bin:/bin"}
    return subprocess.run(argv, check=False, capture_output=True, text=True, env=env, cwd="/", timeout=SECONDS_MAX)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--", "sh", "-c", "echo said; setsid sleep 60 & exit 4"], 4, "said"),
        (["--timeout", "0.1", "--report", "/dev/stdout", "--", "sleep", "60"], 124, '"ended": "timeout"'),
        (["--", "no-such-program"], 127, "there is no program"),
        (["--no-such-flag"], 125, "unrecognized arguments"),
        (["--help"], 0, "usage: banksman guard"),
    ],
)
def test_guard_file_runs_on_a_bare_python(file: Path, words: list[str], code: int, said: str) -> None:
    done = run(file, *words)
    assert done.returncode == code, done.stderr
    assert said in done.stdout + done.stderr


def test_guard_file_reports_a_start_that_fails_in_the_keeper(file: Path, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/no-such-interpreter\n")
    script.chmod(0o755)
    done = run(file, "--", str(script))
    assert done.returncode == 126
    assert "check the interpreter" in done.stderr


def test_guard_file_holds_only_what_a_guard_needs(file: Path) -> None:
    names = {name for name in zipfile.ZipFile(file).namelist() if name.endswith(".py")}
    parts = {name.split("/")[1] for name in names if "/" in name}
    assert parts == {"__init__.py", "errors.py", "cli", "guard", "process", "runtime"}
    assert len(names) <= 42


@thorough
def test_guard_file_is_reproducible(file: Path, tmp_path: Path) -> None:
    guard_file.build(tmp_path / "again.pyz")
    assert (tmp_path / "again.pyz").read_bytes() == file.read_bytes()
