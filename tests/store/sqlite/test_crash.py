"""Kill a writer at every system call that changes its store, and at random times.

No acknowledged event is missing, none is torn, and the next process continues immediately. The same check finds an
injected fault: a writer that acknowledges before it commits.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from tests.store.sqlite import kill_at_syscall
from tests.store.sqlite.crash_child import APPENDS, Campaign, Report
from tests.store.sqlite.kill_at_syscall import REPOSITORY
from tests.thorough import IS_THOROUGH

pytestmark = pytest.mark.thorough

# The calls of a level are divided among this many tests, so that several workers can share them.
SHARES = 3


def campaign(tmp_path: Path, kind: str, **settings: object) -> Report:
    asked = msgspec.json.encode(msgspec.convert({"kind": kind, "folder": str(tmp_path), **settings}, Campaign))
    argv = [sys.executable, "-m", "tests.store.sqlite.crash_child", asked.decode()]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    report = msgspec.json.decode(done.stdout, type=Report)
    # For a person who reads the run: the coverage and the time.
    print(f"{kind} {settings}: {msgspec.structs.replace(report, problems=report.problems[:3])}")
    return report


@pytest.fixture(autouse=True, scope="module")
def can_be_traced() -> None:
    kill_at_syscall.skip_unless_possible()


@pytest.mark.parametrize("share", range(SHARES if IS_THOROUGH else 1))
@pytest.mark.parametrize("level", ["normal", "full"])
def test_writer_loses_no_acknowledged_event_when_killed_at_any_syscall(tmp_path: Path, level: str, share: int) -> None:
    report = campaign(tmp_path, "calls", level=level, first=1 + share, step=SHARES)
    assert report.problems == []
    # The campaign continued until a run completed. Deaths came at every stage: creation of the store, claim, appends,
    # and close with its checkpoint.
    assert report.ended == 1
    assert report.deaths > 2 * APPENDS / SHARES
    assert 0 < report.before < report.deaths
    assert 0 < report.closing < report.deaths
    assert report.acknowledged > report.deaths
    assert any(name.startswith("pwrite64 -wal") for name in report.calls)
    if level == "full":
        assert report.calls["fdatasync -wal"] >= APPENDS // 3 // SHARES


@pytest.mark.parametrize("level", ["normal", "full"])
def test_writer_loses_no_acknowledged_event_when_killed_at_any_time(tmp_path: Path, level: str) -> None:
    report = campaign(tmp_path, "times", level=level, count=100, seed=int.from_bytes(os.urandom(4)))
    assert report.problems == []
    # Every run is killed, and an average run has acknowledged at least half of its appends.
    assert report.deaths == 100
    assert report.acknowledged > 40 * APPENDS


def test_crash_campaign_catches_writer_that_acknowledges_before_commit(tmp_path: Path) -> None:
    """The control: with every eleventh call, the same check finds losses and nothing else."""
    report = campaign(tmp_path, "calls", first=1, step=11, is_early=True)
    assert report.deaths > 10
    assert report.problems
    assert all("acknowledged up to" in problem for problem in report.problems)


def test_migration_killed_at_any_syscall_is_completed_by_next_open(tmp_path: Path) -> None:
    report = campaign(tmp_path, "migration")
    assert report.problems == []
    assert report.ended == 1
    # Some deaths came before the backup had its name, and some after.
    assert 0 < report.backups < report.deaths
    assert 0 < report.closing < report.deaths


def test_tracer_kills_at_entry_of_the_syscall(tmp_path: Path) -> None:
    """Four writes and a sync, on two files and in two threads. The call at the death has no effect."""
    code = """
import os, sys, threading
from tests.store.sqlite import kill_at_syscall
watched, other = sys.argv[1:3]

def program(fd):
    def write(path, data):
        with open(path, "ab", buffering=0) as file:
            file.write(data)
            os.fsync(file.fileno())
    write(watched, b"1")
    write(other, b"x")
    thread = threading.Thread(target=write, args=(f"{watched}-2", b"2"))
    thread.start()
    thread.join()
    os.unlink(f"{watched}-2")
    write(watched, b"3")
    os.write(fd, b"said")

for number in (1, 2, 3, 4, 5, 6, 7, 8):
    death = kill_at_syscall.run(program, watched, kill_at=number)
    with open(watched) as file:
        left = file.read()
    print(number, death.code, *death.calls[-1], left, os.path.exists(f"{watched}-2"), death.said.decode())
    for path in (watched, f"{watched}-2"):
        if os.path.exists(path):
            os.unlink(path)
"""
    argv = [sys.executable, "-c", code, str(tmp_path / "watched"), str(tmp_path / "other")]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    assert done.stdout.replace("unlinkat", "unlink").split("\n") == [
        "1 -9 write   False ",
        "2 -9 fsync  1 False ",
        "3 -9 write -2 1 True ",
        "4 -9 fsync -2 1 True ",
        "5 -9 unlink -2 1 True ",
        "6 -9 write  1 False ",
        "7 -9 fsync  13 False ",
        "8 0 fsync  13 False said",
        "",
    ]
    assert kill_at_syscall.SAID_BYTES_MAX > 20 * APPENDS
