"""`banksman guard` at a real terminal, under a real shell: keys, job control, and the terminal afterwards."""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from tests.guard.running import CALLER, SECONDS_MAX, environment, guard
from tests.process.hosts import Sight, look
from tests.process.test_kill_matrix import GONE_SECONDS_MAX

# Counts the Ctrl-C that it gets. It prints `up`, then a line for each, and exits at the third.
COUNTS = r"""
import os, signal, time
seen = 0
def on_int(number, _frame):
    global seen
    seen += 1
    os.write(1, b'INT %d\n' % seen)
signal.signal(signal.SIGINT, on_int)
os.write(1, b'is up\n')
while seen < 3:
    signal.pause()
"""


class Terminal:
    """A terminal with a program on it: type keys, and wait for text."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.text = ""

    def type(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Wait for a text that was not waited for yet."""
        deadline = time.monotonic() + SECONDS_MAX
        while not (found := re.search(pattern, self.text)):
            assert select.select([self._fd], [], [], max(0.0, deadline - time.monotonic()))[0], self.text
            try:
                self.text += os.read(self._fd, 4096).decode(errors="replace")
            except OSError:
                raise AssertionError(f"the terminal is closed: {self.text}") from None
        self.text = self.text[found.end() :]
        return found


@contextmanager
def on_terminal(argv: list[str]) -> Generator[tuple[Terminal, subprocess.Popen[bytes]]]:
    """Run a program as the leader of a session with a terminal."""
    ours, theirs = os.openpty()
    words = [sys.executable, "-I", "-S", CALLER, "terminal", *argv]
    env = environment(PS1="ready> ", TERM="dumb", HISTFILE="/dev/null")
    with subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env) as process:
        os.close(theirs)
        try:
            yield Terminal(ours), process
        finally:
            os.close(ours)
            process.kill()


@contextmanager
def shell() -> Generator[Terminal]:
    """Run an interactive bash with job control, at its first prompt."""
    with on_terminal(["/bin/bash", "--norc", "--noprofile", "--noediting", "-i"]) as (terminal, process):
        terminal.wait_for("ready> ")
        terminal.type("PS1='now> '; stty -echo; set -b\n")
        terminal.wait_for("now> $")
        yield terminal
        terminal.type("exit\n")
        process.wait(SECONDS_MAX)


def wait_gone(*seen: Sight) -> None:
    """Wait until these processes are gone, for less time than the commands of this module live."""
    deadline = time.monotonic() + GONE_SECONDS_MAX
    while any(each.is_there for each in seen):
        assert time.monotonic() < deadline, "a process is left"
        time.sleep(0.01)


def line(*words: str) -> str:
    """Return the shell line that runs a guard."""
    return shlex.join(guard(*words))


def test_guarded_command_sees_the_terminal() -> None:
    code = "import os; print(all(map(os.isatty, (0, 1, 2))), os.ttyname(0), os.getpgrp() == os.tcgetpgrp(0))"
    with shell() as terminal:
        terminal.type(f"tty; {line('--', sys.executable, '-I', '-S', '-c', code)}\n")
        name = terminal.wait_for(r"(/dev/\S+)")[1]
        terminal.wait_for(f"True {name} True")


def test_ctrl_c_reaches_the_command_once_and_does_not_end_it() -> None:
    with shell() as terminal:
        terminal.type(f"{line('--', sys.executable, '-I', '-S', '-c', COUNTS)}; echo code $?\n")
        terminal.wait_for("is up")
        for number in (1, 2, 3):
            terminal.type("\x03")
            terminal.wait_for(rf"INT {number}\r\n")
        terminal.wait_for("code 0")


def test_ctrl_c_ends_a_script_around_the_guard() -> None:
    """A shell goes on after a child that exits with 130. It ends after one that died of SIGINT."""
    with shell() as terminal:
        script = f"{line('--', 'sh', '-c', 'echo is up; exec sleep 60')}; echo went on"
        terminal.type(f"{shlex.join(['bash', '-c', script])}\n")
        terminal.wait_for("is up")
        terminal.type("\x03")
        assert "went on" not in terminal.wait_for("(?s)(.*)now> ")[1]
        terminal.type("echo code $?\n")
        terminal.wait_for("code 130")


