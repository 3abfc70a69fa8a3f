"""Commands with a terminal: it is a real one, and all guarantees for pipes hold for it."""

from __future__ import annotations

import asyncio
import errno
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.process.helpers import (
    REPOSITORY,
    Heard,
    alive,
    child,
    frozen,
    rungs,
    running_program,
    start,
    wait_none,
    wait_said,
    wait_until,
    zygote_pid,
)

import banksman
from banksman import Command, CommandError, Ended, Host, UsageError
from banksman.commands import running_command
from banksman.core.process_facts import Stream
from banksman.process.portable import PortableProcess


@asynccontextmanager
async def terminal(argv: list[str], *, pty: Any = True, **options: Any) -> AsyncGenerator[Command]:
    async with Host("memory:") as host:
        yield await start(host, argv, pty=pty, **options)


async def on_screen(*argv: str, **options: Any) -> list[str]:
    done = await banksman.execute(list(argv), pty=options.pop("pty", True), timeout=30, **options)
    assert done.ended is Ended.EXITED
    return done.stdout.text.split()


# -- a real terminal -------------------------------------------------------------------------------------------------
async def test_pty_is_one_terminal_for_all_three_streams() -> None:
    script = "test -t 0 && test -t 1 && test -t 2 && tty && echo out && echo err >&2"
    done = await banksman.execute(["sh", "-c", script], pty=True)
    assert done.stdout.text.startswith("/dev/pts/")
    assert done.stdout.text.endswith("\r\nout\r\nerr\r\n")
    assert (done.stderr.total, done.drained, done.code) == (0, True, 0)


async def test_pty_is_the_controlling_terminal_of_its_own_session(marker: str) -> None:
    code = """
terminal = os.open("/dev/tty", os.O_RDWR)
say(os.getsid(0) == os.getpid(), os.tcgetpgrp(terminal) == os.getpgrp(), os.ttyname(0) == os.ttyname(2))
say(sorted(int(fd) for fd in os.listdir("/proc/self/fd")))
"""
    done = await banksman.execute(child(code, marker), pty=True)
    # The program opened 3, and lists the folder by 4.
    assert done.stdout.text.split("\r\n")[:2] == ["True True True", "[0, 1, 2, 3, 4]"]


async def test_pty_size_is_the_default_or_the_requested_one() -> None:
    assert await on_screen("stty", "size") == ["24", "80"]
    assert await on_screen("stty", "size", pty=(7, 65535)) == ["7", "65535"]


async def test_pty_sets_term_and_unsets_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "9")
    show = ["sh", "-c", "echo $TERM ${COLUMNS-none}"]
    assert await on_screen(*show) == ["xterm-256color", "none"]
    assert await on_screen(*show, env={"TERM": "vt100", "COLUMNS": "3"}) == ["vt100", "3"]
    assert (await banksman.execute(show)).stdout.text.split() == ["dumb", "9"]


async def test_pty_resize_signals_the_program(marker: str) -> None:
    code = """
signal.signal(signal.SIGWINCH, lambda *_: say("now", *os.get_terminal_size(0)))
say("up", *os.get_terminal_size(0))
stay()
"""
    async with terminal(child(code, marker), pty=(10, 20)) as command:
        await wait_said(command, "up 20 10")
        await command.resize(30, 40)
        await wait_said(command, "now 40 30")
        await command.stop()
        await command.resize(1, 1)  # Too late, and without effect.


@pytest.mark.parametrize("size", [(0, 80), (24, 65536), (True, 80), ("24", 80), (-1, 1), (2.5, 1)])
async def test_pty_of_invalid_size_is_a_usage_error(size: Any) -> None:
    async with Host("memory:") as host:
        with pytest.raises(UsageError, match="terminal"):
            await host.start(["true"], pty=size)
        command = await host.start(["sleep", "60"], pty=True)
        with pytest.raises(UsageError, match="terminal"):
            await command.resize(*size)


