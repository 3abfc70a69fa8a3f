"""Helpers of the scenario tests: marked children with a limited life, and waits for a fact.

Every child is a small Python program with the test's marker in its argv. So `count.marked` finds it and its forks,
whatever they do to their group, session or environment. Each child sets an alarm, so a bug costs the machine at most
two minutes of an idle process. The alarm is longer than any wait of the tests (`PATIENCE_SECONDS`): a child that ends
by its alarm must not count as one that was ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.process.count import marked

from banksman import Command, Finished, Host
from banksman.process import attributes
from banksman.process.process import ChildProcess
from banksman.process.zygote_client import spawner

if TYPE_CHECKING:
    import pytest  # Children of a test import this file with a Python that has no pytest.

REPOSITORY = Path(__file__).resolve().parents[2]
# Limit of a poll for a fact without a handshake, such as the death of a process that is not a child.
PATIENCE_SECONDS = 60.0
NOBODY = 65534
_RIGHTS = ("--inh-caps=-all,+dac_override", "--ambient-caps=-all,+dac_override")

_CHILD = """
import os, signal, sys, time
signal.alarm(120)
WORDS = sys.argv[1:]

def say(*words, to=1):
    os.write(to, (" ".join(map(str, words)) + "\\n").encode())

def hear():
    line = b""
    while not line.endswith(b"\\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return line.decode().strip()

def fork():
    pid = os.fork()
    if pid == 0:
        signal.alarm(120)
    return pid

def touch(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))

def be_deaf():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)

def stay():
    # Not signal.pause(): a signal that comes right before it is handled when the next one comes, if one does.
    while True:
        time.sleep(1)
"""

_HOST = """
import asyncio, gc, os, signal, sys, threading, time
import banksman
from tests.process.helpers import *
signal.alarm(120)
MARKER, *WORDS = sys.argv[1:]
"""


def child(code: str, marker: str, *words: object) -> list[str]:
    """Return the argv of a child that runs `code`.

    The code knows `say`, `hear`, `fork`, `touch`, `be_deaf`, `stay` and its WORDS. The marker comes first, as an option
    without effect, because a report shows only the start of a command line.
    """
    return [sys.executable, "-X", marker, "-I", "-S", "-c", _CHILD + code, *(str(word) for word in words)]


def program(code: str, marker: str, *words: object, python: str = sys.executable) -> list[str]:
    """Return the argv of a program that uses Banksman, for actions that the process of the tests must not take."""
    return [python, "-c", _HOST + code, marker, *(str(word) for word in words)]


def run_program(
    code: str,
    marker: str,
    *words: object,
    stdin: str = "",
    env: dict[str, str] | None = None,
    python: str = sys.executable,
) -> subprocess.CompletedProcess[str]:
    """Run such a program to its end."""
    return subprocess.run(
        program(code, marker, *words, python=python),
        cwd=REPOSITORY,
        env={**os.environ, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def as_nobody(argv: list[str]) -> list[str]:
    """Return the same program as a user without rights, except to read any folder.

    Python may be installed where only root can look.
    """
    return ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *_RIGHTS, "--", *argv]


@contextlib.contextmanager
def running_program(code: str, marker: str, *words: object) -> Generator[subprocess.Popen[str]]:
    """Run such a program, and kill it at the end if it still lives. Its stdout can be read line by line."""
    with subprocess.Popen(
        program(code, marker, *words), cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


async def start(host: Host, argv: list[str], **options: Any) -> Command:
    """Start a background command. Without `yield_after`, `host.start` always returns one."""
    command = await host.start(argv, **options)
    assert isinstance(command, Command)
    return command


def leave_keepers_untold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the deadlines of a stop from the keepers, which act in place of a late host.

    For tests that count the rungs of the host itself: a busy machine may delay any of them.
    """

    def hurry(_process: ChildProcess, _term_at: float, _kill_at: float) -> None: ...

    monkeypatch.setattr(ChildProcess, "hurry", hurry)


def rungs(done: Finished) -> list[str]:
    """Return each rung once.

    On a busy machine host and keeper may both kill, because a late host leaves it to the keeper.
    """
    return [rung for rung, _ in itertools.groupby(step.rung for step in done.ladder)]


def alive(marker: str) -> list[int]:
    """Return the live processes with the marker."""
    return marked(marker)


def wait_until(is_so: Callable[[], bool], what: str) -> None:
    """Poll until a condition holds that no event reports, such as the state of a process that is not a child."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, f"waited {PATIENCE_SECONDS} s for: {what}"
        time.sleep(0.002)


async def wait_pass(is_so: Callable[[], bool]) -> None:
    """Run the loop pass by pass, and return in the very pass in which the condition holds."""
    while not is_so():  # noqa: ASYNC110  (no event is set in exactly that pass)
        await asyncio.sleep(0)


def wait_none(marker: str) -> None:
    """Wait until no marked process is left. Only for processes that no result has promised to be gone."""
    wait_until(lambda: not alive(marker), f"the end of every process with {marker}")


async def wait_said(command: Command, word: str, *, stream: str = "stdout") -> str:
    """Return the output of a command, once it contains this word."""
    said, after = b"", 0
    while word.encode() not in said:
        piece = await command.read(after=after, stream=stream)
        assert not piece.is_end or word.encode() in said + piece.data, f"it ended and said only {said + piece.data!r}"
        said, after = said + piece.data, piece.next
    return said.decode()


class Heard:
    """An `on_output` that records the output, and in which a test can wait for a word."""

    def __init__(self) -> None:
        self.pieces: list[tuple[str, bytes]] = []
        self._more = asyncio.Event()

    def __call__(self, stream: str, data: bytes) -> None:
        self.pieces.append((stream, data))
        self._more.set()

    @property
    def text(self) -> str:
        return b"".join(data for _stream, data in self.pieces).decode()

    async def wait(self, word: str) -> str:
        while word not in self.text:
            self._more.clear()
            await self._more.wait()
        return self.text


def state_of(pid: int) -> str:
    """Return the state letter of a process, empty if the process does not exist."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def parent_of(pid: int) -> int:
    return int(_stat(pid)[1])


def start_of(pid: int) -> int:
    return int(_stat(pid)[19])


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def zygote_pid() -> int:
    """Return the pid of the zygote that would serve a start by this thread. Start one if needed."""
    return spawner.current(attributes.take_inherited().fingerprint).pid


@contextlib.contextmanager
def frozen(pid: int) -> Generator[None]:
    """Stop a guard (a zygote or keeper), as on a machine that has no time for it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        wait_until(lambda: state_of(pid) == "T", f"{pid} to be stopped")
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def frozen_guards(leader: int) -> Generator[None]:
    """Stop the keeper of a command, and the zygote, which would continue it."""
    keeper = parent_of(leader)
    with frozen(parent_of(keeper)), frozen(keeper):
        yield
