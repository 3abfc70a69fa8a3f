"""What every engine of the log must do, sentence by sentence of `banksman.store.log`.

An engine's test module makes a subclass of `LogConformance` whose `open_log` opens one, and gets all of these; if its
store can be opened by several handles, it makes one of `SharedLogConformance` too. A wrapper that injects faults, or a
cluster, is an engine like any other. Nothing here looks inside: what is checked is what is answered, what is read and
what a wait lets through. And nothing here knows how long anything takes.

Two things an engine may choose, and the tests allow for both. What is not answered yet when another writer claims the
session, or when it is deleted, may be committed or refused, but only as a whole: some from the front, none behind. And
how much a page holds is its own affair as long as it holds an event, is no longer than was asked, and goes on where the
last one ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from banksman.errors import StoreError

# Before their import, or their asserts would fail without saying what they saw.
pytest.register_assert_rewrite(
    "tests.store.kit",
    "tests.store.conformance_writes",
    "tests.store.conformance_reads",
    "tests.store.conformance_order",
    "tests.store.conformance_sessions",
    "tests.store.conformance_shared",
    "tests.store.conformance_machine",
)

from tests.store.conformance_machine import Machine  # noqa: E402
from tests.store.conformance_order import OrderConformance  # noqa: E402
from tests.store.conformance_reads import ReadingConformance  # noqa: E402
from tests.store.conformance_sessions import SessionsConformance  # noqa: E402
from tests.store.conformance_shared import SharedLogConformance  # noqa: E402
from tests.store.conformance_writes import WritingConformance  # noqa: E402
from tests.store.kit import (  # noqa: E402
    AT,
    Answers,
    Refusal,
    Writer,
    chunk,
    data,
    everything,
    everything_placed,
    follow,
    follow_all,
    known,
    lines,
    until,
)
from tests.thorough import sample  # noqa: E402

__all__ = [
    "AT",
    "Answers",
    "LogConformance",
    "Refusal",
    "SharedLogConformance",
    "Writer",
    "chunk",
    "data",
    "everything",
    "everything_placed",
    "follow",
    "follow_all",
    "known",
    "lines",
    "until",
]


class LogConformance(WritingConformance, ReadingConformance, OrderConformance, SessionsConformance):
    """Subclass it as `Test…` and say how a log is opened."""

    # Of what is done at random, against a list: a log for each.
    examples = sample(60)

    # Closing.

    async def test_close_commits_and_answers_pending_appends(self) -> None:
        log = await self.open_log()
        writer = await Writer.claim(log)
        reader = asyncio.ensure_future(log.wait_past("s", 1))
        await asyncio.sleep(0)
        writer.append(b"a")
        writer.advance()
        writer.lease("claude:x")
        writer.append(b"b")
        await log.close()
        assert writer.answers.kinds == [None] * 4
        await reader

    async def test_append_is_refused_once_close_has_begun(self) -> None:
        log = await self.open_log()
        writer = await Writer.claim(log)
        writer.append(b"a")
        closing = asyncio.ensure_future(log.close())
        await asyncio.sleep(0)
        writer.append(b"b")
        await closing
        writer.append(b"c")
        writer.append()
        writer.append(b"d", epoch=0)
        writer.lease("claude:x")
        writer.advance()
        assert await writer.answers.all() == [None, *[StoreError] * 6]

    async def test_wait_past_raises_store_error_when_log_closes(self) -> None:
        log = await self.open_log()
        await (await Writer.claim(log)).commit(b"a")
        waits = [asyncio.ensure_future(log.wait_past(name, 1)) for name in ("s", "s", "unknown")]
        await asyncio.sleep(0)
        await log.close()
        for wait in waits:
            with pytest.raises(StoreError):
                await wait

    async def test_closed_log_raises_store_error_on_every_call(self) -> None:
        log = await self.open_log()
        writer = await Writer.claim(log)
        await writer.commit(b"a")
        position = (await log.read_many(None)).position
        await log.close()
        waits: list[Callable[[], Awaitable[object]]] = [
            lambda: log.claim("s", agent="claude"),
            lambda: log.restore("t", name=None, agent="", chunks=lambda: [chunk(1, b"x")]),
            lambda: log.read("s", 0),
            lambda: log.snapshot("s"),
            lambda: log.wait_past("s", 0),
            lambda: log.read_many(None),
            lambda: log.wait_past_position(position),
            lambda: log.rename("s", "a", expected=None),
            lambda: log.trim("s", 1),
            lambda: log.delete("s"),
        ]
        for wait in waits:
            with pytest.raises(StoreError):
                await wait()
        calls: list[Callable[[], object]] = [lambda: log.head("s"), lambda: log.find("s"), log.sessions]
        for call in calls:
            with pytest.raises(StoreError):
                call()
        writer.release()  # Which the close has done.

    async def test_close_is_idempotent_and_safe_to_call_concurrently(self) -> None:
        log = await self.open_log()
        writer = await Writer.claim(log)
        writer.append(b"a")
        first = asyncio.ensure_future(log.close())
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(log.close(), log.close())
        await log.close()
        await asyncio.wait([first])
        assert await writer.answers.all() == [None]

    # Everything at once, against a list.

    @pytest.mark.explored
    def test_log_behaves_like_the_list_model(self) -> None:
        open_log = self.open_log

        class OfThisEngine(Machine):
            def __init__(self) -> None:
                super().__init__(open_log)

        run_state_machine_as_test(
            OfThisEngine,
            settings=settings(
                max_examples=self.examples,
                stateful_step_count=15,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
