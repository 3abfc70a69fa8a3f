"""The end of a command: its exit, a timeout, a stop, a cancel.

The numbers are those of `scenarios.md`. Scenarios 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 16, 17 are here; 5, 14, 15, 21,
22, 23 are in tests/process/test_trees.py; 19, 27 in test_output.py; 11, 18, 20 in tests/process/test_host_program.py;
the half-way spawn of 18 in test_command.py. The docstring of each test names its scenario.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import (
    Heard,
    alive,
    child,
    frozen,
    parent_of,
    rungs,
    start,
    state_of,
    wait_none,
    wait_pass,
    wait_said,
    wait_until,
    zygote_pid,
)
from tests.thorough import one_in

import banksman
from banksman import Command, Ended, Finished, Host
from banksman.commands.options import Options
from banksman.core.stop_ladder import Timings
from banksman.process.launch import prepare

# A leader that ignores TERM, with a child that has left the session and ignores TERM too. Only a KILL that reaches
# beyond the process group ends both.
STUBBORN = """
be_deaf()
if fork() == 0:
    os.setsid()
    say("ready")
stay()
"""


# -- exit of the command ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("code", [0, 1, 124, 255])
async def test_exit_code_is_that_of_command(marker: str, code: int) -> None:
    done = await banksman.execute(child(f"sys.exit({code})", marker))
    assert (done.ended, done.code, done.signal) == (Ended.EXITED, code, None)
    assert done.ladder == ()
    assert done.drained


async def test_foreign_signal_end_has_signal_and_no_code(marker: str) -> None:
    done = await banksman.execute(child("os.kill(os.getpid(), signal.SIGUSR1)", marker))
    assert (done.ended, done.code, done.signal) == (Ended.EXITED, None, signal.SIGUSR1)


async def test_command_with_closed_output_is_running_until_exit(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child("os.close(1); os.close(2); hear(); sys.exit(7)", marker), stdin="pipe")
        assert (await command.read()).is_end
        assert (await command.read(stream="stderr")).is_end
        assert not command.is_over
        assert alive(marker) == [command.pid]
        await command.write(b"go\n")
        assert (await command.wait()).code == 7


# -- timeouts --------------------------------------------------------------------------------------------------------
async def test_timeout_sends_term_then_kill_after_grace_and_records_times(marker: str) -> None:
    """Scenario 12."""
    done = await banksman.execute(child(STUBBORN, marker), timeout=4.0, grace=0.2)
    assert alive(marker) == []
    assert (done.ended, done.code, done.signal) == (Ended.TIMEOUT, None, signal.SIGKILL)
    assert rungs(done) == ["term", "kill"]
    term, kill = done.ladder
    # The signals never come early. How late they come depends on the machine.
    assert term.at >= 4.0
    assert kill.at - term.at >= 0.2
    assert done.seconds >= kill.at
    assert [swept for swept in done.swept if marker in swept.command]


@pytest.mark.thorough
async def test_timeout_leaves_whole_grace_to_command_that_handles_term(marker: str) -> None:
    """Scenario 12, with a child that handles TERM: its exit code counts, and there is no KILL."""
    code = """
def on_term(number, frame):
    say("cleaned up")
    sys.exit(3)
signal.signal(signal.SIGTERM, on_term)
say("ready")
stay()
"""
    done = await banksman.execute(child(code, marker), timeout=4.0, grace=30)
    assert (done.ended, done.code) == (Ended.TIMEOUT, 3)
    assert done.stdout.text == "ready\ncleaned up\n"
    assert "kill" not in rungs(done)


async def test_timeout_of_zero_ends_command(marker: str) -> None:
    done = await banksman.execute(child("stay()", marker), timeout=0, grace=0)
    assert done.ended is Ended.TIMEOUT
    assert alive(marker) == []


async def test_blocking_term_handler_is_killed_after_grace(marker: str) -> None:
    """Scenario 9. The handler reports its entry, so the TERM certainly arrived before the KILL."""
    code = """
def on_term(number, frame):
    say("asked")
    while True:
        time.sleep(1)
