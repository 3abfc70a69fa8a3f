"""tools/busy.py runs a command beside busy loops, and the loops end with the command in every case."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.process.helpers import wait_until
from tests.thorough import thorough

pytestmark = thorough

TOOL = Path(__file__).parent.parent / "tools" / "busy.py"
# Prints the other children of its parent: the loops.
LIST = """
import os, pathlib
for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
    try:
        state, parent = stat.read_text().rpartition(")")[2].split()[:2]
    except OSError:
        continue
    if int(parent) == os.getppid() and int(stat.parent.name) != os.getpid():
        print(stat.parent.name, flush=True)
"""


def command(*words: str) -> list[str]:
    return [sys.executable, "-I", "-S", str(TOOL), "--loops", "2", *words]


def is_gone(pid: str) -> bool:
    """Return whether the process has ended. A zombie counts, because an orphan waits for its reaper."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(("end", "code"), [("", 0), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_busy_passes_the_exit_code_on_and_ends_its_loops(end: str, code: int) -> None:
    done = subprocess.run(command(sys.executable, "-c", LIST + end), capture_output=True, text=True, check=False)
    loops = done.stdout.split()
    assert done.returncode == code
    assert len(loops) == 2
    assert all(map(is_gone, loops))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_busy_leaves_no_loop_when_it_is_ended(number: signal.Signals) -> None:
    # The command ends when its stdin closes. This test holds the stdin, so the command ends even if no process stops
    # it.
    with subprocess.Popen(
        command(sys.executable, "-c", LIST + "print(os.getpid(), flush=True); os.read(0, 1)"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as busy:
        assert busy.stdout is not None
        pids = [busy.stdout.readline().strip() for _ in range(3)]
        busy.send_signal(number)
        busy.wait()
    for pid in pids:
        wait_until(lambda pid=pid: is_gone(pid), f"the end of {pid}")


def test_busy_ends_a_command_that_takes_too_long() -> None:
    done = subprocess.run(
        command("--minutes", "0.001", "sleep", "60"), capture_output=True, text=True, check=False, stdin=subprocess.PIPE
    )
    assert done.returncode == 124
    assert "took more than 0.001 minutes" in done.stderr


def test_busy_refuses_to_run_nothing() -> None:
    assert subprocess.run(command(), capture_output=True, check=False).returncode == 2
