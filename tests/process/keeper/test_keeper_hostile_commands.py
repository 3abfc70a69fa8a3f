"""Commands that attack their guards: they stop, trace or starve them, or make the keeper exit early.

A command may signal its keeper and the zygote, because they run as the same user. The zygote continues a stopped
keeper, and takes over from one that does not finish after the host's death. To shorten the limits of a zygote, a test
starts it by a script in the place of the Python interpreter.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.process.helpers import (
    REPOSITORY,
    alive,
    as_nobody,
    child,
    program,
    run_program,
    running_program,
    start,
    state_of,
    wait_none,
    wait_said,
    wait_until,
)
from tests.thorough import thorough

import banksman
from banksman import Ended, Host
from banksman.core.process_facts import BytesRead, ProcessFact, TreeEnded
from banksman.process.launch import prepare
from banksman.process.process import ChildProcess

pytestmark = thorough

STOP_KEEPER = "os.kill(os.getppid(), signal.SIGSTOP)\n"
# A tree that outlives TERM, and of which a part has left the session.
STUBBORN = """
be_deaf()
heard, tell = os.pipe()
if fork() == 0:
    os.setsid()
    os.write(tell, b"x")
    stay()
os.read(heard, 1)
"""
# A traced keeper does nothing, and the kernel does not notify its parent: PTRACE_ATTACH.
TRACE_KEEPER = """
import ctypes
assert ctypes.CDLL(None, use_errno=True).ptrace(16, os.getppid(), 0, 0) == 0
"""
HOST = """
async def main():
    argv = child(WORDS[1], MARKER)
    sys.executable = WORDS[0] or sys.executable
    command = await banksman.Host().start(argv, grace=0.2)
    await wait_said(command, "ready")
    keeper = parent_of(command.pid)
    print(keeper, parent_of(keeper), flush=True)
    await command.wait()

asyncio.run(main())
"""


def zygote_with(folder: Path, *changes: str) -> Path:
    """Return a program that starts as the zygote after it has run these lines."""
    python = folder / "python"
    lines = "\n".join(changes)
    python.write_text(f"""#!{sys.executable} -IS
