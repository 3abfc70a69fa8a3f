"""A host that is killed with survive="crash": its agent works on, and the next host continues the turn.

Both hosts are programs of their own (crash_host.py) with one store. Each agent is one real process, for all hosts.
`kill_host.py` kills a host at each of its system calls.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
from tests.process.helpers import PATIENCE_SECONDS, parent_of
from tests.sessions.crash_host import REPOSITORY, Agents
from tests.sessions.helpers import QUICK, bodies
from tests.sessions.kill_host import ANY, HAND_OVER, PLANTED, SUCCESSOR, SURVIVING
from tests.sessions.test_hand_over import (
    STREAM,
    TOOL,
    WAITING,
    Scene,
    copied,
    hanging,
    opened,
    record,
    served_after_loss,
    spoken,
    state,
)
from tests.store.sqlite import kill_at_syscall

from banksman import Event, Host, sockets
from banksman.core.session import event as kinds
from banksman.core.session.facts import Subject
from banksman.core.session.history import beginning
from banksman.core.session.session_config import Config
from banksman.errors import UsageError
from banksman.folders import held_folder
from banksman.process import cgroups, hold_record
from banksman.process.keeper.cgroup import prune
from banksman.sessions import crash_record, held_session, known_agents
from banksman.sessions.crash_journal import CrashJournal
from banksman.sessions.crash_record import FILE_BYTES_MAX, FORMAT, Beginning, Header, Moment
from banksman.sessions.diagnostics import Counters
from banksman.sessions.frame_reader import FrameReader
from banksman.sessions.held_session import HeldSession

__all__ = ["state"]

# Longer than any test, and a hold whose end the next host has to wait for.
SURVIVAL = ("crash", 100.0)
SHORT = ("crash", 3.0)


async def run(folder: Path, marker: str, prompt: str, *, kills: int) -> list[Event]:
    """Run one turn and the asks behind it, and kill so many hosts in the middle of the turn."""
    async with opened(folder, marker, survival=SURVIVAL) as it:
        turns = [await it.ask(prompt), *[await it.ask(f"@@say answer {n}") for n in range(WAITING)]]
        await it.reached()
        for _ in range(kills):
            await crash(it)
        it.go()
        first, *others = await it.results(turns)
        assert first[0] == "done"
        assert others == [["done", f"answer {number}"] for number in range(WAITING)]
        return await it.end()


async def crash(it: Scene) -> None:
    """Kill the host, and let the next one take the session up."""
    # The agent may have reached its pause before the host has noted that its prompt is written.
    await it.host.ping()
    # A process that was handed over survives its next host only a moment after the take-over.
    await it.host.call("survive")
    it.host.kill()
    await it.come()


@pytest.mark.parametrize(
    "prompt", [pytest.param(STREAM, id="stream"), pytest.param(TOOL, id="tool", marks=pytest.mark.thorough)]
)
async def test_turn_goes_on_at_the_next_host_after_a_crash(state: Path, marker: str, prompt: str) -> None:
    crashed = await run(state / "restarted", marker, prompt, kills=2)
    assert spoken(crashed) == spoken(await run(state / "whole", marker, prompt, kills=0))
    assert len([event for event in crashed if event.kind == kinds.PROCESS_ADOPTED]) == 2
    assert kinds.SESSION_RECOVERED not in {event.kind for event in crashed}


async def test_question_is_answered_at_the_next_host_after_a_crash(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, survival=SURVIVAL) as it:
        turn = await it.ask("@@touch {at}/reached\n@@ask Bash\n@@say asked")
        asked: list[str] = []
        while not asked:
            asked = await it.host.call("questions", session=it.session)
        # A question that is not durable yet gets another id at the next host.
        while not bodies(await it.events(), kinds.QUESTION_ASKED):
            await it.host.ping()
        await crash(it)
        assert await it.host.call("questions", session=it.session) == asked
        assert await it.host.call("answer", session=it.session, question=asked[0])
        assert await it.results([turn]) == [["done", "asked"]]
        assert len(bodies(await it.end(), kinds.QUESTION_ASKED)) == 1


@pytest.mark.thorough
async def test_host_of_a_copy_of_the_store_leaves_the_process_to_the_original(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, survival=SURVIVAL) as it:
        # The copy is made while no host has the session.
        await it.host.leave()
        await it.start_host()
        async with copied(it) as copy:
            turn = await it.ask(STREAM)
            await it.reached()
            kept = record().read_bytes()
            assert await copy.call("take_up") == []
            assert record().read_bytes().startswith(kept)
            await crash(it)
            assert await copy.call("take_up") == []
        it.go()
        assert await it.results([turn]) == [["done", "three"]]
        await it.end()


@pytest.mark.thorough
async def test_turn_survives_a_crash_after_a_planned_restart(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, survival=SURVIVAL) as it:
        turn = await it.ask(STREAM)
        await it.reached()
        await it.restart()
        await crash(it)
        await it.restart()
        it.go()
        assert await it.results([turn]) == [["done", "three"]]
        assert len(bodies(await it.end(), kinds.PROCESS_ADOPTED)) == 3


@pytest.mark.thorough
async def test_agent_keeps_its_control_group_through_a_restart_and_a_crash(state: Path, marker: str) -> None:
    why = cgroups.why_not(())
    if why is not None:
        async with Host("memory:") as host:
            with pytest.raises(UsageError, match="cannot set the limits cgroup"):
                await host.open("claude", command=Agents(state, marker).command(), limits={"cgroup": 1})
        return
    async with opened(state / "it", marker, survival=SURVIVAL, limits={"cgroup": 1}) as it:
        turn = await it.ask(STREAM)
        await it.reached()
        (pid,) = it.agents.alive()
        group = cgroups.usage(pid)
        assert group is not None
        await it.restart()
        await crash(it)
        # The next host looks for groups without a keeper, and this one has its keeper.
        prune(cgroups.base_folder())
        again = cgroups.usage(pid)
        assert again is not None
        assert again.path == group.path
        it.go()
        assert await it.results([turn]) == [["done", "three"]]
        assert os.path.isdir(group.path)
        await it.end()
        assert not os.path.exists(group.path)


async def test_output_beyond_the_spool_is_logged_whole(state: Path, marker: str) -> None:
    # Lines of 400 KB, and one that is longer than the spool.
    big, lines = 3 << 20, 8
    agents = Agents(state, marker)
    async with Host(f"sqlite:{state / 'store.db'}", survive="crash") as host:
        session = await host.open("claude", command=agents.command(), options=QUICK)
        script = "\n".join(["@@say " + "y" * 400_000] * lines + ["@@say " + "x" * big])
        outcome = await (await session.ask(script)).outcome()
        assert outcome.text == "x" * big
        await session.close()
    assert agents.alive() == []
    assert list(held_folder().iterdir()) == []


@pytest.mark.thorough
async def test_record_of_a_long_line_is_not_written_anew_at_each_read(
    state: Path, marker: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record has the incomplete line, which makes it larger than the size at which it is written anew."""
    write, written = hold_record.write, list[str]()

    def note(name: str, record: bytes) -> None:
        written.append(name)
        write(name, record)

    monkeypatch.setattr(hold_record, "write", note)
    agents, size = Agents(state, marker), 2 * FILE_BYTES_MAX
    async with Host(f"sqlite:{state / 'store.db'}", survive="crash") as host:
        session = await host.open("claude", command=agents.command(), options=QUICK)
        assert len((await (await session.ask("@@say " + "x" * size)).outcome()).text or "") == size
        await session.close()
    assert len(written) < 10
    assert agents.alive() == []


