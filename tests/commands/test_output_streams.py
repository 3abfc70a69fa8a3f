"""Pull readers of a command's output: no lost byte, backpressure from a slow reader, and an end for each stream."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import tempfile
import time
from pathlib import Path
from typing import Any, cast

import pytest
from tests.process.helpers import alive, child, start, wait_pass

import banksman
from banksman import Command, Ended, Host, UsageError
from banksman.commands import output_streams as reading
from banksman.commands.output import Capture
from banksman.commands.output_streams import HELD_BYTES, OVERRUN_BYTES_MAX, OutputReader
from banksman.core.process_facts import Stream
from banksman.testing import fake_agent

MIB = 1 << 20
# Writes the given number of MiB to stdout, each MiB different, and prints their digest on stderr.
WRITES = """
import hashlib
digest = hashlib.sha256()
for number in range(int(WORDS[0])):
    piece = (b"%07d\\n" % number) * (1 << 17)
    digest.update(piece)
    while piece:
        piece = piece[os.write(1, piece):]
say(digest.hexdigest(), to=2)
"""
# Writes as much as the pipe takes, and prints on stderr to show that it runs.
FLOODS = """
import select
os.set_blocking(1, False)
while True:
    try:
        os.write(1, b"x" * 4096)
    except BlockingIOError:
        select.select([], [1], [], 0.05)
        say("here", to=2)
