"""Explore the schedules of asyncio code in virtual time, without a clock, thread or file.

`explore` runs a scenario under many schedules, `replay` under one, and `shrink` makes a failing
schedule smaller. `SimLoop`, the event loop, is in `sim_loop.py`.

Theory of operation. A *step* is one handle that the loop runs: a callback, a timer, one part of a
task between two awaits. Nothing can run between two lines of one step. Every race in asyncio code
therefore depends only on which step comes next. `SimLoop` runs steps in asyncio's order, unless a
schedule makes it *depart* from that order at a given step.

Which steps may be reordered? asyncio promises that callbacks run in the order of `call_soon`, and
code may rely on it. A test that breaks the promise finds bugs that cannot happen. So each handle is
in a *lane*, and a lane is always FIFO:

- `loop`: all of `call_soon`, and so all tasks without a lane. The promise holds.
- One lane for each name given to `outside()`, for events of the outside world (output of a process,
  a commit of the store). The events of one pipe come in order. Events of two pipes, or of a pipe
  and the loop, come in any order. Without a name, the handle is alone in its lane.
- `threads`: `call_soon_threadsafe`, because another thread calls at any time.
- One lane for each name given to `create_lane_task()`: callers that are independent of each other.
- Timers. A timer never overtakes a timer that is due earlier, as in asyncio. Timers due at the same
  instant come in any order, and a due timer comes anywhere among the ready handles. So to race an
  event of the world against a timer, make both due at the same instant.

At a step where several lanes have a ready handle, the heads of the lanes are the *alternatives*, in
asyncio's order. Alternative 0 is the handle that asyncio would run. Two more kinds of alternatives
can be switched on:

- `jitter_seconds`: a timer due within this time may fire before the ready handles. This models a
  busy loop while time passes.
- `postponing`: each head appears a second time, with another meaning: this handle, and its lane
  behind it, waits until nothing else is ready. A late event then costs one departure, and not one
  for each step that overtakes it.

Example:

    def test_every_ask_has_an_outcome():
        async def scenario():
            loop, session = sim.current(), Session()
            ask = loop.create_lane_task(session.ask("hi"), lane="caller")
            loop.outside(session.on_output, b"done", lane="stdout")
            loop.outside(session.on_exit, 0, lane="exit")
            assert await ask in {DONE, FAILED}

        assert sim.explore(scenario, departures_max=2).is_complete

A *schedule* is a set of departures from asyncio's order. `"12:1 40:3"` takes alternative 1 at step
12 and alternative 3 at step 40. The empty string is asyncio's order. A failure prints its schedule,
and `sim.replay(scenario, "12:1 40:3")` runs it again. Most races need very few departures: one
event came too early, another too late. The explorer therefore runs schedules by their number of
departures: none, then every single departure, then every pair. The first failing schedule has the
smallest possible number of departures.

No schedule runs twice. A run reports the steps where it had alternatives. Its children depart once
more, at one of the steps *after* its last departure. Each set of departures is therefore reached in
one way only, in the order of its steps.

A schedule has a meaning only if it always runs the same way. The explorer checks this at no extra
cost: a child must run exactly as its parent did up to the step where they part.

Time stands still while a handle is ready, and then jumps to the next timer. If no handle is ready
and no timer is set, the run fails with `Deadlock`.
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

# About a minute for a small scenario.
SCHEDULES_MAX = 20_000


@dataclass(frozen=True, slots=True)
class Explored:
    """Result of an exploration without a failure.

    `choice_points` and `steps` are the maxima over all runs. `left`: number of schedules that did
    not run because of `schedules_max`. In that case the schedules that ran are spread evenly over
    all schedules with that number of departures.
    """

    schedules: int
    choice_points: int
    steps: int
    left: int

    @property
    def is_complete(self) -> bool:
        return not self.left


class ScheduleFailed(SimFailure):
    """The scenario fails under `schedule`.

    The failure is the `__cause__` of this exception. `trace` has every step.
    """

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
    """Run a scenario under every schedule of at most `departures_max` departures.

    Raises `ScheduleFailed` for the first schedule that fails. Failures are an exception of the
    scenario, an unhandled exception in a callback or a task, a `Deadlock`, a `Livelock`, and tasks
    left behind.

    The explorer calls `scenario()` once for each schedule, inside a fresh `SimLoop`. The scenario
    must create all objects that it uses. Must not be called from a running loop.
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
            # Take `room` of the `total` children, evenly spread; all of them if there is room for
            # all.
            if index * room // total == (index + 1) * room // total:
                continue
            run = _run(setting, schedule)
            count += 1
            if point not in run.points:
                raise NotDeterministic(
                    f"schedule {_written(schedule)!r} ran differently before step {point.step}"
                )
            _check(setting, run, count=count)
            choice_points, steps = max(choice_points, len(run.points)), max(steps, len(run.trace))
            if departures < departures_max:
                level.append((schedule, [later for later in run.points if later.step > point.step]))
        left = total - room
        if left:
            break  # The next level would extend a sample, so its number would mean nothing.
    return Explored(count, choice_points, steps, left)


