"""Whole trees: wrappers, daemons and orphans, and their end when a guard or the host is lost.

Scenarios 5, 14, 15, 21, 22, 23, and the wide cases around them. The kill matrix has every ending times every shape.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

import pytest
from tests.process.helpers import (
    REPOSITORY,
    alive,
    child,
    frozen,
    frozen_guards,
    parent_of,
    run_program,
    rungs,
    running_program,
    start,
    start_of,
    state_of,
    wait_none,
    wait_pass,
    wait_said,
    wait_until,
    zygote_pid,
)

import banksman
from banksman import Ended, Host
from banksman.core import stop_ladder
from banksman.process.keeper.proc_tree import descendants, open_member, read_stat


# -- wrappers and daemons --------------------------------------------------------------------------------------------
async def test_orphaned_agent_dies_when_its_wrapper_exits_first(marker: str) -> None:
    """Scenario 5: the direct child exits with a code.

    The process that did the work still lives, and the result names it.
    """
    code = """
if fork() == 0:
    os.setsid()
    be_deaf()
    say("agent", os.getpid())
    stay()
hear()
sys.exit(0)
"""
    async with Host() as host:
        command = await start(host, child(code, marker), stdin="pipe", linger=0.1, grace=0.2)
        agent = int((await wait_said(command, "\n")).split()[1])
        await command.write(b"go\n")
        done = await command.wait()
    assert alive(marker) == []
    # The wrapper's 0 is only the wrapper's. The result also lists the swept process.
    assert (done.ended, done.code) == (Ended.EXITED, 0)
    assert [swept.pid for swept in done.swept] == [agent]
    assert marker in done.swept[0].command
    assert rungs(done) == ["rest", "kill"]


async def test_orphaned_agent_keeps_the_grace_when_its_wrapper_dies_of_term(marker: str) -> None:
    """Scenario 5 under a stop: the wrapper exits at the first TERM, and the agent cleans up within the one grace."""
    code = """
agent = fork()
if agent == 0:
    os.setsid()
    def on_term(number, frame):
        say("cleaned up")
        os._exit(0)
    signal.signal(signal.SIGTERM, on_term)
    say("ready")
stay()
"""
    async with Host() as host:
        command = await start(host, child(code, marker), grace=30)
        await wait_said(command, "ready")
        done = await command.stop()
    assert alive(marker) == []
    assert (done.ended, done.signal) == (Ended.STOPPED, signal.SIGTERM)
    assert done.stdout.text == "ready\ncleaned up\n"
    assert rungs(done) == ["term", "rest"]


async def test_term_reaches_the_whole_group_at_once(marker: str) -> None:
    """As a shell, which handles its own TERM only after its foreground program has ended."""
    code = """
be_deaf()
foreground = fork()
if foreground == 0:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    say("ready")
    stay()
os.waitpid(foreground, 0)
say("its program has ended")
sys.exit(3)
"""
    async with Host() as host:
        command = await start(host, child(code, marker), grace=30)
        await wait_said(command, "ready")
        done = await command.stop()
    assert (done.code, done.stdout.text) == (3, "ready\nits program has ended\n")
    assert "kill" not in rungs(done)


async def test_busy_child_dies_with_its_killed_leader_and_our_group_gets_no_signal(marker: str) -> None:
    """Scenario 14. A signal kills the leader. Its child never sleeps, so it never handles a signal."""
    heard: list[int] = []

    def on_signal(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    watched = (signal.SIGTERM, signal.SIGCONT, signal.SIGHUP)
    before = {number: signal.signal(number, on_signal) for number in watched}
    code = """
if fork() == 0:
    be_deaf()
    say("ready")
    while True:
        pass
stay()
"""
    try:
        async with Host() as host:
            command = await start(host, child(code, marker), linger=0.1, grace=0.1)
            await wait_said(command, "ready")
            assert command.pid is not None
            os.kill(command.pid, signal.SIGKILL)
            done = await command.wait()
        assert alive(marker) == []
        assert (done.ended, done.signal) == (Ended.EXITED, signal.SIGKILL)
        assert len(done.swept) == 1
        assert heard == []
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


DAEMONS = {
    "setsid": "fork() or (os.setsid(), be_deaf(), say('ready'), stay())",
    "double_fork": "fork() or (os.setsid(), fork() and os._exit(0), be_deaf(), say('ready'), stay())",
    "no_environment": """
