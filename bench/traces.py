"""CPU time that the spans of turns cost a host: the same turns with and without a reporter.

Each turn writes FRAMES frames, at the pace of an agent that streams, and uses a tool. A collector
in another process takes the spans and drops them. The agents are other processes, so the numbers
are those of the host alone: its event loop, the threads of the store and that of the exporter.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from pathlib import Path

from banksman import Host, Session
from banksman.server.ops import telemetry
from banksman.server.server_settings import ServerSettings
from banksman.testing import fake_agent
from bench.measure import goal

FRAMES = 200
FRAME_SECONDS = 0.005
SESSIONS = 5
TURNS = 4
ROUNDS = 5
SHARE_MAX = 0.05
COLLECTOR = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *_):
        pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


async def seconds_of(host: Host, reporting: AbstractAsyncContextManager[None]) -> float:
    """Run turns in some sessions, and return the CPU seconds of this process for one turn.

    The end of the report is a part of it: the last spans are made and sent there.
    """
    script = {"prompt": [f"stream {FRAMES} {FRAME_SECONDS}", "tool_use Bash", "tool_result done"]}
    command = fake_agent.command({**script, "prompt hello": []})
    sessions = [await host.open("claude", command=command) for _ in range(SESSIONS)]

    async def work(session: Session) -> None:
        for _ in range(TURNS):
            await (await session.ask("go")).outcome()

    async with reporting:
        for session in sessions:
            await (await session.ask("hello")).outcome()
        began = time.process_time()
        await asyncio.gather(*map(work, sessions))
    seconds = time.process_time() - began
    for session in sessions:
        await session.close()
    return seconds / TURNS / SESSIONS


async def measure(folder: Path, endpoint: str) -> tuple[float, float]:
    """Return the seconds of a turn without spans and with them: the least of several rounds."""
    without: list[float] = []
    traced: list[float] = []
    settings = ServerSettings(otel_endpoint=endpoint)
    async with Host(f"sqlite:{folder / 'store.db'}") as host:
        for _ in range(ROUNDS):
            without.append(await seconds_of(host, nullcontext()))
            traced.append(await seconds_of(host, telemetry.reporting(host, settings)))
    return min(without), min(traced)


def main() -> None:
    with (
        tempfile.TemporaryDirectory() as folder,
        subprocess.Popen(
            [sys.executable, "-c", COLLECTOR], stdout=subprocess.PIPE, text=True
        ) as collector,
    ):
        assert collector.stdout is not None
        try:
            endpoint = f"http://127.0.0.1:{int(collector.stdout.readline())}"
            without, traced = asyncio.run(measure(Path(folder), endpoint))
        finally:
            collector.kill()
    share = traced / without - 1
    print(f"CPU time of the host for a turn of {FRAMES} frames and a tool")
    print(f"  without spans {without * 1e3:8.2f} ms")
    print(f"  with spans    {traced * 1e3:8.2f} ms")
    goal(f"spans cost less than {SHARE_MAX:.0%} of a turn", f"{share:+.1%}", share < SHARE_MAX)


if __name__ == "__main__":
    main()