import os, sys
sys.path.append(sys.argv[3].rsplit("/banksman/", 1)[0])
from banksman.process.keeper import keeper; from banksman.process.keeper import zygote
{lines}
zygote.main(int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
""")
    python.chmod(0o700)
    return python


# -- stopped guards --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stopped", ["keeper", "zygote", "zygote and keeper"])
def test_tree_ends_with_its_killed_host_when_guards_are_stopped(marker: str, stopped: str) -> None:
    """The zygote continues the keeper. The spare keeper, which sees the host's death too, continues the zygote."""
    with running_program(HOST, marker, "", STUBBORN + "say('ready')\nstay()") as host:
        assert host.stdout is not None
        keeper, zygote = map(int, host.stdout.readline().split())
        if "zygote" in stopped:
            os.kill(zygote, signal.SIGSTOP)
            wait_until(lambda: state_of(zygote) == "T", "the zygote to be stopped")
        if "keeper" in stopped:
            os.kill(keeper, signal.SIGSTOP)
        host.kill()
        host.wait()
        wait_none(marker)
        wait_until(lambda: not state_of(keeper) and not state_of(zygote), "the end of both guards")


@pytest.mark.parametrize("ends", ["by itself", "by stop"])
async def test_command_that_stops_its_keeper_is_waited_for_like_any_other(marker: str, ends: str) -> None:
    async with Host() as host:
        code = "say('ready')\nhear()\n" + STOP_KEEPER + ("sys.exit(3)" if ends == "by itself" else "say('on')\nstay()")
        command = await start(host, child(code, marker), stdin="pipe", grace=3600, timeout=100)
        await wait_said(command, "ready")
        await command.write(b"go\n")
        if ends == "by stop":
            await wait_said(command, "on")
            await command.stop()
        done = await command.wait()
    assert (done.code, done.signal) == ((3, None) if ends == "by itself" else (None, signal.SIGTERM))
    assert (done.ended, done.survivors) == (Ended.EXITED if ends == "by itself" else Ended.STOPPED, ())


async def test_command_that_stops_its_keeper_at_once_is_started_and_ended(marker: str) -> None:
    """The keeper may be stopped before it has reported the start to the host."""
    for _ in range(5):
        done = await banksman.execute(child(STOP_KEEPER + "sys.exit(3)", marker), timeout=100)
        assert (done.code, done.survivors) == (3, ())


@pytest.mark.parametrize("attack", ["stops it again and again", "traces it"])
def test_zygote_ends_a_tree_whose_keeper_does_not_when_the_host_is_killed(
    marker: str, tmp_path: Path, attack: str
) -> None:
    if attack == "traces it" and os.geteuid() != 0:
        pytest.skip("needs root, who may trace the keeper")
    python = zygote_with(tmp_path, "zygote.DUTY_SECONDS_MAX = 0.2")
    again = "keeper = os.getppid()\nsay('ready')\nwhile True:\n    os.kill(keeper, signal.SIGSTOP)"
    code = STUBBORN + (TRACE_KEEPER + "say('ready')\nstay()" if attack == "traces it" else again)
    with running_program(HOST, marker, python, code) as host:
        assert host.stdout is not None
        keeper, zygote = map(int, host.stdout.readline().split())
        host.kill()
        host.wait()
        wait_none(marker)
        wait_until(lambda: not state_of(keeper) and not state_of(zygote), "the end of both guards")


# -- guards that are traced, starved or made to exit -----------------------------------------------------------------
async def test_tree_whose_keeper_is_traced_is_ended_by_the_last_rung(marker: str) -> None:
    """The tracer also owns the zombie of the keeper, so the zygote gets no notice of its death."""
    if os.geteuid() != 0:
        pytest.skip("needs root, who may trace the keeper")
    facts: asyncio.Queue[ProcessFact] = asyncio.Queue()
    launch = prepare(child(STUBBORN + TRACE_KEEPER + "say('ready')\nstay()", marker))
    process = ChildProcess(launch, stdin="null", grace=0.1, linger=0, deadline=None, on_fact=facts.put_nowait)
    try:
        while not isinstance(await facts.get(), BytesRead):
            pass
        process.kill_keeper()
        while not isinstance(fact := await facts.get(), TreeEnded):
            pass
        left = alive(marker)
    finally:
        process.close()
    assert left == []
    assert fact.survivors == ()


def test_keeper_that_exits_before_its_tree_counts_as_lost(marker: str, tmp_path: Path) -> None:
    """As when a debugger makes it call exit(0). Only the status that follows the proof ends its duty."""
    leave = "os._exit(0) if os.getppid() == ZYGOTE else (_ for _ in ()).throw(OSError())"
    python = zygote_with(tmp_path, "ZYGOTE = os.getpid()", f"keeper.Keeper.stay = lambda self: {leave}")
    code = """
async def main():
    argv = child("fork() or os.setsid()\\nstay()", MARKER)
    sys.executable = WORDS[0]
    done = await banksman.execute(argv, timeout=50)
    print(done.signal, done.survivors, alive(MARKER))

asyncio.run(main())
"""
    done = run_program(code, marker, python)
    assert (done.stdout, done.stderr) == ("9 () []\n", "")


async def test_tree_whose_keeper_may_open_no_file_is_ended(marker: str) -> None:
    """The limit is set from outside. The keeper can neither read /proc nor poll its sockets, and is lost."""
    code = """
import resource
resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0))
say("ready")
stay()
"""
    async with Host() as host:
        command = await start(host, child(STUBBORN + code, marker), grace=0.1)
        await wait_said(command, "ready")
        done = await command.stop()
        left = alive(marker)
    assert left == []
    assert done.survivors == ()


def test_process_of_the_same_user_cannot_trace_the_guards(marker: str) -> None:
    """Unless it has CAP_SYS_PTRACE. Commands themselves stay traceable, and the limit that needs /proc still works."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin:/bin")
    if python is None:
        pytest.skip("there is no Python that every user can run")
    code = """
TRY = '''
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
def attach(pid):
    return libc.ptrace(16, pid, 0, 0) and ctypes.get_errno()
def parent_of(pid):
    return int(open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1])
keeper = os.getppid()
pid = fork() or stay()
say(attach(pid), attach(keeper), attach(parent_of(keeper)), open("/proc/self/oom_score_adj").read())
'''

async def main():
    for limits in (None, {"oom_score_adj": 500}):
        done = await banksman.execute([WORDS[0], *child(TRY, MARKER)[1:]], limits=limits, env={"HOME": "/"}, cwd="/")
        print(done.stdout.text, done.stderr.text, done.survivors)

asyncio.run(main())
"""
    argv = as_nobody(program(code, marker, python))
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["0", "1", "1", "0", "()", "0", "1", "1", "500", "()"], done
