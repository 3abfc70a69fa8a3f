"""The keeper ends the processes that an agent has started since a given moment, and no others.

The agent executes lines of Python from the test. Its tools carry the marker like all children of these tests, so the
remaining processes are counted from outside.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.process import shapes
from tests.process.helpers import (
    alive,
    child,
    frozen_guards,
    parent_of,
    run_program,
    running_program,
    start_of,
    state_of,
    wait_none,
    wait_until,
)

from banksman.core.process_facts import (
    BytesRead,
    Exited,
    ProcessGone,
    Started,
    Survivor,
    SweepEnded,
)
from banksman.core.stop_ladder import Timings
from banksman.process import sweep_requests, syscalls
from banksman.process.keeper import newer_sweep
from banksman.process.launch import prepare
from banksman.process.sweep_requests import NOTES_MAX, StartedSince
from banksman.sessions.agent_process import AgentReport, RealAgent

pytestmark = pytest.mark.thorough

# An agent that executes each line it reads, and exits at the end of its stdin.
AGENT = """
while line := hear():
    exec(eval(line))
"""
# Tools, as lines for the agent. Each prints its pid when it is set up.
TOOLS = {
    "plain": "fork() or (say('tool', os.getpid()), stay())",
    "setsid": "fork() or (os.setsid(), say('tool', os.getpid()), stay())",
    "term_proof": "fork() or (be_deaf(), say('tool', os.getpid()), stay())",
    "far_and_term_proof": "fork() or (os.setsid(), be_deaf(), say('tool', os.getpid()), stay())",
    "stopped": "fork() or (say('tool', os.getpid()), os.kill(os.getpid(), signal.SIGSTOP), stay())",
    # Its parent has exited: the keeper is its parent, and only then it prints.
    "orphan": """
first = fork()
if first == 0:
    os.setsid()
    if fork():
        os._exit(0)
    be_deaf()
    is_adopted = False
    while not is_adopted:
        # Its parent may go between the two looks.
        try:
            is_adopted = open(f'/proc/{os.getppid()}/comm').read() == 'banksman-keeper\\n'
        except (FileNotFoundError, ProcessLookupError):
            pass
    say('tool', os.getpid())
    stay()
os.waitpid(first, 0)
""",
    "of_three": """
if fork() == 0:
    say('tool', os.getpid())
    fork() or (os.setsid(), say('tool', os.getpid()), stay())
    fork() or (be_deaf(), say('tool', os.getpid()), stay())
    stay()
""",
}
# A tool that reports its TERM and ignores it otherwise.
TELLS_TERM = """
if fork() == 0:
    signal.signal(signal.SIGTERM, lambda *_: say('termed'))
    say('tool', os.getpid())
    stay()
"""
# On TERM it forks a child that ignores TERM, in the next tick at the earliest, and so certainly after the order.
FORKS_ON_TERM = """
def on_term(*_):
    tick = lambda: int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf('SC_CLK_TCK'))
    now = tick()
    while tick() == now:
        pass
    # Before the fork: the child is asked to end too, perhaps as soon as it is born.
    be_deaf()
    if fork() == 0:
        os.setsid()
        say('child', os.getpid())
        stay()
    if GOES:
        os._exit(0)
if fork() == 0:
    signal.signal(signal.SIGTERM, on_term)
    say('tool', os.getpid())
    stay()
"""
# A process that continues in a new child forever, until the reader closes the fifo.
ONE_LINE = """
import select
up = os.open(fifo, os.O_WRONLY)
os.write(up, b'up')
reader_is_gone = select.poll()
reader_is_gone.register(up, 0)
be_deaf()
while not reader_is_gone.poll(0):
    signal.alarm(60)
    os.setsid() if os.getpid() != os.getsid(0) else None
    if os.fork():
        os._exit(0)
os._exit(0)
"""
# A helper that executes code from a pipe. It is a subreaper, so orphans below it become its children.
HELPER = """
import ctypes
orders, give = os.pipe()
if fork() == 0:
    assert ctypes.CDLL(None).prctl(36, 1, 0, 0, 0) == 0
    say('helper', os.getpid())
    while order := os.read(orders, 10000):
        exec(order)
