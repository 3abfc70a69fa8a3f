"""Trace ids in log records: `trace_id` and `span_id`, if the server exports spans.

- A record that is logged while a request is handled has the ids of its `traceparent`.
- Another record that names a session of this host has those of the turn that runs in it. Its span
  is the one of `turn_spans.py`, so a backend shows the line beside the turn.

A filter of the log's handlers adds the ids. Without `otel_endpoint` there is no filter.
"""

from __future__ import annotations

import contextvars
import logging
import re
import threading
from collections.abc import Generator
from contextlib import contextmanager

from starlette.types import ASGIApp, Receive, Scope, Send

from banksman.runtime.base_host import Host
from banksman.server.ops import turn_spans
from banksman.sessions import traces
from banksman.sessions.traces import TraceContext

_SESSION = re.compile(r"s-[0-9a-f]{16}")


class _RequestTrace:
    """The trace of a request while it is handled; None afterwards.

    A task that outlives its request keeps the context that it was started in, but not its trace.
    """

    __slots__ = ("trace",)

    def __init__(self, trace: TraceContext) -> None:
        self.trace: TraceContext | None = trace


_request: contextvars.ContextVar[_RequestTrace | None] = contextvars.ContextVar(
    "banksman_request_trace", default=None
)


class TracedRequests:
    """ASGI wrapper: names the trace of a request to the log while the request is handled."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = [value for name, value in scope.get("headers", ()) if name == b"traceparent"]
        trace = traces.parse(found[0].decode("ascii", "replace")) if len(found) == 1 else None
        if trace is None:
            await self._app(scope, receive, send)
            return
        mine = _RequestTrace(trace)
        token = _request.set(mine)
        try:
            await self._app(scope, receive, send)
        finally:
            mine.trace = None
            _request.reset(token)


@contextmanager
def tracing(host: Host) -> Generator[None]:
    """Add the ids to the records of all present handlers, while the context is entered."""
    added = _TraceFilter(host)
    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(added)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(added)


class _TraceFilter(logging.Filter):
    def __init__(self, host: Host) -> None:
        super().__init__()
        self._host = host
        self._thread = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        request = _request.get()
        if request is not None and request.trace is not None:
            record.trace_id, record.span_id = request.trace.trace, request.trace.parent
        # The sessions belong to the thread of the loop.
        elif threading.get_ident() == self._thread and (found := self._of_turn(record)) is not None:
            record.trace_id, record.span_id = found
        return True

    def _of_turn(self, record: logging.LogRecord) -> tuple[str, str] | None:
        args = record.args if isinstance(record.args, tuple) else ()
        named = (*args, getattr(record, "session", None))
        ids = {each for each in named if isinstance(each, str) and _SESSION.fullmatch(each)}
        if not ids:
            return None
        for session in self._host.our_sessions():
            if session.id in ids and (running := session.running_trace) is not None:
                turn, trace = running
                context = turn_spans.context_of(session.id, turn, trace)
                return context.trace, turn_spans.id_of(session.id, turn)
        return None