@pytest.mark.parametrize("wish", [(24,), "24x80", 24, (1, 2, 3)])
async def test_pty_option_of_wrong_type_is_a_usage_error(wish: Any) -> None:
    with pytest.raises(UsageError, match="pty"):
        await banksman.execute(["true"], pty=wish)


async def test_pty_with_stdin_and_resize_without_pty_are_usage_errors() -> None:
    async with Host("memory:") as host:
        for stdin in (b"x", "pipe", "inherit"):
            with pytest.raises(UsageError, match="stdin"):
                await host.start(["true"], pty=True, stdin=stdin)
        command = await host.start(["sleep", "60"], stdin="pipe")
        with pytest.raises(UsageError, match="terminal"):
            await command.resize(24, 80)


# -- input -----------------------------------------------------------------------------------------------------------
async def test_pty_input_is_read_and_echoed() -> None:
    async with terminal(["sh", "-c", "read line; echo got $line"]) as command:
        await command.write(b"a word\n")
        done = await command.wait()
    assert done.stdout.text == "a word\r\ngot a word\r\n"
    piece = await command.read(stream="stderr")
    assert (piece.data, piece.is_end) == (b"", True)


async def test_pty_stderr_has_ended_from_the_start() -> None:
    async with terminal(["sleep", "60"]) as command, asyncio.timeout(20):
        assert (await command.read(stream="stderr")).is_end


@pytest.mark.parametrize("typed", [b"", b"line\n", b"begun"])
async def test_pty_close_stdin_types_the_end_of_input(typed: bytes, marker: str) -> None:
    code = """
data = b""
while piece := os.read(0, 100):
    data += piece
say("read", data)
say("again", os.read(0, 100))
"""
    async with terminal(child(code, marker)) as command:
        if typed:
            await command.write(typed)
        await command.close_stdin()
        await wait_said(command, f"read {typed!r}")
        # That read ended, and the terminal stays open.
        await command.write(b"more\n")
        await wait_said(command, r"again b'more\n'")


async def test_pty_in_raw_mode_gets_the_eof_byte_once(marker: str) -> None:
    code = """
import tty
tty.setraw(0)
say("raw")
say("read", os.read(0, 1), os.read(0, 1), os.read(0, 1))
"""
    async with terminal(child(code, marker)) as command:
        await wait_said(command, "raw")
        await command.write(b"a")
        await command.close_stdin()
        await command.write(b"b")
        await wait_said(command, r"read b'a' b'\x04' b'b'")


async def test_pty_of_execute_has_an_ended_input() -> None:
    assert (await banksman.execute(["cat"], pty=True, timeout=30)).ended is Ended.EXITED


async def test_pty_ctrl_c_ends_the_foreground_job_and_not_the_shell(marker: str) -> None:
    shell = ["bash", "--norc", "--noprofile", "-i"]
    async with terminal(shell, grace=0.2, env={"PS1": "$ ", "HISTFILE": ""}) as command:
        # The terminal echoes the input, so the expected word must not be in it.
        await command.write(f"sh -c 'echo up as $((40 + 2)); exec sleep 60' {marker}\n".encode())
        await wait_said(command, "up as 42")
        await command.write(b"\x03echo its end was $?\n")
        await wait_said(command, f"its end was {128 + signal.SIGINT}")
        assert command.finished is None


async def test_pty_long_input_arrives_whole(marker: str) -> None:
    code = """
import tty
tty.setraw(0)
say("raw")
size = 0
while size < 3_000_000:
    size += len(os.read(0, 65536))
say("read", size)
"""
    async with terminal(child(code, marker)) as command:
        await wait_said(command, "raw")
        await command.write(b"x" * 3_000_000, timeout=30)
        await wait_said(command, "read 3000000")