"""


async def digest_of(command: Command) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    while data := await command.stdout.read(100_000):
        digest.update(data)
        size += len(data)
    return digest.hexdigest(), size


# -- nothing is lost -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("kept", "mib"), [(True, 70), (False, 20)])
async def test_reader_gets_every_byte_of_a_fast_writer(marker: str, kept: bool, mib: int) -> None:
    """The output is larger than memory and disk together can keep."""
    async with Host("memory:") as host:
        command = await start(host, child(WRITES, marker, mib), keep_output=kept)
        digest, size = await digest_of(command)
        assert size == mib * MIB
        assert await command.stderr.read() == f"{digest}\n".encode()
        assert (command.stdout.missed, command.stdout.at_eof(), command.stderr.at_eof()) == (0, True, True)
        done = await command.wait()
        assert (done.ended, done.code, done.stdout.total) == (Ended.EXITED, 0, mib * MIB)


async def test_reader_that_pauses_loses_nothing_of_output_that_is_not_kept(marker: str) -> None:
    """The reader resumes when the writer waits for it.

    A writer without backpressure would have written everything by that time.
    """
    async with Host("memory:") as host:
        command = await start(host, child(WRITES, marker, 20), keep_output=False)
        first = await command.stdout.read(1)
        flow = command._flow  # pyright: ignore[reportPrivateUsage]
        await wait_pass(lambda: bool(flow._held_back) or command.written(Stream.STDOUT) == 20 * MIB)  # pyright: ignore[reportPrivateUsage]
        data = first + await command.stdout.read()
        assert (len(data), command.stdout.missed) == (20 * MIB, 0)
        assert await command.stderr.read() == f"{hashlib.sha256(data).hexdigest()}\n".encode()


async def test_reader_that_comes_late_begins_at_the_first_byte(marker: str) -> None:
    """The reader first reads the kept output from the file, and then the rest as it arrives."""
    async with Host("memory:") as host:
        command = await start(host, child(WRITES, marker, 5), output_bytes_max=1000)
        await wait_pass(lambda: command.written(Stream.STDOUT) > 2 * MIB)
        digest, size = await digest_of(command)
        assert size == 5 * MIB
        assert await command.stderr.readline() == f"{digest}\n".encode()
        assert command.stdout.missed == 0


async def test_readline_returns_whole_lines_however_they_arrive(marker: str) -> None:
    code = "for piece in (b'one\\ntw', b'o\\n', b'\\n', b'three'):\n    os.write(1, piece)\n    hear()"
    async with Host("memory:") as host:
        command = await start(host, child(code, marker), stdin="pipe")
        lines: list[bytes] = []

        async def read() -> None:
            async for line in command.stdout:
                lines.append(line)  # noqa: PERF401  The test reads the list meanwhile.

        reader = asyncio.create_task(read())
        for size in (6, 8, 9, 14):
            await wait_pass(lambda size=size: command.written(Stream.STDOUT) == size)
            await command.write(b"go\n")
        await reader
        assert lines == [b"one\n", b"two\n", b"\n", b"three"]
        assert await command.stdout.readline() == b""
        assert await command.stdout.read(1) == b""


async def test_readline_returns_long_line_whole_and_in_parts_past_its_bound(
    marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 3 * HELD_BYTES + 5
    code = f"left = b'x' * {size} + b'\\n' + b'y' * {size}\nwhile left:\n    left = left[os.write(1, left):]"
    async with Host("memory:") as host:
        command = await start(host, child(code, marker), keep_output=False)
        assert await command.stdout.readline() == b"x" * size + b"\n"
        monkeypatch.setattr(reading, "LINE_BYTES_MAX", 2 * HELD_BYTES)
        parts = [line async for line in command.stdout]
        assert [len(part) for part in parts] == [2 * HELD_BYTES, size - 2 * HELD_BYTES]


async def test_cancelled_read_loses_nothing(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child("os.write(1, b'ab'); hear(); os.write(1, b'c\\n')", marker), stdin="pipe")
        for read in (command.stdout.readline, command.stdout.read):
            waiting = asyncio.create_task(read())
            await wait_pass(lambda: command.written(Stream.STDOUT) == 2)
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        await command.write(b"go\n")
        assert await command.stdout.readline() == b"abc\n"


@pytest.mark.parametrize("exits", [False, True])
async def test_cancelled_read_to_the_end_loses_nothing_of_what_comes_later(marker: str, exits: bool) -> None:
    """The bytes already read exceed the buffer for a fast writer, and no other place keeps them."""
    mib = OVERRUN_BYTES_MAX // MIB + 2
    async with Host("memory:") as host:
        code = f"{WRITES}\nhear()\nos.write(1, b'later')\nsay('wrote', to=2)\n{'' if exits else 'hear()'}"
        command = await start(host, child(code, marker, mib), stdin="pipe", keep_output=False)
        reading = asyncio.create_task(command.stdout.read())
        await wait_pass(lambda: command.written(Stream.STDOUT) == mib * MIB)
        await wait_pass(lambda: "0 bytes to be read" in repr(command.stdout))
        reading.cancel()
        await asyncio.wait([reading])
        await command.write(b"go\n")
        assert await command.stderr.readline() != b""
        assert await command.stderr.readline() == b"wrote\n"
        if exits:
            # The end of the command ends the backpressure: the reader gets the rest from the pipe.
            await wait_pass(lambda: command.is_over)
        else:
            # The output is in the pipe, and stays there.
            command.look_now()
            assert command.written(Stream.STDOUT) == mib * MIB
            await command.close_stdin()
        everything = await command.stdout.read()
        assert (len(everything), everything[-5:], command.stdout.missed) == (mib * MIB + 5, b"later", 0)


# -- backpressure ----------------------------------------------------------------------------------------------------
async def test_slow_reader_makes_command_wait_on_that_stream_only(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child(FLOODS, marker), grace=0.1, idle_timeout=60)
        assert await command.stdout.read(1) == b"x"
        await wait_pass(lambda: command._flow._held_back == {Stream.STDOUT})  # pyright: ignore[reportPrivateUsage]
        taken, said = command.written(Stream.STDOUT), command.written(Stream.STDERR)
        assert taken < HELD_BYTES + MIB
        # The host still reads stderr.
        await command.read(after=said, stream="stderr")
        assert command.written(Stream.STDOUT) == taken
        # The reader is idle, not the command.
        assert command._account.idle_seconds_left(time.monotonic()) == math.inf  # pyright: ignore[reportPrivateUsage]
        # A stop ends the backpressure: a command that is blocked on a full pipe could not react.
        done = await command.stop()
        assert done.ended is Ended.STOPPED
        rest = await command.stdout.read()
        assert 1 + len(rest) + command.stdout.missed == done.stdout.total
        assert len(rest) <= done.stdout.total


async def test_reader_does_not_end_pause_of_caller(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child("say('one'); hear(); say('two'); stay()", marker), stdin="pipe", grace=0.1)
        assert await command.stdout.readline() == b"one\n"
        command.pause_reading()
        reading = asyncio.create_task(command.stdout.readline())
        await command.write(b"go\n")
        for _ in range(100):
            await asyncio.sleep(0)
            command.look_now()
        assert not reading.done()
        command.resume_reading()
        assert await reading == b"two\n"


async def test_buffer_is_bounded_while_stopped_command_writes(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child(f"be_deaf()\n{FLOODS}", marker), grace=0.5, keep_output=False)
        assert await command.stdout.read(1) == b"x"
        done = await command.stop()
        rest = await command.stdout.read()
        assert len(rest) <= HELD_BYTES + OVERRUN_BYTES_MAX + MIB
        assert 1 + len(rest) + command.stdout.missed == done.stdout.total


# -- output that is not kept -----------------------------------------------------------------------------------------
@pytest.fixture
def spill_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "spill"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


async def test_output_that_is_not_kept_is_counted(marker: str, spill_folder: Path) -> None:
    heard = 0

    def hear(_stream: str, data: bytes) -> None:
        nonlocal heard
        heard += len(data)
        assert os.listdir(spill_folder) == []

    done = await banksman.execute(child(WRITES, marker, 3), keep_output=False, on_output=hear)
    assert (done.stdout.head, done.stdout.tail, done.stdout.file) == (b"", b"", None)
    assert (done.stdout.total, done.stdout.dropped, done.stderr.dropped, heard) == (3 * MIB, 3 * MIB, 65, 3 * MIB + 65)


async def test_command_whose_output_is_not_kept_waits_for_a_reader(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child(WRITES, marker, 3), keep_output=False)
        await wait_pass(lambda: command.written(Stream.STDOUT) >= HELD_BYTES)
        for _ in range(100):
            await asyncio.sleep(0)
        assert command.written(Stream.STDOUT) < HELD_BYTES + MIB
        with pytest.raises(UsageError, match="not kept"):
            await command.read()
        with pytest.raises(UsageError, match="not kept"):
            await command.watch("x")
        # A caller that waits for the end does not discard output while a reader reads.
        done, (_, size) = await asyncio.gather(command.wait(), digest_of(command))
        assert (done.code, size, command.stdout.missed) == (0, 3 * MIB, 0)


async def test_command_with_output_neither_kept_nor_read_ends_when_awaited(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child(WRITES, marker, 3), keep_output=False)
        assert (await command.wait()).code == 0
        beginning = await command.stdout.read()
        assert len(beginning) + command.stdout.missed == 3 * MIB


@pytest.mark.parametrize("how", ["wait_over", "wait_ended", "finish", "drain"])
async def test_command_with_held_output_ends_when_a_caller_waits_for_its_end(marker: str, how: str) -> None:
    async with asyncio.timeout(30), Host("memory:") as host:
        command = await start(host, child(WRITES, marker, 3), keep_output=False)
        await wait_pass(lambda: command._flow._held_back == {Stream.STDOUT})  # pyright: ignore[reportPrivateUsage]
        await getattr(command if how == "wait_over" else host, how)()
        done = command.result()
        assert (done.ended, done.code, done.stdout.total) == (Ended.EXITED, 0, 3 * MIB)
        # The buffer held the beginning all the time.
        beginning = await command.stdout.read()
        assert (len(beginning) >= HELD_BYTES, len(beginning) + command.stdout.missed) == (True, 3 * MIB)


async def test_command_started_during_wait_for_ends_does_not_wait_for_reader(marker: str) -> None:
    async with asyncio.timeout(30), Host("memory:") as host:
        ended = asyncio.create_task(host.wait_ended())
        await asyncio.sleep(0)
        command = await start(host, child(WRITES, marker, 3), keep_output=False)
        assert await ended == [command]


async def test_draining_host_ends_commands_with_held_output_while_session_works(marker: str) -> None:
    async with asyncio.timeout(30), Host("memory:") as host:
        session = await host.open("claude", command=fake_agent.command())
        turn = await session.ask("@@hang")
        command = await start(host, child(WRITES, marker, 3), keep_output=False)
        draining = asyncio.create_task(host.drain())
        await wait_pass(lambda: command.is_over)
        assert (command.result().ended, draining.done()) == (Ended.EXITED, False)
        await turn.interrupt()
        await draining


async def test_cancelled_wait_for_ends_leaves_held_output_to_a_reader(marker: str) -> None:
    async with Host("memory:") as host:
        command = await start(host, child(f"hear()\n{WRITES}", marker, 3), keep_output=False, stdin="pipe")
        for wait in (command.wait(), command.wait_over(), host.wait_ended()):
            waiting = asyncio.create_task(wait)
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.wait([waiting])
        await command.write(b"go\n")
        await wait_pass(lambda: command._flow._held_back == {Stream.STDOUT})  # pyright: ignore[reportPrivateUsage]
        assert ((await digest_of(command))[1], command.stdout.missed) == (3 * MIB, 0)


async def test_yield_after_leaves_held_output_to_a_reader(marker: str) -> None:
    """The caller does not have the command yet, so it cannot read."""
    async with Host("memory:") as host:
        command = await host.start(child(WRITES, marker, 3), keep_output=False, yield_after=0.2)
        assert isinstance(command, Command)
        assert ((await digest_of(command))[1], command.stdout.missed) == (3 * MIB, 0)


# -- the end of one stream -------------------------------------------------------------------------------------------
async def test_end_of_stdout_is_seen_while_command_and_stderr_live(marker: str) -> None:
    code = "say('last'); os.close(1); hear(); say('still here', to=2); stay()"
    async with Host("memory:") as host:
        command = await start(host, child(code, marker), stdin="pipe", grace=0.1)
        assert [line async for line in command.stdout] == [b"last\n"]
        piece = await command.read(after=5)
        assert (piece.data, piece.is_end, command.state) == (b"", True, "running")
        assert await command.watch("never") is None
        assert not command.stderr.at_eof()
        await command.write(b"go\n")
        assert await command.stderr.readline() == b"still here\n"
        await command.stop()
        assert await command.stderr.read() == b""


async def test_terminal_has_one_stream_to_read() -> None:
    async with Host("memory:") as host:
        command = await start(host, ["sh", "-c", "echo one; echo two >&2"], pty=True)
        assert [line async for line in command.stdout] == [b"one\r\n", b"two\r\n"]
        assert await command.stderr.read() == b""


@pytest.mark.parametrize("size", [0, -2, True, 1.5, "x", None])
async def test_read_refuses_invalid_size(size: Any) -> None:
    async with Host("memory:") as host:
        command = await start(host, ["sleep", "60"])
        with pytest.raises(UsageError):
            await command.stdout.read(size)


# -- without a host --------------------------------------------------------------------------------------------------
async def test_start_without_a_host_returns_a_command(marker: str) -> None:
    command = await banksman.start(child("say(hear())", marker), stdin="pipe")
    await command.write(b"heard\n")
    assert await command.stdout.readline() == b"heard\n"
    assert (await command.wait()).code == 0
    assert isinstance(await banksman.start(["true"], yield_after=30), banksman.Finished)


def test_start_without_a_host_ends_with_its_loop(marker: str) -> None:
    async def begin() -> Command:
        return await banksman.start(child("stay()", marker))

    command = asyncio.run(begin())
    assert command.result().ended is Ended.HOST_CLOSED
    assert alive(marker) == []
    host: Any = getattr(command, "_on_end").__self__  # noqa: B009
    assert host.take_ended() == [], "nobody could take its reports, so none is kept"


def test_missing_asyncio_loop_is_usage_error_with_hint() -> None:
    """The situation under trio, which runs coroutines without asyncio."""

    async def enter() -> None:
        async with Host("memory:"):
            pass

    host = Host("memory:")
    for work in (banksman.execute(["true"]), banksman.start(["true"]), host.start(["true"]), enter(), host.close()):
        with pytest.raises(UsageError, match="no asyncio event loop is running") as caught:
            work.send(None)
        assert "trio" in (caught.value.hint or "")


async def test_reader_that_keeps_up_with_stopped_command_loses_nothing() -> None:
    """The reader is always slightly behind.

    The bound counts unread bytes, not all bytes since the reader was last level.
    """
    capture, source = Capture(0, 0), _Stopped()
    reader = OutputReader(cast("Any", source), Stream.STDOUT, capture)
    reader.is_attached = True

    def feed(size: int) -> None:
        capture.add(b"x" * size)
        reader.feed(b"x" * size)

    piece = HELD_BYTES // 4
    feed(HELD_BYTES + piece)
    read = 0
    for _ in range(4 * OVERRUN_BYTES_MAX // piece):
        feed(piece)
        read += len(await reader.read(piece))
    source.has_stopped = True
    while data := await reader.read(MIB):
        read += len(data)
    assert (read, reader.missed) == (capture.total, 0)


class _Stopped:
    """Source for a reader: a command that is being stopped, whose streams do not wait for their readers."""

    has_stopped = False

    def has_ended(self, _: Stream) -> bool:
        return self.has_stopped

    def update(self, _: Stream) -> None:
        pass

    async def wait_changed(self) -> None:
        raise AssertionError("there is always something to read")