@pytest.mark.thorough
async def test_process_is_read_beyond_its_spool_at_a_next_host_without_survival(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, survival=SURVIVAL) as it:
        lines = "\n".join(["@@say " + "y" * 400_000] * 6)
        turn = await it.ask("@@touch {at}/reached\n@@wait {at}/go\n" + lines + "\n@@say end")
        await it.reached()
        it.survival = ()
        await it.restart()
        it.go()
        assert await it.results([turn]) == [["done", "end"]]
        await it.end()


# -- parts of a moment -----------------------------------------------------------------------------------------------
class Driven:
    """A driver without a process, and the record of its journal."""

    id = "s"
    is_large = False
    last_in: float | None = None
    head = durable_head = 0
    redaction = None
    dues: ClassVar[dict[Subject, float]] = {}
    walls: ClassVar[dict[Subject, float]] = {}

    def __init__(self) -> None:
        past = beginning(Config(dialect=known_agents.load("claude").dialect))
        self.uncounted = (past.session, 0, 0.0)
        self.process_state = past.session.process
        self.dialect = past.session.config.dialect
        self.counters = Counters()
        self.moments: list[tuple[int, bytes, bool]] = []

    def add(self, moment: Moment) -> None:
        self.moments.append((moment.offset, bytes(moment.line[: moment.line_bytes]), bool(moment.lost)))

    def turns_after(self) -> dict[str, int]:
        return {}

    def obstacle(self) -> str:
        return ""

    def on_frames(self, *_: object) -> None: ...
    def on_backlog(self) -> None: ...
    def on_caught_up(self) -> None: ...