# -- output ----------------------------------------------------------------------------------------------------------
async def test_pty_large_output_arrives_whole_and_in_order(marker: str) -> None:
    code = "for n in range(300_000):\n    sys.stdout.write(f'{n}\\n')"
    heard = Heard()
    done = await banksman.execute(child(code, marker), pty=True, on_output=heard, output_bytes_max=1000)
    assert heard.text.split("\r\n") == [*(str(n) for n in range(300_000)), ""]
    assert {stream for stream, _data in heard.pieces} == {"stdout"}
    assert (done.stdout.total, done.drained) == (len(heard.text), True)
    assert done.stdout.file is not None
    assert Path(done.stdout.file).read_bytes() == heard.text.encode()


async def test_pty_pause_pushes_back_and_a_stop_ends_it(marker: str) -> None:
    async with terminal(child("while True:\n    say('x' * 100)", marker), grace=0.3) as command:
        await wait_said(command, "x")
        command.pause_reading()
        read = command.written(Stream.STDOUT)
        (pid,) = alive(marker)
        wait_until(lambda: _is_asleep(pid), "it waits for somebody to read")
        for _ in range(10):
            await asyncio.sleep(0)
        assert command.written(Stream.STDOUT) == read
        assert (await command.stop()).ended is Ended.STOPPED
    assert not alive(marker)


def _is_asleep(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


async def test_pty_idle_timeout_and_output_limit_end_the_command() -> None:
    done = await banksman.execute(["sleep", "60"], pty=True, idle_timeout=0.1)
    assert done.ended is Ended.IDLE_TIMEOUT
    done = await banksman.execute(["yes"], pty=True, output_total_max=10_000)
    assert done.ended is Ended.OUTPUT_LIMIT


# -- the end ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "shell", [["bash", "--norc", "--noprofile"], ["sh"], ["zsh", "-f"]], ids=lambda words: words[0]
)
async def test_interactive_shell_is_hung_up(shell: list[str]) -> None:
    """It ignores TERM. With a grace of an hour the test ends only if a rung before KILL ends the shell."""
    if shutil.which(shell[0]) is None:
        pytest.skip(f"there is no {shell[0]} here")
    async with terminal([*shell, "-i"], grace=3600, env={"PS1": "$ ", "HISTFILE": ""}) as command:
        # The terminal echoes the input, so the expected word must not be in it.
        await command.write(b"echo up as $((40 + 2))\n")
        await wait_said(command, "up as 42")
        done = await command.stop()
    assert (done.ended, done.survivors, "kill" in rungs(done)) == (Ended.STOPPED, (), False)


async def test_interactive_shell_with_a_job_is_hung_up(marker: str) -> None:
    """Also while it waits for a foreground job, with another job stopped."""
    async with terminal(["bash", "--norc", "--noprofile", "-i"], grace=3600, env={"HISTFILE": ""}) as command:
        await command.write(f"sh -c 'kill -STOP $$' {marker}\nsh -c 'echo up as $((40 + 2)); cat' {marker}\n".encode())
        await wait_said(command, "up as 42")
        done = await command.stop()
    assert (done.ended, done.survivors, "kill" in rungs(done)) == (Ended.STOPPED, (), False)
    assert not alive(marker)


async def test_program_under_nohup_is_ended_by_term(tmp_path: Path) -> None:
    # In the test's folder: nohup redirects terminal output to a file there.
    async with terminal(["nohup", "sh", "-c", "echo up; exec sleep 60"], grace=3600, cwd=tmp_path) as command:
        written = tmp_path / "nohup.out"
        await asyncio.to_thread(wait_until, lambda: written.exists() and written.read_text() == "up\n", "it is up")
        done = await command.stop()
    assert (done.signal, "kill" in rungs(done)) == (signal.SIGTERM, False)


async def test_shell_that_ignores_term_only_after_a_moment_is_hung_up(marker: str) -> None:
    """Like a shell that begins to read a line: for microseconds, readline has a handler of its own."""
    code = """
signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_IGN))
say("up")
stay()
"""
    async with terminal(child(code, marker), grace=20) as command:
        await wait_said(command, "up")
        done = await command.stop()
    assert (done.signal, "kill" in rungs(done)) == (signal.SIGHUP, False)


