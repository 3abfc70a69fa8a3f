"""Zygote and keeper in trouble: orders that cannot be handed over, guards that are stopped, killed or late.

Each of these was a bug once. The guards are processes of their own, so trouble is made for them by signals, by a plan
of faults, or by a Python that changes something before it becomes the zygote.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.real.helpers import (
    alive,
    child,
    frozen,
    parent_of,
    rungs,
    run_program,
    start,
    wait_said,
    wait_until,
)

import banksman
from banksman import Ended, Host
from banksman.core import ladder
from banksman.core.facts import BytesRead, Exited, KeeperActed, ProcessFact, Started, TreeEnded
from banksman.run import host as host_module
from banksman.run import process as process_module
from banksman.run.keeper import wire
from banksman.run.keeper.keeper import KILLING, Keeper
from banksman.run.launch import prepare
from banksman.run.process import Process
from banksman.run.spawner import socketpair

# Two that left the leader's session; all three ignore TERM.
STUBBORN = """
be_deaf()
if fork() and fork():
    say("ready")
else:
    os.setsid()
stay()
"""
SPARE = """
def spare_of(zygote):
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if parent_of(pid) == zygote and open(f"/proc/{pid}/comm").read() == "banksman-spare\\n":
                return pid
        except (OSError, IndexError):
            continue
    return 0
"""


def assert_said(done: subprocess.CompletedProcess[str], marker: str, expected: str) -> None:
    """The program said this and nothing else, and left nothing: looked at right after its exit."""
    left = alive(marker)
    assert done.stderr == ""
    assert (done.stdout, done.returncode) == (expected, 0)
    assert left == []


# -- orders and starts -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("number", ["ENOBUFS", "ETOOMANYREFS"])
def test_an_order_that_cannot_be_handed_to_the_spare_keeper_costs_neither_it_nor_the_zygote(
    marker: str, number: str
) -> None:
    """The fds of a command are counted against its user while they are under way. A zygote that dies of that takes
    every start that is under way with it; the command is to be served by a keeper forked for it."""
    code = """
import errno
from banksman.run.spawner import spawner
spawner.plan_text = f"zygote:send_fds:1:{getattr(errno, WORDS[0])}:"
before = zygote_pid()
print([asyncio.run(banksman.execute(child(f"sys.exit({code})", MARKER))).code for code in (3, 4, 5)])
print(zygote_pid() == before, state_of(before) in "SR")
"""
    assert_said(run_program(code, marker, number), marker, "[3, 4, 5]\nTrue True\n")


def test_a_fork_in_another_thread_in_the_middle_of_a_start_holds_none_of_its_pipes(marker: str) -> None:
    """The command's first pipe has just been made when the fork comes. Held by the fork, which lives on, it would never
    end. The fork has to wait until all of the command's fds are known, and then closes its copies."""
    code = """
from banksman.run import system
from banksman.run.spawner import spawner

held, hold = os.pipe()
has_come, pids, plain_pipe, plain_lock = threading.Event(), [], system.pipe, spawner.fork_lock

class Lock:
    def acquire(self):
        has_come.set()
        plain_lock.acquire()
    def release(self):
        plain_lock.release()
    def __enter__(self):
        plain_lock.acquire()
    def __exit__(self, *_):
        plain_lock.release()

def fork():
    pid = os.fork()
    if pid == 0:
        os.close(hold)
        os.read(held, 1)
        os._exit(0)
    pids.append(pid)
    has_come.set()

def pipe():
    ends = plain_pipe()
    if not forking.ident:
        # The pipe is there, and nobody has been told of it.
        forking.start()
        assert has_come.wait(20)
    return ends

forking = threading.Thread(target=fork)

async def main():
    async with banksman.Host() as host:
        spawner.fork_lock, system.pipe = Lock(), pipe
        command = await host.start(child("while hear(): pass\\nsay('end')", MARKER), stdin="pipe", drain=1, timeout=9)
        await asyncio.to_thread(forking.join)
        await command.close_stdin()
        done = await command.wait()
        print(done.ended, done.drained, done.stdout.text, end="")

asyncio.run(main())
os.close(hold)
print(os.waitstatus_to_exitcode(os.waitpid(pids[0], 0)[1]))
"""
    assert_said(run_program(code, marker), marker, "exited True end\n0\n")


def test_a_shutdown_while_a_command_starts_ends_it_as_the_closing_of_its_host(marker: str) -> None:
    """The orders wait in the queue of a zygote that does not run. Whoever waits for such a command is told that it was
    stopped, which is true, and not that something went wrong."""
    code = """
async def main():
    with frozen(zygote_pid()):
        starting = [asyncio.create_task(banksman.execute(child("stay()", MARKER))) for _ in range(3)]
        await asyncio.sleep(0)
        print(await asyncio.to_thread(banksman.shutdown))
        for done in await asyncio.gather(*starting):
            print(done.ended, done.code, done.survivors)

asyncio.run(main())
"""
    assert_said(run_program(code, marker), marker, "True\n" + "host_closed None ()\n" * 3)


# -- guards that are stopped -----------------------------------------------------------------------------------------
async def test_a_tree_whose_keeper_and_zygote_are_both_stopped_is_ended_all_the_same(
    marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kill -STOP -1`, or a command that does it to its ancestors. Stopped guards would stay for ever, and the tree."""
    monkeypatch.setattr(ladder, "KILL_REPORT_SECONDS_MAX", 2.0)
    async with Host() as host:
        command = await start(host, child(STUBBORN, marker), grace=0.2)
        await wait_said(command, "ready")
        assert command.pid is not None
        keeper = parent_of(command.pid)
        with frozen(parent_of(keeper)), frozen(keeper):
            done = await command.stop()
            left = alive(marker)
    assert left == []
    assert rungs(done) == ["term", "kill", "keeper"]
    assert (done.ended, done.survivors) == (Ended.STOPPED, ())


@pytest.mark.parametrize("who", ["spare", "zygote"])
def test_a_shutdown_does_not_wait_for_a_guard_that_is_stopped(marker: str, who: str) -> None:
    """A stopped spare keeper never sees that it is dismissed, and its zygote would wait for it for ever."""
    code = (
        SPARE
        + """
asyncio.run(banksman.execute(child("", MARKER)))
zygote = zygote_pid()
wait_until(lambda: spare_of(zygote) != 0, "a spare keeper")
spare = spare_of(zygote)
with frozen(spare if WORDS[0] == "spare" else zygote):
    print(banksman.shutdown(), state_of(zygote) == "", state_of(spare) == "")
"""
    )
    assert_said(run_program(code, marker, who), marker, "True True True\n")