signal.signal(signal.SIGTERM, on_term)
say("ready")
stay()
"""
    async with Host() as host:
        command = await start(host, child(code, marker), grace=0.5)
        await wait_said(command, "ready")
        done = await command.stop()
    assert alive(marker) == []
    assert (done.ended, done.signal) == (Ended.STOPPED, signal.SIGKILL)
    assert done.stdout.text == "ready\nasked\n"
    assert rungs(done) == ["term", "kill"]
    # The wait is bounded: the grace, the five seconds of the sweep, and time for a slow machine.
    assert done.seconds < 20


def _block_the_loop_until_ended(command: Command) -> None:
    """Block the loop until the keeper has reaped the command. The keeper records the end before it reaps."""
    assert command.pid is not None
    wait_until(lambda: state_of(command.pid or 0) == "", "the command's own exit")


async def test_passed_deadline_is_reported_though_its_timer_ran_late(marker: str) -> None:
    """The loop is busy from before the deadline until after the exit. The exit comes after the deadline."""
    async with Host() as host:
        began = time.monotonic()
        command = await start(host, child("hear(); time.sleep(1.2)", marker), stdin="pipe", timeout=1.0)
        await command.write(b"go\n")
        _block_the_loop_until_ended(command)
        assert time.monotonic() - began > 1.2
        done = await command.wait()
    assert (done.ended, done.code) == (Ended.TIMEOUT, 0)


@pytest.mark.thorough
async def test_timely_exit_is_not_timed_out_by_late_timer(marker: str) -> None:
    """The loop is busy from before the exit until after the deadline. The exit comes before the deadline."""
    async with Host() as host:
        began = time.monotonic()
        command = await start(host, child("hear()", marker), stdin="pipe", timeout=5)
        await command.write(b"go\n")
        _block_the_loop_until_ended(command)
        assert time.monotonic() - began < 5, "the machine was too slow for this test to mean anything"
        wait_until(lambda: time.monotonic() - began > 5.1, "the deadline")
        done = await command.wait()
    assert (done.ended, done.code) == (Ended.EXITED, 0)


# -- stop ------------------------------------------------------------------------------------------------------------
async def test_parked_stderr_reader_sees_end_of_killed_command(marker: str) -> None:
    """Scenario 1: the read does not hang, does not raise, and does not use a cleared buffer.

    One of the two reads is cancelled too.
    """
    async with Host() as host:
        command = await start(host, child('say("ready"); stay()', marker))
        await wait_said(command, "ready")
        parked = [asyncio.create_task(command.read(stream="stderr")) for _ in range(2)]
        await asyncio.sleep(0)
        parked[1].cancel()
        done = await command.stop(at_once=True)
        piece = await parked[0]
        assert (piece.data, piece.is_end) == (b"", True)
        await asyncio.wait(parked)
        assert parked[1].cancelled()
        assert done.signal == signal.SIGKILL


async def test_forced_kill_leaves_no_zombie_of_leader_or_keeper(marker: str) -> None:
    """Scenario 2: an immediate KILL, which skips the earlier rungs, cleans up like the full ladder."""
    async with Host() as host:
        command = await start(host, child(STUBBORN, marker), grace=60)
        await wait_said(command, "ready")
        assert command.pid is not None
        keeper = parent_of(command.pid)
        done = await command.stop(at_once=True)
        # The leader is reaped, not only dead: a zombie would still be in /proc.
        assert state_of(command.pid) == ""
        assert alive(marker) == []
        assert rungs(done) == ["kill"]
        wait_until(lambda: state_of(keeper) == "", "the keeper to be reaped by the zygote")


async def test_command_is_listed_until_its_death_is_confirmed(marker: str) -> None:
    """Scenario 3: a cancelled close forgets no command, and the next close finds the command."""
    host = Host()
    command = await start(host, child(STUBBORN, marker), grace=1.0)
    await wait_said(command, "ready")
    closing = asyncio.create_task(host.close())
    await asyncio.sleep(0)
    closing.cancel()
    await asyncio.wait([closing])
    assert closing.cancelled()
    assert alive(marker)
    assert host.commands() == [command]
    assert command.state == "stopping"
    await host.close()
    assert alive(marker) == []
    assert command.state == "ended"


async def test_concurrent_stops_and_closes_agree_on_one_end(marker: str) -> None:
    """Scenario 4: a second kill that races the first one loses nothing. All callers get the same result."""
    host = Host()
    command = await start(host, child(STUBBORN, marker), grace=30)
    await wait_said(command, "ready")
    stops = [command.stop(), command.stop(at_once=True), command.stop(), command.stop(at_once=True), command.wait()]
    results = await asyncio.gather(*stops, host.close(), host.close())
    assert alive(marker) == []
    assert all(done is command.finished for done in results[:5])
    assert command.result().ended is Ended.STOPPED
    # Later stops return the same result too.
    assert await command.stop() is command.finished
    assert await command.stop(at_once=True) is command.finished
    await host.close()


async def _start_and_let_it_exit_unheard(host: Host, argv: list[str]) -> Command:
    """Return a command that has exited, while its host does not know it yet, because the loop was busy."""
    command = await start(host, argv, stdin="pipe")
    await wait_said(command, "ready")
    await command.write(b"go\n")
    _block_the_loop_until_ended(command)
    assert not command.is_over
    return command


async def test_stop_of_vanished_group_succeeds_without_warning(marker: str, caplog: pytest.LogCaptureFixture) -> None:
    """Scenario 6: no process is left to signal, and that is the goal of the stop. No warning, no survivor."""
    with caplog.at_level(logging.DEBUG, logger="banksman"):
        async with Host() as host:
            command = await _start_and_let_it_exit_unheard(host, child('say("ready"); hear(); sys.exit(3)', marker))
            done = await command.stop()
    assert (done.code, done.signal) == (3, None)
    assert done.survivors == ()
    assert done.drained
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_command_that_exited_before_stop_is_reported_as_exited(marker: str) -> None:
    """A finished command beats a late stop, even if the host learns of the two in the wrong order."""
    async with Host() as host:
        command = await _start_and_let_it_exit_unheard(host, child('say("ready"); hear(); sys.exit(3)', marker))
        done = await command.stop()
    assert (done.ended, done.code) == (Ended.EXITED, 3)


async def test_command_blocked_on_full_pipe_stops_quickly(marker: str, tmp_path: Path) -> None:
    """Scenario 7: no reader reads, the child blocks TERM, and it would exit after the end of its write.

    The child fills the pipe and then creates a file, so it is certain that the pipe is full. Then the child writes one
    more mebibyte.
    """
    code = """
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
hear()
os.set_blocking(1, False)
try:
    while True:
        os.write(1, bytes(4096))