if fork() == 0:
    os.setsid()
    # A program of its own with nothing inherited but its stdout: no variable by which it could be recognised.
    code = "import os, signal, time; signal.alarm(60); signal.signal(15, 1); os.write(1, b'ready\\\\n'); time.sleep(60)"
    os.execve(sys.executable, [sys.executable, "-X", WORDS[0], "-I", "-S", "-c", code], {})
""",
}


# One case with a timeout is enough: it costs its whole timeout, which is long so that the tree is up in time.
LEFT = [*((kind, ending) for kind in DAEMONS for ending in ("exit", "stop")), ("double_fork", "timeout")]


@pytest.mark.parametrize(("kind", "ending"), LEFT)
async def test_process_that_left_the_session_dies_with_the_tree(marker: str, kind: str, ending: str) -> None:
    """Scenario 22. Counted right after the report: over means over."""
    async with Host() as host:
        command = await start(
            host,
            child(DAEMONS[kind] + "\nhear()\nsys.exit(0) if WORDS[1] == 'exit' else stay()", marker, marker, ending),
            stdin="pipe",
            linger=0.1,
            grace=0.2,
            timeout=2.0 if ending == "timeout" else None,
        )
        await wait_said(command, "ready")
        await command.write(b"go\n")
        done = await (command.stop() if ending == "stop" else command.wait())
        assert alive(marker) == []
        assert done.survivors == ()
        assert done.ended == {"exit": "exited", "stop": "stopped"}.get(ending, ending)
        assert [marker in swept.command for swept in done.swept] == [True]


async def test_stopped_tree_is_ended_by_term(marker: str) -> None:
    """A stopped process does not notice TERM until it is continued. No KILL is needed for it."""
    code = """
if fork() == 0:
    os.setsid()
    say("child", os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    stay()
hear()
os.kill(os.getpid(), signal.SIGSTOP)
stay()
"""
    async with Host() as host:
        command = await start(host, child(code, marker), stdin="pipe", grace=30)
        stopped = int((await wait_said(command, "\n")).split()[1])
        await command.write(b"go\n")
        for pid in (stopped, command.pid or 0):
            wait_until(lambda pid=pid: state_of(pid) == "T", f"{pid} to stop itself")
        done = await command.stop()
    assert alive(marker) == []
    assert rungs(done) == ["term", "rest"]


async def test_lingering_helper_may_finish_its_work(marker: str, tmp_path: Path) -> None:
    """`cmd > >(tee log)`: the leader has exited, and its helper still writes.

    No output is lost, and the linger ends early.
    """
    code = """
if fork() == 0:
    while not os.path.exists(WORDS[0]):
        time.sleep(0.005)
    say("late")
    os._exit(0)
say("early")
"""
    release = tmp_path / "release"
    async with Host() as host:
        command = await start(host, child(code, marker, release), linger=30)
        await wait_said(command, "early")
        wait_until(lambda: state_of(command.pid or 0) in ("Z", ""), "the leader's exit")
        release.touch()
        done = await command.wait()
    assert done.stdout.text == "early\nlate\n"
    assert (done.swept, done.ladder) == ((), ())


async def test_stop_during_linger_ends_the_rest_and_keeps_exited(marker: str) -> None:
    async with Host() as host:
        command = await start(host, child('fork() or (say("ready"), stay())', marker), linger=60)
        await wait_said(command, "ready")
        await wait_pass(lambda: command.state == "stopping")
        done = await command.stop()
    assert alive(marker) == []
    assert (done.ended, done.code) == (Ended.EXITED, 0)
    assert rungs(done) == ["rest"]


async def test_inner_background_commands_end_with_the_outer_command(marker: str) -> None:
    """Scenario 15, nested: the command is a program that uses Banksman, with commands in the background.

    It is stopped without a chance to clean up. Its own zygote and keepers ignore TERM, and end the processes that they
    guard.
    """
    code = f"""
import asyncio, os
os.chdir({str(REPOSITORY)!r})
sys.path[:0] = {sys.path!r}
import banksman
from tests.process.helpers import child, wait_said

async def main():
    host = banksman.Host()
    for _ in range(3):
        command = await host.start(child("be_deaf(); say('ready'); stay()", WORDS[0]))
        await wait_said(command, "ready")
    say("ready")
    await command.wait()

asyncio.run(main())
"""
    async with Host() as host:
        # With the site-packages of this interpreter, where it finds Banksman. So the options of `child` are removed.
        argv = [word for word in child(code, marker, marker) if word not in ("-I", "-S")]
        command = await start(host, argv, grace=0.5)
        await wait_said(command, "ready")
        assert len(alive(marker)) == 4
        done = await command.stop()
    assert alive(marker) == []
    assert done.survivors == ()


async def test_background_commands_are_drained_with_their_host(marker: str) -> None:
    """Scenario 15: background commands do not pile up. Ten at the same time, each with a child in a new session."""
    async with Host() as host:
        for _ in range(10):
            command = await start(host, child(DAEMONS["double_fork"] + "\nstay()", marker, marker), grace=0.2)
            await wait_said(command, "ready")
        # The first fork of each pair has nothing to do but exit, and may still be at it.
        await wait_pass(lambda: len(alive(marker)) == 20)
    assert alive(marker) == []
    assert {command.result().ended for command in host.commands()} == {Ended.HOST_CLOSED}


@pytest.mark.thorough
async def test_survivor_that_may_not_be_signalled_is_named(marker: str) -> None:
    """A root without CAP_KILL, and a child that became another user: like `sudo` for an ordinary user."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    code = """
import ctypes
PR_CAPBSET_DROP, CAP_KILL = 24, 5
# Taken from what the next exec may have: the zygote, and so every keeper, is a root without this power.
assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_KILL, 0, 0, 0) == 0