"""


class Agent:
    """A `RealAgent` that runs `AGENT`, and the events that it reported."""

    def __init__(
        self, marker: str, *, eof: float = 5.0, helper: Sequence[str] = (), python: str = sys.executable
    ) -> None:
        self.events: list[AgentReport] = []
        self._more = asyncio.Event()
        self._read = 0
        timings = Timings(eof=eof, grace=0.3, linger=0.1)
        argv = [python, *child(AGENT, marker)[1:]]
        self.process = RealAgent(prepare(argv, helper=helper), timings, self._on_event)

    def _on_event(self, event: AgentReport) -> None:
        assert not self.count(ProcessGone), f"{event} after the end"
        self.events.append(event)
        self._more.set()

    def count(self, kind: type[object]) -> int:
        return sum(isinstance(event, kind) for event in self.events)

    @property
    def pid(self) -> int:
        return next(event.pid for event in self.events if isinstance(event, Started))

    @property
    def sweeps(self) -> list[SweepEnded]:
        return [event for event in self.events if isinstance(event, SweepEnded)]

    @property
    def gone(self) -> ProcessGone:
        return next(event for event in self.events if isinstance(event, ProcessGone))

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(30):
            while not is_so():
                self._more.clear()
                await self._more.wait()

    async def wait(self, kind: type[object], count: int = 1) -> None:
        await self.wait_until(lambda: self.count(kind) >= count)

    async def run(self, code: str, says: int = 1) -> list[list[str]]:
        """Execute this code, and return the words of the next lines from the agent or its tools."""
        self.tell(code)
        return [await self.hear() for _ in range(says)]

    async def tools(self, code: str, count: int = 1) -> set[int]:
        return {int(words[1]) for words in await self.run(code, count)}

    def tell(self, code: str) -> None:
        self.process.write(repr(code).encode() + b"\n")

    async def hear(self) -> list[str]:
        def said() -> bytes:
            return b"".join(event.data for event in self.events if isinstance(event, BytesRead))[self._read :]

        await self.wait_until(lambda: b"\n" in said())
        line = said().partition(b"\n")[0]
        self._read += len(line) + 1
        return line.decode().split()

    async def sweep(self, since: float, *, ends: bool = True) -> SweepEnded:
        count = self.count(SweepEnded)
        self.process.sweep_tools(since, ends)
        await self.wait(SweepEnded, count + 1)
        assert self.count(SweepEnded) == count + 1
        return self.sweeps[-1]

    async def wait_well(self) -> None:
        """Check that the agent still executes orders."""
        assert await self.run("say('well')") == [["well"]]


@asynccontextmanager
async def started(marker: str, *, eof: float = 5.0) -> AsyncGenerator[Agent]:
    agent = Agent(marker, eof=eof)
    try:
        await agent.wait(Started)
        yield agent
    finally:
        agent.process.stop()
        await agent.wait(ProcessGone)
    assert agent.gone.survivors == ()
    assert alive(marker) == []


def now_tick() -> int:
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * syscalls.TICKS_PER_SECOND)


def after(*pids: int) -> float:
    """Return a moment after the start of all these processes, as far as the kernel's clock can tell."""
    wait_until(lambda: now_tick() > max(map(start_of, pids)), "the next tick of the kernel's clock")
    return time.monotonic()


def swept(told: SweepEnded) -> set[int]:
    assert len({process.pid for process in told.swept}) == len(told.swept)
    return {process.pid for process in told.swept}


# -- the selection of processes ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", TOOLS)
async def test_sweep_ends_a_tool_and_keeps_the_agent_and_its_older_helper(marker: str, kind: str) -> None:
    """Counted right after the report: swept means gone."""
    async with started(marker) as agent:
        helpers = await agent.tools(TOOLS["far_and_term_proof"]) | await agent.tools(TOOLS["plain"])
        since = after(agent.pid, *helpers)
        tools = await agent.tools(TOOLS[kind], 3 if kind == "of_three" else 1)
        if kind == "stopped":
            wait_until(lambda: state_of(*tools) == "T", "the tool to stop itself")
        told = await agent.sweep(since)
        assert set(alive(marker)) == {agent.pid, *helpers}
        assert swept(told) == tools
        assert told.survivors == ()
        assert all(marker in process.command for process in told.swept)
        await agent.wait_well()
    # Reported once, and not again with the end of the process, when they were gone.
    assert not tools & {process.pid for process in agent.gone.swept}


