"""Background commands: start, read, write, signal, stop and list; the report of each end; the host that owns them."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import (
    alive,
    child,
    frozen,
    start,
    state_of,
    wait_none,
    wait_pass,
    wait_said,
    wait_until,
    zygote_pid,
)

import banksman
from banksman import Command, CommandError, Ended, Finished, Host, Refused, UsageError

PIPE_BYTES = 65536
# Leaves its stdin unread until a signal arrives. Then reports each run of equal bytes and its length. Whole writes make
# whole runs.
READS_LATE = """
import itertools
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
say("ready")
signal.sigwait([signal.SIGUSR1])
data = b""
while piece := os.read(0, 1 << 20):
    data += piece
say(*(f"{chr(byte)}:{len(list(run))}" for byte, run in itertools.groupby(data)), "end")
"""


# -- reading ---------------------------------------------------------------------------------------------------------
async def test_read_continues_after_last_piece(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child("while line := hear(): say(line)", marker), stdin="pipe")
        after = 0
        for word in (b"one\n", b"two\n", b"three\n"):
            await command.write(word)
            piece = await command.read(after=after)
            assert (piece.data, piece.missed, piece.is_end) == (word, 0, False)
            assert piece.next == after + len(word)
            after = piece.next
        await command.close_stdin()
        piece = await command.read(after=after)
        assert (piece.data, piece.next, piece.is_end) == (b"", after, True)
        # Reading removes nothing: the whole output can be read again, in any pieces, also after the end.
        await command.wait()
        assert (await command.read()).text == "one\ntwo\nthree\n"
        piece = await command.read(after=4, bytes_max=3)
        assert (piece.data, piece.is_end) == (b"two", False)
        assert (await command.read(after=8, bytes_max=6)).is_end
        piece = await command.read(after=1000)
        assert (piece.data, piece.next, piece.is_end) == (b"", 14, True)


async def test_read_waits_for_its_own_stream(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child('say("out"); hear(); say("err", to=2); hear()', marker), stdin="pipe")
        waiting = asyncio.create_task(command.read(stream="stderr"))
        assert (await command.read()).data == b"out\n"
        assert not waiting.done()
        await command.write(b"go\n")
        assert (await waiting).data == b"err\n"
        with pytest.raises(UsageError):
            await command.read(stream="stdlog")
        with pytest.raises(UsageError):
            await command.read(after=-1)
        with pytest.raises(UsageError):
            await command.read(bytes_max=0)


async def test_pause_reading_pushes_back_on_command_and_loses_nothing(marker: str) -> None:
    """The child counts the bytes that the pipe takes until it is full.

    The child writes the rest after reading resumes.
    """
    code = """
hear()
os.set_blocking(1, False)
taken = 0
try:
    while True:
        taken += os.write(1, b"x" * 4096)
except BlockingIOError:
    say(taken, to=int(WORDS[0]))
    os.set_blocking(1, True)