async def test_frame_waits_until_the_keeper_holds_the_process(state: Path) -> None:
    """A host that died in between would leave a turn that may have run, and no process."""
    it: Any = Driven()
    written: list[bytes] = []
    it.store_identity, it.write = "store", written.append
    journal = CrashJournal(it, 1, it, it, it, 10.0, Beginning())
    journal.drive(it)
    assert journal.survival.on_named is not None
    assert journal.survival.on_answered is not None
    listener, path = sockets.listen_in(held_folder(), socket.SOCK_SEQPACKET)
    journal.survival.on_named(path.name)
    journal.write(b"prompt")
    assert written == []
    journal.survival.on_answered()
    assert written == [b"prompt"]
    journal.give_up()
    listener.close()


async def test_moment_behind_an_oversize_frame_has_the_beginning_of_the_next_line() -> None:
    it: Any = Driven()
    frames = FrameReader(it)
    frames.begin(100, b"", CrashJournal(it, 1, it, it, it, 10.0, Beginning(record=it)))
    frames.feed(1, b"x" * 160)
    frames.feed(1, b'xx\n{"type":"par')
    assert it.moments == [(160, b"", True), (175, b'{"type":"par', False)]


@pytest.mark.parametrize("session", ['s "quoted" \\ and\nbroken', "s" * 100_000])
def test_session_of_any_id_is_found_in_its_records(state: Path, session: str) -> None:
    listener, path = sockets.listen_in(held_folder(), socket.SOCK_SEQPACKET)
    with listener:
        header = Header(format=FORMAT, store="it", session=session, secret=bytes(32), clock=0.0, process=1)
        hold_record.write(path.name, msgspec.json.encode(header) + b"\n{}\n")
        assert crash_record.find("it", session) == [(path.name, header)]
        assert held_session.waiting("it") == (set(), {session})
        held = HeldSession(secret=bytes(32), session=session, head=1, clock=0.0, state={}, partial=b"")
        hold_record.write(path.name, held_session.encode(held, "it"))
        assert held_session.unlogged("it", session) == path.name
        assert held_session.unlogged("other", session) is None
        assert held_session.waiting("it") == ({session}, set())


# -- who ends the process --------------------------------------------------------------------------------------------
async def lost(it: Scene, lose: Callable[[], None]) -> None:
    """Kill the host of an open turn with an ask behind it, lose the process, and let the next host serve the ask."""
    turns = await hanging(it)
    # The agent has written its words before its pause, and the host may not have read them yet.
    while not any(b'"one"' in data for _kind, data in spoken(await it.events())):
        await it.host.ping()
    it.host.kill()
    lose()
    await served_after_loss(it, turns)


@pytest.mark.thorough
async def test_process_is_dead_and_turn_unknown_when_no_host_came_in_time(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, survival=("crash", 0.5)) as it:

        def wait() -> None:
            until = time.monotonic() + PATIENCE_SECONDS
            while it.agents.alive() and time.monotonic() < until:
                time.sleep(0.01)

        await lost(it, wait)


@pytest.mark.thorough
async def test_turn_is_unknown_when_the_secret_in_the_record_is_wrong(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, survival=SHORT) as it:

        def falsify() -> None:
            header, rest = record().read_bytes().split(b"\n", 1)
            told = msgspec.json.decode(header, type=Header)
            record().write_bytes(msgspec.json.encode(msgspec.structs.replace(told, secret=bytes(32))) + b"\n" + rest)

        await lost(it, falsify)


@pytest.mark.thorough
async def test_turn_is_unknown_when_the_record_is_of_another_moment(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, survival=SURVIVAL) as it:

        def cut_off() -> None:
            header, _ = record().read_bytes().split(b"\n", 1)
            record().write_bytes(header + b"\n")

        # The next host has the secret, so it ends the process at once.
        await lost(it, cut_off)