async def main():
    host = banksman.Host()
    command = await host.start(child('''
if fork() == 0:
    os.setresuid(65534, 65534, 65534)
    say("ready", os.getpid())
stay()
''', MARKER), grace=0.2, drain=0.2)
    pid = (await wait_said(command, "ready")).split()[1]
    done = await command.stop()
    print(pid, done.ended, [(survivor.pid, survivor.why) for survivor in done.survivors])
    assert MARKER in done.survivors[0].command
    # Only now the test is told who is to be ended by it.
    sys.stdout.flush()
    sys.stdin.readline()
    await host.close()

asyncio.run(main())
"""
    with running_program(code, marker) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        line = await asyncio.to_thread(running.stdout.readline)
        pid, rest = line.split(" ", 1)
        assert rest == f"stopped [({pid}, 'no permission to signal it')]\n"
        os.kill(int(pid), signal.SIGKILL)
        running.stdin.write("\n")
        running.stdin.close()
        assert await asyncio.to_thread(running.wait) == 0
    await asyncio.to_thread(wait_none, marker)


# -- identity --------------------------------------------------------------------------------------------------------
def test_recycled_pid_is_not_opened(marker: str) -> None:
    """Scenario 21: the identity is pid and start time. A pid that now belongs to another process is not even opened."""
    process = subprocess.Popen(child("stay()", marker))
    try:
        start_time = start_of(process.pid)
        assert read_stat(process.pid) == (os.getpid(), state_of(process.pid), start_time)
        for other in (start_time - 1, start_time + 1, 0):
            assert open_member((process.pid, other)) is None
        fd = open_member((process.pid, start_time))
        assert fd is not None
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        os.close(fd)
        assert process.wait() == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
    assert open_member((process.pid, start_time)) is None
    assert read_stat(process.pid) is None


def test_tree_membership_is_decided_by_ancestry_alone(marker: str) -> None:
    """A stranger with the same command line, in the same group and session, is no member. A daemon is."""
    code = "fork() or (os.setsid(), say(os.getpid()), stay()); stay()"
    stranger = subprocess.Popen(child(code, marker), stdout=subprocess.PIPE)
    root = subprocess.Popen(child(code, marker), stdout=subprocess.PIPE)
    daemons: dict[int, int] = {}
    try:
        for process in (stranger, root):
            assert process.stdout is not None
            daemons[process.pid] = int(process.stdout.readline())
        # Not only the near ones: pids wrap around, and the daemon's may be below its ancestor's.
        assert [pid for pid, _start in descendants(root.pid, near=False)] == [daemons[root.pid]]
    finally:
        for pid in (*daemons, *daemons.values()):
            os.kill(pid, signal.SIGKILL)
        for process in (stranger, root):
            process.communicate()
    wait_none(marker)


# -- lost and late guards --------------------------------------------------------------------------------------------
async def test_lost_keeper_with_an_unread_order_is_not_taken_for_loss_of_both_guards(marker: str) -> None:
    """A socket that is closed with unread data gives the other side an error before its queued messages.

    The zygote's report is in that queue, and it is true: the tree is gone, and no process survived.
    """
    async with Host() as host:
        command = await start(host, child(DAEMONS["setsid"] + "\nstay()", marker, marker))
        await wait_said(command, "ready")
        assert command.pid is not None
        keeper = parent_of(command.pid)
        zygote = parent_of(keeper)
        with frozen_guards(command.pid):
            await command.signal(signal.SIGUSR1)
            os.kill(keeper, signal.SIGKILL)
            os.kill(zygote, signal.SIGCONT)
            done = await command.wait()
    assert alive(marker) == []
    assert done.survivors == ()
    assert (done.ended, done.signal) == (Ended.EXITED, signal.SIGKILL)


async def test_keeper_that_does_not_answer_is_killed_with_its_tree(
    marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last rung.

    The keeper's limit of seven seconds is shortened, the zygote's is not. The keeper is continued first.
    """
    monkeypatch.setattr(stop_ladder, "KILL_REPORT_SECONDS_MAX", 0.1)
    async with Host() as host:
        command = await start(host, child(DAEMONS["double_fork"] + "\nstay()", marker, marker), grace=0.2)
        await wait_said(command, "ready")
        assert command.pid is not None
        with frozen_guards(command.pid):
            done = await command.stop()
    assert alive(marker) == []
    assert rungs(done) == ["term", "kill", "keeper"]
    assert (done.ended, done.survivors) == (Ended.STOPPED, ())


