"""Timers of a session: which fire, when and in which order, and what they cost the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from banksman.core.session.facts import Subject, Timer
from banksman.sessions.session_timers import SessionTimers
from banksman.testing import sim

A, B, C = (Timer.DRAIN, "a"), (Timer.WRITE, "b"), (Timer.SETTLE, "c")


class Scene:
    """The timers of one session, and what has fired: subject and time."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.fired: list[tuple[Subject, float]] = []
        # Called for a timer that fires.
        self.then: Callable[[Subject], None] = lambda _: None
        self.timers = SessionTimers(lambda fire: fire(), self._fire)

    def _fire(self, subject: Subject) -> None:
        self.fired.append((subject, self.loop.time()))
        self.then(subject)

    def start(self, subject: Subject, seconds: float) -> None:
        self.timers.start(subject, self.loop.time() + seconds)


def simulated(program: Callable[[Scene], Awaitable[None]]) -> None:
    async def main() -> None:
        scene = Scene()
        await program(scene)
        scene.timers.cancel_all()

    sim.explore(main)


def test_timers_fire_in_the_order_of_their_times() -> None:
    async def program(scene: Scene) -> None:
        began = scene.loop.time()
        for subject, seconds in ((A, 3.0), (B, 1.0), (C, 2.0)):
            scene.start(subject, seconds)
        await asyncio.sleep(4)
        assert scene.fired == [(B, began + 1), (C, began + 2), (A, began + 3)]
        assert not scene.timers.running

    simulated(program)


def test_cancelled_timer_does_not_fire_and_those_behind_it_do() -> None:
    async def program(scene: Scene) -> None:
        began = scene.loop.time()
        scene.start(A, 1.0)
        scene.start(B, 2.0)
        scene.timers.cancel(A)
        await asyncio.sleep(3)
        assert scene.fired == [(B, began + 2)]

    simulated(program)


def test_restarted_timer_fires_only_at_its_new_time() -> None:
    async def program(scene: Scene) -> None:
        began = scene.loop.time()
        scene.start(A, 1.0)
        scene.start(A, 2.0)
        scene.start(B, 3.0)
        scene.start(B, 1.0)
        await asyncio.sleep(4)
        assert scene.fired == [(B, began + 1), (A, began + 2)]

    simulated(program)


def test_timer_that_another_one_cancels_or_restarts_at_the_same_moment_does_not_fire() -> None:
    async def program(scene: Scene) -> None:
        began = scene.loop.time()

        def then(subject: Subject) -> None:
            if subject == A:
                scene.timers.cancel(B)
                scene.start(C, 1.0)

        scene.then = then
        for subject in (A, B, C):
            scene.timers.start(subject, began + 1)
        await asyncio.sleep(3)
        # In any order, because all were due at the same time. After A, neither of the others may fire.
        assert scene.fired[-1][0] == C
        behind = scene.fired[[subject for subject, _ in scene.fired].index(A) :]
        assert behind == [(A, began + 1), (C, began + 2)]

    simulated(program)


def test_failing_timer_does_not_stop_the_others() -> None:
    async def main() -> None:
        failures: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))
        scene, over = Scene(), asyncio.Event()

        def then(subject: Subject) -> None:
            if subject == A:
                raise ValueError
            over.set()

        scene.then = then
        scene.timers.start(A, 0.0)
        scene.timers.start(B, 0.0)
        await over.wait()
        assert [type(failure["exception"]) for failure in failures] == [ValueError]

    asyncio.run(main())


def test_timer_by_the_wall_clock_fires_when_that_clock_has_passed_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = 1000.0
    monkeypatch.setattr(time, "time", lambda: wall)

    async def program(scene: Scene) -> None:
        nonlocal wall
        wall = 1000.0
        scene.timers.wait_until(A, 1010.0)
        assert A in scene.timers.running
        assert not scene.timers.dues
        await asyncio.sleep(11)  # The wall clock has stood still.
        assert scene.fired == []
        wall = 1020.0
        await asyncio.sleep(11)
        assert [subject for subject, _ in scene.fired] == [A]
        assert not scene.timers.walls

    simulated(program)


async def test_timers_of_a_turn_leave_the_queue_of_the_loop_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    scene, started = Scene(), 0
    call_at = loop.call_at

    def counted(*args: Any, **options: Any) -> asyncio.TimerHandle:
        nonlocal started
        started += 1
        return call_at(*args, **options)

    monkeypatch.setattr(loop, "call_at", counted)
    for _ in range(100):
        for subject, seconds in ((B, 60.0), (A, 60.0), (C, 60.0)):
            scene.start(subject, seconds)
            scene.timers.cancel(subject)
    assert started == 1
    scene.timers.cancel_all()