say("end")
"""
    counted, tell = os.pipe()
    try:
        async with Host() as host:
            command = await start(host, child(code, marker, tell), stdin="pipe", pass_fds=(tell,))
            command.pause_reading()
            await command.write(b"go\n")
            taken = int(os.read(counted, 100))
            assert taken == PIPE_BYTES
            assert not command.is_over
            command.resume_reading()
            done = await command.wait()
            assert done.stdout.total == taken + len("end\n")
    finally:
        os.close(counted)
        os.close(tell)


# -- writing ---------------------------------------------------------------------------------------------------------
async def test_writes_of_several_tasks_arrive_whole_and_in_order(marker: str) -> None:
    """Each write is larger than the pipe, so the kernel splits each one many times. The writes must not mix."""
    size = 3 * PIPE_BYTES + 1
    async with Host() as host:
        command = await start(host, child(READS_LATE, marker), stdin="pipe")
        await wait_said(command, "ready")
        writes = [asyncio.create_task(command.write(letter * size)) for letter in (b"a", b"b", b"c", b"d")]
        await asyncio.sleep(0)
        assert not any(write.done() for write in writes)
        await command.signal(signal.SIGUSR1)
        await asyncio.gather(*writes)
        await command.close_stdin()
        assert (await wait_said(command, "end")).split()[1:-1] == [f"{letter}:{size}" for letter in "abcd"]


async def test_write_not_taken_in_time_is_refused_and_not_written(marker: str) -> None:
    """The write waits behind another one, so it can be withdrawn whole. The write behind it still succeeds."""
    async with Host() as host:
        command = await start(host, child(READS_LATE, marker), stdin="pipe")
        await wait_said(command, "ready")
        first = asyncio.create_task(command.write(b"a" * (PIPE_BYTES + 10)))
        await asyncio.sleep(0)
        with pytest.raises(Refused):
            await command.write(b"b" * 10, timeout=0.05)
        third = asyncio.create_task(command.write(b"c" * 10))
        await asyncio.sleep(0)
        await command.signal(signal.SIGUSR1)
        await asyncio.gather(first, third)
        await command.close_stdin()
        assert (await wait_said(command, "end")).split()[1:-1] == [f"a:{PIPE_BYTES + 10}", "c:10"]


async def test_write_cut_by_deadline_closes_stdin(marker: str) -> None:
    """The pipe took a part of the write.

    Half a write followed by another would form a frame that no caller sent, so the command closes its stdin.
    """
    async with Host() as host:
        command = await start(host, child(READS_LATE, marker), stdin="pipe")
        await wait_said(command, "ready")
        cut = asyncio.create_task(command.write(b"a" * (PIPE_BYTES + 10), timeout=0.05))
        await asyncio.sleep(0)
        behind = asyncio.create_task(command.write(b"b"))
        with pytest.raises(Refused):
            await cut
        with pytest.raises(CommandError):
            await behind
        with pytest.raises(CommandError):
            await command.write(b"c")
        await command.signal(signal.SIGUSR1)
        assert (await wait_said(command, "end")).split()[1:-1] == [f"a:{PIPE_BYTES}"]


async def test_write_taken_whole_succeeds_past_its_deadline(marker: str) -> None:
    """The loop is busy while the command reads.

    The last byte is written and the timer fires in the same pass of the loop. The write counts as complete, and stdin
    stays open.
    """
    code = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
say("ready")
signal.sigwait([signal.SIGUSR1])
left = int(WORDS[0])
while left:
    left -= len(os.read(0, left))
os.close(int(WORDS[1]))
say("rest", hear())
"""
    seen, tell = os.pipe()
    async with Host() as host:
        argv = child(code, marker, PIPE_BYTES, tell)
        command = await start(host, argv, stdin="pipe", pass_fds=(tell,))
        os.close(tell)
        await wait_said(command, "ready")
        began = time.monotonic()
        writing = asyncio.create_task(command.write(b"a" * PIPE_BYTES + b"b", timeout=0.5))
        await asyncio.sleep(0)
        await command.signal(signal.SIGUSR1)
        assert os.read(seen, 1) == b""  # Blocks the loop until the child has made room.
        os.close(seen)
        wait_until(lambda: time.monotonic() - began > 0.6, "the deadline")
        await writing
        await command.write(b"c\n")
        assert (await wait_said(command, "rest")).endswith("rest bc\n")


async def test_cancelled_write_in_progress_is_finished_in_background(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child(READS_LATE, marker), stdin="pipe")
        await wait_said(command, "ready")
        begun = asyncio.create_task(command.write(b"a" * (PIPE_BYTES + 10)))
        waiting = asyncio.create_task(command.write(b"b" * 10))
        await asyncio.sleep(0)
        for write in (begun, waiting):
            write.cancel()
        await asyncio.wait([begun, waiting])
        assert begun.cancelled()
        assert waiting.cancelled()
        last = asyncio.create_task(command.write(b"c" * 10))
        await asyncio.sleep(0)
        await command.signal(signal.SIGUSR1)
        await last
        await command.close_stdin()
        assert (await wait_said(command, "end")).split()[1:-1] == [f"a:{PIPE_BYTES + 10}", "c:10"]


async def test_write_fails_when_command_closed_its_stdin(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child('os.close(0); say("ready"); stay()', marker), stdin="pipe")
        await wait_said(command, "ready")
        with pytest.raises(CommandError):
            await command.write(b"x")
        assert command.state == "running"


