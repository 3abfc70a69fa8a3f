"""Trace ids in the log: of requests, and of running turns by the session that a record names."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.server.kit import Served
from tests.server.ops.test_telemetry import HEADERS, PARENT, TRACE, Collector

from banksman import Host
from banksman.server.ops import trace_logs
from banksman.server.ops.trace_logs import TracedRequests
from banksman.testing import fake_agent

log = logging.getLogger("banksman.test")


class Records(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.ids: list[tuple[Any, Any]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.ids.append((getattr(record, "trace_id", None), getattr(record, "span_id", None)))


@pytest.fixture
def records() -> Iterator[Records]:
    handler = Records()
    logging.getLogger().addHandler(handler)
    yield handler
    logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("otel", [True, False])
def test_line_of_a_request_has_its_trace_if_spans_are_exported(tmp_path: Path, otel: bool) -> None:
    with Collector() as collector:
        settings: dict[str, Any] = {"otel_endpoint": collector.url} if otel else {}
        with Served(tmp_path / "server", log_format="json", log_level="debug", **settings) as served:
            served.get("/v1/sessions?limit=3", headers=HEADERS)
            served.get("/v1/sessions?limit=4")
            served.stop()
        lines = [json.loads(line) for line in served.log.read_text(encoding="utf-8").splitlines()]
        lines = [line for line in lines if line["message"].startswith("GET /v1/sessions ")]
        wanted = [(TRACE, PARENT) if otel else (None, None), (None, None)]
        assert [(line.get("trace_id"), line.get("span_id")) for line in lines] == wanted


async def test_record_that_names_a_session_has_the_span_of_its_running_turn(records: Records) -> None:
    async with Host("memory:") as host:
        with trace_logs.tracing(host):
            session = await host.open("claude", command=fake_agent.command())
            log.warning("session %s: before", session.id)
            turn = await session.ask("@@say begun\n@@hang", trace=HEADERS["traceparent"])
            async for _ in turn:
                break
            log.warning("session %s: now", session.id)
            log.warning("other", extra={"session": session.id})
            log.warning("session %s: another one", "s-0123456789abcdef")
            # The state of a session is not read in another thread.
            thread = threading.Thread(target=log.warning, args=("session %s: there", session.id))
            thread.start()
            await asyncio.to_thread(thread.join)
            await turn.interrupt()
            log.warning("session %s: after", session.id)
            own = await session.ask("@@say begun\n@@hang")
            async for _ in own:
                break
            log.warning("session %s: a trace of its own", session.id)
        log.warning("session %s: without the filter", session.id)
    none = (None, None)
    span = (TRACE, turn.id.removeprefix("t-"))
    assert records.ids[:7] == [none, span, span, none, none, none, (records.ids[6][0], own.id.removeprefix("t-"))]
    assert len(records.ids[6][0]) == 32
    assert records.ids[7] == none


async def test_task_that_outlives_its_request_has_no_trace_of_it(records: Records) -> None:
    go = asyncio.Event()
    tasks: list[asyncio.Task[None]] = []

    async def later() -> None:
        await go.wait()
        log.warning("after the request")

    async def app(scope: Any, receive: Any, send: Any) -> None:
        tasks.append(asyncio.create_task(later()))
        log.warning("in the request")

    async with Host("memory:") as host:
        with trace_logs.tracing(host):
            headers = [(b"traceparent", HEADERS["traceparent"].encode())]
            nothing: Any = None
            await TracedRequests(app)({"headers": headers}, nothing, nothing)
            go.set()
            await tasks[0]
            for bad in (b"00-x", b"\xff"):
                await TracedRequests(app)({"headers": [(b"traceparent", bad)]}, nothing, nothing)
            await asyncio.gather(*tasks)
    assert records.ids[:2] == [(TRACE, PARENT), (None, None)]
    assert set(records.ids[2:]) == {(None, None)}