@pytest.mark.thorough
async def test_turn_is_unknown_when_the_keeper_was_killed_after_its_host(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, survival=SURVIVAL) as it:

        def kill() -> None:
            (pid,) = it.agents.alive()
            os.kill(parent_of(pid), signal.SIGKILL)

        await lost(it, kill)


@pytest.mark.thorough
@pytest.mark.parametrize("crashes", [0, 1], ids=["first host", "successor"])
async def test_process_ends_with_its_host_when_its_record_cannot_be_written(
    state: Path, marker: str, crashes: int
) -> None:
    """The next host need not wait for the end of the hold, which is longer than the test."""
    async with opened(state / "it", marker, survival=SURVIVAL) as it:
        turn = await it.ask("@@say one\n@@touch {at}/reached\n@@hang")
        await it.reached()
        for _ in range(crashes):
            await crash(it)
        await it.host.call("fill_disk")
        turns = [turn, await it.ask("@@say two")]
        assert list(held_folder().glob(f"*{hold_record.SUFFIX}")) == []
        it.host.kill()
        adopted = len(bodies(await it.events(), kinds.PROCESS_ADOPTED))
        await served_after_loss(it, turns, adopted)


@pytest.mark.thorough
async def test_host_that_is_frozen_keeps_its_session(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, survival=SURVIVAL) as it:
        turn = await it.ask(STREAM)
        await it.reached()
        first = it.host
        os.kill(first.pid, signal.SIGSTOP)
        try:
            await it.start_host()
            assert await it.host.call("take_up") == []
        finally:
            os.kill(first.pid, signal.SIGCONT)
        await it.host.leave()
        it.host = first
        it.go()
        assert await it.results([turn]) == [["done", "three"]]
        await it.end()


async def test_one_of_two_hosts_gets_the_session_after_a_crash(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, survival=SURVIVAL) as it:
        turn = await it.ask(STREAM)
        await it.reached()
        await it.host.ping()
        it.host.kill()
        await it.start_host()
        one = it.host
        await it.start_host()
        other = it.host
        taken = await asyncio.gather(one.call("take_up"), other.call("take_up"))
        assert sorted(map(len, taken)) == [0, 1]
        it.host, loser = (one, other) if taken[0] else (other, one)
        await loser.leave()
        it.go()
        assert await it.results([turn]) == [["done", "three"]]
        assert len(bodies(await it.end(), kinds.PROCESS_ADOPTED)) == 1


@pytest.mark.parametrize("how", [{"env": {"SOME": "thing"}}, {"on_question": print}])
async def test_session_that_no_other_host_can_open_cannot_survive(state: Path, marker: str, how: Any) -> None:
    async with Host(f"sqlite:{state / 'store.db'}") as host:
        with pytest.raises(UsageError, match="no other host could open the session"):
            await host.open("claude", command=Agents(state, marker).command(), survive="crash", **how)


async def test_session_whose_containment_has_a_secret_cannot_survive(state: Path, marker: str) -> None:
    agents = Agents(state, marker)
    async with Host(f"sqlite:{state / 'store.db'}", secrets=["hunter2-hunter2"]) as host:
        wrap = ["env", "TOKEN=hunter2-hunter2"]
        await host.open("claude", name="it", command=agents.command(), options=QUICK, wrap=wrap)
        with pytest.raises(UsageError, match="no other host could open the session"):
            await host.open("claude", name="it", command=agents.command(), options=QUICK, survive="crash")


async def test_open_without_survive_keeps_the_process_after_a_crash(state: Path, marker: str) -> None:
    async with opened(state / "it", marker, survive="crash") as it:
        turn = await it.ask(STREAM)
        await it.reached()
        await it.host.ping()
        it.host.kill()
        await it.start_host()
        assert await it.host.open(name="the session", command=it.agents.command(), options=QUICK) == it.session
        it.go()
        waiting = await it.ask("@@say after")
        assert await it.results([turn, waiting]) == [["done", "three"], ["done", "after"]]
        await it.end()


@pytest.mark.parametrize("store", ["memory:", "nats://127.0.0.1:1"])
def test_host_without_a_file_cannot_survive(store: str) -> None:
    with pytest.raises(UsageError, match="its store is not a file"):
        Host(store, survive="crash")


