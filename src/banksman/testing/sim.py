"""A loop with virtual time, whose order of steps can be chosen: asyncio code run without a clock, a thread or a file.

Theory of operation. A *step* is one handle run by the loop: a callback, a timer, one leg of a task between two awaits.
Nothing can come between two lines of one step, so every race of asyncio code is a matter of which step comes next, and
of nothing else. `SimLoop` runs steps in asyncio's own order, unless it is told to *depart* from it at a given step.

What may be reordered? asyncio promises that callbacks run in the order of `call_soon`, and code may rely on it: a test
that breaks the promise finds bugs that no one can meet. So each handle is in a *lane*, and a lane is always FIFO:

- `loop`: all of `call_soon`, and so all tasks that were not given a lane. The promise is kept.
- one for each name given to `outside()`: the world speaks (output of a process, a commit of the store). What one pipe
  says comes in order; two pipes, and a pipe and the loop, come in any. Without a name the handle is alone in its lane.
- `threads`: `call_soon_threadsafe`, for another thread calls when it likes.
- one for each name given to `create_lane_task()`: callers that know nothing of each other.
- timers. One never overtakes another that is due earlier, as in asyncio; those due at the same instant come in any
  order, and a due timer comes anywhere among the ready handles. So to race an event of the world against a timer, let
  both be due at the same instant.

At a step where several lanes have something ready, the heads of the lanes are the *alternatives*, in asyncio's order: 0
is what asyncio would run. Two more kinds can be switched on. With `jitter_seconds`, a timer due that soon may fire
before the handles that are ready: the loop was busy and time went by. With `postponing`, after the heads come the same
heads once more, each meaning: this one, and its lane behind it, waits until nothing else is ready. (A word that comes
late then costs one departure, and not one for each step that overtakes it.)

    def test_every_ask_has_an_outcome():
        async def scenario():
            loop, session = sim.current(), Session()
            ask = loop.create_lane_task(session.ask("hi"), lane="caller")
            loop.outside(session.on_output, b"done", lane="stdout")
            loop.outside(session.on_exit, 0, lane="exit")
            assert await ask in {DONE, FAILED}

        assert sim.explore(scenario, departures_max=2).is_complete

A *schedule* is a set of departures from asyncio's order: `"12:1 40:3"` is alternative 1 at step 12 and alternative 3 at
step 40; the empty string is asyncio's own order. One that fails is printed, and `sim.replay(scenario, "12:1 40:3")`
runs it. Most races need very few departures (one thing came too early, another too late), so schedules are run by their
number: none, then every single one, then every pair. The first that fails therefore has as few as can be.

Nothing is run twice: a run tells at which steps it had alternatives, and its children depart once more at one of the
steps *after* its last departure. So each set of departures is met in one way only, in the order of its steps. A
schedule means something only if the same one always runs the same. That is checked for free: a child must have run
exactly as its parent did up to the step where they part.

Time stands still while something is ready and then jumps to the next timer. Nothing ready and no timer is `Deadlock`.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from banksman.errors import UsageError
from banksman.testing.sim_failures import (
    Deadlock,
    Livelock,
    NotDeterministic,
    NotSimulated,
    SimFailure,
    TasksLeft,
    Unhandled,
)
from banksman.testing.sim_loop import REPORT_STEPS_MAX, STEPS_MAX, Point, SimLoop, current
from banksman.testing.sim_loop import SimStep as Step

__all__ = [
    "Deadlock",
    "Explored",
    "Livelock",
    "NotDeterministic",
    "NotSimulated",
    "Scenario",
    "ScheduleFailed",
    "SimFailure",
    "SimLoop",
    "Step",
    "TasksLeft",
    "Unhandled",
    "current",
    "explore",
    "replay",
    "shrink",
]

Scenario: TypeAlias = Callable[[], Awaitable[object]]
Departures: TypeAlias = tuple[tuple[int, int], ...]

# About a minute of a small scenario.
SCHEDULES_MAX = 20_000


@dataclass(frozen=True, slots=True)
class Explored:
    """What was explored, all of it without a failure.

    `choice_points` and `steps` are the most that one run had. `left` schedules were not run, for there were more than
    `schedules_max`: those that ran were then spread evenly over all of their number of departures.
    """

    schedules: int
    choice_points: int
    steps: int
    left: int

    @property
    def is_complete(self) -> bool:
        return not self.left


class ScheduleFailed(SimFailure):
    """The scenario fails under `schedule`; the failure itself is the cause. `trace` has every step."""

    def __init__(self, message: str, *, schedule: str, trace: tuple[Step, ...]) -> None:
        super().__init__(message)
        self.schedule = schedule
        self.trace = trace


@dataclass(frozen=True, slots=True)
class _Setting:
    scenario: Scenario
    steps_max: int
    jitter_seconds: float
    postponing: bool


@dataclass(frozen=True, slots=True)
class _Run:
    departures: Departures
    points: list[Point]
    trace: list[Step]
    digest: int
    failure: BaseException | None

    def is_same(self, other: _Run) -> bool:
        return self.digest == other.digest and type(self.failure) is type(other.failure)


def explore(
    scenario: Scenario,
    *,
    departures_max: int = 2,
    schedules_max: int = SCHEDULES_MAX,
    steps_max: int = STEPS_MAX,
    jitter_seconds: float = 0.0,
    postponing: bool = False,
) -> Explored:
    """Run `scenario()` under every schedule of at most `departures_max` departures; raise `ScheduleFailed` at the first
    that fails.

    A failure is an exception of the scenario, one that nobody took in a callback or a task, a `Deadlock`, a `Livelock`,
    or tasks left behind. The scenario is called once for each schedule, inside a fresh `SimLoop`, and must make
    everything it uses anew. Not to be called from a running loop.
    """
    assert departures_max >= 0
    assert schedules_max >= 1
    setting = _Setting(scenario, steps_max, jitter_seconds, postponing)
    first = _run(setting, ())
    if not first.is_same(_run(setting, ())):
        raise NotDeterministic("two runs in asyncio's own order differ")
    _check(setting, first, count=1)
    count, left = 1, 0
    choice_points, steps = len(first.points), len(first.trace)
    level: list[tuple[Departures, list[Point]]] = [((), first.points)]
    for departures in range(1, departures_max + 1):
        total = sum(point.alternatives - 1 for _, points in level for point in points)
        room = min(schedules_max - count, total)
        parents = level
        level = []
        for index, (schedule, point) in enumerate(_children(parents)):
            # As many of the total as there is room for, evenly spread: all of them if there is room for all.
            if index * room // total == (index + 1) * room // total:
                continue
            run = _run(setting, schedule)
            count += 1
            if point not in run.points:
                raise NotDeterministic(f"schedule {_written(schedule)!r} ran differently before step {point.step}")
            _check(setting, run, count=count)
            choice_points, steps = max(choice_points, len(run.points)), max(steps, len(run.trace))
            if departures < departures_max:
                level.append((schedule, [later for later in run.points if later.step > point.step]))
        left = total - room
        if left:
            break  # The next level would be that of a sample: its number would mean nothing.
    return Explored(count, choice_points, steps, left)


def replay(
    scenario: Scenario,
    schedule: str,
    *,
    steps_max: int = STEPS_MAX,
    jitter_seconds: float = 0.0,
    postponing: bool = False,
) -> tuple[Step, ...]:
    """Run `scenario()` once under `schedule`: the trace, or `ScheduleFailed`. Give the same options as to `explore`."""
    run = _run(_Setting(scenario, steps_max, jitter_seconds, postponing), _parsed(schedule))
    if run.failure is not None:
        raise _failed(run) from run.failure
    _check_fits(run)
    return tuple(run.trace)


def shrink(
    scenario: Scenario,
    schedule: str,
    *,
    steps_max: int = STEPS_MAX,
    jitter_seconds: float = 0.0,
    postponing: bool = False,
) -> str:
    """A schedule with no departure too many that fails as `schedule` does. `explore` finds such ones by itself: this is
    for schedules made by hand or at random."""
    setting = _Setting(scenario, steps_max, jitter_seconds, postponing)
    run = _run(setting, _parsed(schedule))
    if run.failure is None:
        raise UsageError(f"schedule {schedule!r} does not fail")
    departures, index = run.departures, 0
    while index < len(departures):
        fewer = departures[:index] + departures[index + 1 :]
        try:
            failure = _run(setting, fewer).failure
        except NotDeterministic:
            failure = None  # Without this departure the later ones mean nothing.
        if type(failure) is type(run.failure):
            departures, index = fewer, 0
        else:
            index += 1
    return _written(departures)


def _children(parents: list[tuple[Departures, list[Point]]]) -> Iterator[tuple[Departures, Point]]:
    """Each schedule with one departure more, and the point where it departs."""
    for departures, points in parents:
        for point in points:
            for alternative in range(1, point.alternatives):
                yield (*departures, (point.step, alternative)), point


def _run(setting: _Setting, departures: Departures) -> _Run:
    if asyncio._get_running_loop() is not None:
        raise UsageError("a loop is running here", hint="call it from a plain function")

    async def main() -> None:
        await setting.scenario()

    loop = SimLoop(
        departures=dict(departures),
        steps_max=setting.steps_max,
        jitter_seconds=setting.jitter_seconds,
        postponing=setting.postponing,
    )
    # When garbage is collected depends on all that ran before, and finalisers may call the loop.
    was_collecting = gc.isenabled()
    gc.disable()
    failure: BaseException | None = None
    try:
        loop.run_until_complete(loop.create_task(main(), name="main"))
        loop.check_ended()
    except (KeyboardInterrupt, SystemExit, NotDeterministic):
        raise
    except (
        BaseException
    ) as exc:  # Kept, and raised again as the cause. (pytest.fail is no Exception, nor is a cancellation.)
        failure = exc
    finally:
        run = _Run(departures, loop.points.copy(), loop.trace.copy(), loop.digest, failure)
        loop.wind_down()
        loop.close()
        if was_collecting:
            gc.enable()
    return run


def _check(setting: _Setting, run: _Run, *, count: int) -> None:
    """Raise the failure, if there is one, and if it comes back when it is called."""
    if run.failure is None:
        _check_fits(run)
        return
    if not run.is_same(_run(setting, run.departures)):
        raise NotDeterministic(f"schedule {_written(run.departures)!r} failed only once") from run.failure
    raise _failed(run, f"schedule number {count}") from run.failure


def _check_fits(run: _Run) -> None:
    missed = {step for step, _ in run.departures} - {point.step for point in run.points}
    if missed:
        raise NotDeterministic(f"schedule {_written(run.departures)!r}: nothing to choose at step {min(missed)}")


def _failed(run: _Run, which: str = "replayed") -> ScheduleFailed:
    schedule, departed = _written(run.departures), dict(run.departures)
    lines = [
        f"{type(run.failure).__name__}: {run.failure}",
        f"schedule: {schedule!r} ({which}), to be run again by replay(scenario, {schedule!r}, …)",
        f"steps, those marked > out of order, and the last {REPORT_STEPS_MAX}:",
    ]
    for index, step in enumerate(run.trace):
        if index in departed or index >= len(run.trace) - REPORT_STEPS_MAX:
            lines.append(f"{'>' if index in departed else ' '} {index:5} {step.at:10.4f} {step.lane}: {step.label}")
    return ScheduleFailed("\n".join(lines), schedule=schedule, trace=tuple(run.trace))


def _written(departures: Departures) -> str:
    return " ".join(f"{step}:{alternative}" for step, alternative in departures)


def _parsed(schedule: str) -> Departures:
    try:
        pairs = [(int(step), int(alternative)) for step, alternative in (word.split(":") for word in schedule.split())]
    except ValueError as exc:
        raise UsageError(f"not a schedule: {schedule!r}", hint='it is written as "12:1 40:3"') from exc
    if any(step < 0 or alternative < 1 for step, alternative in pairs) or len(dict(pairs)) != len(pairs):
        raise UsageError(
            f"not a schedule: {schedule!r}", hint="steps count from 0 and alternatives from 1, each step once"
        )
    return tuple(sorted(pairs))