except BlockingIOError:
    os.set_blocking(1, True)
touch(WORDS[0])
rest = memoryview(bytes(1 << 20))
while rest:
    rest = rest[os.write(1, rest):]
sys.exit(5)
"""
    full = tmp_path / "full"
    async with Host() as host:
        command = await start(host, child(code, marker, full), stdin="pipe", grace=30)
        command.pause_reading()
        await command.write(b"go\n")
        wait_until(full.exists, "the pipe to be full")
        began = time.monotonic()
        done = await command.stop()
        seconds = time.monotonic() - began
    assert seconds < 20  # Much less than the grace.
    assert done.code == 5
    # Reading unblocks the child. On a busy machine the child can exit before the keeper sends TERM. Then the result is
    # EXITED.
    assert done.ended in (Ended.STOPPED, Ended.EXITED)
    assert done.stdout.total >= 1 << 20
    assert rungs(done)[:1] == ["term"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentOptions(Options):
    """Options with the EOF rung, which sessions use for agents. Plain commands do not have it."""

    @property
    def timings(self) -> Timings:
        return Timings(grace=self.grace, linger=self.linger, drain=self.drain, eof=30.0)


async def test_output_after_eof_is_not_cut_by_term(marker: str) -> None:
    """Scenario 8: EOF comes first, with a separate grace. The child writes its last message and exits."""
    code = """
say("ready")
while hear():
    pass
say("last words")
sys.exit(0)
"""
    async with Host() as host:
        command = host.launch(prepare(child(code, marker)), AgentOptions(stdin="pipe"))
        await wait_said(command, "ready")
        done = await command.stop()
    assert (done.ended, done.code, done.signal) == (Ended.STOPPED, 0, None)
    assert done.stdout.text == "ready\nlast words\n"
    assert rungs(done) == ["eof", "rest"]


NEVER = 3600.0
FLOOD = "say('ready')\nwhile True:\n    os.write(1, b'x' * 65536)"
WRAPPER = """
if fork() == 0:
    say("ready")
    while hear():
        pass
    time.sleep(0.5)
    say("last words")
    os._exit(0)
