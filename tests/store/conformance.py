"""Conformance suite of the log: the contract of `banksman.store.log`, for every engine.

The test module of an engine defines a subclass of `LogConformance` with an `open_log`, and inherits all tests. If
several handles can open the store, the module also defines a subclass of `SharedLogConformance`. A wrapper that injects
faults, or a cluster, is an engine like any other. The tests use only the public answers, reads and waits of a log. They
make no assumption about time.

The tests allow for two choices of an engine:

- Appends that have no answer yet when another writer claims the session, or when the session is deleted, may be
  committed or refused. Each append is treated whole: some from the front are committed, and none behind a refused one.
- A page may have any size, if it has at least one event, is at most as long as the limit, and continues where the last
  page ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from banksman.errors import StoreError

# Before the imports: otherwise a failed assert shows no values.
pytest.register_assert_rewrite(
    "tests.store.kit",
    "tests.store.conformance_writes",
    "tests.store.conformance_reads",
    "tests.store.conformance_order",
    "tests.store.conformance_sessions",
    "tests.store.conformance_shared",
    "tests.store.conformance_machine",
    "tests.store.conformance_usage",
)

from tests.store.conformance_machine import Machine  # noqa: E402
from tests.store.conformance_order import OrderConformance  # noqa: E402
from tests.store.conformance_reads import ReadingConformance  # noqa: E402
from tests.store.conformance_sessions import SessionsConformance  # noqa: E402
from tests.store.conformance_shared import SharedLogConformance  # noqa: E402
from tests.store.conformance_usage import UsageConformance  # noqa: E402
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


class LogConformance(WritingConformance, ReadingConformance, OrderConformance, SessionsConformance, UsageConformance):
    """Subclass it as `Test…` and implement `open_log`."""

    # Number of random runs against the list model. Each run opens a new log.
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
        writer.release()  # The close has released it already.

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

    # Random calls, compared with the list model.

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
