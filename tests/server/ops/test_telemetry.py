"""Spans of a real server at a real OTLP/HTTP receiver, decoded with the protocol's own package."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.server.access.test_isolation import wait_output
from tests.server.kit import Served
from tests.server.ops.test_server_hand_over import restart, serving
from tests.thorough import thorough

from banksman.testing import fake_agent

SECONDS_MAX = 60.0
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
WRITES = 'printf %s "$TRACEPARENT" > "$0.new" && mv "$0.new" "$0"; exec "$@"'


class Collector:
    """Receives spans. Its loopback port is the endpoint."""

    def __init__(self) -> None:
        self._spans: list[Any] = []
        self._changed = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert (self.path, self.headers["Content-Type"]) == ("/v1/traces", "application/x-protobuf")
                collector.take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Collector:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        request = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            for resource in request.resource_spans:
                for scope in resource.scope_spans:
                    assert scope.scope.name == "banksman"
                    self._spans += scope.spans
            self._changed.notify_all()

    def wait(self, condition: Callable[[list[Any]], bool]) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self._spans), SECONDS_MAX), self._spans
            return [*self._spans]


def named(spans: list[Any], name: str) -> Any:
    [found] = [span for span in spans if span.name == name]
    return found


def attributes(span: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_trace_goes_from_the_request_through_queue_turn_and_tool_to_the_agent(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    with Collector() as collector, Served(tmp_path / "server", otel_endpoint=collector.url) as served:
        script = {"prompt": ["tool_use Bash", "tool_result secret-output"]}
        command = ["sh", "-c", WRITES, str(seen), *fake_agent.command(script)]
        session = served.post("/v1/sessions", {"command": command})["id"]
        path = f"/v1/sessions/{session}/turns"
        turn = served.post(path, {"prompt": "secret-prompt"}, headers=HEADERS)["turn"]
        served.outcome(session, turn)
        # The stop sends what the thread has gathered.
        served.stop()
        spans = collector.wait(lambda spans: len(spans) >= 3)
        assert sorted(span.name for span in spans) == ["execute_tool Bash", "invoke_agent claude", "queue"]
        assert {span.trace_id.hex() for span in spans} == {TRACE}
        agent, queue = named(spans, "invoke_agent claude"), named(spans, "queue")
        tool = named(spans, "execute_tool Bash")
        assert agent.parent_span_id.hex() == PARENT
        assert queue.parent_span_id == tool.parent_span_id == agent.span_id
        # What the agent reports belongs to the span of its turn.
        assert seen.read_text() == f"00-{TRACE}-{agent.span_id.hex()}-01"
        assert agent.start_time_unix_nano == queue.start_time_unix_nano <= queue.end_time_unix_nano
        assert queue.end_time_unix_nano <= tool.start_time_unix_nano <= tool.end_time_unix_nano
        assert tool.end_time_unix_nano <= agent.end_time_unix_nano
        told = attributes(agent)
        assert told["gen_ai.conversation.id"] == session
        assert told["gen_ai.usage.input_tokens"] > 0
        assert told["banksman.outcome"] == "done"
        assert "error.type" not in told
        # Content only on request.
        assert "secret" not in repr(spans)


def test_failed_turn_has_its_error_and_content_is_there_on_request(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"otel_content": True}
    with Collector() as collector, Served(tmp_path / "server", otel_endpoint=collector.url, **settings) as served:
        session = served.open({"prompt": ["tool_use Bash", "exit 3"]})
        turn = served.ask(session, "secret-prompt")
        served.outcome(session, turn)
        served.stop()
        spans = collector.wait(lambda spans: len(spans) >= 3)
        agent, tool = named(spans, "invoke_agent claude"), named(spans, "execute_tool Bash")
        assert agent.status.code == tool.status.code == 2
        assert attributes(tool)["error.type"] == "unfinished"
        assert attributes(agent)["error.type"]
        assert attributes(agent)["gen_ai.input.messages"] == "secret-prompt"
        assert agent.parent_span_id == b""


def test_trace_that_is_not_recorded_is_not_sent(tmp_path: Path) -> None:
    with Collector() as collector, Served(tmp_path / "server", otel_endpoint=collector.url) as served:
        session = served.open()
        path = f"/v1/sessions/{session}/turns"
        off = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        served.outcome(session, served.post(path, {"prompt": "hello"}, headers=off)["turn"])
        served.outcome(session, served.ask(session, "hello"))
        served.stop()
        spans = collector.wait(lambda spans: len(spans) >= 2)
        assert TRACE not in {span.trace_id.hex() for span in spans}


@thorough
def test_spans_of_a_turn_that_the_next_server_continues_are_linked(tmp_path: Path) -> None:
    with Collector() as collector:
        with serving(tmp_path / "server", otel_endpoint=collector.url) as served:
            session = served.open()
            path = f"/v1/sessions/{session}/turns"
            turn = served.post(path, {"prompt": "@@say begun\n@@hang"}, headers=HEADERS)["turn"]
            wait_output(served, session, turn)
            restart(served)
            served.post(f"{path}/{turn}/interrupt")
            served.outcome(session, turn)
        spans = collector.wait(lambda spans: len(spans) >= 3)
    first, second = sorted((span for span in spans if span.name != "queue"), key=lambda span: span.start_time_unix_nano)
    assert (first.name, second.name) == ("invoke_agent claude",) * 2
    assert first.span_id.hex() == turn.removeprefix("t-")
    assert first.end_time_unix_nano == second.start_time_unix_nano
    assert {(span.trace_id.hex(), span.parent_span_id.hex()) for span in (first, second)} == {(TRACE, PARENT)}
    assert [*first.links] == []
    assert [(link.trace_id, link.span_id) for link in second.links] == [(first.trace_id, first.span_id)]
    assert named(spans, "queue").parent_span_id == first.span_id


def test_server_without_an_endpoint_imports_nothing_of_it() -> None:
    code = (
        "import sys, banksman.server.main, banksman.server.embedded, banksman.cli;"
        "print([name for name in sys.modules if 'opentelemetry' in name or name.endswith('ops.telemetry')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "[]\n"