os.wait()
sys.exit(0)
"""


@pytest.mark.parametrize("code", ["say('ready'); signal.pause()", FLOOD], ids=["asleep", "flood"])
async def test_eof_wait_is_cut_short_when_child_does_not_react(marker: str, code: str) -> None:
    async with Host() as host, asyncio.timeout(60):
        command = host.launch(prepare(child(code, marker)), Options(stdin="pipe", eof=NEVER))
        await wait_said(command, "ready")
        if code != FLOOD:
            wait_until(lambda: state_of(command.pid or 0) == "S", "the sleep of the child")
        done = await command.stop()
    assert rungs(done)[:2] == ["eof", "term"]
    assert (done.signal, alive(marker)) == (signal.SIGTERM, [])


async def test_eof_wait_is_kept_for_reader_behind_wrapper(marker: str) -> None:
    """The leader sleeps and never wakes, and its child reads the stdin of both."""
    async with Host() as host:
        command = host.launch(prepare(child(WRAPPER, marker)), Options(stdin="pipe", eof=NEVER))
        await wait_said(command, "ready")
        done = await command.stop()
    assert (done.code, done.stdout.text) == (0, "ready\nlast words\n")
    assert "term" not in rungs(done)


async def test_eof_wait_is_cut_short_when_last_reader_exits(marker: str) -> None:
    """The leader sleeps. Its child reads the stdin of both, so that only a later look finds no reader."""
    code = """
if fork() == 0:
    say("ready")
    while hear():
        pass
    time.sleep(0.5)
    os._exit(0)
while True:
    signal.pause()
"""
    async with Host() as host, asyncio.timeout(60):
        command = host.launch(prepare(child(code, marker)), Options(stdin="pipe", eof=NEVER))
        await wait_said(command, "ready")
        wait_until(lambda: state_of(command.pid or 0) == "S", "the sleep of the leader")
        done = await command.stop()
    assert rungs(done)[:2] == ["eof", "term"]
    assert (done.signal, alive(marker)) == (signal.SIGTERM, [])


# -- the end comes after the whole tree ------------------------------------------------------------------------------
ENDINGS = ("exit", "timeout", "stop", "close", "kill", "idle_timeout", "output_limit")


@pytest.mark.parametrize("ending", one_in(2, ENDINGS))
async def test_end_is_reported_after_whole_tree_is_dead(marker: str, ending: str) -> None:
    """Scenario 16. The check follows the report without a wait. The tree ignores TERM and has left its session."""
    code = """
be_deaf()
if fork() == 0:
    os.setsid()
    say("ready")
    stay()
hear()
if WORDS[0] == "exit":
    sys.exit(0)
if WORDS[0] == "output_limit":
    say("x" * 100)
stay()
"""
    options: dict[str, Any] = {
        "timeout": {"timeout": 5.0},
        "idle_timeout": {"idle_timeout": 5.0},
        "output_limit": {"output_total_max": 50},
    }.get(ending, {})
    host = Host()
    argv = child(code, marker, ending)
    command = await start(host, argv, stdin="pipe", grace=0.2, linger=0.1, **options)
    await wait_said(command, "ready")
    assert len(alive(marker)) == 2
    await command.write(b"go\n")
    if ending in ("stop", "kill"):
        command.stop_nowait(at_once=ending == "kill")
    elif ending == "close":
        await host.close()
        assert alive(marker) == []
    done = await command.wait()
    assert alive(marker) == []
    expected = {"exit": "exited", "stop": "stopped", "kill": "stopped", "close": "host_closed"}
    assert done.ended == expected.get(ending, ending)
    assert done.survivors == ()
    await host.close()


async def test_pipe_held_outside_tree_settles_at_drain_timeout(marker: str, tmp_path: Path) -> None:
    """Scenarios 13 and 17: a process outside the tree holds the stdout.

    The child passes its stdout to the test process and exits. No end of file ever comes, so the drain timeout settles
    the wait and the result says so. Later writes reach no reader.
    """
    code = """