def test_ctrl_z_and_fg_stop_and_continue_the_command() -> None:
    code = "import os; os.write(1, b'is up\\n'); print('read', os.read(0, 9))"
    with shell() as terminal:
        terminal.type(f"{line('--', sys.executable, '-I', '-S', '-c', code)}\n")
        terminal.wait_for("is up")
        terminal.type("\x1a")
        terminal.wait_for("Stopped")
        terminal.wait_for("now> ")
        terminal.type("jobs -p\n")
        pid = int(terminal.wait_for(r"(\d+)\r\n")[1])
        guard_seen = look(pid)
        assert guard_seen is not None
        assert guard_seen.state == "T"
        terminal.type("fg\n")
        terminal.wait_for("banksman guard")
        terminal.type("word\n")
        terminal.wait_for(r"read b'word\\n'")


def test_background_guard_stops_when_its_command_reads_the_terminal() -> None:
    with shell() as terminal:
        terminal.type(f"{line('--', 'sh', '-c', 'read word; echo got $word')} &\n")
        terminal.wait_for("Stopped")
        terminal.type("fg\n")
        terminal.wait_for("banksman guard")
        terminal.type("it\n")
        terminal.wait_for("got it")


def test_ctrl_z_is_left_to_a_command_that_ignores_it() -> None:
    code = "import os, signal; signal.signal(20, signal.SIG_IGN); os.write(1, b'is up\\n'); print(os.read(0, 9))"
    with shell() as terminal:
        terminal.type(f"{line('--', sys.executable, '-I', '-S', '-c', code)}; echo code $?\n")
        terminal.wait_for("is up")
        terminal.type("\x1a")
        terminal.type("word\n")
        terminal.wait_for(r"b'word\\n'\r\n")
        terminal.wait_for("code 0")


def test_stopped_job_ends_with_its_shell() -> None:
    """A stopped guard cannot watch its parent. Its keeper does."""
    with on_terminal(["/bin/bash", "--norc", "--noprofile", "--noediting", "-i"]) as (terminal, process):
        terminal.wait_for("ready> ")
        terminal.type(f"{line('--', 'sh', '-c', 'echo is $PPID; exec sleep 60')}\n")
        keeper = look(int(terminal.wait_for(r"is (\d+)\r\n")[1]))
        assert keeper is not None
        seen = look(keeper.parent)
        assert seen is not None
        terminal.type("\x1a")
        terminal.wait_for("Stopped")
        process.kill()
        process.wait()
        wait_gone(keeper, seen)


def test_guard_takes_the_terminal_back_from_a_dead_group() -> None:
    """The command makes its own group the foreground group, and is killed."""
    code = (
        "import os, signal; signal.signal(22, signal.SIG_IGN); os.setpgid(0, 0); os.tcsetpgrp(0, os.getpid());"
        "os.kill(os.getpid(), 9)"
    )
    check = "import os; print('mine', os.getpgrp() == os.tcgetpgrp(0))"
    words = [*guard("--", sys.executable, "-I", "-S", "-c", code)]
    script = f'"$@"; {sys.executable} -I -S -c "{check}"'
    with on_terminal(["/bin/sh", "-c", script, "sh", *words]) as (terminal, process):
        terminal.wait_for("mine True")
        assert process.wait(SECONDS_MAX) == 0


def test_closed_terminal_ends_the_tree() -> None:
    with on_terminal(guard("--grace", "0.3", "--", "sh", "-c", "trap '' HUP; echo is $PPID; sleep 60")) as (
        terminal,
        _,
    ):
        keeper = look(int(terminal.wait_for(r"is (\d+)\r\n")[1]))
        assert keeper is not None
        os.close(terminal._fd)  # pyright: ignore[reportPrivateUsage]
        wait_gone(keeper)
        # For the end of the block.
        terminal._fd = os.open("/dev/null", os.O_RDONLY)  # pyright: ignore[reportPrivateUsage]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_of_a_process_ends_the_command_at_a_terminal(number: int) -> None:
    with on_terminal(guard("--grace", "60", "--", "sh", "-c", "echo is up; exec sleep 60")) as (terminal, process):
        terminal.wait_for("is up")
        process.send_signal(number)
        assert process.wait(SECONDS_MAX) == -number
