"""Stop ladder in virtual time, without a process: every order of facts, and the meaning of the rungs."""

from __future__ import annotations

import itertools
from collections import deque

import pytest

from banksman.core.process_facts import Exited, TreeEnded
from banksman.core.stop_ladder import (
    KILL_REPORT_SECONDS_MAX,
    TAKE_OVER_SECONDS_MAX,
    CloseOutput,
    CloseStdin,
    Effect,
    Fact,
    Hurry,
    InputEndIgnored,
    KillKeeper,
    KillTree,
    Ladder,
    LadderPhase,
    LadderTimerFired,
    OutputClosed,
    Settle,
    StartLadderTimer,
    StopAsked,
    TermGroup,
    TermRest,
    Timings,
    step,
)

AGENT = Timings(grace=5.0, linger=0.3, drain=2.0, eof=1.5)
COMMAND = Timings(grace=5.0, linger=0.3, drain=2.0)


def exited(at: float) -> Exited:
    return Exited(0, None, at)


class World:
    """A process that reacts to chosen rungs, under a clock that jumps from timer to timer."""

    def __init__(
        self,
        timings: Timings,
        *,
        exits_on: LadderPhase | None,
        rest_ends_on: LadderPhase | None,
        held_outside: bool = False,
    ) -> None:
        self.now = 0.0
        self.ladder = Ladder(timings)
        self.exits_on, self.rest_ends_on, self.held_outside = exits_on, rest_ends_on, held_outside
        self.has_exited = self.is_rest_gone = False
        self.trace: list[tuple[float, Effect]] = []
        self.timer: StartLadderTimer | None = None

    def run(self, *facts: Fact) -> list[tuple[float, Effect]]:
        waiting = deque(facts)
        while self.ladder.phase is not LadderPhase.OVER:
            if waiting:
                self._take(waiting.popleft(), waiting)
            else:
                assert self.timer is not None, f"nothing will ever happen again: {self.trace}"
                timer, self.timer = self.timer, None
                self.now = max(self.now, timer.at)
                waiting.append(LadderTimerFired(self.now, timer.phase))
        return self.trace

    def _take(self, fact: Fact, waiting: deque[Fact]) -> None:
        self.ladder, effects = step(self.ladder, fact)
        for effect in effects:
            self.trace.append((self.now, effect))
            match effect:
                case StartLadderTimer():
                    self.timer = effect
                case CloseStdin():
                    self._react(LadderPhase.EOF, waiting)
                case TermGroup():
                    self._react(LadderPhase.TERM, waiting)
                case TermRest():
                    self._react(LadderPhase.REST, waiting)
                case KillTree():
                    self._react(LadderPhase.KILL, waiting)
                case KillKeeper():
                    self._react(LadderPhase.KEEPER, waiting)
                case _:
                    pass

    def _react(self, rung: LadderPhase, waiting: deque[Fact]) -> None:
        if rung is self.exits_on and not self.has_exited:
            self.has_exited = True
            waiting.append(exited(self.now))
        if self.has_exited and not self.is_rest_gone and rung is self.rest_ends_on:
            self.is_rest_gone = True
            if not self.held_outside:
                waiting.append(OutputClosed(self.now))
            waiting.append(TreeEnded((), self.now))

    def rungs(self) -> list[tuple[float, str]]:
        shown = (CloseStdin, TermGroup, TermRest, KillTree, KillKeeper, CloseOutput, Settle)
        return [(at, type(effect).__name__) for at, effect in self.trace if isinstance(effect, shown)]


def test_ladder_ends_at_once_when_command_obeys() -> None:
    world = World(COMMAND, exits_on=LadderPhase.TERM, rest_ends_on=LadderPhase.REST)
    world.run(StopAsked(0.0))
    assert world.rungs() == [(0.0, "TermGroup"), (0.0, "TermRest"), (0.0, "Settle")]


def test_ladder_skips_rest_of_eof_wait_when_end_of_input_is_ignored() -> None:
    world = World(AGENT, exits_on=LadderPhase.TERM, rest_ends_on=LadderPhase.REST)
    world.run(StopAsked(0.0), InputEndIgnored(0.0))
    assert world.rungs() == [(0.0, "CloseStdin"), (0.0, "TermGroup"), (0.0, "TermRest"), (0.0, "Settle")]


@pytest.mark.parametrize("phase", [phase for phase in LadderPhase if phase is not LadderPhase.EOF])
def test_ignored_end_of_input_changes_nothing_outside_of_eof_phase(phase: LadderPhase) -> None:
    ladder = Ladder(AGENT, phase=phase)
    assert step(ladder, InputEndIgnored(1.0)) == (ladder, [])