import socket
door = socket.socket(socket.AF_UNIX)
door.connect(WORDS[0])
say("before")
socket.send_fds(door, [b"x"], [1])
"""
    path = str(tmp_path / "door")
    heard = Heard()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen(1)
        running = asyncio.create_task(banksman.execute(child(code, marker, path), drain=0.3, on_output=heard))
        await heard.wait("before")
        with door.accept()[0] as held:
            _data, fds, _flags, _address = socket.recv_fds(held, 1, 1)
    done = await running
    try:
        assert (done.ended, done.code, done.drained) == (Ended.EXITED, 0, False)
        assert done.stdout.text == "before\n"
        # The host's end is closed, so a writer gets EPIPE immediately. Python ignores SIGPIPE.
        with pytest.raises(BrokenPipeError):
            os.write(fds[0], b"after")
        assert heard.text == "before\n"
    finally:
        os.close(fds[0])


class Tracer(threading.Thread):
    """Trace a process from outside its tree, as a debugger does.

    A traced process that dies stays a zombie until its tracer releases it. This is the closest that a test can come to
    an unkillable process.
    """

    SEIZE = 0x4206

    def __init__(self, pid: int) -> None:
        super().__init__()
        self._pid = pid
        self.error = ""
        self.is_attached = threading.Event()
        self.let_go = threading.Event()

    def run(self) -> None:
        library = ctypes.CDLL(None, use_errno=True)
        library.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        if library.ptrace(self.SEIZE, self._pid, None, None) != 0:
            self.error = os.strerror(ctypes.get_errno())
        self.is_attached.set()
        # The kernel detaches when the thread that attached ends.
        self.let_go.wait()


@pytest.mark.thorough
@pytest.mark.parametrize("who", ["leader", "descendant"])
async def test_unkillable_process_is_named_and_wait_settles(marker: str, who: str) -> None:
    """Scenario 13, the lasting zombie: the report comes after the sweep's five seconds, and names the survivor.

    The keeper stays until the survivor is gone. It uses little CPU time, because the wait can last for hours.
    """
    code = {
        "leader": 'say("ready", os.getpid()); stay()',
        "descendant": 'fork() or os.setsid() or say("ready", os.getpid()); stay()',
    }[who]
    async with Host() as host:
        command = await start(host, child(code, marker), grace=0.1)
        pid = int((await wait_said(command, "\n")).split()[1])
        assert command.pid is not None
        keeper = parent_of(command.pid)
        tracer = Tracer(pid)
        tracer.start()
        try:
            await asyncio.to_thread(tracer.is_attached.wait)
            if tracer.error:
                pytest.skip(f"this machine does not let us trace: {tracer.error}")
            done = await command.stop()
            assert done.ended is Ended.STOPPED
            assert len(done.survivors) == 1
            assert done.survivors[0].why
            assert done.drained
            assert state_of(pid) == "Z"
            assert state_of(keeper) not in ("", "Z")
            assert len({swept.pid for swept in done.swept}) == len(done.swept)
            ticks = sum(
                int(field) for field in Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[11:13]
            )
            assert ticks / os.sysconf("SC_CLK_TCK") < 0.5 * done.seconds, "the keeper spins while it waits"
        finally:
            tracer.let_go.set()
            tracer.join()
    wait_until(lambda: state_of(keeper) == "", "the keeper to leave once the zombie is released")


# -- cancel ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("times", [1, 3])
async def test_cancel_returns_promptly_while_teardown_continues(marker: str, times: int) -> None:
    """Raw `task.cancel()`, one or more times.

    The child still lives, which proves that the cancel waited for no teardown.
    """
    heard = Heard()
    running = asyncio.create_task(banksman.execute(child(STUBBORN, marker), grace=1.5, on_output=heard))
    await heard.wait("ready")
    for _ in range(times):
        running.cancel()
        await asyncio.sleep(0)
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(alive(marker)) == 2
    await asyncio.to_thread(wait_none, marker)


async def test_second_cancel_inside_async_with_still_reaps_command(marker: str) -> None:
    """Scenario 10: the second cancel hits the close that the first one caused."""
    begun: asyncio.Future[Command] = asyncio.get_running_loop().create_future()

    async def user() -> None:
        async with Host() as host:
            command = await start(host, child(STUBBORN, marker), grace=0.5)
            await wait_said(command, "ready")
            begun.set_result(command)
            await command.wait()

    task = asyncio.create_task(user())
    command = await begun
    for _ in range(2):
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([task])
    assert task.cancelled()
    done = await command.wait()
    assert alive(marker) == []
    assert done.ended is Ended.HOST_CLOSED


async def test_cancel_at_any_loop_pass_leaves_nothing(marker: str) -> None:
    """Cancel at every await, from before the first step to after the last.

    The check after each test counts the leftovers.
    """
    passes, running = 0, None
    while running is None or running.cancelled():
        running = asyncio.create_task(banksman.execute(child("say('x'); sys.exit(0)", marker), grace=5))
        for _ in range(passes):
            await asyncio.sleep(0)
        running.cancel()
        running.cancel()
        await asyncio.wait([running])
        # The steps are dense at the start, where the state changes with each pass, and grow until one call completes.
        passes += 1 if passes < 30 else passes // 3
    assert (await running).code == 0
    await asyncio.to_thread(wait_none, marker)


@pytest.mark.parametrize("times", [1, 2])
async def test_cancel_of_start_in_progress_ends_its_command(marker: str, times: int) -> None:
    """The zygote is frozen, so the start certainly hangs. The cancel returns while the start still hangs."""
    host = Host()
    with frozen(zygote_pid()):
        starting = asyncio.create_task(host.start(child("stay()", marker), grace=5))
        await asyncio.sleep(0)
        (command,) = host.commands()
        assert command.state == "starting"
        for _ in range(times):
            starting.cancel()
            await asyncio.sleep(0)
        await asyncio.wait([starting])
        assert starting.cancelled()
    await _wait_over(command)
    assert alive(marker) == []
    # Only the listing shows CANCELLED: the caller got the CancelledError.
    assert command.finished is None or command.finished.ended is Ended.CANCELLED
    await host.close()


async def _wait_over(command: Command) -> None:
    """Wait for the end, whether the command ran or was stopped before its start."""
    try:
        await command.wait()
    except banksman.BanksmanError:
        assert command.is_over


def test_loop_that_ends_after_cancel_ends_tree(marker: str) -> None:
    """`asyncio.run` returns only after the teardown, because there is no later moment for it."""

    async def main() -> None:
        heard = Heard()
        running = asyncio.create_task(banksman.execute(child(STUBBORN, marker), grace=0.3, on_output=heard))
        await heard.wait("ready")
        running.cancel()

    asyncio.run(main())
    assert alive(marker) == []


def test_loop_that_ends_with_awaited_command_ends_tree(marker: str) -> None:
    """No caller cancels: `asyncio.run` cancels the waiting task, and then the loop ends."""
    waiting: list[asyncio.Task[Finished]] = []

    async def main() -> None:
        heard = Heard()
        waiting.append(asyncio.create_task(banksman.execute(child(STUBBORN, marker), grace=0.3, on_output=heard)))
        await heard.wait("ready")

    asyncio.run(main())
    assert alive(marker) == []
    assert waiting[0].cancelled()


@pytest.mark.parametrize("passes", [0, 1, 2])
async def test_cancel_together_with_end_is_not_swallowed(marker: str, passes: int) -> None:
    """An accepted cancel must raise CancelledError. Otherwise `asyncio.timeout()` around the call would never fire."""
    async with Host() as host:
        starting = asyncio.create_task(host.start(child("sys.exit(0)", marker), yield_after=30))
        await wait_pass(lambda: any(command.is_over for command in host.commands()))
        for _ in range(passes):
            await asyncio.sleep(0)
        was_accepted = starting.cancel()
        await asyncio.wait([starting])
        assert starting.cancelled() is was_accepted


async def test_cancelled_wait_only_stops_waiting(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child('say("ready"); hear(); sys.exit(4)', marker), stdin="pipe")
        await wait_said(command, "ready")
        waiting = [asyncio.create_task(command.wait()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.wait([waiting[0]])
        assert waiting[0].cancelled()
        assert command.state == "running"
        await command.write(b"go\n")
        assert (await waiting[1]).code == 4


async def test_timeout_block_around_execute_ends_command(marker: str) -> None:
    """Most callers use `asyncio.timeout`, which is a cancel like any other."""
    heard = Heard()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.5):
            await banksman.execute(child(STUBBORN, marker), grace=0.2, on_output=heard)
    await asyncio.to_thread(wait_none, marker)