async def test_sweep_gives_a_tool_time_to_clean_up(marker: str) -> None:
    code = """
def on_term(*_):
    # What it does takes more than one round of the keeper's.
    until = time.monotonic() + 0.1
    while time.monotonic() < until:
        pass
    say('cleaned', 'up')
    os._exit(0)
if fork() == 0:
    signal.signal(signal.SIGTERM, on_term)
    say('tool', os.getpid())
    stay()
"""
    async with started(marker) as agent:
        since = after(agent.pid)
        tools = await agent.tools(code)
        assert swept(await agent.sweep(since)) == tools
        assert await agent.hear() == ["cleaned", "up"]
        assert alive(marker) == [agent.pid]


async def test_sweep_ends_what_an_older_helper_started_since(marker: str) -> None:
    """An adapter over a second process: the agent's tools are children of that process."""
    async with started(marker) as agent:
        [helper] = await agent.tools(HELPER)
        since = after(agent.pid, helper)
        tools = await agent.tools(f"os.write(give, {TOOLS['far_and_term_proof'].encode()!r})")
        assert {parent_of(pid) for pid in tools} == {helper}
        assert swept(await agent.sweep(since)) == tools
        assert set(alive(marker)) == {agent.pid, helper}
        # The helper still works.
        again = await agent.tools(f"os.write(give, {TOOLS['plain'].encode()!r})")
        assert {parent_of(pid) for pid in again} == {helper}


@pytest.mark.parametrize("lines", [1, 8])
async def test_sweep_ends_a_tool_that_forks_forever(marker: str, tmp_path: Path, lines: int) -> None:
    """Lines of descent that ignore TERM, each continuing in a new child.

    Many lines are hard to end, and one is hard to see. The fifo that they hold ends with the last of them.
    """
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    up = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        async with started(marker) as agent:
            since = after(agent.pid)
            argv = shapes.argv(marker, "fork_loop", "leader", str(fifo), "never")
            loop = f"os.execv({sys.executable!r}, {argv!r})" if lines > 1 else f"exec({ONE_LINE!r})"
            agent.tell(f"fifo = {str(fifo)!r}; fork() or {loop}")
            await asyncio.to_thread(select.select, [up], [], [], 20)
            assert os.read(up, 100)
            told = await agent.sweep(since)
            # All of them are killed. On a busy machine one may take its time.
            assert all(survivor.why == "still dying" for survivor in told.survivors)
            await asyncio.to_thread(select.select, [up], [], [], 20)
            assert os.read(up, 100) == b""
            assert alive(marker) == [agent.pid]
            assert told.swept
            await agent.wait_well()
    finally:
        os.close(up)


@pytest.mark.parametrize("goes", [True, False])
async def test_sweep_ends_what_a_tool_forks_on_term(marker: str, goes: bool) -> None:
    """If the tool exits immediately, the child is an orphan. Otherwise it is below a target of the sweep."""
    async with started(marker) as agent:
        since = after(agent.pid)
        tools = await agent.tools(FORKS_ON_TERM.replace("GOES", str(goes)))
        agent.process.sweep_tools(since, True)
        [_, word] = await agent.hear()
        await agent.wait(SweepEnded)
        assert alive(marker) == [agent.pid]
        assert swept(agent.sweeps[0]) == {*tools, int(word)}


async def test_sweep_ends_what_a_tool_forks_on_term_below_an_older_helper(marker: str) -> None:
    """The child never becomes the keeper's: after the exit of the tool the old helper is its parent."""
    async with started(marker) as agent:
        helpers = await agent.tools(HELPER)
        since = after(agent.pid, *helpers)
        code = FORKS_ON_TERM.replace("GOES", "False").encode()
        tools = await agent.tools(f"os.write(give, {code!r})")
        agent.process.sweep_tools(since, True)
        [_, word] = await agent.hear()
        await agent.wait(SweepEnded)
        assert set(alive(marker)) == {agent.pid, *helpers}
        assert swept(agent.sweeps[0]) == {*tools, int(word)}


