"""CPU time that the spans of turns cost a server: the same turns with and without `otel_endpoint`.

Two servers run: one exports spans, one does not. Both get the same turns at the same time, so what
slows the machine slows both. The number is the CPU time (user and system) of the server process
with all its threads, up to the arrival of the last span. Neither the agents nor the collector are
in it.

Each turn streams FRAMES frames at the pace of an agent, and uses a tool. No client follows the
events: each one would add to the cost of a turn, and so lower the share of the spans.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from banksman.testing import fake_agent
from bench.measure import goal
from bench.serving import SECONDS_MAX, Server, served

FRAMES = 200
FRAME_SECONDS = 0.005
SESSIONS = 5
TURNS = 6
ROUNDS = 4
SHARE_MAX = 0.05
# The spans of a turn: the turn, its queue time and its tool.
SPANS = 3


class Collector:
    """Receiver of spans that only counts them. Runs in a thread of this process."""

    def __init__(self) -> None:
        self._spans = 0
        self._changed = threading.Condition()
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                take(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def _take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        request = ExportTraceServiceRequest.FromString(body)
        scopes = [scope for each in request.resource_spans for scope in each.scope_spans]
        with self._changed:
            self._spans += sum(len(scope.spans) for scope in scopes)
            self._changed.notify_all()

    def wait(self, spans: int) -> None:
        """Wait for this number of spans, and forget them."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._spans >= spans, SECONDS_MAX), self._spans
            self._spans -= spans


@contextmanager
def collecting() -> Generator[Collector]:
    collector = Collector()
    thread = threading.Thread(target=collector.server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield collector
    finally:
        collector.server.shutdown()
        thread.join()
        collector.server.server_close()


def opened(server: Server) -> list[str]:
    script = {"prompt": [f"stream {FRAMES} {FRAME_SECONDS}", "tool_use Bash", "tool_result done"]}
    body = {"command": fake_agent.command({**script, "prompt hello": []})}
    sessions = [server.request("POST", "/v1/sessions", body)["id"] for _ in range(SESSIONS)]
    for session in sessions:
        server.wait_done(session, server.ask(session, "hello"))
    return sessions


def seconds_of(server: Server, sessions: list[str], collector: Collector | None) -> float:
    """Run the turns, and return the CPU seconds of the server for one of them."""

    def work(session: str) -> None:
        for _ in range(TURNS):
            server.wait_done(session, server.ask(session, "go"))

    began = server.cpu_seconds()
    with ThreadPoolExecutor(SESSIONS) as pool:
        list(pool.map(work, sessions))
    if collector is not None:
        collector.wait(SESSIONS * TURNS * SPANS)
    return (server.cpu_seconds() - began) / SESSIONS / TURNS


def measure() -> tuple[list[float], list[float]]:
    """Return the seconds of a turn without spans and with them, for each round."""
    with (
        collecting() as collector,
        served() as plain,
        served(otel_endpoint=collector.url) as traced,
        ThreadPoolExecutor(2) as both,
    ):
        sides = [(plain, opened(plain), None), (traced, opened(traced), collector)]
        # The turns of `opened` have no tool.
        collector.wait(SESSIONS * (SPANS - 1))
        rounds = [list(both.map(lambda side: seconds_of(*side), sides)) for _ in range(ROUNDS)]
    return [each[0] for each in rounds], [each[1] for each in rounds]


def main() -> None:
    without, traced = measure()
    share = sum(traced) / sum(without) - 1
    shares = [after / before - 1 for before, after in zip(without, traced, strict=True)]
    print(f"CPU time of the server for a turn of {FRAMES} frames and a tool, {ROUNDS} rounds")
    for name, found in (("without spans", without), ("with spans", traced)):
        print(f"  {name:13} {statistics.mean(found) * 1e3:8.2f} ms")
    more = statistics.mean(traced) - statistics.mean(without)
    by_round = " ".join(f"{each:+.1%}" for each in shares)
    print(f"  the spans     {more * 1e3:8.2f} ms, in each round {by_round}")
    goal(f"spans cost less than {SHARE_MAX:.0%} of a turn", f"{share:+.1%}", share < SHARE_MAX)


if __name__ == "__main__":
    main()
