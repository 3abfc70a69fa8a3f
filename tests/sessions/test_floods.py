"""An agent that says too much keeps nobody else waiting, and can be ended."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest

from banksman import Host, Outcome
from banksman.core import event as kinds
from banksman.run.sessions.backlog import PASS_SECONDS_MAX, SLICE_LINES_MAX, Backlog, slices
from banksman.testing import fake_agent


def _busy() -> None:
    """Work that takes a quarter of a pass."""
    until = time.monotonic() + PASS_SECONDS_MAX / 4
    while time.monotonic() < until:
        pass


async def test_others_have_their_turn_between_the_passes() -> None:
    loop = asyncio.get_running_loop()
    order: list[str] = []
    is_empty = loop.create_future()
    backlog = Backlog(loop, lambda: is_empty.set_result(None))

    def step(name: str) -> Callable[[], None]:
        def do() -> None:
            _busy()
            order.append(name)

        return do

    def other() -> None:
        order.append("other")
        if not is_empty.done():
            loop.call_soon(other)

    loop.call_soon(other)
    names = [str(number) for number in range(20)]
    backlog.take(*(step(name) for name in names[:12]))
    assert backlog
    # What comes later comes after.
    backlog.take(*(step(name) for name in names[12:]))
    await is_empty
    assert not backlog
    assert [name for name in order if name != "other"] == names
    runs = "".join("x" if name == "other" else "." for name in order).strip("x").split("x")
    # As many as fit into a pass, and not one pass more.
    assert max(map(len, runs)) <= 5


async def test_what_fits_into_one_pass_is_done_at_once() -> None:
    done: list[int] = []
    backlog = Backlog(asyncio.get_running_loop(), lambda: done.append(-1))

    def first() -> None:
        done.append(1)
        backlog.take(lambda: done.append(3))
        assert done == [1], "in its order, and not inside of another"

    backlog.take(first, lambda: done.append(2))
    assert done == [1, 2, 3]
    assert not backlog


def test_slices_are_the_whole_in_its_order() -> None:
    few, many = [b"x"] * SLICE_LINES_MAX, [b"%d" % number for number in range(10 * SLICE_LINES_MAX + 1)]
    assert slices(few) == [few]
    assert [line for part in slices(many) for line in part] == many
    assert max(map(len, slices(many))) == SLICE_LINES_MAX


@pytest.mark.thorough
async def test_a_program_that_only_says_yes_holds_up_nobody_and_is_ended() -> None:
    """Half a million lines a read."""
    async with asyncio.timeout(60), Host("memory:") as host:
        flood = await host.open("custom", command=["yes"])
        lost = await flood.ask("hello")
        async for event in flood.follow():
            if event.kind == kinds.UPDATE:
                break
        session = await host.open("claude", command=fake_agent.command())
        turn = await session.ask("@@say hello")
        assert (await turn.outcome()).text == "hello"
        await lost.interrupt()
        await flood.close()
        assert (await lost.outcome()).kind in (Outcome.WITHDRAWN, Outcome.FAILED)
        assert (await (await session.ask("@@say still here")).outcome()).text == "still here"


async def test_the_last_line_of_many_is_heard_before_the_end() -> None:
    """It has no newline, and so is known for a line only when the output has ended: then all else may wait already."""
    async with asyncio.timeout(60), Host("memory:") as host:
        session = await host.open("custom", command=["sh", "-c", "yes | head -n 12000; printf last"])
        turn = await session.ask("hello")
        assert (await turn.outcome()).kind is Outcome.FAILED
        events = [event async for event in session.events(waits=False)]
        assert [event.kind for event in events if event.data == b"last"] == [kinds.UPDATE]
