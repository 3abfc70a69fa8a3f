"""Tests of the batch of operations that are written together, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from banksman.store.operation_batch import BATCH_BYTES_MAX, BATCH_OPERATIONS_MAX, COALESCE_SECONDS, OperationBatch
from banksman.store.sqlite.operations import Operation


class Clock:
    """The part of an event loop that a batch uses. Time moves only by `advance`."""

    def __init__(self) -> None:
        self.now = 100.0
        self._timers: list[asyncio.TimerHandle] = []

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return self.call_at(self.now, callback)

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, (), cast(asyncio.AbstractEventLoop, self))
        self._timers.append(timer)
        return timer

    def get_debug(self) -> bool:
        return False

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        pass

    def advance(self, seconds: float = 0.0) -> None:
        """Let the time pass, and run what is due."""
        self.now += seconds
        due = [timer for timer in self._timers if timer.when() <= self.now]
        self._timers = [timer for timer in self._timers if timer not in due]
        for timer in due:
            if not timer.cancelled():
                timer._run()


class Waiting(Operation):
    can_wait = True

    def __init__(self, size: int = 1) -> None:
        super().__init__(lambda _: None)
        self.size = size


class Urgent(Operation):
    def __init__(self) -> None:
        super().__init__(lambda _: None)


def batch() -> tuple[Clock, list[list[Operation]], OperationBatch[Operation]]:
    clock, passed = Clock(), list[list[Operation]]()
    return clock, passed, OperationBatch(cast(asyncio.AbstractEventLoop, clock), passed.append)


def test_batch_passes_a_lone_operation_on_in_the_next_pass_of_the_loop() -> None:
    clock, passed, waiting = batch()
    for _ in range(3):
        one, other = Waiting(), Waiting()
        waiting.add(one)
        waiting.add(other)
        clock.advance()
        assert passed.pop() == [one, other]
        clock.advance(COALESCE_SECONDS)
    assert passed == []


def test_batch_collects_the_operations_of_a_window_and_passes_them_on_at_its_end() -> None:
    clock, passed, waiting = batch()
    first, second, third = Waiting(), Waiting(), Waiting()
    for one in (first, second, third):
        waiting.add(one)
        clock.advance(COALESCE_SECONDS / 4)
    assert passed == [[first]]
    clock.advance(COALESCE_SECONDS)
    assert passed == [[first], [second, third]]


def test_batch_passes_an_urgent_operation_on_in_the_next_pass_behind_those_that_wait() -> None:
    clock, passed, waiting = batch()
    first, second, urgent, behind = Waiting(), Waiting(), Urgent(), Waiting()
    waiting.add(first)
    clock.advance()
    waiting.add(second)
    waiting.add(urgent)
    waiting.add(behind)
    # A caller of `add` must not be called back by it.
    assert passed == [[first]]
    clock.advance()
    assert passed == [[first], [second, urgent, behind]]
    # The timer of the window has nothing left to pass on.
    clock.advance(COALESCE_SECONDS)
    assert len(passed) == 2


def test_batch_of_many_bytes_does_not_wait() -> None:
    clock, passed, waiting = batch()
    first, second, large = Waiting(), Waiting(), Waiting(BATCH_BYTES_MAX + 1)
    waiting.add(first)
    clock.advance()
    waiting.add(second)
    waiting.add(large)
    clock.advance()
    assert passed == [[first], [second, large]]


def test_batch_of_many_operations_does_not_wait() -> None:
    clock, passed, waiting = batch()
    waiting.add(Waiting())
    clock.advance()
    for _ in range(BATCH_OPERATIONS_MAX - 1):
        waiting.add(Waiting())
    clock.advance()
    assert len(passed) == 1
    waiting.add(Waiting())
    clock.advance()
    assert [len(operations) for operations in passed] == [1, BATCH_OPERATIONS_MAX]


def test_batch_delays_no_operation_by_more_than_the_window() -> None:
    clock, passed, waiting = batch()
    added: list[tuple[Operation, float]] = []
    for _ in range(100):
        one = Waiting()
        waiting.add(one)
        added.append((one, clock.now))
        clock.advance(COALESCE_SECONDS / 7)
        late = [each for each, at in added if at <= clock.now - COALESCE_SECONDS]
        assert set(late) <= {each for group in passed for each in group}
    assert len(passed) < 20
