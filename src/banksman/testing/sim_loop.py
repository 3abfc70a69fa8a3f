"""Simulated asyncio event loop: virtual time, lanes, departures. `sim` explains the theory."""

from __future__ import annotations

import asyncio
import heapq
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping
from contextvars import Context
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar, cast

from banksman.testing.sim_failures import (
    Deadlock,
    Livelock,
    NotDeterministic,
    NotSimulated,
    TasksLeft,
    Unhandled,
    label,
    stack,
    without_world,
)

T = TypeVar("T")

# Far more steps than any scenario has. A loop without end still fails within a second.
STEPS_MAX = 100_000
# Steps that a failed scenario may use to clean up after its tasks are cancelled.
WIND_DOWN_STEPS_MAX = 10_000
# Same as asyncio on Linux: timers closer together than this are due at the same instant.
RESOLUTION_SECONDS = 1e-9
# Number of last steps that a report shows.
REPORT_STEPS_MAX = 20

LOOP, TIMER, THREADS = "loop", "timer", "threads"

# `seq` orders the handles. Postponed handles sort behind all others, and timers that fire early
# sort behind postponed handles.
_POSTPONED = 2**40
_EARLY = 2**50


class SimStep(NamedTuple):
    """One step: its time, its lane, and the name of its task or callback."""

    at: float
    lane: str
    label: str


class Point(NamedTuple):
    """A step with alternatives: their number, and a digest of all steps before it."""

    step: int
    alternatives: int
    digest: int


class _Handle(asyncio.Handle):
    __slots__ = ("lane", "seq")
    lane: str
    seq: int


class _Timer(asyncio.TimerHandle):
    __slots__ = ("seq",)
    seq: int


_seq = attrgetter("seq")