def test_ladder_kills_stubborn_command_after_one_grace() -> None:
    world = World(COMMAND, exits_on=LadderPhase.KILL, rest_ends_on=LadderPhase.KILL)
    world.run(StopAsked(0.0))
    assert world.rungs() == [(0.0, "TermGroup"), (5.0, "KillTree"), (5.0, "Settle")]


def test_ladder_counts_grace_once_from_first_term() -> None:
    world = World(COMMAND, exits_on=None, rest_ends_on=LadderPhase.KILL)
    world.has_exited = True
    ladder, _ = step(world.ladder, StopAsked(0.0))
    world.ladder, world.now = ladder, 3.0
    world.run(exited(3.0))
    assert world.rungs() == [(3.0, "TermRest"), (5.0, "KillTree"), (5.0, "Settle")]


def test_ladder_closes_stdin_of_agent_first() -> None:
    world = World(AGENT, exits_on=LadderPhase.TERM, rest_ends_on=LadderPhase.REST)
    world.run(StopAsked(0.0))
    assert world.rungs() == [(0.0, "CloseStdin"), (1.5, "TermGroup"), (1.5, "TermRest"), (1.5, "Settle")]


def test_ladder_lets_leftovers_linger_before_term() -> None:
    world = World(COMMAND, exits_on=None, rest_ends_on=LadderPhase.REST)
    world.has_exited = True
    world.run(exited(0.0))
    assert world.rungs() == [(0.3, "TermRest"), (0.3, "Settle")]


def test_ladder_stop_ends_linger_at_once() -> None:
    world = World(COMMAND, exits_on=None, rest_ends_on=LadderPhase.REST)
    world.has_exited = True
    world.run(exited(0.0), StopAsked(0.0))
    assert world.rungs() == [(0.0, "TermRest"), (0.0, "Settle")]


def test_ladder_at_once_skips_to_kill_from_every_rung() -> None:
    for first in ([], [StopAsked(0.0)], [exited(0.0)], [StopAsked(0.0), exited(0.0)]):
        world = World(AGENT, exits_on=LadderPhase.KILL, rest_ends_on=LadderPhase.KILL)
        world.run(*first, StopAsked(0.0, at_once=True))
        assert [name for at, name in world.rungs() if at == 0.0][-2:] == ["KillTree", "Settle"], world.rungs()


def test_ladder_with_kill_deadline_gives_each_rung_its_share() -> None:
    world = World(AGENT, exits_on=None, rest_ends_on=None)
    world.run(StopAsked(0.0, kill_by=1.3))
    assert [(round(at, 9), name) for at, name in world.rungs()[:3]] == [
        (0.0, "CloseStdin"),
        (0.3, "TermGroup"),
        (1.3, "KillTree"),
    ]
    hurry = next(effect for _, effect in world.trace if isinstance(effect, Hurry))
    assert (round(hurry.term_at, 9), hurry.kill_at) == (0.3, 1.3)
    assert [round(effect.seconds, 9) for _, effect in world.trace if isinstance(effect, TermGroup)] == [1.0]


def test_ladder_ignores_kill_deadline_that_fits() -> None:
    worlds = [World(AGENT, exits_on=LadderPhase.KILL, rest_ends_on=LadderPhase.KILL) for _ in range(2)]
    worlds[0].run(StopAsked(0.0))
    worlds[1].run(StopAsked(0.0, kill_by=6.5))
    assert worlds[0].rungs() == worlds[1].rungs()


@pytest.mark.parametrize("timings", [AGENT, COMMAND])
def test_ladder_without_time_takes_every_rung_at_once(timings: Timings) -> None:
    world = World(timings, exits_on=LadderPhase.KILL, rest_ends_on=LadderPhase.KILL)
    world.run(StopAsked(0.0, kill_by=-5.0))
    assert world.now == 0.0
    assert [name for _, name in world.rungs()][-3:] == ["TermGroup", "KillTree", "Settle"]


@pytest.mark.parametrize("timings", [AGENT, COMMAND])
@pytest.mark.parametrize("at", [0.5, 3.0])
@pytest.mark.parametrize("has_exited", [False, True])
def test_ladder_kill_deadline_only_ever_shortens_stop(timings: Timings, at: float, has_exited: bool) -> None:
    """KILL comes at the earliest kill deadline in any order of deadlines, or earlier if the ladder reaches it first."""
    for bounds in itertools.permutations((at + 0.5, at + 1.0, 100.0)):
        world = World(timings, exits_on=None, rest_ends_on=LadderPhase.KILL)
        world.has_exited = True
        world.ladder, _ = step(world.ladder, StopAsked(0.0))
        if timings.eof is not None and at > timings.eof:
            world.ladder, _ = step(world.ladder, LadderTimerFired(timings.eof, LadderPhase.EOF))
        if has_exited:
            world.ladder, _ = step(world.ladder, exited(at))
        world.now = at
        world.run(*(StopAsked(at, kill_by=bound) for bound in bounds))
        assert [round(when - at, 9) for when, name in world.rungs() if name == "KillTree"] == [0.5], bounds


