"""Each invariant of the storm fails when its fault is planted into a correct history.

Faults of processes are planted with real processes: two agents of one session at the same time, and an agent that
outlives the lease of a stopped host.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.cluster import invariants, marked
from tests.chaos.cluster.history import History, Reader
from tests.chaos.cluster.nemesis import Nemesis
from tests.chaos.cluster.storm import prompts_of
from tests.chaos.cluster.test_storm import SHORT
from tests.chaos.cluster.world import Host, World

from banksman.testing.checks import Message, View

Event = dict[str, Any]
ID = "s-1"


def an_event(seq: int, epoch: int, kind: str, turn: str | None = None, **body: Any) -> Event:
    place = {"cursor": f"{epoch}.{seq}", "session": ID, "epoch": epoch, "seq": seq}
    return {**place, "kind": kind, "turn": turn, "body": body}


def a_log() -> list[Event]:
    """Return the log of two asks under two owners.

    The first ask is done. The second was open when its host died.
    """
    return [
        an_event(1, 1, "session.opened"),
        an_event(2, 1, "turn.queued", "t1", key="k1"),
        an_event(3, 1, "turn.started", "t1"),
        an_event(4, 1, "turn.ended", "t1", outcome="done"),
        an_event(5, 1, "turn.queued", "t2", key="k2"),
        an_event(6, 1, "turn.started", "t2"),
        an_event(7, 2, "turn.ended", "t2", outcome="unknown"),
    ]


def a_history() -> History:
    history = History()
    for number, (kind, text) in enumerate((("done", "w1 w1.0"), ("unknown", "w2")), 1):
        ask = history.sends(0, f"k{number}", f"w{number}", f"w{number} w{number}.0")
        history.accepts(ask, 0, f"t{number}")
        history.accepts(ask, 1, f"t{number}")
        history.tells(ask, 0, {"kind": kind, "text": text})
    return history


def a_view(events: list[Event]) -> View:
    messages = {(ID, event["seq"]): Message(event["cursor"], None, json.dumps(event).encode()) for event in events}
    return View(messages, {}, is_many=False)


GIVEN = [["w1\n@@speak 0 w1 w1.0"], ["w2\n@@speak 0 w2 w2.0"]]


def judge(
    history: History,
    events: list[Event],
    seen: list[Event] | None = None,
    given: list[list[str]] | None = None,
) -> None:
    """Judge one session as the storm does.

    `seen`: the events that a reader received. `given`: the prompts that its agents received.
    """
    last = a_view(events)
    invariants.readers([Reader("a reader", a_view(events if seen is None else seen))], {ID: last})
    invariants.answers(history.asks)
    invariants.log(invariants.events_of(last))
    invariants.asks(ID, invariants.events_of(last), history.asks)
    invariants.prompts(ID, GIVEN if given is None else given, invariants.events_of(last), history.asks)


def test_invariants_accept_correct_history() -> None:
    judge(a_history(), a_log())
    # A reader that has not yet seen all events has seen nothing wrong.
    judge(a_history(), a_log(), seen=a_log()[:4])


# -- the logs --------------------------------------------------------------------------------------------------------
def a_hole(events: list[Event]) -> None:
    del events[3]


def twice(events: list[Event]) -> None:
    events.insert(3, {**events[2]})


def a_falling_epoch(events: list[Event]) -> None:
    events.append(an_event(8, 1, "process.exited"))


def interleaved(events: list[Event]) -> None:
    events[3]["epoch"] = 2


def a_second_outcome(events: list[Event]) -> None:
    events.append(an_event(8, 2, "turn.ended", "t1", outcome="done"))


def no_outcome(events: list[Event]) -> None:
    events[6]["kind"] = "process.exited"


def begun_twice(events: list[Event]) -> None:
    events.append(an_event(8, 2, "turn.started", "t2"))


def lost(events: list[Event]) -> None:
    del events[4:]


def queued_twice(events: list[Event]) -> None:
    events += [an_event(8, 2, "turn.queued", "t3", key="k2"), an_event(9, 2, "turn.ended", "t3", outcome="done")]


def of_nobody(events: list[Event]) -> None:
    events += [an_event(8, 2, "turn.queued", "t3", key="k3"), an_event(9, 2, "turn.ended", "t3", outcome="done")]


def another_outcome(events: list[Event]) -> None:
    events[6]["body"]["outcome"] = "failed"


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (a_hole, "where 4 should be there is 5"),
        (twice, "where 4 should be there is 3|two clients"),
        (a_falling_epoch, "the epoch falls"),
        (interleaved, "the epoch falls"),
        (a_second_outcome, "k1 ended 2 times"),
        (no_outcome, "k2 ended 0 times"),
        (begun_twice, "k2 began 2 times"),
        (lost, "k2 was accepted as t2, which the log does not have"),
        (queued_twice, "are in the log twice"),
        (of_nobody, "nobody asked"),
        (another_outcome, "told unknown, and the log says failed"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_invariants_find_faulty_log(plant: Callable[[list[Event]], None], message: str) -> None:
    events = a_log()
    plant(events)
    if plant is twice:  # A view has each place once; a log that has a place twice is not dense.
        with pytest.raises(AssertionError, match=message):
            invariants.log(events)
        return
    with pytest.raises(AssertionError, match=message):
        judge(a_history(), events)


# -- answers to clients ----------------------------------------------------------------------------------------------
def test_invariants_find_event_that_vanished() -> None:
    seen = [*a_log(), an_event(8, 2, "process.exited")]
    with pytest.raises(AssertionError, match="which is not there any more"):
        judge(a_history(), a_log(), seen=seen)


def test_invariants_find_event_that_changed() -> None:
    seen = a_log()
    seen[5] = an_event(6, 1, "process.exited")
    with pytest.raises(AssertionError, match="was given another"):
        judge(a_history(), a_log(), seen=seen)


def test_invariants_find_gap() -> None:
    view = View(a_view(a_log()).events, {ID: [(1, 2)]}, is_many=False)
    with pytest.raises(AssertionError, match="was told of gaps"):
        invariants.readers([Reader("a reader", view)], {ID: a_view(a_log())})


def test_invariants_find_ask_accepted_as_two_turns() -> None:
    history = a_history()
    history.accepts(history.asks[0], 1, "t2")
    with pytest.raises(AssertionError, match="k1 was accepted as"):
        judge(history, a_log())


def test_invariants_find_contradicting_outcomes() -> None:
    history = a_history()
    history.tells(history.asks[1], 1, {"kind": "failed", "text": "w2"})
    with pytest.raises(AssertionError, match="told different outcomes"):
        judge(history, a_log())


def test_invariants_find_answer_of_another_ask() -> None:
    history = a_history()
    history.asks[0].told[0] = history.asks[0].told[0]._replace(text="w2 w2.0")
    with pytest.raises(AssertionError, match="k1 was answered with words of"):
        judge(history, a_log())


def test_invariants_find_half_answer_reported_as_done() -> None:
    history = a_history()
    history.asks[0].told[0] = history.asks[0].told[0]._replace(text="w1")
    with pytest.raises(AssertionError, match="the answer is"):
        judge(history, a_log())


# -- prompts of agents -----------------------------------------------------------------------------------------------
def test_invariants_find_prompt_given_to_two_processes() -> None:
    with pytest.raises(AssertionError, match="given to an agent 2 times"):
        judge(a_history(), a_log(), given=[*GIVEN, GIVEN[1]])


def test_invariants_find_answer_that_no_agent_gave() -> None:
    with pytest.raises(AssertionError, match="no agent was given it"):
        judge(a_history(), a_log(), given=GIVEN[1:])


def test_prompts_of_reads_prompts_from_process_input() -> None:
    frames: list[Any] = [
        {"type": "control_request", "request": {}},
        {"type": "user", "message": {"content": "one"}},
        {"type": "user", "message": {"content": [{"type": "text", "text": "two"}]}},
    ]
    data = b"".join(json.dumps(frame).encode() + b"\n" for frame in frames)
    assert prompts_of(data + b'{"type": "user", "mess') == ["one", "two"]


# -- processes -------------------------------------------------------------------------------------------------------
class Agents:
    """Processes with the marks of a world, without its hosts and nodes."""

    def __init__(self, folder: Path) -> None:
        self.world = World(folder, sessions=2, lease=0.3)
        self.life = f"{self.world.prefix}-a.1"
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, session: int) -> subprocess.Popen[bytes]:
        folder = self.world.agent_folder(session)
        folder.mkdir(parents=True, exist_ok=True)
        says = "import sys, time; print('up', flush=True); time.sleep(60)"
        words = [sys.executable, "-I", "-S", marked.__file__, str(folder), sys.executable, "-c", says, f"{folder}/"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, env={**os.environ, "CHAOS_LIFE": self.life})
        self._started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        return process

    def end(self) -> None:
        for process in self._started:
            process.kill()
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    found = Agents(tmp_path / "world")
    yield found
    found.end()


def test_world_finds_overlapping_agents_of_one_session(agents: Agents) -> None:
    first = agents.start(0)
    agents.start(1)
    first.kill()
    first.wait()
    second = agents.start(0)
    assert agents.world.overlaps() == []
    third = agents.start(0)
    (overlap,) = agents.world.overlaps()
    assert json.loads(overlap["holder"])["pid"] == second.pid
    assert overlap["second"]["pid"] == third.pid


def test_world_finds_agent_by_host_and_session(agents: Agents) -> None:
    first, second = agents.start(0), agents.start(1)
    found = {(each.pid, each.session) for each in agents.world.agents_of(agents.life)}
    assert found == {(first.pid, 0), (second.pid, 1)}
    first.kill()
    first.wait()
    assert {each.pid for each in agents.world.agents_of(agents.life)} == {second.pid}


def test_nemesis_finds_agent_that_outlives_lease_of_its_host(agents: Agents) -> None:
    nemesis = Nemesis(agents.world, History(), SHORT.plan, 1, threading.Event())
    host = Host(agents.world.folder / "a", "", "a", agents.world.prefix)
    host.lives = 1
    assert host.life == agents.life
    process = agents.start(0)
    with pytest.raises(AssertionError, match=r"was stopped .* and there are still"):
        nemesis.check_dead_by_lease(host, time.monotonic())
    process.send_signal(signal.SIGKILL)
    process.wait()
    nemesis.check_dead_by_lease(host, time.monotonic())
    assert nemesis.stops_measured == 1