def current() -> SimLoop:
    """Return the running loop, for scenarios that use `outside()` or `create_lane_task()`."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SimLoop), "not inside a simulation"
    return loop


@without_world
class SimLoop(asyncio.BaseEventLoop):
    """Asyncio loop with virtual time and lanes (see `sim`). Its time starts at 0.

    `departures`: which alternative to take at which step; all other steps run in asyncio's order.
    Afterwards, `points` lists the steps that had alternatives, and `trace` lists the steps that
    ran. A test that only needs virtual time may use `asyncio.Runner(loop_factory=SimLoop)`.
    """

    _asyncgens: weakref.WeakSet[AsyncGenerator[object, object]]

    def __init__(
        self,
        *,
        departures: Mapping[int, int] | None = None,
        jitter_seconds: float = 0.0,
        postponing: bool = False,
        steps_max: int = STEPS_MAX,
    ) -> None:
        super().__init__()
        # Debug mode reads the real clock, and PYTHONASYNCIODEBUG may have turned it on.
        self.set_debug(False)
        self.points: list[Point] = []
        self.trace: list[SimStep] = []
        self.digest = 0
        self._departures = dict(departures or {})
        self._jitter_seconds = jitter_seconds
        self._postponing = postponing
        self._steps_max = steps_max
        self._thread = threading.get_ident()
        self._now = 0.0
        self._seq = 0
        self._lanes: dict[str, deque[_Handle]] = {}  # A lane is never empty.
        self._timers: list[tuple[float, int, _Timer]] = []  # A heap of timers that are not yet due.
        self._due: list[_Timer] = []  # By time, then by age.
        # All tasks, by strong references: the moment when the garbage collector drops a task would
        # otherwise change the schedule.
        self._tasks: list[asyncio.Task[Any]] = []
        self._task_lanes: dict[asyncio.Task[Any], str] = {}
        self._newborn_lane: str | None = None
        self._faults: list[dict[str, Any]] = []
        self._is_winding_down = False

    def __repr__(self) -> str:
        ready = sum(map(len, self._lanes.values())) + len(self._due)
        return (
            f"<SimLoop time={self._now:g} steps={len(self.trace)} "
            f"ready={ready} timers={len(self._timers)}>"
        )

    # ── Interface of asyncio ──

    def time(self) -> float:
        return self._now

    def call_soon(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        lane = LOOP
        if self._newborn_lane is not None:
            lane = self._newborn_lane
        elif self._task_lanes:
            # The steps of a task are callbacks bound to it.
            owner = getattr(callback, "__self__", None)
            if isinstance(owner, asyncio.Task):
                lane = self._task_lanes.get(owner, LOOP)  # pyright: ignore[reportUnknownArgumentType]
        return self._make_ready(lane, callback, args, context)

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        if threading.get_ident() != self._thread:
            raise NotSimulated(
                "a real thread called the simulated loop: its order cannot be chosen; use outside()"
            )
        return self._make_ready(THREADS, callback, args, context)

    def call_later(
        self,
        delay: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self,
        when: float,
        callback: Callable[..., object],
        *args: Any,
        context: Context | None = None,
    ) -> asyncio.TimerHandle:
        self._check_open()
        timer = _Timer(when, callback, args, self, context)
        self._seq += 1
        heapq.heappush(self._timers, (when, self._seq, timer))
        return timer

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        **options: Any,
    ) -> asyncio.Task[T]:
        # The default names of asyncio count all tasks of the process, so they differ from run to
        # run.
        task = super().create_task(coro, name=name or f"task-{len(self._tasks)}", **options)
        self._tasks.append(task)
        return task

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        self._faults.append(context)

    def close(self) -> None:
        super().close()
        self._lanes.clear()
        self._timers.clear()
        self._due.clear()
        self._tasks.clear()
        self._task_lanes.clear()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # Cancelled timers are skipped when they are due.

    # ── Interface of the simulated world and the scenario ──

    def outside(
        self, callback: Callable[..., object], *args: Any, lane: str | None = None
    ) -> asyncio.Handle:
        """Schedule an event of the outside world.

        `callback(*args)` runs as soon as the schedule allows, in any order except within its lane.
        """
        assert lane != TIMER, "the timers' order is their own"
        return self._make_ready(
            f"outside-{self._seq}" if lane is None else lane, callback, args, None
        )

    def create_lane_task(
        self, coro: Coroutine[Any, Any, T], *, lane: str, name: str | None = None
    ) -> asyncio.Task[T]:
        """Create a task whose steps run in `lane`.

        The tasks that it creates run in lane `loop`, unless they get a lane too.
        """
        assert lane != TIMER, "the timers' order is their own"
        assert self._newborn_lane is None, "a task is created inside the creation of another"
        # asyncio schedules the first step before the task can be looked up.
        self._newborn_lane = lane
        try:
            task = self.create_task(coro, name=name or f"{lane}-{len(self._tasks)}")
        finally:
            self._newborn_lane = None
        self._task_lanes[task] = lane
        return task

    def check_ended(self) -> None:
        """Raise if the scenario left an unfinished task or an exception that no code handled."""
        if left := self._waiting():
            raise TasksLeft(f"tasks left behind:\n{left}")
        for task in self._tasks:
            if task._log_traceback:
                raise Unhandled(
                    f"nobody took the exception of {task.get_name()}"
                ) from task.exception()
        self._raise_fault()

    def wind_down(self) -> None:
        """Cancel all remaining tasks silently, so that nothing of this run reaches the next.

        The number of steps is bounded; tasks that are still not done are closed and dropped.
        """
        self._is_winding_down = True
        self._departures = {}
        self._steps_max = len(self.trace) + WIND_DOWN_STEPS_MAX
        for task in self._tasks:
            task.cancel()
        if not self._is_all_done():
            self.run_forever()
        if self._asyncgens:
            self.create_task(self.shutdown_asyncgens())
            self.run_forever()
        for task in self._tasks:
            task._log_traceback = False
            if not task.done():
                task._log_destroy_pending = False  # pyright: ignore[reportAttributeAccessIssue]
                try:
                    cast(Coroutine[Any, Any, Any], task.get_coro()).close()
                except Exception:
                    # The task ignored both the cancellation and the close. The run has already
                    # reported its failure.
                    pass

    # ── Order of steps ──

    def _make_ready(
        self,
        lane: str,
        callback: Callable[..., object],
        args: tuple[Any, ...],
        context: Context | None,
    ) -> _Handle:
        self._check_open()
        handle = _Handle(callback, args, self, context)
        self._seq += 1
        handle.lane, handle.seq = lane, self._seq
        queue = self._lanes.get(lane)
        if queue is None:
            self._lanes[lane] = deque((handle,))
        else:
            queue.append(handle)
        return handle

    def _check_open(self) -> None:
        if self.is_closed():
            raise RuntimeError("Event loop is closed")

    def _run_once(self) -> None:
        """Run one round as asyncio does.

        A round polls the timers once, then runs the handles that are ready now, but not the handles
        that these add. The limit matters, because asyncio puts due timers behind the handles that
        the last round made ready.
        """
        end = self._poll()
        while (choices := self._choices()) and choices[0].seq <= end:
            if len(self.trace) >= self._steps_max:
                if not self._is_winding_down:
                    raise Livelock(
                        f"not done after {len(self.trace)} steps, time {self._now:g}:\n"
                        f"{self._last_steps()}"
                    )
                self.stop()
                return
            self._run(choices[0] if len(choices) == 1 else self._choose(choices))
        if self._is_winding_down and self._is_all_done():
            self.stop()

    def _poll(self) -> int:
        """Advance the time if nothing is ready, collect due timers, return the end of the round."""
        ready = self._heads()
        if ready and ready[0].seq >= _POSTPONED:
            for handle in ready:  # Only postponed handles are left, so they run now.
                handle.seq -= _POSTPONED
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not ready:
            if timers:
                self._now = max(self._now, timers[0][0])
            elif self._is_winding_down:
                self.stop()
            else:
                raise Deadlock(
                    f"nothing is ready and no timer runs, time {self._now:g}; waiting:\n"
                    f"{self._waiting()}"
                )
        while timers and timers[0][0] < self._now + RESOLUTION_SECONDS:
            timer = heapq.heappop(timers)[2]
            self._seq += 1
            timer.seq = self._seq
            self._due.append(timer)
        return self._seq

    def _heads(self) -> list[_Handle | _Timer]:
        """Return the first ready handle of each lane in asyncio's order; drop cancelled handles."""
        heads: list[_Handle | _Timer] = []
        for lane in tuple(self._lanes):
            queue = self._lanes[lane]
            while queue and queue[0]._cancelled:
                queue.popleft()
            if queue:
                heads.append(queue[0])
            else:
                del self._lanes[lane]
        if self._due:
            self._due = [timer for timer in self._due if not timer.cancelled()]
            heads += [
                timer
                for timer in self._due
                if timer.when() - self._due[0].when() < RESOLUTION_SECONDS
            ]
        if len(heads) > 1:
            heads.sort(key=_seq)
        return heads

    def _choices(self) -> list[_Handle | _Timer]:
        """Return the heads, followed by the timers that may fire early.

        No timer fires early while an earlier timer is still ready.
        """
        choices = self._heads()
        horizon = self._now + self._jitter_seconds + RESOLUTION_SECONDS
        if self._timers and self._timers[0][0] < horizon and not self._due:
            early = sorted(
                entry for entry in self._timers if entry[0] < horizon and not entry[2].cancelled()
            )
            for index, (when, _, timer) in enumerate(early):
                if when - early[0][0] < RESOLUTION_SECONDS:
                    timer.seq = _EARLY + index
                    choices.append(timer)
        return choices

    def _choose(self, choices: list[_Handle | _Timer]) -> _Handle | _Timer:
        step = len(self.trace)
        movable = (
            [handle for handle in choices if handle.seq < _POSTPONED] if self._postponing else []
        )
        if len(movable) == 1:
            movable = []  # Postponing the only handle has no effect.
        alternatives = len(choices) + len(movable)
        self.points.append(Point(step, alternatives, self.digest))
        chosen = self._departures.get(step, 0)
        if chosen >= alternatives:
            raise NotDeterministic(
                f"step {step} has {alternatives} alternatives, and the schedule wants {chosen}"
            )
        if chosen < len(choices):
            return choices[chosen]
        movable[chosen - len(choices)].seq += _POSTPONED
        return min(choices, key=_seq)

    def _run(self, handle: _Handle | _Timer) -> None:
        lane = TIMER
        if isinstance(handle, _Handle):
            lane = handle.lane
            self._lanes[lane].popleft()
        elif handle.seq < _EARLY:
            # By identity: two timers with the same callback are equal.
            self._due = [timer for timer in self._due if timer is not handle]
        else:
            self._timers = [entry for entry in self._timers if entry[2] is not handle]
            heapq.heapify(self._timers)
            self._now = max(self._now, handle.when())
        what = label(handle)
        self.trace.append(SimStep(self._now, lane, what))
        self.digest = hash((self.digest, self._now, lane, what))
        handle._run()
        if self._faults:
            self._raise_fault()

    # ── Reports ──

    def _raise_fault(self) -> None:
        if self._faults and not self._is_winding_down:
            context = self._faults[0]
            about = [
                f"{key}: {value!r}"
                for key, value in context.items()
                if key not in {"message", "exception"}
            ]
            raise Unhandled("\n".join([context["message"], *about])) from context.get("exception")

    def _is_all_done(self) -> bool:
        return all(task.done() for task in self._tasks)

    def _waiting(self) -> str:
        return "\n".join(stack(task) for task in self._tasks if not task.done())

    def _last_steps(self) -> str:
        return "\n".join(
            f"  {step.at:g} {step.lane}: {step.label}" for step in self.trace[-REPORT_STEPS_MAX:]
        )