async def test_ended_command_refuses_write_and_signal_and_can_be_read(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child('say("bye")', marker), stdin="pipe")
        await command.wait()
        with pytest.raises(CommandError):
            await command.write(b"x")
        await command.signal(signal.SIGTERM)
        await command.close_stdin()
        assert (await command.read()).text == "bye\n"


async def test_command_without_stdin_pipe_refuses_write(marker: str) -> None:
    async with Host() as host:
        for stdin in (None, b"all of it"):
            command = await start(host, child("stay()", marker), stdin=stdin)
            with pytest.raises(UsageError):
                await command.write(b"x")
            await command.close_stdin()


# -- signals ---------------------------------------------------------------------------------------------------------
HEARS_SIGNALS = """
def on_signal(number, frame):
    say(name, signal.Signals(number).name)
name = "leader"
if fork() == 0:
    name = "child"
signal.signal(signal.SIGUSR1, on_signal)
signal.signal(signal.SIGUSR2, on_signal)
say(name, "ready")
stay()
"""


async def test_signal_reaches_leader_alone_or_its_group(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child(HEARS_SIGNALS, marker))
        await wait_said(command, "leader ready")
        await wait_said(command, "child ready")
        await command.signal(signal.SIGUSR1)
        await wait_said(command, "leader SIGUSR1")
        await command.signal(signal.SIGUSR2, group=True)
        await wait_said(command, "leader SIGUSR2")
        said = await wait_said(command, "child SIGUSR2")
        assert "child SIGUSR1" not in said
        await command.signal(signal.SIGKILL)
        done = await command.wait()
        # The signal was sent on request, not by a stop, so the command counts as exited.
        assert (done.ended, done.signal) == (Ended.EXITED, signal.SIGKILL)


async def test_signal_before_command_runs_is_delivered_later(marker: str) -> None:
    """The call comes while the zygote still works on the start.

    The signal must not be lost, and must not reach another process.
    """
    async with Host() as host:
        with frozen(zygote_pid()):
            starting = asyncio.create_task(start(host, child("stay()", marker)))
            await asyncio.sleep(0)
            (command,) = host.commands()
            signalling = asyncio.create_task(command.signal(signal.SIGKILL))
            await asyncio.sleep(0)
        await asyncio.gather(starting, signalling)
        assert (await command.wait()).signal == signal.SIGKILL


@pytest.mark.parametrize("number", [0, -1, 65, True, "TERM", None, 9.0])
async def test_signal_refuses_invalid_number(marker: str, number: Any) -> None:
    async with Host() as host:
        command = await start(host, child("stay()", marker))
        with pytest.raises(UsageError) as caught:
            await command.signal(number)
        assert caught.value.hint
        assert command.state == "running"


@pytest.mark.parametrize("data", ["text", 3, None, [1, 2]])
async def test_write_refuses_value_that_is_no_bytes(marker: str, data: Any) -> None:
    async with Host() as host:
        command = await start(host, child('say("got", repr(hear()))', marker), stdin="pipe")
        with pytest.raises(UsageError) as caught:
            await command.write(data)
        assert caught.value.hint
        wrong: list[Any] = [-1, float("nan"), "1"]
        for timeout in wrong:
            with pytest.raises(UsageError):
                await command.write(b"wrong", timeout=timeout)
        view: Any = memoryview(bytearray(b"right\n"))
        await command.write(view)
        assert (await wait_said(command, "\n")) == "got 'right'\n"


# -- listing ---------------------------------------------------------------------------------------------------------
async def test_commands_lists_each_command_with_its_state(marker: str) -> None:
    async with Host() as host:
        assert host.commands() == []
        ended = await start(host, child("sys.exit(1)", marker))
        await ended.wait()
        running = await start(host, child("be_deaf(); say('ready'); stay()", marker), grace=30)
        await wait_said(running, "ready")
        stopping = await start(host, child("be_deaf(); say('ready'); stay()", marker), grace=30)
        await wait_said(stopping, "ready")
        stopping.stop_nowait()
        with frozen(zygote_pid()):
            starting = asyncio.create_task(start(host, child("stay()", marker)))
            await asyncio.sleep(0)
            assert [command.state for command in host.commands()] == ["ended", "running", "stopping", "starting"]
            assert host.command(stopping.id) is stopping
        await starting
        with pytest.raises(UsageError):
            host.command("nobody")
        assert running.argv[0] == child("", marker)[0]
        assert str(running.pid) in repr(running)
        for command in (running, stopping):
            await command.stop(at_once=True)


