"""OpenTelemetry: export the spans of turns by OTLP over HTTP. The extra is `banksman[otel]`.

The reporter reads the log of each session of this host, four times a second and each event once. At
the end of a turn it makes the spans of this turn (`turn_spans.py`). A thread of the SDK sends them
in batches. So a collector that is slow or down delays no turn; spans beyond the SDK's queue are
dropped.

Without `otel_endpoint` nothing of this is imported, and no event is read.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from banksman import Event, __version__
from banksman.errors import BanksmanError, UsageError
from banksman.runtime.base_host import Host
from banksman.server.ops import trace_logs
from banksman.server.ops.turn_spans import MARKS, SpanData, TurnSpans
from banksman.server.server_settings import ServerSettings
from banksman.sessions.session import Session
from banksman.sessions.traces import TraceContext
from banksman.store.log_values import READ_EVENTS_MAX
from banksman.tasks import OwnedTasks

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

# How often the reporter looks for new events. They are still in memory then.
POLL_SECONDS = 0.25
# For one request to the collector, and for the last ones when the server stops.
EXPORT_SECONDS_MAX = 5.0

log = logging.getLogger("banksman.telemetry")

Export = Callable[[TraceContext, SpanData], None]


@asynccontextmanager
async def reporting(host: Host, settings: ServerSettings) -> AsyncGenerator[None]:
    """Export the spans of the turns that end on this host, until the context exits."""
    assert settings.otel_endpoint is not None
    export, close = _exporter(settings.otel_endpoint)
    reporter = SpanReporter(host, export, has_content=settings.otel_content)
    tasks = OwnedTasks()
    try:
        tasks.start(reporter.run())
        with trace_logs.tracing(host):
            yield
    finally:
        await tasks.end()
        # The turns that ended with the server.
        await reporter.report()
        await asyncio.to_thread(close)


class SpanReporter:
    """Reads the logs of this host's sessions, and exports the spans of each turn that has ended."""

    def __init__(self, host: Host, export: Export, *, has_content: bool) -> None:
        self._host = host
        self._export = export
        self._has_content = has_content
        self._began = time.time()
        self._readers: dict[str, _SessionReader] = {}

    async def run(self) -> None:
        """Report turns until this is cancelled."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            await self.report()

    async def report(self) -> None:
        """Read what is new in the sessions of this host, and report the turns that ended."""
        # In a cluster each host reports its own sessions.
        sessions = {session.id: session for session in self._host.our_sessions()}
        for id in self._readers.keys() - sessions.keys():
            del self._readers[id]
        for id, session in sessions.items():
            try:
                reader = self._readers.get(id)
                if reader is None:
                    reader = _SessionReader(session, self._has_content)
                    self._readers[id] = reader
                    await reader.begin(self._began)
                for spans in await reader.ended():
                    for span in spans.spans():
                        self._export(spans.context, span)
            except BanksmanError as exc:
                # The store failed, or the session was deleted.
                log.debug("cannot read events for spans: %s", exc, extra={"session": id})


class _SessionReader:
    """Reads a session from one event to the next, and keeps the spans of its open turns."""

    def __init__(self, session: Session, has_content: bool) -> None:
        self._session = session
        self._has_content = has_content
        self._mark = MARKS.get(session.dialect.name)
        self._seq = 0
        self._open: dict[str, TurnSpans] = {}

    async def begin(self, began: float) -> None:
        """Start at the first event since the reporter began, or near it."""
        if self._session.created >= began:
            return
        events = await self._session.page_before(self._session.committed + 1)
        self._seq = next(
            (one.seq for one in events if one.at >= began), self._session.committed + 1
        )
        self._seq -= 1

    async def ended(self) -> list[TurnSpans]:
        """Read to the end of the log, and return the spans of the turns that ended."""
        found: list[TurnSpans] = []
        # An idle session costs one lookup.
        while self._session.committed > self._seq:
            # The events of the last second are in memory, where they cost least.
            events = self._session.recent(self._seq, READ_EVENTS_MAX)
            events = events or (await self._session.page(self._seq)).events
            if not events:
                break
            found += [spans for turn in self._take(events) if (spans := await self._end(turn))]
            self._seq = events[-1].seq
        return found

    def _take(self, events: Sequence[Event]) -> list[str]:
        """Pass the events on to their turns, and return the turns that they end."""
        ends: list[str] = []
        mark, opened = self._mark, self._open
        for event in events:
            turn, kind = event.turn, event.kind
            if kind == "update":
                # Nearly every event. Those that matter are decoded.
                if turn in opened and (mark is None or mark in event.data):
                    opened[turn].add(event)
            elif kind == "process.adopted":
                for spans in opened.values():
                    spans.add(event)
            elif turn is not None:
                if kind == "turn.queued" or (kind == "turn.started" and turn not in opened):
                    opened.setdefault(turn, self._spans(turn))
                if turn in opened:
                    opened[turn].add(event)
                if kind == "turn.ended":
                    ends.append(turn)
        return ends

    async def _end(self, turn: str) -> TurnSpans | None:
        spans = self._open.pop(turn, None)
        if spans is not None and spans.is_whole:
            return spans
        # The turn began before this reader, perhaps under another host.
        place = await self._session.find_turn(turn)
        if place is None or place.ended is None:
            return spans
        spans, seq = self._spans(turn), place.first - 1
        while seq < place.ended:
            page = await self._session.page(seq)
            if not page.events:
                break
            for event in page.events:
                if event.seq <= place.ended:
                    spans.add(event)
            seq = page.events[-1].seq
        return spans

    def _spans(self, turn: str) -> TurnSpans:
        session = self._session
        dialect = session.dialect.name
        return TurnSpans(session.id, session.agent, dialect, turn, has_content=self._has_content)


def _exporter(endpoint: str) -> tuple[Export, Callable[[], None]]:
    """Return the function that exports a span, and the one that sends the rest and closes."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
            OTLPSpanExporter,
        )
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as exc:
        hint = "pip install 'banksman[otel]', or leave otel_endpoint out"
        raise UsageError(f"cannot send spans: {exc}", hint=hint) from exc
    url = f"{endpoint.rstrip('/')}/v1/traces"
    processor = BatchSpanProcessor(OTLPSpanExporter(url, timeout=EXPORT_SECONDS_MAX))
    convert = _converter()

    def export(context: TraceContext, span: SpanData) -> None:
        processor.on_end(convert(context, span))

    return export, processor.shutdown


