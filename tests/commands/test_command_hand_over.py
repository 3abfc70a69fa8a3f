"""Background commands that move from one host to another, both in the process of the test."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from banksman import Command, Host
from banksman.commands import command_hand_over, command_state
from banksman.commands.output import Capture
from banksman.core.process_facts import Stream
from banksman.errors import Closed, MachineError, Moved, Refused
from banksman.process import hold_record

SCOPE = "sqlite:/of/the/test"
HOLD_SECONDS = 100.0
ECHO = """
import sys
print("ready", flush=True)
for line in sys.stdin:
    print("heard", line.strip(), flush=True)
sys.exit(3)
"""
FLOOD = f"import sys; sys.stdout.write('x' * 1_000_000); sys.stdout.flush(); {ECHO}"


@pytest.fixture(autouse=True)
def state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path


async def started(host: Host, code: str = ECHO, **how: Any) -> Command:
    command = await host.start([sys.executable, "-S", "-c", code], stdin="pipe", **how)
    assert isinstance(command, Command)
    if command.keeps_output:
        assert await command.watch("ready")
    return command


async def moved(old: Host, new: Host, *, stays: int = 0) -> list[Command]:
    """Hand the commands of one host over to the other, and return them there."""
    assert await old.hand_over_commands(HOLD_SECONDS, scope=SCOPE) == stays
    await new.take_over_commands(SCOPE)
    return new.commands()


@pytest.mark.parametrize("bytes_max", [1 << 20, 1000, 0])
async def test_kept_output_is_the_same_at_the_next_host(bytes_max: int) -> None:
    async with Host() as old, Host() as new:
        before = await started(old, FLOOD, output_bytes_max=bytes_max)
        positions = (0, 1, 400, 500_000, 999_999, before.written(Stream.STDOUT))
        pieces = {after: await before.read(after=after, bytes_max=100) for after in positions[:-1]}
        (command,) = await moved(old, new)
        assert command.id == before.id
        for after, piece in pieces.items():
            assert await command.read(after=after, bytes_max=100) == piece
        await command.write(b"a\n")
        await command.close_stdin()
        done = await command.wait()
        assert (done.code, done.stdout.total) == (3, 1_000_000 + len("ready\nheard a\n"))


async def test_stream_whose_file_was_lost_gets_no_new_file() -> None:
    capture = Capture(10, 0)
    capture.add(b"x" * 100)
    restored = Capture(10, 1000)
    restored.restore(capture.state())
    restored.add(b"y" * 100)
    done = restored.finish()
    assert (done.total, done.spill, done.head, done.tail) == (200, None, b"x" * 5, b"y" * 5)


async def test_end_of_a_command_is_reported_once_by_the_next_host() -> None:
    async with Host() as old, Host() as new:
        await started(old)
        (command,) = await moved(old, new)
        assert old.take_ended() == []
        assert old.commands() == []
        await command.close_stdin()
        assert await new.wait_ended() == [command]
        assert new.take_ended() == []


async def test_caller_that_waits_on_the_old_host_is_told_to_turn_to_the_next() -> None:
    async with Host() as old, Host() as new:
        command = await started(old)
        waits = [asyncio.ensure_future(call) for call in (command.wait(), command.read(after=100), command.watch("no"))]
        await asyncio.sleep(0)
        await moved(old, new)
        for wait in waits:
            with pytest.raises(Moved, match="was handed over to another host"):
                await wait
        with pytest.raises(Moved, match="was handed over to another host"):
            old.command(command.id)
        with pytest.raises(Closed):
            await old.start(["true"])


@pytest.mark.parametrize("is_handed_over", [True, False])
async def test_wait_for_ends_fails_when_the_host_ends(is_handed_over: bool) -> None:
    async with Host() as old, Host() as new:
        command = await started(old)
        waiting = asyncio.ensure_future(old.wait_ended())
        await asyncio.sleep(0)
        if is_handed_over:
            await moved(old, new)
        else:
            await command.stop()  # This reports the end.
        await old.drain(timeout=0)
        with pytest.raises(Closed, match="no command can end here"):
            await asyncio.wait_for(waiting, 60)


async def test_options_hold_at_the_next_host() -> None:
    async with Host() as old, Host() as new:
        await started(old, timeout=1000.0, grace=0.25, eof=0.5, output_total_max=2_000)
        (command,) = await moved(old, new)
        await command.write(b"y" * 3_000 + b"\n")
        done = await command.wait()
        assert done.ended.value == "output_limit"
        assert [step.rung for step in done.ladder][:1] == ["eof"]


async def test_input_that_was_given_at_the_start_is_not_written_again() -> None:
    async with Host() as old, Host() as new:
        code = "import sys, time; heard = sys.stdin.read(); print('ready', flush=True); time.sleep(1000); print(heard)"
        command = await old.start([sys.executable, "-S", "-c", code], stdin=b"given")
        assert isinstance(command, Command)
        await command.watch("ready")
        (command,) = await moved(old, new)
        done = await command.stop()
        assert b"given" not in done.stdout.head


async def test_command_whose_output_this_process_reads_stays_and_goes_on() -> None:
    async with Host() as old, Host() as new:
        heard: list[str] = []

        def on_output(stream: str, data: bytes) -> None:
            del data
            heard.append(stream)

        called = await started(old, on_output=on_output)
        unkept = await started(old, keep_output=False)
        read = await started(old)
        assert await read.stdout.readline() == b"ready\n"
        assert await moved(old, new, stays=3) == []
        for command in (called, unkept, read):
            await command.write(b"still\n")
        assert await called.watch("heard still")
        assert await unkept.stdout.readline() == b"ready\n"
        assert await unkept.stdout.readline() == b"heard still\n"
        assert await read.stdout.readline() == b"heard still\n"


async def test_command_with_an_unfinished_write_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command_hand_over, "WRITE_SECONDS_MAX", 0.05)
    async with Host() as old, Host() as new:
        code = "import sys, time; print('ready', flush=True); time.sleep(1000)"
        command = await started(old, code)
        write = asyncio.ensure_future(command.write(b"z" * 1_000_000))
        await asyncio.sleep(0)
        assert await moved(old, new, stays=1) == []
        assert command.state == "running"
        await command.stop(at_once=True)
        with pytest.raises(BaseException):  # noqa: B017, PT011
            await write


async def test_record_of_another_version_or_another_thing_is_not_a_command() -> None:
    assert command_state.decode(b"something else") is None
    for record in (b"banksman-command-99\n\x80", command_state.WORD + b"\xc1"):
        with pytest.raises(Refused, match="not readable here"):
            command_state.decode(record)


async def test_command_whose_record_cannot_be_written_stays_and_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str, record: bytes) -> None:
        del name, record
        raise MachineError("no space", number=28)

    monkeypatch.setattr(hold_record, "write", fail)
    async with Host() as old, Host() as new:
        command = await started(old)
        assert await moved(old, new, stays=1) == []
        await command.write(b"still\n")
        assert await command.watch("heard still")
