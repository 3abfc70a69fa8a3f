"""The simulated loop equals asyncio's loop except for time, and the explorer finds exactly the planted races."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest

from banksman.errors import UsageError
from banksman.testing import sim

Program = Callable[[list[object]], Awaitable[None]]


# In asyncio's order, the simulated loop behaves as asyncio's loop.


async def program_callbacks(said: list[object]) -> None:
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def first() -> None:
        said.append("first")
        loop.call_later(0, said.append, "timer")
        loop.call_soon(third)

    def third() -> None:
        said.append("third")
        loop.call_soon(over.set)

    loop.call_soon(first)
    loop.call_soon(said.append, "second")
    loop.call_soon(said.append, "cancelled").cancel()
    loop.call_soon_threadsafe(said.append, "other thread")
    await over.wait()
    said.append("over")


async def program_tasks(said: list[object]) -> None:
    lock, queue, event = asyncio.Lock(), asyncio.Queue[int](2), asyncio.Event()

    async def worker(name: str) -> None:
        async with lock:
            said.append((name, "in"))
            await asyncio.sleep(0)
            said.append((name, await queue.get()))
        await event.wait()
        said.append((name, "out"))

    async def feeder() -> None:
        for item in range(4):
            await queue.put(item)
            said.append(("fed", item))
        event.set()

    async with asyncio.TaskGroup() as group:
        for name in "abcd":
            group.create_task(worker(name))
        group.create_task(feeder())
    said.append(await asyncio.gather(*(asyncio.sleep(0, number) for number in range(3))))


async def program_cancels(said: list[object]) -> None:
    async def stubborn() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            said.append("cancelled")
            await asyncio.sleep(0)
            said.append("cleaned")

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.002):
            await stubborn()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(stubborn(), 0.002)
    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    task.cancel()
    asyncio.get_running_loop().call_soon(said.append, "after cancel")
    with pytest.raises(asyncio.CancelledError):
        await task
    said.append(asyncio.get_running_loop().is_running())


async def program_timers(said: list[object]) -> None:
    loop = asyncio.get_running_loop()
    for delay in (0.003, 0.001, 0.002):
        loop.call_later(delay, said.append, delay)
    loop.call_later(0.0015, said.append, "cancelled").cancel()
    await asyncio.sleep(0.004)
    said.append("slept")


async def program_generators(said: list[object]) -> None:
    async def numbers() -> AsyncIterator[int]:
        try:
            for number in range(9):
                yield number
                await asyncio.sleep(0)
        finally:
            said.append("closed")

    variable = contextvars.ContextVar("variable", default=0)

    async def shows() -> None:
        said.append(variable.get())
        variable.set(2)

    async for number in numbers():
        said.append(number)
        if number == 2:
            break
    variable.set(1)
    await asyncio.create_task(shows())
    said.append(variable.get())
    await asyncio.sleep(0)


def random_program(seed: int) -> Program:
    """Callbacks, timers that are due immediately, and tasks, each of which starts others."""

    async def program(said: list[object]) -> None:
        rng, loop, numbers = random.Random(seed), asyncio.get_running_loop(), itertools.count()
        tasks: list[asyncio.Task[None]] = []

        def spawn(depth: int) -> None:
            number = next(numbers)
            kind = rng.randrange(4)
            if kind == 0:
                loop.call_soon(act, number, depth)
            elif kind == 1:
                loop.call_later(0, act, number, depth)
            elif kind == 2:
                tasks.append(loop.create_task(walk(number, depth)))
            else:
                future = loop.create_future()
                future.add_done_callback(lambda _: act(number, depth))
                loop.call_soon(future.set_result, None)

        def act(number: int, depth: int) -> None:
            said.append(number)
            for _ in range(rng.randrange(3) if depth else 0):
                spawn(depth - 1)

        async def walk(number: int, depth: int) -> None:
            for leg in range(rng.randrange(3)):
                said.append((number, leg))
                await asyncio.sleep(0)
            act(number, depth)

        for _ in range(6):
            spawn(4)
        for _ in range(40):
            await asyncio.sleep(0)
            said.append("main")
        for task in tasks:
            await task

    return program


def ran_on(loop: asyncio.AbstractEventLoop, program: Program) -> list[object]:
    said: list[object] = []

    async def main() -> None:
        await program(said)

    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        runner.run(main())
    return said


PROGRAMS = [program_callbacks, program_tasks, program_cancels, program_timers, program_generators]


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_sim_loop_orders_callbacks_like_asyncio(program: Program) -> None:
    real = ran_on(asyncio.SelectorEventLoop(), program)
    assert ran_on(sim.SimLoop(), program) == real
    assert real


def test_sim_loop_orders_random_programs_like_asyncio() -> None:
    lengths: list[int] = []
    for seed in range(60):
        real = ran_on(asyncio.SelectorEventLoop(), random_program(seed))
        assert ran_on(sim.SimLoop(), random_program(seed)) == real, f"seed {seed}"
        lengths.append(len(real))
    assert max(lengths) > 80


# Virtual time


def test_sim_loop_time_is_virtual() -> None:
    async def main() -> float:
        loop = sim.current()
        assert loop.time() == 0
        await asyncio.sleep(3600)
        loop.call_later(1e9, print).cancel()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(60):
                await loop.create_future()
        return loop.time()

    with asyncio.Runner(loop_factory=sim.SimLoop) as runner:
        assert runner.run(main()) == 3660


def test_sim_loop_refuses_io_and_threads() -> None:
    async def main() -> None:
        loop = sim.current()
        with pytest.raises(sim.NotSimulated, match="add_reader"):
            loop.add_reader(0, print)
        with pytest.raises(sim.NotSimulated, match="run_in_executor"):
            await asyncio.to_thread(print)
        with pytest.raises(sim.NotSimulated, match="create_connection"):
            await asyncio.open_connection("localhost", 1)
        refused: list[BaseException] = []

        def call() -> None:
            try:
                loop.call_soon_threadsafe(print)
            except sim.NotSimulated as exc:
                refused.append(exc)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert len(refused) == 1

    sim.replay(main, "")


# Counting: every schedule runs, and none twice.


def orders_of(
    start: Callable[[sim.SimLoop, Callable[[str], None]], object],
    expected: int,
    *,
    departures_max: int,
    jitter_seconds: float = 0.0,
    postponing: bool = False,
    schedules_max: int = 1000,
) -> tuple[sim.Explored, list[str]]:
    """Return the letters of each schedule as one word. `start` begins work that says `expected` letters."""
    seen: list[str] = []

    async def scenario() -> None:
        loop = sim.current()
        said: list[str] = []
        over = loop.create_future()

        def say(letter: str) -> None:
            said.append(letter)
            if len(said) == expected:
                over.set_result(None)

        start(loop, say)
        await over
        seen.append("".join(said))

    explored = sim.explore(
        scenario,
        departures_max=departures_max,
        jitter_seconds=jitter_seconds,
        postponing=postponing,
        schedules_max=schedules_max,
    )
    assert seen[0] == seen[1]  # asyncio's order runs twice, to check that it is deterministic.
    return explored, seen[1:]


def start_three(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
    for letter in "abc":
        loop.outside(say, letter)


# Three choices, then two: one departure gives 2 + 1 schedules, two give 2 × 1, and there is no third.
@pytest.mark.parametrize(("departures_max", "count"), [(0, 1), (1, 4), (2, 6), (3, 6)])
def test_explorer_of_three_free_handles_runs_every_schedule(departures_max: int, count: int) -> None:
    explored, orders = orders_of(start_three, 3, departures_max=departures_max)
    assert explored.schedules == count == len(orders) == len(set(orders))
    assert explored.choice_points == 2
    # main, a, b, c, main again, and asyncio's callback that stops the loop.
    assert explored.steps == 6
    assert explored.is_complete
    if departures_max >= 2:
        assert set(orders) == {"".join(order) for order in itertools.permutations("abc")}


def test_explorer_runs_fewest_departures_first() -> None:
    _, orders = orders_of(start_three, 3, departures_max=2)
    assert orders == ["abc", "bac", "cab", "acb", "bca", "cba"]


def test_sim_lane_keeps_its_order() -> None:
    def start(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
        loop.outside(say, "1", lane="stdout")
        loop.outside(say, "2", lane="stdout")
        loop.outside(say, "x", lane="stderr")

    assert orders_of(start, 3, departures_max=9)[1] == ["12x", "x12", "1x2"]


def test_sim_call_soon_keeps_its_order() -> None:
    def start(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
        for letter in "abcd":
            loop.call_soon(say, letter)

    explored, orders = orders_of(start, 4, departures_max=9)
    assert orders == ["abcd"]
    assert explored.choice_points == 0


def test_sim_tasks_keep_their_order_unless_they_have_lanes() -> None:
    async def says(say: Callable[[str], None], letters: str) -> None:
        for letter in letters:
            say(letter)
            await asyncio.sleep(0)

    tasks: list[asyncio.Task[None]] = []

    def plain(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
        tasks[:] = [loop.create_task(says(say, "ab")), loop.create_task(says(say, "xy"))]

    def in_lanes(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
        tasks[:] = [loop.create_lane_task(says(say, word), lane=word) for word in ("ab", "xy")]

    async def scenario(start: Callable[[sim.SimLoop, Callable[[str], None]], None], seen: set[str]) -> None:
        said: list[str] = []
        start(sim.current(), said.append)
        for task in tasks:
            await task
        seen.add("".join(said))

    seen: set[str] = set()
    assert sim.explore(lambda: scenario(plain, seen)).schedules == 1
    assert seen == {"axby"}
    sim.explore(lambda: scenario(in_lanes, seen), departures_max=4)
    assert seen == {"abxy", "axby", "axyb", "xyab", "xaby", "xayb"}


def test_sim_timers_of_one_instant_are_free_and_others_are_not() -> None:
    def start(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
        for letter, when in (("a", 0.3), ("b", 0.1 + 0.2), ("c", 0.4)):
            loop.call_at(when, say, letter)

    _, orders = orders_of(start, 3, departures_max=9)
    assert orders == ["abc", "bac"]


def test_sim_equal_timers_are_two() -> None:
    def start(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
        loop.call_at(1, say, "a")
        loop.call_at(1, say, "a")

    assert orders_of(start, 2, departures_max=9)[1] == ["aa", "aa"]
    assert orders_of(start, 2, departures_max=9, jitter_seconds=2)[1] == ["aa", "aa"]


def test_sim_due_timer_comes_anywhere_among_the_ready() -> None:
    def start(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
        def world() -> None:
            say("1")
            loop.call_soon(say, "2")

        loop.call_at(1, world)
        loop.call_at(1, say, "t")

    _, orders = orders_of(start, 3, departures_max=9)
    assert orders == ["1t2", "t12", "12t"]


def test_sim_timer_due_soon_may_fire_early() -> None:
    def start(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
        def fires() -> None:
            assert loop.time() == 0.01  # Early for the others, but on time for the timer.
            say("a")

        loop.call_soon(loop.call_soon, say, "x")
        loop.call_later(0.01, fires)
        loop.call_later(0.02, say, "b")
        loop.call_later(0.20, say, "c")

    assert orders_of(start, 4, departures_max=9)[1] == ["xabc"]
    _, orders = orders_of(start, 4, departures_max=9, jitter_seconds=0.05)
    assert set(orders) == {"xabc", "axbc", "abxc"}


def test_sim_postponed_handle_waits_until_nothing_else_is_ready() -> None:
    def start(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
        def chain(letters: str) -> None:
            say(letters[0])
            if letters[1:]:
                loop.call_soon(chain, letters[1:])

        loop.outside(say, "!", lane="late")
        loop.outside(say, "?", lane="late")
        loop.call_soon(chain, "abcde")
        loop.call_later(1, say, "t")

    assert "abcde!?t" not in orders_of(start, 8, departures_max=1)[1]
    assert "abcde!?t" in orders_of(start, 8, departures_max=1, postponing=True)[1]


def test_explorer_postponing_doubles_alternatives_where_it_matters() -> None:
    def start(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
        loop.outside(say, "a")
        loop.outside(say, "b")
        loop.call_later(0.01, say, "t")

    # Step 1 has a, b, the early t, and a or b postponed. The next step has b and the early t: b cannot be postponed,
    # because there is nothing else to run before it.
    explored, orders = orders_of(start, 3, departures_max=1, jitter_seconds=0.05, postponing=True)
    assert explored.schedules == 1 + 4 + 1
    assert orders == ["abt", "bat", "tab", "bat", "abt", "atb"]
    # One more departure: after b first, t early; after t first, b, a or b postponed; after a postponed, the early t,
    # because a waits already; after b postponed, the early t.
    assert orders_of(start, 3, departures_max=2, jitter_seconds=0.05, postponing=True)[0].schedules == 6 + 1 + 3 + 1 + 1


def test_sim_postponed_handle_is_not_postponed_again() -> None:
    # Six alternatives, then four: one departure gives 5 + 3 schedules.
    assert orders_of(start_three, 3, departures_max=1, postponing=True)[0].schedules == 1 + 5 + 3
    # Three more each after b or c first, and one after each postponement: to run the postponed handle anyway.
    assert orders_of(start_three, 3, departures_max=2, postponing=True)[0].schedules == 9 + 3 + 3 + 1 + 1 + 1


def test_explorer_beyond_schedules_max_runs_a_spread_and_counts_the_rest() -> None:
    def start(loop: sim.SimLoop, say: Callable[[str], None]) -> None:
        for letter in "abcdef":
            loop.outside(say, letter)

    # One departure gives 5 + 4 + 3 + 2 + 1 schedules.
    explored, orders = orders_of(start, 6, departures_max=2, schedules_max=16)
    assert (explored.schedules, explored.is_complete) == (16, False)
    explored, orders = orders_of(start, 6, departures_max=2, schedules_max=6)
    assert (explored.schedules, explored.left) == (6, 10)
    assert len(set(orders)) == 6
    assert orders[-1] == "abcdfe"  # The spread reaches the last schedule.
    assert orders_of(start, 6, departures_max=1, schedules_max=16)[0].is_complete


# Planted races: each is hidden in asyncio's order. The explorer finds and replays it, and it is gone in the fixed code.


def finds(broken: sim.Scenario, fixed: sim.Scenario, failure: type[BaseException]) -> sim.ScheduleFailed:
    sim.replay(broken, "")
    with pytest.raises(sim.ScheduleFailed) as found:
        sim.explore(broken)
    assert type(found.value.__cause__) is failure
    assert sim.shrink(broken, found.value.schedule) == found.value.schedule
    for _ in range(2):
        with pytest.raises(sim.ScheduleFailed) as replayed:
            sim.replay(broken, found.value.schedule)
        assert replayed.value.trace == found.value.trace
        assert type(replayed.value.__cause__) is failure
    assert repr(found.value.schedule) in str(found.value)
    explored = sim.explore(fixed)
    assert explored.is_complete
    assert explored.schedules > 2
    return found.value


def test_explorer_finds_an_update_lost_across_an_await() -> None:
    async def scenario(lock: asyncio.Lock | None) -> None:
        balance = 0

        async def add(waits: int) -> None:
            nonlocal balance
            for _ in range(waits):
                await asyncio.sleep(0)
            if lock:
                await lock.acquire()
            before = balance
            await asyncio.sleep(0)
            balance = before + 1
            if lock:
                lock.release()

        loop = sim.current()
        tasks = [loop.create_lane_task(add(waits), lane=f"caller {waits}") for waits in range(2)]
        for task in tasks:
            await task
        assert balance == 2

    found = finds(lambda: scenario(None), lambda: scenario(asyncio.Lock()), AssertionError)
    assert len(found.schedule.split()) == 1


class Permit:
    """One permit. A waiter gets it through a future, and may be cancelled before it wakes up."""

    def __init__(self, *, passes_on: bool) -> None:
        self.is_free = True
        self.waiters: list[asyncio.Future[None]] = []
        self.passes_on = passes_on

    async def acquire(self) -> None:
        if self.is_free:
            self.is_free = False
            return
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        try:
            await waiter
        except asyncio.CancelledError:
            if self.passes_on and waiter.done() and not waiter.cancelled():
                self.release()
            raise

    def release(self) -> None:
        while self.waiters:
            waiter = self.waiters.pop(0)
            if not waiter.done():
                waiter.set_result(None)
                return
        self.is_free = True


def test_explorer_finds_a_grant_lost_to_a_cancelled_waiter() -> None:
    async def scenario(*, passes_on: bool) -> None:
        loop, permit = sim.current(), Permit(passes_on=passes_on)
        await permit.acquire()
        first = loop.create_lane_task(permit.acquire(), lane="first", name="first")
        second = loop.create_lane_task(permit.acquire(), lane="second", name="second")
        await asyncio.sleep(0)
        loop.outside(first.cancel)
        loop.outside(permit.release)
        with suppress(asyncio.CancelledError):
            await first
            permit.release()
        await second

    found = finds(lambda: scenario(passes_on=False), lambda: scenario(passes_on=True), sim.Deadlock)
    assert "second\n" in str(found)
    assert "in Permit.acquire" in str(found)


def test_explorer_finds_a_stale_timer_that_acts_on_a_newer_turn() -> None:
    async def scenario(*, names_its_turn: bool) -> None:
        loop, turn = sim.current(), 1
        killed: list[int] = []

        def drain_expired(subject: int) -> None:
            if not names_its_turn or subject == turn:
                killed.append(turn)

        def boundary() -> None:
            nonlocal turn
            turn = 2
            drain.cancel()

        loop.call_at(5, boundary)
        # The timer only schedules the callback, and other callbacks may run between the two.
        drain = loop.call_at(5, loop.call_soon_threadsafe, drain_expired, turn)
        await asyncio.sleep(6)
        assert 2 not in killed

    finds(lambda: scenario(names_its_turn=False), lambda: scenario(names_its_turn=True), AssertionError)


def test_explorer_finds_the_deadlock_of_two_locks() -> None:
    async def scenario(*, is_ordered: bool) -> None:
        loop, left, right = sim.current(), asyncio.Lock(), asyncio.Lock()

        async def both(one: asyncio.Lock, other: asyncio.Lock, waits: int) -> None:
            for _ in range(waits):
                await asyncio.sleep(0)
            async with one:
                await asyncio.sleep(0)
                async with other:
                    pass

        tasks = [
            loop.create_lane_task(both(left, right, 0), lane="p"),
            loop.create_lane_task(both(*((left, right) if is_ordered else (right, left)), 1), lane="q"),
        ]
        for task in tasks:
            await task

    found = finds(lambda: scenario(is_ordered=False), lambda: scenario(is_ordered=True), sim.Deadlock)
    assert str(found).count(".both\n") == 2


def test_shrink_reduces_a_schedule_to_what_it_needs() -> None:
    async def scenario() -> None:
        loop, said = sim.current(), list[str]()
        for letter in "abc":
            loop.outside(said.append, letter)
        await asyncio.sleep(1)
        assert said.index("a") < said.index("c")

    with pytest.raises(sim.ScheduleFailed):
        sim.replay(scenario, "1:2 2:1")
    assert sim.shrink(scenario, "1:2 2:1") == "1:2"
    with pytest.raises(UsageError, match="does not fail"):
        sim.shrink(scenario, "1:1")


# Kinds of failures, and their messages


def fails(scenario: sim.Scenario, failure: type[BaseException], *words: str, steps_max: int = 1000) -> None:
    with pytest.raises(sim.ScheduleFailed) as found:
        sim.explore(scenario, steps_max=steps_max)
    assert type(found.value.__cause__) is failure
    for word in words:
        assert word in str(found.value)
    assert found.value.schedule == ""


def test_sim_deadlock_names_the_waiting_tasks() -> None:
    async def inner() -> None:
        await asyncio.get_running_loop().create_future()

    async def scenario() -> None:
        await asyncio.sleep(7)
        await asyncio.wait([asyncio.create_task(inner(), name="stuck")])

    fails(scenario, sim.Deadlock, "time 7", "stuck\n", "scenario\n", "inner\n", "Future pending")


def test_sim_livelock_names_what_ran() -> None:
    def again() -> None:
        asyncio.get_running_loop().call_soon(again)

    async def scenario() -> None:
        again()
        await asyncio.get_running_loop().create_future()

    fails(scenario, sim.Livelock, "1000 steps", "again")


def test_sim_steps_max_is_the_last_number_that_passes() -> None:
    async def scenario() -> None:
        for _ in range(7):
            await asyncio.sleep(0)

    steps = len(sim.replay(scenario, ""))
    sim.explore(scenario, steps_max=steps)
    fails(scenario, sim.Livelock, steps_max=steps - 1)


def test_sim_unhandled_exception_is_a_failure() -> None:
    def raises() -> None:
        raise LookupError("lost")

    async def callback() -> None:
        asyncio.get_running_loop().call_soon(raises)
        await asyncio.sleep(1)

    async def task() -> None:
        async def raises_later() -> None:
            raises()

        await asyncio.wait([asyncio.create_task(raises_later(), name="loser")])

    fails(callback, sim.Unhandled, "raises")
    fails(task, sim.Unhandled, "loser")


def test_sim_task_left_behind_is_a_failure() -> None:
    cleaned: list[str] = []

    async def stays() -> None:
        try:
            await asyncio.sleep(1)
        finally:
            cleaned.append("up")

    async def scenario() -> None:
        task = asyncio.create_task(stays(), name="stays")
        await asyncio.sleep(0)
        assert not task.done()

    fails(scenario, sim.TasksLeft, "stays\n")
    assert set(cleaned) == {"up"}


def test_sim_stubborn_task_does_not_outlive_its_run() -> None:
    async def stubborn() -> None:
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(1)

    async def bad_loser() -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            await asyncio.get_running_loop().create_future()

    async def scenario() -> None:
        tasks = [asyncio.create_task(stubborn()), asyncio.create_task(bad_loser())]
        await asyncio.sleep(0)
        assert tasks
        pytest.fail("on purpose")

    fails(scenario, pytest.fail.Exception, "on purpose")


def test_sim_unfinished_generator_is_closed() -> None:
    closed: list[bool] = []

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
        finally:
            await asyncio.sleep(1)
            closed.append(True)

    async def scenario() -> None:
        generator = numbers()
        kept.append(generator)
        await anext(generator)

    kept: list[AsyncIterator[int]] = []
    sim.replay(scenario, "")
    assert closed == [True]


# A schedule is deterministic, or the explorer reports an error.


def test_explorer_reports_a_scenario_that_differs_between_runs() -> None:
    runs = itertools.count()

    async def scenario() -> None:
        for _ in range(next(runs)):
            await asyncio.sleep(0)

    with pytest.raises(sim.NotDeterministic, match="asyncio's own order"):
        sim.explore(scenario)


def test_explorer_reports_a_scenario_that_changes_later() -> None:
    runs = itertools.count()

    async def scenario() -> None:
        loop, said = sim.current(), list[str]()
        await asyncio.sleep(next(runs) // 4)
        for letter in "abc":
            loop.outside(said.append, letter)
        await asyncio.sleep(1)

    with pytest.raises(sim.NotDeterministic, match="ran differently before step"):
        sim.explore(scenario)


def test_explorer_reports_a_failure_that_does_not_reproduce() -> None:
    runs = itertools.count()

    async def scenario() -> None:
        for _ in range(2):
            sim.current().outside(int)
        await asyncio.sleep(1)
        assert next(runs) != 2

    with pytest.raises(sim.NotDeterministic, match="failed only once"):
        sim.explore(scenario)


def test_replay_reports_a_schedule_that_does_not_fit() -> None:
    async def scenario() -> None:
        for _ in range(2):
            sim.current().outside(int)
        await asyncio.sleep(1)

    assert [step.label for step in sim.replay(scenario, "1:1")][:3] == ["main", "int", "int"]
    with pytest.raises(sim.NotDeterministic, match="step 1 has 2 alternatives"):
        sim.replay(scenario, "1:2")
    with pytest.raises(sim.NotDeterministic, match="nothing to choose at step 2"):
        sim.replay(scenario, "2:1")
    for schedule in ("1", "1:x", "1:0", "-1:1", "1:1 1:1"):
        with pytest.raises(UsageError, match="not a schedule"):
            sim.replay(scenario, schedule)


async def test_explorer_refuses_to_run_inside_a_loop() -> None:
    async def scenario() -> None:
        pass

    with pytest.raises(UsageError, match="a loop is running"):
        sim.explore(scenario)