def replay(
    scenario: Scenario,
    schedule: str,
    *,
    steps_max: int = STEPS_MAX,
    jitter_seconds: float = 0.0,
    postponing: bool = False,
) -> tuple[Step, ...]:
    """Run a scenario once under `schedule` and return the trace, or raise `ScheduleFailed`.

    The options must be those that `explore` had.
    """
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
    """Remove every departure that the failure of `schedule` does not need.

    Returns the smaller schedule. `explore` finds minimal schedules already, so this is for
    schedules made by hand or at random.
    """
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
            failure = None  # Without this departure the later ones do not fit.
        if type(failure) is type(run.failure):
            departures, index = fewer, 0
        else:
            index += 1
    return _written(departures)


def _children(parents: list[tuple[Departures, list[Point]]]) -> Iterator[tuple[Departures, Point]]:
    """Yield each schedule with one more departure, and the point where it departs."""
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
    # The time of a garbage collection depends on all earlier runs, and finalisers may call the
    # loop.
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
        # Kept, and raised again as the cause. (pytest.fail and cancellations are not `Exception`s.)
    ) as exc:
        failure = exc
    finally:
        run = _Run(departures, loop.points.copy(), loop.trace.copy(), loop.digest, failure)
        loop.wind_down()
        loop.close()
        if was_collecting:
            gc.enable()
    return run


def _check(setting: _Setting, run: _Run, *, count: int) -> None:
    """Raise the failure of a run, if it has one and a second run fails in the same way."""
    if run.failure is None:
        _check_fits(run)
        return
    if not run.is_same(_run(setting, run.departures)):
        raise NotDeterministic(
            f"schedule {_written(run.departures)!r} failed only once"
        ) from run.failure
    raise _failed(run, f"schedule number {count}") from run.failure


def _check_fits(run: _Run) -> None:
    missed = {step for step, _ in run.departures} - {point.step for point in run.points}
    if missed:
        raise NotDeterministic(
            f"schedule {_written(run.departures)!r}: nothing to choose at step {min(missed)}"
        )


def _failed(run: _Run, which: str = "replayed") -> ScheduleFailed:
    schedule, departed = _written(run.departures), dict(run.departures)
    lines = [
        f"{type(run.failure).__name__}: {run.failure}",
        f"schedule: {schedule!r} ({which}), to be run again by replay(scenario, {schedule!r}, …)",
        f"steps, those marked > out of order, and the last {REPORT_STEPS_MAX}:",
    ]
    for index, step in enumerate(run.trace):
        if index in departed or index >= len(run.trace) - REPORT_STEPS_MAX:
            lines.append(
                f"{'>' if index in departed else ' '} "
                f"{index:5} {step.at:10.4f} {step.lane}: {step.label}"
            )
    return ScheduleFailed("\n".join(lines), schedule=schedule, trace=tuple(run.trace))


def _written(departures: Departures) -> str:
    return " ".join(f"{step}:{alternative}" for step, alternative in departures)


def _parsed(schedule: str) -> Departures:
    try:
        pairs = [
            (int(step), int(alternative))
            for step, alternative in (word.split(":") for word in schedule.split())
        ]
    except ValueError as exc:
        raise UsageError(
            f"not a schedule: {schedule!r}", hint='it is written as "12:1 40:3"'
        ) from exc
    if any(step < 0 or alternative < 1 for step, alternative in pairs) or len(dict(pairs)) != len(
        pairs
    ):
        raise UsageError(
            f"not a schedule: {schedule!r}",
            hint="steps count from 0 and alternatives from 1, each step once",
        )
    return tuple(sorted(pairs))