def _converter() -> Callable[[TraceContext, SpanData], ReadableSpan]:
    """Return the function that makes a span of the SDK.

    It makes the finished span itself: the SDK's tracer would choose the ids.
    """
    from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
    from opentelemetry.sdk.trace import ReadableSpan  # noqa: PLC0415
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope  # noqa: PLC0415
    from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags  # noqa: PLC0415
    from opentelemetry.trace.status import Status, StatusCode  # noqa: PLC0415

    name = {} if os.environ.get("OTEL_SERVICE_NAME") else {"service.name": "banksman"}
    resource = Resource.create({**name, "service.version": __version__})
    scope = InstrumentationScope("banksman", __version__)

    def convert(context: TraceContext, span: SpanData) -> ReadableSpan:
        flags = TraceFlags(int(context.flags, 16))

        def place(id: str) -> SpanContext:
            return SpanContext(int(context.trace, 16), int(id, 16), True, flags)

        attributes = dict(span.attributes)
        if span.error is not None:
            attributes["error.type"] = span.error
        return ReadableSpan(
            span.name,
            context=place(span.id),
            parent=None if span.parent is None else place(span.parent),
            resource=resource,
            attributes=attributes,
            links=() if span.continues is None else (Link(place(span.continues)),),
            kind=SpanKind.INTERNAL,
            status=Status() if span.error is None else Status(StatusCode.ERROR),
            start_time=int(span.start * 1e9),
            end_time=int(span.end * 1e9),
            instrumentation_scope=scope,
        )

    return convert