@pytest.mark.parametrize("how", [{"survive": "power cut"}, {"survive": "crash", "hold_seconds": 0.0}])
def test_survival_is_checked(how: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Host(**how)


# -- killed at every system call -------------------------------------------------------------------------------------
def run_cases(folder: Path, marker: str, mode: str, first: int, step: int) -> list[dict[str, Any]]:
    words = [str(folder), marker, mode, str(first), str(step)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.sessions.kill_host", *words],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cases = [json.loads(line) for line in done.stdout.splitlines()]
    counts = collections.Counter(case["ending"] for case in cases)
    print(f"{len(cases)} cases from {first} in steps of {step}, mode {mode!r}: {dict(counts)}")
    return cases


# A step of 7 * 4 with each of 4 beginnings: a part of the calls for each test. All of them in `make explore`.
STEP = 7 * 4 if "BANKSMAN_EXPLORE_LARGE" not in os.environ else 4


@pytest.mark.thorough
@pytest.mark.parametrize("first", [1, 8, 15, 22] if STEP > 4 else [1, 2, 3, 4])
def test_killed_host_leaves_the_turn_to_its_successor_or_a_write_in_flight(
    first: int, tmp_path: Path, marker: str
) -> None:
    cases = run_cases(tmp_path, marker, "", first, STEP)
    wrong = [case for case in cases if case["ending"].startswith("wrong")]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(map(str, wrong))
    # A quarter of the calls, or more, come during the turn.
    assert sum(case["ending"] in {"continued", "unknown"} for case in cases) >= 2


# As many cases as above, of all system calls of the kernel.
ANY_STEP = 71 if "BANKSMAN_EXPLORE_LARGE" not in os.environ else 4


@pytest.mark.thorough
@pytest.mark.parametrize("first", [20, 38, 56, 74] if ANY_STEP > 4 else [1, 2, 3, 4])
def test_host_killed_at_any_call_of_the_kernel_leaves_the_turn_to_its_successor(
    first: int, tmp_path: Path, marker: str
) -> None:
    kill_at_syscall.skip_unless_possible()
    cases = run_cases(tmp_path, marker, ANY, first, ANY_STEP)
    wrong = [case for case in cases if case["ending"].startswith("wrong")]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(map(str, wrong))
    # A quarter of the calls, or more, come during the turn.
    assert sum(case["ending"] in {"continued", "unknown"} for case in cases) >= 2


# Of about 40 calls.
HAND_OVER_STEP = 4 if "BANKSMAN_EXPLORE_LARGE" not in os.environ else 1


@pytest.mark.thorough
@pytest.mark.parametrize("mode", [HAND_OVER, SURVIVING])
def test_host_killed_in_a_hand_over_leaves_the_turn_to_its_successor_or_ends_it(
    mode: str, tmp_path: Path, marker: str
) -> None:
    """Without survive="crash", the process ends with a host that is killed before the keeper has it."""
    cases = run_cases(tmp_path, marker, mode, 1, HAND_OVER_STEP)
    endings = [case["ending"] for case in cases]
    wrong = [case for case in cases if case["ending"].startswith("wrong")]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(map(str, wrong))
    if mode == SURVIVING:
        assert set(endings) == {"continued"}
    else:
        # The last calls come after the answer of the keeper.
        assert set(endings) == {"continued", "the process ended with its host"}
        assert endings[-1] == "continued"


# Of about 190 calls.
SUCCESSOR_STEP = 16 if "BANKSMAN_EXPLORE_LARGE" not in os.environ else 1


@pytest.mark.thorough
def test_killed_successor_leaves_the_turn_to_the_third_host_or_a_write_in_flight(tmp_path: Path, marker: str) -> None:
    cases = run_cases(tmp_path, marker, SUCCESSOR, 5, SUCCESSOR_STEP)
    wrong = [case for case in cases if case["ending"] not in {"continued", "unknown"}]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases:\n" + "\n".join(map(str, wrong))
    assert "continued" in {case["ending"] for case in cases}


@pytest.mark.thorough
@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bug_is_found_by_the_killed_hosts(bug: str, tmp_path: Path, marker: str) -> None:
    # From the first frame of the agent on.
    *_, last = run_cases(tmp_path, marker, bug, 150, 1)
    assert last["ending"].startswith("wrong")
