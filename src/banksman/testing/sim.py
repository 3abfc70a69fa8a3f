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

A schedule that fails is printed as `"12:1 40:3"` (step:alternative), and `sim.replay(scenario, "12:1 40:3")` runs it.

Time stands still while something is ready and then jumps to the next timer. Nothing ready and no timer is `Deadlock`.
"""

from banksman.testing.sim_failures import (
    Deadlock,
    Livelock,
    NotDeterministic,
    NotSimulated,
    SimFailure,
    TasksLeft,
    Unhandled,
)
from banksman.testing.sim_loop import SimLoop, Step, current
from banksman.testing.sim_schedules import Explored, Scenario, ScheduleFailed, explore, replay, shrink

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