async def test_finished_commands_are_kept_by_count(marker: str) -> None:
    async with Host(finished_max=2) as host:
        commands = [await start(host, child(f"sys.exit({n})", marker)) for n in range(4)]
        for command in commands:
            await command.wait()
        kept = host.commands()
        assert len(kept) == 2
        assert set(kept) < set(commands)
        # The caller's reference stays usable.
        assert [command.result().code for command in commands] == [0, 1, 2, 3]


async def test_finished_commands_are_kept_by_age(marker: str) -> None:
    async with Host(finished_seconds_max=0.05) as host:
        command = await start(host, child("sys.exit(0)", marker))
        await command.wait()
        wait_until(lambda: host.commands() == [], "its age")
        with pytest.raises(UsageError):
            host.command(command.id)


# -- one report for each end -----------------------------------------------------------------------------------------
async def test_take_ended_reports_each_end_once(marker: str) -> None:
    async with Host() as host:
        commands = {await start(host, child(f"sys.exit({n})", marker)) for n in range(5)}
        reported: list[Command] = []
        while len(reported) < 5:
            reported += await host.wait_ended()
        assert set(reported) == commands
        assert len(reported) == 5
        assert host.take_ended() == []


async def test_concurrent_wait_ended_calls_share_reports(marker: str) -> None:
    """A call that is cancelled takes no report with it."""
    async with Host() as host:
        waiting = [asyncio.create_task(host.wait_ended()) for _ in range(3)]
        await asyncio.sleep(0)
        first = await start(host, child("sys.exit(0)", marker))
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        (done,), rest = await asyncio.wait(waiting[1:], return_when=asyncio.FIRST_COMPLETED)
        assert done.result() == [first]
        second = await start(host, child("sys.exit(0)", marker))
        assert await rest.pop() == [second]
        assert host.take_ended() == []


async def test_take_ended_reports_every_end_beyond_kept_commands(marker: str) -> None:
    """The count limits the commands that are kept for the listing. Every end is still reported."""
    async with Host(finished_max=1) as host:
        commands = {await start(host, child("sys.exit(0)", marker)) for _ in range(4)}
        await wait_pass(lambda: all(command.is_over for command in commands))
        assert set(host.take_ended()) == commands
        assert host.take_ended() == []


@pytest.mark.parametrize("how", ["wait", "stop"])
async def test_take_ended_excludes_end_returned_by_wait_or_stop(marker: str, how: str) -> None:
    async with Host() as host:
        seen = await start(host, child("hear()", marker), stdin="pipe")
        unseen = await start(host, child("hear()", marker), stdin="pipe")
        for command in (seen, unseen):
            await command.close_stdin()
        await (seen.wait() if how == "wait" else seen.stop())
        await wait_pass(lambda: unseen.is_over)
        assert host.take_ended() == [unseen]
        # The result stays available after the report was taken.
        assert (await unseen.wait()).ended is Ended.EXITED
        assert host.take_ended() == []


async def test_take_ended_includes_end_after_cancelled_wait(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child("hear()", marker), stdin="pipe")
        waiting = asyncio.create_task(command.wait())
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait([waiting])
        await command.close_stdin()
        assert await host.wait_ended() == [command]


async def test_yield_after_result_is_its_only_report(marker: str) -> None:
    async with Host() as host:
        done = await host.start(child('say("quick"); sys.exit(2)', marker), yield_after=30)
        assert isinstance(done, Finished)
        assert (done.ended, done.code, done.stdout.text) == (Ended.EXITED, 2, "quick\n")
        assert host.take_ended() == []
        assert [command.finished for command in host.commands()] == [done]


@pytest.mark.parametrize("seconds", [0, 0.2])
async def test_yield_after_leaves_longer_command_in_background_and_reports_it_later(
    marker: str, seconds: float
) -> None:
    async with Host() as host:
        command = await host.start(child("hear(); sys.exit(2)", marker), stdin="pipe", yield_after=seconds)
        assert isinstance(command, Command)
        assert command.state == "running"
        assert host.take_ended() == []
        await command.write(b"go\n")
        assert await host.wait_ended() == [command]
        assert command.result().code == 2