async def test_program_that_cleans_up_on_term_is_not_hung_up(marker: str) -> None:
    code = """
def clean(*_):
    say("cleaning")
    say("got", hear())
    os._exit(7)
signal.signal(signal.SIGTERM, clean)
say("up")
stay()
"""
    async with terminal(child(code, marker), grace=3600) as command:
        await wait_said(command, "up")
        command.stop_nowait()
        await wait_said(command, "cleaning")
        await command.write(b"word\n")
        done = await command.wait()
    assert (done.code, "kill" in rungs(done)) == (7, False)
    assert "got word" in done.stdout.text


async def test_pty_job_that_ignores_term_and_hangup_is_killed(marker: str) -> None:
    code = "be_deaf()\nsignal.signal(signal.SIGHUP, signal.SIG_IGN)\nsay('up')\nstay()"
    async with terminal(child(code, marker), grace=0.2) as command:
        await wait_said(command, "up")
        done = await command.stop()
    assert (done.signal, rungs(done), done.drained) == (signal.SIGKILL, ["term", "kill"], True)
    assert not alive(marker)


async def test_pty_process_that_left_the_session_is_swept(marker: str) -> None:
    code = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
if fork() == 0:
    os.setsid()
    be_deaf()
    os.close(0); os.close(1)
    say("up", to=2)
    stay()