async def test_start_that_was_given_up_never_runs(marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The zygote is stopped while the host stops the commands, ends their ladders, and reports them as over.

    When the zygote continues, the orders are still in its queue. A command that was reported as over must not start.
    One that started would be stopped again within a millisecond. So twenty quick ones make sure that at least one would
    leave a trace.
    """
    monkeypatch.setattr(stop_ladder, "KILL_REPORT_SECONDS_MAX", 0.1)
    monkeypatch.setattr(stop_ladder, "TAKE_OVER_SECONDS_MAX", 0.1)
    argv = ["/bin/sh", "-c", 'echo ran >> "$1"', marker, str(tmp_path / "ran")]
    async with Host() as host:
        with frozen(zygote_pid()):
            starting = [asyncio.create_task(host.start(argv, grace=0.1)) for _ in range(20)]
            await asyncio.sleep(0)
            commands = host.commands()
            assert len(commands) == 20
            for task in starting:
                task.cancel()
            await asyncio.wait(starting)
            # Over, with a result or with an error: the API does not promise which.
            await asyncio.gather(*(command.wait() for command in commands), return_exceptions=True)
            assert all(command.is_over for command in commands)
        # The same zygote (or its successor) serves a later command after those in the queue.
        assert (await banksman.execute(child("sys.exit(0)", marker))).code == 0
    wait_none(marker)
    assert not (tmp_path / "ran").exists()


# -- a host that dies ------------------------------------------------------------------------------------------------
HOST_WITH_TREES = f"""
async def main():
    host = banksman.Host()
    for daemon in {list(DAEMONS.values())!r}:
        command = await host.start(child(daemon + "\\nbe_deaf()\\nstay()", MARKER, MARKER), grace=0.3)
        await wait_said(command, "ready")
    print("ready", flush=True)
    %s
    await command.wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGQUIT])
def test_killed_host_takes_its_trees_along(marker: str, number: int) -> None:
    """Scenario 23: no process is left within seconds. A signal that ends a program by default has the same effect."""
    with running_program(HOST_WITH_TREES % "", marker) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        assert len(alive(marker)) == 7
        running.send_signal(number)
        assert running.wait() == -number
        wait_none(marker)


