"""Targets of stdout and stderr: a file, nowhere, the program's own streams, or both in one."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import child, run_program, rungs, start

import banksman
from banksman import Ended, Host, UsageError

BOTH = "say('out'); say('err', to=2)"


@pytest.mark.parametrize("portable", [False, True])
async def test_output_goes_where_it_is_sent(
    marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, portable: bool
) -> None:
    if portable:
        from banksman.commands import running_command
        from banksman.process.portable import PortableProcess

        monkeypatch.setattr(running_command, "PROCESS", PortableProcess)
    path = tmp_path / "out"
    path.write_text("what was there before")
    done = await banksman.execute(child(BOTH, marker), stdout=path)
    assert (path.read_text(), done.stdout.total, done.stderr.text) == ("out\n", 0, "err\n")
    with path.open("ab") as file:
        done = await banksman.execute(child(BOTH, marker), stdout=str(tmp_path / "other"), stderr=file)
        done = await banksman.execute(child(BOTH, marker), stdout=file.fileno(), stderr=subprocess.STDOUT)
    assert (path.read_text(), (tmp_path / "other").read_text()) == ("out\nerr\nout\nerr\n", "out\n")
    assert (done.stdout.total, done.stderr.total, done.drained) == (0, 0, True)
    done = await banksman.execute(child(BOTH, marker), stdout=subprocess.DEVNULL)
    assert (done.stdout.total, done.stderr.text) == (0, "err\n")
    done = await banksman.execute(child(BOTH, marker), stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
    assert (done.stdout.total, done.stderr.total, done.code) == (0, 0, 0)
    done = await banksman.execute(child(BOTH, marker), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert (done.stdout.text, done.stderr.total) == ("out\nerr\n", 0)


async def test_stream_redirected_elsewhere_has_ended_here(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child("stay()", marker), stderr=subprocess.DEVNULL)
        assert await command.stderr.read() == b""
        assert (await command.read(stream="stderr")).is_end
        assert not command.stdout.at_eof()
        await command.stop()
        assert await command.stdout.read() == b""


INHERITS = """
async def main():
    done = await banksman.execute(child("say('out'); say('err', to=2)", MARKER), stdout="inherit", stderr="inherit")
    assert (done.stdout.total, done.stderr.total) == (0, 0)
asyncio.run(main())
"""


def test_inherited_streams_are_those_of_the_program(marker: str) -> None:
    done = run_program(INHERITS, marker)
    assert (done.stdout, done.stderr, done.returncode) == ("out\n", "err\n", 0)


WRONG: list[dict[str, Any]] = [
    {"stdout": subprocess.STDOUT},
    {"stdout": 10**9},
    {"stderr": -7},
    {"stdout": True},
    {"stdout": "pipe"},
    {"stderr": ""},
    {"stdout": 1.5},
    {"stdout": Path("/nowhere/at/all")},
    {"stdout": Path("/")},
    {"stdout": subprocess.DEVNULL, "pty": True},
    {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "idle_timeout": 1},
    {"eof": 1.0},
    {"eof": -1, "stdin": b""},
]


@pytest.mark.parametrize("how", WRONG, ids=[str(n) for n in range(len(WRONG))])
async def test_invalid_output_target_is_a_usage_error(how: dict[str, Any], marker: str) -> None:
    with pytest.raises(UsageError) as caught:
        await banksman.execute(child(BOTH, marker), **how)
    assert caught.value.hint


async def test_fifo_target_without_a_reader_is_an_error_and_not_a_wait(marker: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(UsageError, match="cannot write output to"):
        await banksman.execute(child(BOTH, marker), stdout=tmp_path / "fifo")


# -- the end of stdin as the first rung ------------------------------------------------------------------------------
async def test_stop_with_eof_closes_stdin_first(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child("hear(); sys.exit(5)", marker), stdin="pipe", eof=30)
        done = await command.stop()
        assert (done.ended, done.code, rungs(done)[:1]) == (Ended.STOPPED, 5, ["eof"])
        command = await start(host, child("stay()", marker), stdin="pipe", eof=0.01)
        done = await command.stop()
        assert (done.signal, rungs(done)[:2]) == (15, ["eof", "term"])
