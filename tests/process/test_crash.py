"""A tree survives a host that is killed: nothing is lost, one host has it, and no tree is left without one.

The first host is always a program of its own. `crash_host.py` kills it at each of its system calls.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.process.crash_host import QUESTIONS
from tests.process.helpers import (
    REPOSITORY,
    alive,
    child,
    parent_of,
    run_program,
    running_program,
    state_of,
    wait_none,
    wait_until,
)
from tests.process.test_tree_hand_over import (
    ECHO,
    LONG_SECONDS,
    SECRET,
    SHORT_SECONDS,
    STUBBORN,
    sockets_left,
    wait_gone,
)

from banksman.core.process_facts import BytesRead, Exited, ProcessFact, Stream, TreeEnded
from banksman.errors import MachineError, NotFound, Refused
from banksman.folders import held_folder
from banksman.process import spool
from banksman.process.adoption import AdoptedProcess, Claimed, claim
from banksman.process.input_mark import InputState
from banksman.process.keeper import zygote
from banksman.process.launch import prepare
from banksman.process.process import ChildProcess
from banksman.process.tree_hand_over import Survival

# The first host: it starts the child, waits for "ready", prints where a successor claims it, and then does WORDS[2].
HOST = """
from tests.process.test_crash import Kept
from banksman.process.tree_hand_over import Survival

async def main():
    code, seconds, act = WORDS
    kept = Kept.start(child(code, MARKER), Survival(float(seconds), bytes(range(32))))
    await kept.wait("ready")
    print(await kept.process.place, kept.process.pid, flush=True)
    if act == "write":
        kept.process.stdin.put(b"one\\n")
        await kept.wait("heard one")
    if act == "flood":
        kept.process.stdin.put(b"x" * 1_000_000)
    if act == "wait":
        await asyncio.sleep(60)
    if act == "gone":
        kept.process.stdin.end()
        await kept.wait_gone()
    if act == "exec":
        os.execv("/bin/sleep", ["sleep", "60"])
    if act != "exit":
        os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""