hear()
"""
    async with terminal(child(code, marker), grace=0.2, linger=0.05) as command:
        await wait_said(command, "up")
        await command.write(b"go\n")
        done = await command.wait()
    assert (done.code, len(done.swept), done.survivors, done.drained) == (0, 1, (), True)
    assert not alive(marker)


TERMINALS = """
def terminals():
    paths = (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd"))
    return [path for path in paths if os.path.lexists(path) and os.readlink(path).startswith(("/dev/pt", "/dev/tty"))]
"""


@pytest.mark.parametrize("end", ["kill", "exit", "abandon"])
def test_pty_tree_ends_with_its_host(end: str, marker: str) -> None:
    code = """
END, *ARGV = WORDS

async def main():
    host = banksman.Host("memory:")
    command = await host.start(ARGV, pty=True, grace=0.2)
    await wait_said(command, "up")
    print("up", flush=True)
    if END == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if END == "exit":
        os._exit(0)
    asyncio.get_running_loop().stop()

loop = asyncio.new_event_loop()
task = loop.create_task(main())
loop.run_forever()
loop.close()
gc.collect()
asyncio.run(banksman.execute(["true"]))
assert not terminals()
"""
    inner = """
signal.signal(signal.SIGHUP, signal.SIG_IGN)
be_deaf()
if fork() == 0:
    os.setsid()
    say("up")
stay()
"""
    with running_program(TERMINALS + code, "no-marker", end, *child(inner, marker)) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.wait(60)
    assert process.returncode == (-signal.SIGKILL if end == "kill" else 0)
    wait_none(marker)


def test_fork_of_the_program_holds_no_terminal_open(marker: str) -> None:
    code = """
async def main():
    async with banksman.Host("memory:") as host:
        command = await host.start(WORDS, pty=True)
        await wait_said(command, "up")
        pid = os.fork()
        if pid == 0:
            os._exit(len(terminals()))
        print(len(terminals()), os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

asyncio.run(main())
"""
    with running_program(TERMINALS + code, "no-marker", *child("say('up')\nstay()", marker)) as process:
        assert process.communicate(timeout=60)[0] == "2 0\n"
    wait_none(marker)


async def test_cancelled_or_failed_start_leaves_no_terminal(marker: str) -> None:
    async with Host("memory:") as host:
        with frozen(zygote_pid()):
            starting = asyncio.ensure_future(host.start(child("stay()", marker), pty=True, grace=0.1))
            await asyncio.sleep(0)
            starting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await starting
    with pytest.raises(banksman.ProgramNotExecutable):
        await banksman.execute(["/etc/passwd"], pty=True)
    assert not alive(marker)


async def test_pty_write_after_the_end_raises_command_error() -> None:
    async with terminal(["true"]) as command:
        await command.wait()
        with pytest.raises(CommandError):
            await command.write(b"x")


# -- lack of resources -----------------------------------------------------------------------------------------------
OUT_OF_FDS = """
import json, resource

async def main():
    await banksman.execute(["true"])
    before = len(os.listdir("/proc/self/fd"))
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    seen = {"errors": 0, "hints": [], "succeeded": 0}
    for limit in range(3, 40):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        try:
            assert (await banksman.execute(["sh", "-c", "exit 3"], pty=True)).code == 3
            seen["succeeded"] += 1
        except banksman.MachineError as exc:
            seen["errors"] += 1
            seen["hints"].append(exc.hint)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    seen["leaked"] = len(os.listdir("/proc/self/fd")) - before
    print(json.dumps(seen), flush=True)

asyncio.run(main())
"""


def test_pty_start_out_of_fds_is_an_error_with_a_hint_and_never_a_leak() -> None:
    with running_program(OUT_OF_FDS, "no-marker") as process:
        seen = json.loads(process.communicate(timeout=100)[0])
    assert seen["errors"] >= 4
    assert set(seen["hints"]) == {"this process has too many open files: close some, or raise its limit (ulimit -n)"}
    assert (seen["leaked"], seen["succeeded"] >= 1) == (0, True)


FAULTS = """
from tests.process import fault_host

async def scenario(name, marker):
    return await banksman.execute(["sh", "-c", "read line; tty -s && exit 7", marker], pty=True, linger=0.05, grace=0.2)

fault_host.scenario = scenario
asyncio.run(fault_host.main())
"""


@pytest.mark.thorough
@pytest.mark.parametrize("role", ["host", "keeper"])
def test_pty_failing_syscall_is_an_error_or_the_truth_and_never_a_leak(role: str, marker: str, tmp_path: Path) -> None:
    record = tmp_path / "calls"
    run_faults(marker, f"::::{record}")
    calls = [line.split() for line in record.read_text().splitlines()]
    ours = ("open_pty", "ioctl", "dup", "set_blocking", "open_fd", "read", "write", "fork", "pipe", "setsid", "execve")
    plans = [
        f"{role}:{call}:{nth}:{errno.EMFILE if call == 'open_pty' else errno.ENOMEM}:"
        for call in ours
        for nth in range(1, min(calls.count([role, call]), 4) + 1)
    ]
    assert any(("open_pty" if role == "host" else "ioctl") in plan for plan in plans)
    wrong = [seen for seen in run_faults(marker, *plans) if not is_right(seen)]
    assert not wrong, "\n".join(map(str, wrong))
    assert not alive(marker)


def run_faults(marker: str, *plans: str) -> list[dict[str, Any]]:
    code = f"import asyncio, sys, banksman\nsys.argv[1:] = ['pty', *sys.argv[1:]]\n{FAULTS}"
    argv = [sys.executable, "-c", code, marker, *plans]
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def is_right(seen: dict[str, Any]) -> bool:
    finished = seen.get("finished")
    is_told = "error" in seen or (finished and finished["code"] in (7, None) and not finished["survivors"])
    return bool(is_told) and seen["has_ended"] and seen["fds_more"] == 0 and seen["next"] == 5


# -- without a keeper ------------------------------------------------------------------------------------------------
async def test_pty_works_with_the_portable_process(monkeypatch: pytest.MonkeyPatch, marker: str) -> None:
    monkeypatch.setattr(running_command, "PROCESS", PortableProcess)
    code = "say(hear(), os.get_terminal_size(0).lines, os.isatty(2), os.tcgetpgrp(0) == os.getpid())"
    async with terminal(child(code, marker), pty=(5, 6)) as command:
        await command.write(b"word\n")
        done = await command.wait()
    assert done.stdout.text == "word\r\nword 5 True True\r\n"
