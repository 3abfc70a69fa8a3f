"""`banksman exec` at a terminal, and under make."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.cli.tui.kit import BANKSMAN, CTRL_C, CTRL_D, SECONDS_MAX, Terminal

PYTHON = sys.executable
KEPT = ("PATH", "HOME", "PYTHONPATH")
SIZE = "import os; print(*map(os.isatty, range(3)), *os.get_terminal_size())"
# Prints its size when it changes, and exits.
RESIZED = """
import os, signal, time
def tell(*_): os.write(1, b"now %d %d" % os.get_terminal_size()); os._exit(7)
signal.signal(signal.SIGWINCH, tell)
print("ready", flush=True)
while True: time.sleep(1)
"""
DEAF = "import signal; signal.signal(2, signal.SIG_IGN); print('ready', flush=True); signal.pause()"


@pytest.fixture
def env() -> dict[str, str]:
    return {name: os.environ[name] for name in KEPT if name in os.environ}


def at_terminal(env: dict[str, str], *words: str) -> Terminal:
    return Terminal("exec", *words, env=env)


def test_exec_at_a_terminal_gives_the_command_a_pty_of_its_size(env: dict[str, str]) -> None:
    with at_terminal(env, "--", PYTHON, "-c", SIZE) as terminal:
        assert terminal.end() == 0
        assert terminal.text == "True True True 80 24"


def test_exec_with_no_pty_gives_the_command_pipes(env: dict[str, str]) -> None:
    code = "import os; print(*map(os.isatty, range(3)))"
    with at_terminal(env, "--no-pty", "--", PYTHON, "-c", code) as terminal:
        assert terminal.end() == 0
        assert terminal.text == "True False False"


def test_exec_keeps_redirected_stderr_apart(env: dict[str, str], tmp_path: Path) -> None:
    words = "exec -- sh -c 'echo out; echo err >&2'"
    shell = ["sh", "-c", f"exec {' '.join(BANKSMAN)} {words} 2>{tmp_path}/err"]
    with Terminal(env=env, command=shell) as terminal:
        assert terminal.end() == 0
        assert terminal.text == "out"
    assert (tmp_path / "err").read_text() == "err\n"


@pytest.mark.parametrize(("flag", "said"), [("--", "True False False"), ("--pty", "True True True")])
def test_exec_runs_at_a_terminal_that_is_not_its_controlling_terminal(
    env: dict[str, str], flag: str, said: str
) -> None:
    """In a new session 0, 1 and 2 are a terminal, which has no foreground group for this session."""
    code = "import os; print(*map(os.isatty, range(3)))"
    command = ["setsid", "--wait", *BANKSMAN, "exec", flag, PYTHON, "-c", code]
    with Terminal(env=env, command=command) as terminal:
        assert terminal.end() == 0
        assert terminal.text == said


def test_exec_with_pty_gives_a_pty_in_a_pipeline(env: dict[str, str]) -> None:
    command = [*BANKSMAN, "exec", "--pty", "--", PYTHON, "-c", "import os; print(input(), os.isatty(1))"]
    done = subprocess.run(command, input=b"typed\n", capture_output=True, timeout=SECONDS_MAX, check=False, env=env)
    assert done.returncode == 0
    assert b"typed True" in done.stdout


def test_exec_ctrl_c_interrupts_a_repl_that_lives_on(env: dict[str, str]) -> None:
    with at_terminal(env, "--", PYTHON, "-q", "-i") as terminal:
        terminal.wait_text(">>>")
        # Python's readline prints the prompt before it waits. It sees a signal between the two only with the next key.
        terminal.type(CTRL_C + "\r")
        terminal.wait_text("KeyboardInterrupt")
        terminal.type("6 * 7\r")
        terminal.wait_text("42")
        terminal.type(CTRL_D)
        assert terminal.end() == 0


def test_exec_third_ctrl_c_ends_a_command_that_ignores_them(env: dict[str, str]) -> None:
    with at_terminal(env, "--", PYTHON, "-c", DEAF) as terminal:
        terminal.wait_text("ready")
        terminal.type(3 * CTRL_C)
        assert terminal.end() == 130
        assert "stopped after" in terminal.text


def test_exec_forwards_window_size_and_exit_code(env: dict[str, str]) -> None:
    with at_terminal(env, "--", PYTHON, "-c", RESIZED) as terminal:
        terminal.wait_text("ready")
        terminal.resize(100, 30)
        assert terminal.end() == 7
        assert "now 100 30" in terminal.text


# -- file descriptors ------------------------------------------------------------------------------------------------
def test_exec_of_recursive_make_uses_the_jobserver(env: dict[str, str], tmp_path: Path) -> None:
    run = f"{' '.join(BANKSMAN)} exec --"
    (tmp_path / "Makefile").write_text(f"all:\n\t+{run} $(MAKE) inner\ninner: a b\na b:\n\t@echo $@\n")
    done = subprocess.run(
        ["make", "-j4", "all"], cwd=tmp_path, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, env=env
    )
    assert done.returncode == 0, done.stderr
    assert "jobserver unavailable" not in done.stdout + done.stderr
    assert {"a", "b"} <= set(done.stdout.split())


def test_exec_passes_fds_under_their_numbers(env: dict[str, str]) -> None:
    shell = f"{' '.join(BANKSMAN)} exec --pass-fds 7,9 -- sh -c 'cat <&7 >&9' 7<<E 9>&1\npassed\nE\n"
    done = subprocess.run(["sh", "-c", shell], capture_output=True, timeout=SECONDS_MAX, check=False, env=env)
    assert (done.returncode, done.stdout) == (0, b"passed\n"), done.stderr


@pytest.mark.parametrize("given", ["8", "x", "3,"])
def test_exec_refuses_fds_that_are_not_open(env: dict[str, str], given: str) -> None:
    command = [*BANKSMAN, "exec", "--pass-fds", given, "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, env=env)
    assert done.returncode == 125
    assert "pass" in done.stderr


def test_exec_does_not_pass_closed_jobserver_fds(env: dict[str, str]) -> None:
    """Nor does it pass an internal fd that happens to have that number."""
    count = "import os; print(sorted(fd for fd in range(64) if os.path.exists(f'/proc/self/fd/{fd}')))"
    flags = {"MAKEFLAGS": " -j4 --jobserver-auth=3,4"}
    command = [*BANKSMAN, "exec", "--", PYTHON, "-c", count]
    plain, told = (
        subprocess.run(command, capture_output=True, timeout=SECONDS_MAX, check=True, env=each).stdout
        for each in (env, env | flags)
    )
    assert told == plain
