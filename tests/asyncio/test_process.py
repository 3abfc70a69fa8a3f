"""`banksman.asyncio`: the guarantee that asyncio's processes lack, and the interface that both share.

`test_cpython_suite.py` has CPython's own tests of the interface. The tests here cover the tree of a child, the ends of
a loop and a program, and the redirects.
"""

from __future__ import annotations

import asyncio
import asyncio.subprocess
import hashlib
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
import uvloop
from tests.process.helpers import (
    alive,
    child,
    frozen,
    run_program,
    rungs,
    running_program,
    wait_none,
    wait_until,
    zygote_pid,
)
from tests.thorough import thorough

from banksman import Ended
from banksman import asyncio as basyncio
from banksman.asyncio import DEVNULL, PIPE, STDOUT, Process

# libuv makes a pipe for signals once per process and keeps it. Made here, it does not count as a leak of a test.
uvloop.new_event_loop().close()

# The leader says "up" when a descendant in another session runs, which holds stdout.
HAS_DAEMON = """
read_end, write_end = os.pipe()
if fork() == 0:
    os.setsid()
    os.write(write_end, b"x")
    stay()
os.read(read_end, 1)
say("up")
"""
# The same with a descendant that ignores TERM.
HAS_DEAF_DAEMON = HAS_DAEMON.replace("os.setsid()", "os.setsid(); be_deaf()")


async def start(code: str, marker: str, *words: object, **keywords: Any) -> Process:
    how: dict[str, Any] = {"stdout": PIPE, **keywords}
    return await basyncio.create_subprocess_exec(*child(code, marker, *words), **how)


async def read_line(process: Process) -> str:
    assert process.stdout is not None
    return (await process.stdout.readline()).decode().strip()


# -- the tree --------------------------------------------------------------------------------------------------------
async def test_communicate_ends_when_a_daemon_holds_stdout(marker: str) -> None:
    process = await start(HAS_DAEMON, marker)
    assert await process.communicate() == (b"up\n", None)
    assert alive(marker) == []
    assert process.returncode == 0
    assert process.finished is not None
    assert len(process.finished.swept) == 1


async def test_kill_ends_the_whole_tree(marker: str) -> None:
    process = await start(f"{HAS_DEAF_DAEMON}stay()", marker)
    await read_line(process)
    assert len(alive(marker)) == 2
    process.kill()
    assert await process.wait() == -signal.SIGKILL
    assert alive(marker) == []
    assert process.finished is not None
    assert rungs(process.finished) == ["kill"]
    assert len(process.finished.swept) == 1
    assert process.finished.survivors == ()


async def test_kill_ends_the_rest_of_the_tree_after_the_exit_of_the_leader(marker: str) -> None:
    process = await start(HAS_DEAF_DAEMON, marker)
    await read_line(process)
    while process.returncode is None:  # noqa: ASYNC110  (asyncio has no event for it)
        await asyncio.sleep(0)
    process.kill()
    assert await process.wait() == 0
    assert alive(marker) == []
    assert process.finished is not None
    assert rungs(process.finished) == ["kill"]


async def test_terminate_signals_the_leader_alone(marker: str) -> None:
    code = """
read_end, write_end = os.pipe()
seen = []
signal.signal(signal.SIGTERM, lambda *_: os.write(write_end, b"x"))
if fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: seen.append("TERM"))
    say("up")
    os.read(read_end, 1)
    say("the leader was signalled, and the child saw", seen)
stay()
"""
    process = await start(code, marker)
    assert await read_line(process) == "up"
    process.terminate()
    assert await read_line(process) == "the leader was signalled, and the child saw []"
    process.kill()
    await process.wait()


async def test_stop_takes_the_rungs_of_the_ladder(marker: str) -> None:
    process = await start(f"be_deaf()\n{HAS_DEAF_DAEMON}stay()", marker)
    await read_line(process)
    finished = await process.stop(grace=0.1)
    assert (finished.ended, finished.signal) == (Ended.STOPPED, signal.SIGKILL)
    at = {step.rung: step.at for step in finished.ladder}
    assert at["kill"] - at["term"] < 5.0, "this is the default grace"
    assert finished is process.finished
    assert alive(marker) == []