class Kept:
    """A child that a test drives, with everything that was heard of it."""

    def __init__(self, make: Callable[[Callable[[ProcessFact], None]], ChildProcess | AdoptedProcess]) -> None:
        self.facts: list[ProcessFact] = []
        self._more = asyncio.Event()
        self.process = make(self._hear)

    @classmethod
    def start(cls, argv: list[str], survival: Survival) -> Kept:
        options: dict[str, Any] = {"stdin": "pipe", "grace": 0.2, "linger": 0.2, "deadline": None}
        return cls(lambda on_fact: ChildProcess(prepare(argv), on_fact=on_fact, survival=survival, **options))

    @classmethod
    def adopt(cls, claimed: Claimed, offset: int = 0) -> Kept:
        offsets = {Stream.STDOUT: offset}
        return cls(lambda on_fact: AdoptedProcess(claimed, on_fact=on_fact, offsets=offsets))

    def _hear(self, fact: ProcessFact) -> None:
        self.facts.append(fact)
        self._more.set()

    @property
    def output(self) -> bytes:
        return b"".join(fact.data for fact in self.facts if isinstance(fact, BytesRead))

    async def wait_fact(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._more.clear()
            await self._more.wait()

    async def wait(self, word: str) -> None:
        await self.wait_fact(lambda: word.encode() in self.output)

    async def wait_output(self, size: int) -> None:
        await self.wait_fact(lambda: len(self.output) >= size)

    async def wait_gone(self) -> None:
        await self.wait_fact(lambda: any(isinstance(fact, TreeEnded) for fact in self.facts))

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.put(f"{text}\n".encode())

    async def stop(self) -> None:
        """Kill the tree, and release its keeper."""
        self.process.kill()
        await self.wait_gone()
        self.process.close()


def survivor(code: str, marker: str, *, act: str = "kill", seconds: float = LONG_SECONDS) -> tuple[str, int]:
    """Let a host start the child and be killed. Return the name, and the pid of the child."""
    done = run_program(HOST, marker, code, seconds, act)
    assert done.returncode == (0 if act == "exit" else -signal.SIGKILL), done.stderr
    name, pid = done.stdout.split()
    return name, int(pid)


async def take(name: str, secret: bytes = SECRET) -> Claimed:
    return await claim(name, secret, argv=(b"child",))


# -- nothing is lost ---------------------------------------------------------------------------------------------------
async def test_successor_of_a_killed_host_hears_everything_that_was_not_durable(marker: str) -> None:
    name, pid = survivor(ECHO, marker, act="write")
    claimed = await take(name)
    assert claimed.pid == pid
    assert claimed.input_state() == InputState(finished=1, is_writing=False)
    kept = Kept.adopt(claimed, offset=len("ready\n"))
    kept.write("two")
    await kept.wait("heard two")
    assert kept.output == b"heard one\nheard two\n"
    await kept.stop()
    await asyncio.to_thread(wait_none, marker)


async def test_write_in_flight_is_known_to_the_successor(marker: str) -> None:
    name, _pid = survivor("say('ready')\nstay()", marker, act="flood")
    claimed = await take(name)
    assert claimed.input_state() == InputState(finished=0, is_writing=True)
    claimed.close()
    await asyncio.to_thread(wait_none, marker)


async def test_exit_that_the_killed_host_has_heard_is_repeated_for_the_successor(marker: str) -> None:
    name, pid = survivor(ECHO, marker, act="gone")
    assert alive(marker) == []
    kept = Kept.adopt(await take(name))
    await kept.wait_gone()
    assert kept.output == b"ready\n"
    [exited] = [fact for fact in kept.facts if isinstance(fact, Exited)]
    assert (exited.code, exited.by_itself) == (3, True)
    keeper = kept.process.keeper_pid
    assert keeper is not None
    # It stays until the successor says that all of it is durable.
    assert state_of(keeper) not in {"", "Z"}
    kept.process.close()
    await wait_gone(keeper)
    assert sockets_left() == []
    assert state_of(pid) == ""


async def test_tree_survives_its_successor_too(marker: str) -> None:
    name, _pid = survivor(ECHO, marker)
    code = """
from tests.process.test_crash import Kept, take
async def main():
    kept = Kept.adopt(await take(WORDS[0]))
    kept.write(WORDS[1])
    await kept.wait("heard " + WORDS[1])
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    for word in ("one", "two"):
        assert run_program(code, f"other-{marker[7:]}", name, word).returncode == -signal.SIGKILL
    claimed = await take(name)
    assert claimed.input_state() == InputState(finished=2, is_writing=False)
    kept = Kept.adopt(claimed)
    await kept.wait("heard two")
    assert kept.output == b"ready\nheard one\nheard two\n"
    await kept.stop()


async def test_successor_asks_for_its_own_secret(marker: str) -> None:
    name, _pid = survivor(ECHO, marker)
    code = """
from tests.process.test_crash import Kept, take
from banksman.process.tree_hand_over import Survival
async def main():
    kept = Kept.adopt(await take(WORDS[0]))
    print(await kept.process.survive(Survival(100.0, bytes(32))), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
asyncio.run(main())
"""
    done = run_program(code, f"other-{marker[7:]}", name)
    other = done.stdout.strip()
    await asyncio.to_thread(wait_until, lambda: sockets_left() == [other], f"one socket: {done.stderr}")
    with pytest.raises(NotFound):
        await take(name)
    with pytest.raises(Refused, match="the secret is wrong"):
        await take(other)
    kept = Kept.adopt(await take(other, bytes(32)))
    await kept.wait("ready")
    await kept.stop()


async def test_tree_that_survives_can_be_handed_over(marker: str) -> None:
    first = Kept.start(child(ECHO, marker), Survival(LONG_SECONDS, SECRET))
    await first.wait("ready")
    assert isinstance(first.process, ChildProcess)
    assert first.process.place is not None
    await first.process.place
    name = await first.process.hand_over(LONG_SECONDS, SECRET)
    claimed = await take(name)
    assert not claimed.is_lasting
    # The keeper removes the socket for a crash right after it has given the tree away.
    await asyncio.to_thread(wait_until, lambda: sockets_left() == [], "the end of both sockets")
    kept = Kept.adopt(claimed, offset=len("ready\n"))
    kept.write("one")
    await kept.wait("heard one")
    assert kept.output == b"heard one\n"
    # It can survive its new host as well.
    await kept.process.survive(Survival(LONG_SECONDS, SECRET))
    await kept.stop()
    await asyncio.to_thread(wait_until, lambda: sockets_left() == [], "the end of the keeper")


@pytest.mark.thorough
async def test_guards_leave_a_tree_alone_long_after_its_host_was_killed(marker: str) -> None:
    bound = zygote.DUTY_SECONDS_MAX + 2.0
    name, _pid = survivor(ECHO, marker, seconds=bound + 5.0)
    await asyncio.sleep(bound)
    kept = Kept.adopt(await take(name))
    await asyncio.sleep(bound + 5.0)
    kept.write("one")
    await kept.wait("heard one")
    await kept.stop()


# -- the spool ---------------------------------------------------------------------------------------------------------
async def test_reader_stops_at_the_bound_until_bytes_are_settled(marker: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spool, "SPOOL_BYTES_MAX", 100_000)
    monkeypatch.setattr(spool, "FREE_BYTES", 50_000)
    total = 1_000_000
    code = f"say('ready')\nos.write(1, b'x' * {total})\nos.write(1, b'end')\nhear()"
    kept = Kept.start(child(code, marker), Survival(LONG_SECONDS, SECRET))
    heard, whole = 0, total + len("ready\nend")
    while heard < whole:
        wanted = min(heard + 100_000, whole)
        await kept.wait_output(wanted)
        # The child waits: no further byte arrives in many passes of the loop.
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(kept.output) <= heard + 100_000
        heard = len(kept.output)
        kept.process.settle(Stream.STDOUT, heard)
    assert kept.output == b"ready\n" + b"x" * total + b"end"
    await kept.stop()


def test_full_spool_goes_on_when_its_host_died_between_commit_and_note(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spool, "SPOOL_BYTES_MAX", 10)
    monkeypatch.setattr(spool, "FREE_BYTES", 5)
    read, write = os.pipe()
    os.write(write, b"0123456789abc")
    first = spool.Spool.create()
    assert first.take(read, 100) == b"0123456789"
    assert first.is_full
    after = spool.Spool(os.dup(first.fileno()))
    after.start_at(10)
    assert not after.is_full
    assert after.take(read, 100) == b"abc"
    for part in (first, after):
        part.close()
    os.close(read)
    os.close(write)


def test_spool_says_that_bytes_are_gone_before_a_successor_continues_without_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(spool, "FREE_BYTES", 5)
    read, write = os.pipe()
    os.write(write, b"0123456789")
    first = spool.Spool.create()
    first.take(read, 100)
    first.settle(10)
    after = spool.Spool(os.dup(first.fileno()))
    for offset in (0, 9, 11):
        with pytest.raises(MachineError, match="cannot continue the output at offset"):
            after.start_at(offset)
    after.start_at(10)
    for part in (first, after):
        part.close()
    os.close(read)
    os.close(write)


# -- the child sees what its host closes -------------------------------------------------------------------------------
async def test_child_sees_the_end_of_its_stdin(marker: str) -> None:
    kept = Kept.start(child(ECHO, marker), Survival(LONG_SECONDS, SECRET))
    await kept.wait("ready")
    assert isinstance(kept.process, ChildProcess)
    assert kept.process.place is not None
    await kept.process.place
    assert kept.process.stdin is not None
    kept.process.stdin.end()
    await kept.wait_gone()
    [exited] = [fact for fact in kept.facts if isinstance(fact, Exited)]
    assert exited.code == 3
    kept.process.close()


async def test_child_gets_a_broken_pipe_when_its_output_is_closed(marker: str) -> None:
    code = "say('ready')\nhear()\ntry:\n    while True: say('x' * 1000)\nexcept BrokenPipeError: os._exit(4)"
    kept = Kept.start(child(code, marker), Survival(LONG_SECONDS, SECRET))
    await kept.wait("ready")
    assert isinstance(kept.process, ChildProcess)
    assert kept.process.place is not None
    await kept.process.place
    kept.process.close_output()
    kept.write("go")
    await kept.wait_fact(lambda: any(isinstance(fact, Exited) for fact in kept.facts))
    [exited] = [fact for fact in kept.facts if isinstance(fact, Exited)]
    assert exited.code == 4
    await kept.wait_gone()
    kept.process.close()


# -- who ends the tree -------------------------------------------------------------------------------------------------
async def test_tree_ends_when_nobody_comes_after_a_crash(marker: str) -> None:
    name, pid = survivor(STUBBORN, marker, seconds=SHORT_SECONDS)
    await asyncio.to_thread(wait_none, marker)
    await wait_gone(pid)
    await asyncio.to_thread(wait_until, lambda: sockets_left() == [], "the end of the hold")
    with pytest.raises(NotFound, match="no process waits there"):
        await take(name)


@pytest.mark.parametrize("act", ["exit", "exec"])
async def test_tree_ends_with_a_host_that_exits_or_replaces_itself(act: str, marker: str) -> None:
    """A program that exits ends its trees at once. One that replaces itself has no say any more: nobody comes."""
    seconds = LONG_SECONDS if act == "exit" else SHORT_SECONDS
    with running_program(HOST, marker, "say('ready')\nstay()", seconds, act) as host:
        assert host.stdout is not None
        _name, pid = host.stdout.readline().split()
        await wait_gone(int(pid))
        assert act == "exit" or host.poll() is None
    await asyncio.to_thread(wait_until, lambda: sockets_left() == [], "the end of the hold")


async def test_closed_process_ends_although_it_would_survive(marker: str) -> None:
    kept = Kept.start(child(STUBBORN, marker), Survival(LONG_SECONDS, SECRET))
    await kept.wait("ready")
    assert isinstance(kept.process, ChildProcess)
    assert kept.process.place is not None
    await kept.process.place
    kept.process.close()
    await asyncio.to_thread(wait_none, marker)
    await asyncio.to_thread(wait_until, lambda: sockets_left() == [], "the end of the keeper")


async def test_claim_waits_for_the_death_of_the_host(marker: str) -> None:
    with running_program(HOST, marker, ECHO, LONG_SECONDS, "wait") as host:
        assert host.stdout is not None
        name, _pid = host.stdout.readline().split()
        claiming = asyncio.ensure_future(take(name))
        # The claim is in the queue, and its host lives.
        for _ in range(20):
            await asyncio.sleep(0)
        assert not claiming.done()
        host.kill()
        kept = Kept.adopt(await claiming)
        await kept.wait("ready")
        await kept.stop()


@pytest.mark.thorough
@pytest.mark.parametrize("who", ["keeper", "keeper and host"])
async def test_tree_ends_when_its_keeper_is_killed_although_it_would_survive(who: str, marker: str) -> None:
    with running_program(HOST, marker, STUBBORN, LONG_SECONDS, "wait") as host:
        assert host.stdout is not None
        name, pid = host.stdout.readline().split()
        keeper = parent_of(int(pid))
        guardian = parent_of(keeper)
        if who == "keeper":
            host.kill()
            host.wait()
            os.kill(keeper, signal.SIGKILL)
        else:
            os.kill(keeper, signal.SIGKILL)
            host.kill()
        await asyncio.to_thread(wait_none, marker)
        await wait_gone(guardian)
        with pytest.raises(NotFound):
            await take(name)


@pytest.mark.thorough
@pytest.mark.parametrize("when", ["before", "after"])
async def test_tree_survives_its_host_without_a_zygote(when: str, marker: str) -> None:
    with running_program(HOST, marker, STUBBORN, LONG_SECONDS, "wait") as host:
        assert host.stdout is not None
        name, pid = host.stdout.readline().split()
        guardian = parent_of(parent_of(int(pid)))
        if when == "before":
            os.kill(guardian, signal.SIGKILL)
        host.kill()
        host.wait()
        if when == "after":
            os.kill(guardian, signal.SIGKILL)
        await wait_gone(guardian)
        kept = Kept.adopt(await take(name))
        await kept.wait("ready")
        await kept.stop()
        await asyncio.to_thread(wait_none, marker)


async def test_tree_ends_in_time_when_its_socket_file_was_removed(marker: str) -> None:
    name, pid = survivor(STUBBORN, marker, seconds=SHORT_SECONDS)
    (held_folder() / name).unlink(missing_ok=True)
    with pytest.raises(NotFound):
        await take(name)
    await asyncio.to_thread(wait_none, marker)
    await wait_gone(pid)


async def test_wrong_secret_is_refused_after_a_crash_and_the_hold_continues(marker: str) -> None:
    name, _pid = survivor(ECHO, marker)
    with pytest.raises(Refused, match="the secret is wrong"):
        await take(name, bytes(32))
    kept = Kept.adopt(await take(name))
    await kept.wait("ready")
    await kept.stop()


async def test_ordinary_keeper_has_no_more_fds_than_before(marker: str) -> None:
    options: dict[str, Any] = {"stdin": "pipe", "grace": 0.2, "linger": 0.2, "deadline": None}
    plain = Kept(lambda on_fact: ChildProcess(prepare(child(ECHO, marker)), on_fact=on_fact, **options))
    await plain.wait("ready")
    # The standard streams, the control socket, the pidfds of host and leader, the pipe of SIGCHLD, and /proc.
    assert len(os.listdir(f"/proc/{plain.process.keeper_pid}/fd")) == 9
    await plain.stop()


# -- killed at every system call ---------------------------------------------------------------------------------------
def run_cases(tmp_path: Path, marker: str, mode: str, first: int, step: int, again: int = 0) -> list[dict[str, Any]]:
    argv = [sys.executable, str(Path(__file__).with_name("crash_host.py")), str(tmp_path), marker, mode]
    argv += map(str, (first, step, again))
    done = subprocess.run(argv, cwd=REPOSITORY, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    counts = collections.Counter(case["ending"] for case in cases)
    print(f"{len(cases)} cases from {first} in steps of {step}, mode {mode!r}: {dict(counts)}")
    return cases


def check_cases(cases: list[dict[str, Any]]) -> None:
    wrong = [case for case in cases if not case["is_right"]]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(map(str, wrong))


def test_killed_host_leaves_a_dense_log_or_a_write_in_flight(tmp_path: Path, marker: str) -> None:
    cases = run_cases(tmp_path, marker, "", 7, 29)
    check_cases(cases)
    assert sum(case["ending"] == "continued" for case in cases) >= 3


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(1, 5))
def test_host_killed_at_each_system_call_leaves_a_dense_log(first: int, tmp_path: Path, marker: str) -> None:
    cases = run_cases(tmp_path, marker, "", first, 4)
    check_cases(cases)
    assert len(cases) > 30
    unknown = [case for case in cases if case["ending"] == "unknown"]
    # Between the two notes of a write: before the write itself, and before the second note.
    assert {case["call"] for case in unknown} <= {"write", "pwrite"}
    assert len(unknown) <= 2 * QUESTIONS


@pytest.mark.thorough
@pytest.mark.parametrize("again", [5, 40, 90])
def test_second_killed_host_leaves_a_dense_log(again: int, tmp_path: Path, marker: str) -> None:
    cases = run_cases(tmp_path, marker, "", 60, 23, again)
    check_cases(cases)
    assert any(len(case["statuses"]) == 3 and case["ending"] == "continued" for case in cases)


@pytest.mark.thorough
def test_host_killed_at_any_moment_leaves_a_dense_log(tmp_path: Path, marker: str) -> None:
    check_cases(run_cases(tmp_path, marker, "clock", 50, 11))


@pytest.mark.thorough
@pytest.mark.parametrize("bug", ["early_settle", "early_commit", "early_clear", "plain_read"])
def test_planted_bug_is_found_by_the_killed_hosts(bug: str, tmp_path: Path, marker: str) -> None:
    assert not run_cases(tmp_path, marker, bug, 40, 1)[-1]["is_right"]