async def test_start_cancelled_while_it_yields_stops_command(marker: str) -> None:
    """No caller has the command yet, so no caller could stop it."""
    async with Host() as host:
        starting = asyncio.create_task(host.start(child("stay()", marker), yield_after=60))
        await wait_pass(lambda: [command.state for command in host.commands()] == ["running"])
        (command,) = host.commands()
        starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled()
        assert (await command.wait()).ended is Ended.CANCELLED
        assert alive(marker) == []


async def test_failed_start_raises_and_is_not_reported_as_end(marker: str, tmp_path: Path) -> None:
    async with Host() as host:
        with pytest.raises(banksman.ProgramNotFound):
            await host.start([tmp_path / "nothing", marker])
        assert host.take_ended() == []
        assert alive(marker) == []


# -- close of the host -----------------------------------------------------------------------------------------------
async def test_host_close_ends_and_reports_its_commands(marker: str) -> None:
    host = Host()
    commands = {await start(host, child("stay()", marker)) for _ in range(3)}
    parked = asyncio.create_task(next(iter(commands)).wait())
    await asyncio.gather(host.close(), host.close())
    assert alive(marker) == []
    assert (await parked).ended is Ended.HOST_CLOSED
    assert {command.result().ended for command in commands} == {Ended.HOST_CLOSED}
    # The command that `wait` returned counts as reported.
    assert len(host.take_ended()) == 2
    await host.close()
    with pytest.raises(Refused) as caught:
        await host.start(child("stay()", marker))
    assert caught.value.hint
    assert alive(marker) == []


async def test_host_close_waits_for_start_in_progress_and_ends_it(marker: str) -> None:
    """Scenario 18, the half-way spawn. The zygote is frozen, so the start is certainly unanswered."""
    host = Host()
    with frozen(zygote_pid()):
        starting = asyncio.create_task(host.start(child("stay()", marker)))
        await asyncio.sleep(0)
        closing = asyncio.create_task(host.close())
        await asyncio.sleep(0)
        assert not closing.done()
        with pytest.raises(Refused):
            await host.start(child("stay()", marker))
    await closing
    assert alive(marker) == []
    # The start either raises, or returns a command that is over already. It does not hang, and no process runs.
    await asyncio.wait([starting])
    if starting.exception() is None:
        command = starting.result()
        assert isinstance(command, Command)
        assert command.result().ended is Ended.HOST_CLOSED
    else:
        assert isinstance(starting.exception(), banksman.BanksmanError)


async def test_unused_host_can_be_closed() -> None:
    host = Host()
    await host.close()
    await host.close()


async def test_exception_inside_host_block_ends_commands_and_propagates(marker: str) -> None:
    async def user() -> None:
        async with Host() as host:
            await start(host, child("stay()", marker))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await user()
    assert alive(marker) == []


def test_host_belongs_to_one_loop(marker: str) -> None:
    host = Host()

    async def use() -> None:
        assert (await host.start(child("sys.exit(0)", marker), yield_after=30)) is not None

    asyncio.run(use())
    with pytest.raises(UsageError, match="loop"):
        asyncio.run(use())
    assert alive(marker) == []


async def test_concurrent_commands_keep_their_own_results(marker: str) -> None:
    """The starts compete for one zygote and the ends for one loop. Each result belongs to its command."""
    async with Host() as host:
        argvs = [child(f"say({n}); sys.exit({n})", marker) for n in range(50)]
        results = await asyncio.gather(*(host.start(argv, yield_after=60) for argv in argvs))
        for n, done in enumerate(results):
            assert isinstance(done, Finished)
            assert (done.code, done.stdout.text) == (n, f"{n}\n")
    assert alive(marker) == []


async def test_command_stays_the_same_when_leader_execs(marker: str) -> None:
    """exec keeps the pid. The keeper guards the process, not the program."""
    code = "os.execv(sys.executable, [sys.executable, *WORDS])"
    inner = child('say("inner", os.getpid()); stay()', marker)[1:]
    async with Host() as host:
        command = await start(host, child(code, marker, *inner))
        assert (await wait_said(command, "\n")).split() == ["inner", str(command.pid)]
        done = await command.stop()
        assert done.signal == signal.SIGTERM
        assert state_of(command.pid or 0) == ""
    wait_none(marker)
