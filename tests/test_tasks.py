"""Background tasks and concurrent work: log lines, bounds, errors."""

from __future__ import annotations

import asyncio

import pytest

from banksman.tasks import OwnedTasks, for_each


async def test_failed_background_task_is_logged_by_its_name(caplog: pytest.LogCaptureFixture) -> None:
    async def renew_leases() -> None:
        raise ValueError("odd")

    tasks = OwnedTasks()
    tasks.start(renew_leases())
    await tasks.wait()
    (line,) = caplog.messages
    assert line.startswith("background task failed (task=")
    assert line.endswith("renew_leases error=ValueError('odd'))")


async def test_work_for_each_item_runs_at_once_up_to_its_bound_and_in_order() -> None:
    begun: list[int] = []
    gates = [asyncio.Event() for _ in range(5)]

    async def work(item: int) -> None:
        begun.append(item)
        await gates[item].wait()

    everything = asyncio.ensure_future(for_each(range(5), work, at_once=2))
    expected = [0, 1]
    for ends in (1, 0, 3, 2, 4):
        # More passes of the loop than a task needs to begin.
        for _ in range(10):
            await asyncio.sleep(0)
        assert begun == expected
        gates[ends].set()
        expected = list(range(min(5, len(expected) + 1)))
    await everything


async def test_error_in_work_for_one_item_cancels_the_rest() -> None:
    begun: list[int] = []

    async def work(item: int) -> None:
        begun.append(item)
        if item == 1:
            raise ValueError("odd")
        await asyncio.Event().wait()

    with pytest.raises(ExceptionGroup) as caught:
        await for_each(range(5), work, at_once=2)
    assert [repr(each) for each in caught.value.exceptions] == ["ValueError('odd')"]
    assert begun == [0, 1]