def test_sweep_does_not_take_a_look_with_only_newly_dead_as_proof(marker: str) -> None:
    """A process that has just died may have left a child that started behind the look.

    The test is a separate program whose children all belong to the test.
    """
    code = """
import subprocess
from banksman.process.keeper.newer_sweep import NewerSweep
from tests.process.test_sweep_requests import now_tick

leader = subprocess.Popen(child("stay()", MARKER))
after = start_of(leader.pid) + 1
wait_until(lambda: now_tick() >= after, "the next tick of the kernel's clock")
sweep = NewerSweep(1, (after, 0), ends=True, leader=leader.pid, reap=lambda: None, ender=None)
try:
    assert not sweep.go_on(), "one look is none"
    dead = subprocess.Popen(child("", MARKER))
    wait_until(lambda: state_of(dead.pid) == "Z", "its end")
    assert not sweep.go_on(), "one was there that was not dead before"
    assert sweep.go_on()
    assert (sweep.ended, sweep.survivors) == ([], [])
    assert leader.poll() is None
finally:
    leader.kill()
    leader.wait()
    dead.wait()
"""
    done = run_program(code, marker)
    assert done.returncode == 0, done.stderr


def test_sweep_needs_two_empty_looks_in_a_row_after_a_target_was_seen(marker: str) -> None:
    """The target forks and exits, and its parent reaps it: one look can miss both the target and its child."""
    code = """
import subprocess
from banksman.process.keeper.newer_sweep import NewerSweep
from tests.process.test_sweep_requests import now_tick

leader = subprocess.Popen(child("stay()", MARKER))
after = start_of(leader.pid) + 1
wait_until(lambda: now_tick() >= after, "the next tick of the kernel's clock")
tool = subprocess.Popen(child("stay()", MARKER))
sweep = NewerSweep(1, (after, 0), ends=True, leader=leader.pid, reap=lambda: None, ender=None)
try:
    assert not sweep.go_on(), "the tool was running"
    tool.kill()
    tool.wait()
    assert not sweep.go_on(), "the first empty look"
    assert sweep.go_on(), "the second empty look"
    assert sweep.survivors == []
    assert leader.poll() is None
finally:
    for process in (leader, tool):
        process.kill()
        process.wait()
"""
    done = run_program(code, marker)
    assert done.returncode == 0, done.stderr


async def test_sweep_keeps_what_the_agent_starts_after_the_order(marker: str) -> None:
    async with started(marker) as agent:
        since = after(agent.pid)
        tools = await agent.tools(TELLS_TERM)
        agent.process.sweep_tools(since, True)
        assert await agent.hear() == ["termed"]
        # In the next tick at the earliest, and so certainly after the order.
        tick = now_tick()
        wait_until(lambda: now_tick() > tick, "the next tick of the kernel's clock")
        later = await agent.tools(TOOLS["plain"])
        await agent.wait(SweepEnded)
        assert swept(agent.sweeps[0]) == tools
        assert set(alive(marker)) == {agent.pid, *later}


async def test_sweep_keeps_a_stranger_with_the_same_command_line(marker: str) -> None:
    async with started(marker) as agent:
        since = after(agent.pid)
        stranger = subprocess.Popen(child("say('up'); stay()", marker), stdout=subprocess.PIPE)
        try:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"up\n"
            tools = await agent.tools(TOOLS["plain"])
            assert swept(await agent.sweep(since)) == tools
            assert set(alive(marker)) == {agent.pid, stranger.pid}
        finally:
            stranger.kill()
            stranger.communicate()


async def test_sweep_with_nothing_to_do_ends_at_once(marker: str) -> None:
    async with started(marker) as agent:
        helpers = await agent.tools(TOOLS["far_and_term_proof"])
        since = after(agent.pid, *helpers)
        seconds: list[float] = []
        for _ in range(20):
            began = time.monotonic()
            assert await agent.sweep(since) == SweepEnded()
            seconds.append(time.monotonic() - began)
        # A sweep that waits for the grace never takes less. One that does not may take more on a busy machine.
        assert min(seconds) < newer_sweep.NEWER_GRACE_SECONDS
        assert set(alive(marker)) == {agent.pid, *helpers}


async def test_sweep_that_only_looks_ends_nothing(marker: str) -> None:
    async with started(marker) as agent:
        helpers = await agent.tools(TOOLS["plain"])
        since = after(agent.pid, *helpers)
        tools = await agent.tools(TOOLS["of_three"], 3)
        told = await agent.sweep(since, ends=False)
        assert told.swept == ()
        assert {left.pid for left in told.survivors} == tools
        assert {left.why for left in told.survivors} == {"left as it is"}
        assert set(alive(marker)) == {agent.pid, *helpers, *tools}


