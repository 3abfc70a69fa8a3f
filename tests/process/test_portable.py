"""Portable process for systems without a subreaper, tested on Linux.

It has the same interface, and the endings that need no subreaper.
"""

from __future__ import annotations

import asyncio
import sys

import pytest
from tests.process.count import marked

import banksman
from banksman.commands import running_command
from banksman.process.portable import PortableProcess

# Prints "up" once its child is up, in its group or ("far") in a new session. "deaf" ignores TERM.
TREE = """
import os, signal, sys, time
if "deaf" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
if os.fork() == 0:
    if "far" in sys.argv: os.setsid()
    os.write(1, b"up\\n"); time.sleep(60); os._exit(0)
if "leaves" in sys.argv: sys.exit(3)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def portable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_command, "PROCESS", PortableProcess)


def tree(marker: str, *words: str) -> list[str]:
    return [sys.executable, "-I", "-S", "-c", TREE, marker, *words]


async def test_portable_process_passes_code_output_and_input() -> None:
    done = await banksman.execute(["sh", "-c", "cat; echo err >&2; exit 3"], stdin=b"in")
    assert (done.ended, done.code, done.stdout.text, done.stderr.text) == ("exited", 3, "in", "err\n")
    assert done.survivors == ()
    assert done.drained


async def test_portable_process_reports_a_signal_instead_of_a_code() -> None:
    done = await banksman.execute(["sh", "-c", "kill -9 $$"])
    assert (done.code, done.signal) == (None, 9)


@pytest.mark.parametrize("words", [(), ("far",), ("deaf",), ("far", "deaf")], ids=" ".join)
async def test_portable_stop_ends_the_group_and_processes_seen_by_ps(marker: str, words: tuple[str, ...]) -> None:
    async with banksman.Host() as host:
        running = await host.start(tree(marker, *words), grace=0.3)
        assert isinstance(running, banksman.Command)
        assert (await running.read()).text == "up\n"
        done = await running.stop()
    assert done.ended == "stopped"
    assert done.survivors == ()
    assert marked(marker) == []


async def test_portable_process_sweeps_the_group_after_an_exit(marker: str) -> None:
    done = await banksman.execute(tree(marker, "leaves"), linger=0.05, grace=0.3)
    assert (done.ended, done.code) == ("exited", 3)
    assert len(done.swept) == 1
    assert marked(marker) == []


async def test_portable_process_supports_timeout_and_cancel(marker: str) -> None:
    assert (await banksman.execute(tree(marker), timeout=0.5, grace=0.3)).ended == "timeout"
    task = asyncio.create_task(banksman.execute(tree(marker), grace=0.3))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_portable_process_starts_nothing_on_bad_input(marker: str) -> None:
    with pytest.raises(banksman.ProgramNotFound):
        await banksman.execute(["no-such-program-anywhere", marker])
    with pytest.raises(banksman.UsageError):
        await banksman.execute(["true", marker], limits={"nofile": (10**9, 10**9)})