async def test_stop_continues_when_its_caller_is_cancelled(marker: str) -> None:
    process = await start(f"{HAS_DAEMON}stay()", marker)
    await read_line(process)
    stop = asyncio.create_task(process.stop(grace=0.1))
    await asyncio.sleep(0)
    stop.cancel()
    with pytest.raises(asyncio.CancelledError):
        await stop
    assert await process.wait() == -signal.SIGTERM
    assert alive(marker) == []


# -- waits and signals -----------------------------------------------------------------------------------------------
async def test_process_is_a_process_of_asyncio(marker: str) -> None:
    process = await start("hear()", marker, stdin=PIPE)
    assert isinstance(process, asyncio.subprocess.Process)
    assert process.returncode is None
    assert process.finished is None
    await process.communicate(b"")
    assert process.returncode == 0


async def test_cancelled_wait_leaves_the_child_running(marker: str) -> None:
    process = await start("say(hear())", marker, stdin=PIPE)
    waits = [asyncio.create_task(process.wait()) for _ in range(3)]
    await asyncio.sleep(0)
    waits[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits[0]
    assert (await process.communicate(b"still here\n"))[0] == b"still here\n"
    assert await asyncio.gather(*waits[1:]) == [0, 0]


async def test_signal_after_the_end_raises_process_lookup_error(marker: str) -> None:
    process = await start("os._exit(7)", marker)
    assert await process.wait() == 7
    for send in (process.terminate, process.kill, lambda: process.send_signal(signal.SIGUSR1)):
        with pytest.raises(ProcessLookupError):
            send()


async def test_invalid_signal_is_an_os_error(marker: str) -> None:
    process = await start("hear()", marker, stdin=PIPE)
    process.send_signal(0)
    with pytest.raises(OSError, match="Invalid argument"):
        process.send_signal(99)
    await process.communicate(b"")
    assert process.returncode == 0


async def test_cancelled_creation_leaves_nothing(marker: str) -> None:
    """The cancellation comes at every step of a start, up to the request to a zygote that does not answer yet."""
    with frozen(zygote_pid()):
        for passes in range(20):
            creation = asyncio.create_task(start("stay()", marker, stdin=PIPE))
            for _ in range(passes):
                await asyncio.sleep(0)
            creation.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creation
    # The zygote answers this request after the others.
    process = await start("hear()", marker, stdin=PIPE)
    await process.communicate(b"")
    wait_none(marker)


async def test_slow_reader_gets_every_byte_through_a_small_limit(marker: str) -> None:
    """The pipe is paused and resumed many times, and the child waits meanwhile."""
    process = await start('os.write(1, b"0123456789" * 100_000)', marker, limit=1000)
    assert process.stdout is not None
    digest, size = hashlib.sha256(), 0
    while data := await process.stdout.read(4096):
        digest.update(data)
        size += len(data)
        await asyncio.sleep(0)
    assert size == 1_000_000
    assert digest.digest() == hashlib.sha256(b"0123456789" * 100_000).digest()
    assert await process.wait() == 0


async def test_wait_returns_while_output_is_unread(marker: str) -> None:
    process = await start('os.write(1, b"x" * 5000)', marker, limit=10)
    assert await process.wait() == 0
    assert process.stdout is not None
    assert len(await process.stdout.read()) == 5000


def test_process_works_under_uvloop(marker: str) -> None:
    async def main() -> None:
        process = await start("say(hear())", marker, stdin=PIPE, stderr=PIPE)
        assert await process.communicate(b"hello\n") == (b"hello\n", b"")
        assert process.returncode == 0
        running = await start(f"{HAS_DEAF_DAEMON}stay()", marker, stdin=PIPE)
        await read_line(running)
        running.kill()
        await running.wait()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())
    assert alive(marker) == []


# -- ends of the loop and of the program -----------------------------------------------------------------------------
STARTS = """
from banksman import asyncio as basyncio
from tests.asyncio.test_process import HAS_DAEMON

async def start(create):
    argv = child(HAS_DAEMON + "os.write(1, b'x' * 1_000_000)\\nstay()", MARKER)
    process = await create(*argv, stdin=-1, stdout=-1, stderr=-1, limit=100)
    await process.stdout.readline()
    return process
"""