async def test_sweeps_in_sequence_and_overlapping_are_each_answered_once(marker: str) -> None:
    async with started(marker) as agent:
        since = after(agent.pid)
        first = await agent.tools(TOOLS["plain"])
        assert swept(await agent.sweep(since)) == first
        assert await agent.sweep(since) == SweepEnded()
        # A sweep during another replaces it, and the earlier one reports how far it came.
        second = await agent.tools(TELLS_TERM)
        agent.process.sweep_tools(since, True)
        assert await agent.hear() == ["termed"]
        agent.process.sweep_tools(since, True)
        await agent.wait(SweepEnded, 4)
        assert [swept(told) for told in agent.sweeps[2:]] == [second, second]
        assert alive(marker) == [agent.pid]
    assert agent.count(SweepEnded) == 4


async def test_sweep_names_more_processes_than_fit_one_message(marker: str) -> None:
    """The names exceed one message between keeper and host."""
    code = f"for _ in range(120): {TOOLS['setsid']}"
    async with started(marker) as agent:
        since = after(agent.pid)
        tools = await agent.tools(code, 120)
        assert swept(await agent.sweep(since)) == tools
        assert alive(marker) == [agent.pid]


# -- ends during a sweep -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ending", ["exit", "kill", "stop"])
async def test_process_end_precedes_the_end_of_a_sweep(marker: str, ending: str) -> None:
    async with started(marker, eof=0.01) as agent:
        since = after(agent.pid)
        tools = await agent.tools(TELLS_TERM)
        agent.process.sweep_tools(since, True)
        assert await agent.hear() == ["termed"]
        if ending == "stop":
            # The keeper does not see the end of stdin, which is the first rung. This test needs the next rung.
            assert await agent.run("be_deaf(); say('deaf')") == [["deaf"]]
            agent.tell("stay()")
            agent.process.stop()
        elif ending == "kill":
            os.kill(agent.pid, signal.SIGKILL)
        else:
            agent.tell("os._exit(3)")
        await agent.wait(ProcessGone)
        assert alive(marker) == []
        assert agent.gone.survivors == ()
        assert agent.count(SweepEnded) == 1
        assert swept(agent.sweeps[0]) == tools
        if ending == "exit":
            assert next(event for event in agent.events if isinstance(event, Exited)).code == 3
        # A later request has no effect and no answer.
        agent.process.sweep_tools(since, True)
        await asyncio.sleep(0)
        assert agent.count(SweepEnded) == 1


async def test_sweep_after_the_exit_is_answered_with_nothing(marker: str) -> None:
    """The leader has exited, and its remaining processes are about to be ended anyway."""
    async with started(marker) as agent:
        since = after(agent.pid)
        tools = await agent.tools(TELLS_TERM)
        agent.tell("os._exit(0)")
        await agent.wait(Exited)
        assert await agent.sweep(since) == SweepEnded()
        await agent.wait(ProcessGone)
        assert swept_by_end(agent) == tools


def swept_by_end(agent: Agent) -> set[int]:
    return {process.pid for process in agent.gone.swept}


HOST = f"""
from tests.process.test_sweep_requests import Agent, TELLS_TERM, TOOLS, after
from banksman.core.process_facts import Started

async def main():
    agent = Agent(MARKER)
    await agent.wait(Started)
    await agent.tools(TOOLS["far_and_term_proof"])
    since = after(agent.pid)
    await agent.tools({TELLS_TERM!r})
    agent.process.sweep_tools(since, True)
    assert await agent.hear() == ["termed"]
    print("termed", flush=True)
    await agent.wait_until(lambda: False)

asyncio.run(main())
"""


def test_host_killed_during_a_sweep_takes_its_whole_tree_along(marker: str) -> None:
    with running_program(HOST, marker) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "termed\n"
        host.kill()
        assert host.wait() == -signal.SIGKILL
        wait_none(marker)