def test_host_that_calls_exec_takes_its_trees_along(marker: str) -> None:
    """exec keeps the pid, so a watch on the process alone would see nothing. The closed socket shows it."""
    # The new program has no marker: the count sees only the processes that it left behind.
    become = 'os.execv("/bin/cat", ["cat"])'
    with running_program(HOST_WITH_TREES % become, marker) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "ready\n"
        wait_none(marker)
        assert running.poll() is None


@pytest.mark.parametrize("starts", [0, 1, 3, 8])
def test_host_killed_while_starting_commands_leaves_none(marker: str, starts: int) -> None:
    """Scenario 23 during starts: twenty starts are in progress, and `starts` of them were answered."""
    code = """
async def main():
    host = banksman.Host()
    argv = child("be_deaf(); stay()", MARKER)
    waiting = {asyncio.create_task(host.start(argv, grace=0.2)) for _ in range(20)}
    await asyncio.sleep(0)
    started = 0
    while started < int(WORDS[0]):
        done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        started += len(done)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
    assert run_program(code, marker, starts).returncode == -signal.SIGKILL
    wait_none(marker)


@pytest.mark.thorough
def test_frozen_host_does_not_keep_a_command_past_its_timeout(marker: str) -> None:
    """The keeper has the deadline too, and acts alone. When continued, the host reports the actions and the reason."""
    code = """
async def main():
    heard = Heard()
    running = asyncio.create_task(
        banksman.execute(child("be_deaf(); say('ready'); stay()", MARKER), timeout=5, grace=0.2, on_output=heard)
    )
    await heard.wait("ready")
    os.kill(os.getpid(), signal.SIGSTOP)
    done = await running
    print(done.ended, done.signal, [step.rung for step in done.ladder], done.survivors)

asyncio.run(main())
"""
    with running_program(code, marker) as running:
        wait_until(lambda: state_of(running.pid) == "T", "the host to freeze itself")
        # All but the host itself, which carries the marker too.
        wait_until(lambda: alive(marker) == [running.pid], "the keeper to end the tree alone")
        assert state_of(running.pid) == "T"
        running.send_signal(signal.SIGCONT)
        assert running.stdout is not None
        assert running.stdout.readline() == "timeout 9 ['term', 'kill'] ()\n"
        assert running.wait() == 0


async def test_sweep_of_many_names_every_process(marker: str) -> None:
    """More than a hundred names do not fit into one message between keeper and host. All are ended and named."""
    code = """
for _ in range(120):
    if fork() == 0:
        os.setsid()
        stay()
say("ready")
stay()
"""
    async with Host() as host:
        command = await start(host, child(code, marker), grace=0.5)
        await wait_said(command, "ready")
        done = await command.stop(at_once=True)
    assert alive(marker) == []
    assert len({swept.pid for swept in done.swept}) == 120
    assert len(done.swept) == 120


LEADERLESS = """
import ctypes, threading
be_deaf()
if WORDS[0] == "descendant":
    if fork(): stay()
    os.setsid()
def go_on():
    while "State:\\tZ" not in open("/proc/self/status").read():
        pass
    say("ready")
    time.sleep(60)
threading.Thread(target=go_on).start()
ctypes.CDLL(None).pthread_exit(None)
"""


@pytest.mark.parametrize("ending", ["stop", "keeper"])
@pytest.mark.parametrize("role", ["leader", "descendant"])
async def test_process_whose_first_thread_ended_is_no_zombie(marker: str, role: str, ending: str) -> None:
    """/proc shows it as a zombie.

    It lives in its other threads and ignores TERM here, and must be killed like any other.
    """
    async with Host() as host:
        command = await host.start(child(LEADERLESS, marker, role), grace=0.2)
        await wait_said(command, "ready")
        if ending == "keeper":
            assert command.pid is not None
            os.kill(parent_of(command.pid), signal.SIGKILL)
            done = await command.wait()
        else:
            done = await command.stop()
    assert done.survivors == ()
    assert not left_alive(marker)


def left_alive(marker: str) -> list[int]:
    """Also a process that shows no argv because its first thread is gone: its other threads show it."""
    found: list[int] = []
    for path in Path("/proc").glob("[0-9]*/task/[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if marker.encode() in path.read_bytes():
                found.append(int(path.parts[2]))
    return found