def test_end_of_the_loop_leaves_nothing(marker: str) -> None:
    """The child still runs and has unread output, and its task was cancelled by the end of the loop."""
    code = f"""{STARTS}
async def main():
    # The debug mode logs slow callbacks, and a busy machine makes any of them slow.
    asyncio.get_running_loop().slow_callback_duration = 60
    task = asyncio.create_task(wait())
    await up.wait()

async def wait():
    process = await start(basyncio.create_subprocess_exec)
    up.set()
    await process.wait()

up = asyncio.Event()
asyncio.run(main())
gc.collect()
print(alive(MARKER))
"""
    done = run_program(code, marker, env={"PYTHONWARNINGS": "error", "PYTHONDEVMODE": "1"})
    # The program has the marker in its argv too, but its own pid does not count.
    assert (done.stdout, done.stderr, done.returncode) == ("[]\n", "", 0)
    assert alive(marker) == []


@thorough
def test_exit_with_an_open_loop_leaves_nothing(marker: str) -> None:
    code = f"""{STARTS}
loop = asyncio.new_event_loop()
process = loop.run_until_complete(start(basyncio.create_subprocess_exec))
"""
    done = run_program(code, marker)
    assert done.returncode == 0
    assert alive(marker) == []


@pytest.mark.parametrize("module", ["basyncio", "asyncio"])
def test_killed_program_leaves_nothing_only_with_banksman(module: str, marker: str) -> None:
    code = f"""{STARTS}
async def main():
    process = await start({module}.create_subprocess_exec)
    print(process.pid, flush=True)
    await process.wait()

asyncio.run(main())
"""
    with running_program(code, marker) as program:
        assert program.stdout is not None
        leader = int(program.stdout.readline())
        program.kill()
        program.wait()
    if module == "basyncio":
        wait_none(marker)
        return
    # The control: plain asyncio leaves both, and this test ends them.
    left = alive(marker)
    assert leader in left
    assert len(left) == 2
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not alive(marker), "the end of the processes that asyncio left")


# -- streams ---------------------------------------------------------------------------------------------------------
async def test_streams_accept_files_fds_and_devnull(marker: str, tmp_path: Path) -> None:
    (tmp_path / "in").write_text("from a file\n")
    with (tmp_path / "in").open() as stdin, tempfile.TemporaryFile() as stdout:
        process = await start("say(hear())", marker, stdin=stdin, stdout=stdout.fileno(), stderr=DEVNULL)
        assert await process.wait() == 0
        assert (process.stdin, process.stdout, process.stderr) == (None, None, None)
        stdout.seek(0)
        assert stdout.read() == b"from a file\n"


async def test_stderr_joins_stdout(marker: str) -> None:
    process = await start('say("one")\nsay("two", to=2)', marker, stderr=STDOUT)
    assert await process.communicate() == (b"one\ntwo\n", None)


@thorough
def test_streams_are_inherited_by_default(marker: str) -> None:
    code = """
from banksman import asyncio as basyncio

async def main():
    process = await basyncio.create_subprocess_exec(*child("say(hear())\\nsay('error', to=2)", MARKER))
    assert await process.wait() == 0

asyncio.run(main())
"""
    done = run_program(code, marker, stdin="inherited\n")
    assert (done.stdout, done.stderr, done.returncode) == ("inherited\n", "error\n", 0)


@thorough
def test_closed_streams_are_inherited_as_devnull(marker: str) -> None:
    code = """
from banksman import asyncio as basyncio

async def main():
    argv = child("os._exit(len(os.read(0, 1)) + (os.fstat(1).st_rdev == 0))", MARKER)
    process = await basyncio.create_subprocess_exec(*argv)
    os._exit(await process.wait())

for fd in (0, 1):
    os.close(fd)
asyncio.run(main())
"""
    done = run_program(code, marker)
    assert (done.stderr, done.returncode) == ("", 0)