async def test_sweep_does_not_wait_for_an_unresponsive_keeper(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report says that the result is unknown.

    The keeper's later actions are in no answer, but in the final report.
    """
    monkeypatch.setattr(sweep_requests, "ANSWER_SECONDS_MAX", 0.2)
    async with started(marker) as agent:
        since = after(agent.pid)
        tools = await agent.tools(TOOLS["plain"])
        with frozen_guards(agent.pid):
            told = await agent.sweep(since)
        assert told == SweepEnded((), (Survivor(0, "", "unknown: its keeper does not answer"),))
        wait_until(lambda: alive(marker) == [agent.pid], "the keeper, thawed, to end the tool")
        monkeypatch.undo()
        assert await agent.sweep(since) == SweepEnded()
    assert tools <= swept_by_end(agent)


async def test_lost_keeper_during_a_sweep_ends_the_process(marker: str) -> None:
    async with started(marker) as agent:
        since = after(agent.pid)
        await agent.tools(TELLS_TERM)
        agent.process.sweep_tools(since, True)
        assert await agent.hear() == ["termed"]
        os.kill(parent_of(agent.pid), signal.SIGKILL)
        await agent.wait(ProcessGone)
        assert alive(marker) == []
        assert agent.count(SweepEnded) == 0


def test_sweep_names_processes_it_may_not_signal(marker: str) -> None:
    """A root without CAP_KILL, and a tool that became another user."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")
    code = f"""
import ctypes
from tests.process.test_sweep_requests import Agent, TOOLS, after
from banksman.core.process_facts import Started
PR_CAPBSET_DROP, CAP_KILL = 24, 5
assert ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, CAP_KILL, 0, 0, 0) == 0

async def main():
    agent = Agent(MARKER)
    await agent.wait(Started)
    since = after(agent.pid)
    plain = await agent.tools(TOOLS["plain"])
    [other] = await agent.tools("fork() or (os.setresuid({65534}, {65534}, {65534}), say('tool', os.getpid()), stay())")
    told = await agent.sweep(since)
    assert {{swept.pid for swept in told.swept}} == plain
    assert [(left.pid, left.why) for left in told.survivors] == [(other, "no permission to signal it")], told
    assert set(alive(MARKER)) == {{agent.pid, other}}
    await agent.wait_well()
    print(other, flush=True)
    sys.stdin.readline()
    agent.process.stop()
    await agent.wait_until(lambda: agent.events[-1].__class__.__name__ == "ProcessGone")

asyncio.run(main())
"""
    with running_program(code, marker) as running:
        assert running.stdin is not None
        assert running.stdout is not None
        os.kill(int(running.stdout.readline()), signal.SIGKILL)
        running.stdin.write("\n")
        running.stdin.close()
        assert running.wait() == 0
    wait_none(marker)


# -- moments -----------------------------------------------------------------------------------------------------------
def test_started_since_tells_processes_of_one_tick_apart(marker: str) -> None:
    """Repeatedly within one tick of the kernel: only the pids differ."""
    started_since = StartedSince()
    processes = [subprocess.Popen(child("stay()", marker))]
    moments: list[float] = []
    try:
        for _ in range(10):
            moments.append(time.monotonic())
            started_since.note()
            processes.append(subprocess.Popen(child("stay()", marker)))
        born = [(start_of(process.pid), process.pid) for process in processes]
        for number, moment in enumerate(moments):
            mark = started_since.since(moment)
            assert [each > (mark.tick, mark.pid) for each in born] == [n > number for n in range(len(born))]
        ticks = [tick for tick, _ in born]
        assert len(set(ticks)) < len(ticks), "this machine is too slow to show it"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_started_since_without_a_note_means_the_whole_tick(marker: str) -> None:
    started_since = StartedSince()
    started_since.note()
    moment = time.monotonic()
    process = subprocess.Popen(child("stay()", marker))
    try:
        mark = started_since.since(moment)
        assert (mark.tick, mark.pid) < (start_of(process.pid), process.pid)
        assert mark.pid == 0
    finally:
        process.kill()
        process.wait()


def test_started_since_of_an_adopted_child_does_not_take_its_first_note_for_an_earlier_moment() -> None:
    # The old host has written to the child too, and tools may have started before the first note of this host.
    started_since = StartedSince(has_forgotten=True)
    before = time.monotonic()
    assert started_since.since(before).pid == 0
    started_since.note()
    assert started_since.since(before).pid == 0
    after = time.monotonic()
    started_since.note()
    assert started_since.since(after).pid > 0


def test_started_since_with_a_forgotten_note_means_the_whole_tick() -> None:
    started_since = StartedSince()
    moment = time.monotonic()
    for _ in range(NOTES_MAX):
        started_since.note()
    first = started_since.since(moment)
    assert first.pid > 0
    started_since.note()
    assert started_since.since(moment).pid == 0
    assert started_since.since(moment).tick <= first.tick