@pytest.mark.parametrize(("timings", "kill_at"), [(AGENT, 6.5), (COMMAND, 5.0)])
def test_ladder_ignores_kill_deadline_past_its_end(timings: Timings, kill_at: float) -> None:
    world = World(timings, exits_on=LadderPhase.KILL, rest_ends_on=LadderPhase.KILL)
    world.run(StopAsked(0.0), StopAsked(0.0, kill_by=100.0))
    assert [at for at, name in world.rungs() if name == "KillTree"] == [kill_at]


def test_ladder_kills_keeper_that_does_not_report() -> None:
    world = World(COMMAND, exits_on=None, rest_ends_on=None)
    world.run(StopAsked(0.0, at_once=True))
    wedged, given_up = KILL_REPORT_SECONDS_MAX, KILL_REPORT_SECONDS_MAX + TAKE_OVER_SECONDS_MAX
    expected = [(0.0, "KillTree"), (wedged, "KillKeeper"), (given_up, "CloseOutput"), (given_up, "Settle")]
    assert world.rungs() == expected


def test_ladder_stops_draining_pipe_held_outside_tree() -> None:
    world = World(COMMAND, exits_on=LadderPhase.TERM, rest_ends_on=LadderPhase.REST, held_outside=True)
    trace = world.run(StopAsked(0.0))
    assert trace[-2:] == [(2.0, CloseOutput()), (2.0, Settle(drained=False))]


@pytest.mark.parametrize("phase", [phase for phase in LadderPhase if phase is not LadderPhase.RUNNING])
def test_ladder_ignores_timer_of_another_phase(phase: LadderPhase) -> None:
    ladder = Ladder(COMMAND)
    assert step(ladder, LadderTimerFired(99.0, phase)) == (ladder, [])


@pytest.mark.parametrize(
    ("timings", "exits_on", "rest_ends_on", "held"),
    list(
        itertools.product(
            (AGENT, COMMAND),
            (LadderPhase.EOF, LadderPhase.TERM, LadderPhase.KILL, None),
            (LadderPhase.REST, LadderPhase.KILL, LadderPhase.KEEPER, None),
            (False, True),
        )
    ),
)
def test_ladder_ends_within_sum_of_its_waits(
    timings: Timings, exits_on: LadderPhase | None, rest_ends_on: LadderPhase | None, held: bool
) -> None:
    world = World(timings, exits_on=exits_on, rest_ends_on=rest_ends_on, held_outside=held)
    world.run(StopAsked(0.0))
    assert (
        world.now
        <= (timings.eof or 0.0) + timings.grace + KILL_REPORT_SECONDS_MAX + TAKE_OVER_SECONDS_MAX + timings.drain
    )


@pytest.mark.parametrize("timings", [AGENT, COMMAND])
def test_ladder_settles_once_in_every_order_of_facts(timings: Timings, capsys: pytest.CaptureFixture[str]) -> None:
    """Explore every reachable state with every fact.

    Each step gives an answer. The ladder settles once and does nothing after that. It sends KILL without TERM only with
    `at_once`.
    """
    kinds: list[Fact] = [
        StopAsked(1.0),
        StopAsked(1.0, at_once=True),
        *(StopAsked(1.0, kill_by=by) for by in (0.5, 2.0, 50.0)),
        exited(1.0),
        OutputClosed(1.0),
        InputEndIgnored(1.0),
        TreeEnded((), 1.0),
        *(LadderTimerFired(1.0, phase) for phase in LadderPhase),
    ]
    start = Ladder(timings)
    seen, waiting, transitions = {start}, deque([start]), 0
    while waiting:
        ladder = waiting.popleft()
        for fact in kinds:
            after, effects = step(ladder, fact)
            transitions += 1
            settled = [effect for effect in effects if isinstance(effect, Settle)]
            assert len(settled) == (ladder.phase is not LadderPhase.OVER and after.phase is LadderPhase.OVER), (
                ladder,
                fact,
            )
            if ladder.phase is LadderPhase.OVER:
                assert (after, effects) == (ladder, [])
            killed_unasked = any(isinstance(effect, KillTree) for effect in effects) and ladder.kill_at is None
            assert not killed_unasked or (isinstance(fact, StopAsked) and fact.at_once), (ladder, fact)
            has_timer = any(isinstance(effect, StartLadderTimer) for effect in effects)
            assert after.phase in (ladder.phase, LadderPhase.OVER) or has_timer, "a phase that nothing ends"
            if after not in seen:
                seen.add(after)
                waiting.append(after)
    with capsys.disabled():
        print(f"\nladder: {len(seen)} states, {transitions} transitions")
    assert {ladder.phase for ladder in seen} == set(LadderPhase) - ({LadderPhase.EOF} if timings.eof is None else set())
