"""Helpers for the server benchmarks: a real server process, its followers, and their resources.

All followers run in one other process (`followers.py`), which only counts events and reads the
clock.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from bench.agents import tiny

TOKEN = "a-token-of-the-benchmarks"
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
SECONDS_MAX = 60.0
_FOLLOWERS = (sys.executable, "-I", "-S", str(Path(__file__).with_name("followers.py")))
BARE = Path(__file__).with_name("bare_server.py")


class Process:
    """A child process, with its CPU time and its memory."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        # Id of the CPU clock of the process with all its threads: see clock_getcpuclockid(3).
        self._clock = (~process.pid << 3) | 2

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"process has ended: {self.process.args!r:.80}"
        return line.strip()

    def cpu_seconds(self) -> float:
        return time.clock_gettime(self._clock)

    def memory_bytes(self) -> int:
        """Return the PSS: the private pages, and a share of each shared page."""
        with open(f"/proc/{self.process.pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


class Server(Process):
    """A running `banksman serve`, or another server that prints its URL. `port`: its port."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(process)
        line = self.line()
        self.port = urlsplit(line[line.index("http://") :]).port or 0

    def request(self, method: str, path: str, body: Any = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS_MAX)
        headers = {**AUTHORIZATION, "Content-Type": "application/json"}
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            response = connection.getresponse()
            data = response.read()
        finally:
            connection.close()
        assert response.status < 300, (response.status, data)
        return json.loads(data)

    def open(self) -> str:
        """Open a session with the tiny agent, run one turn in it, and return its id."""
        id: str = self.request("POST", "/v1/sessions", {"command": tiny()})["id"]
        self.wait_done(id, self.ask(id, "warm up"))
        return id

    def ask(self, session: str, prompt: str) -> str:
        return self.request("POST", f"/v1/sessions/{session}/turns", {"prompt": prompt})["turn"]

    def wait_done(self, session: str, turn: str) -> None:
        shown = self.request("GET", f"/v1/sessions/{session}/turns/{turn}?wait=60")
        outcome = shown["outcome"]
        assert outcome is not None, turn
        assert outcome["kind"] == "done", outcome["error"]

    def seq(self, session: str) -> int:
        return self.request("GET", f"/v1/sessions/{session}")["seq"]


class Heard(NamedTuple):
    """Counts of all followers since the last request.

    `p50`, `p99`, `max`: the latency in seconds of the events that contain the time of their write;
    NaN without such an event.
    """

    events: int
    bytes: int
    p50: float
    p99: float
    max: float


class Followers(Process):
    """Clients of a server, one per path, in one process."""

    def __init__(self, process: subprocess.Popen[str], began: Mapping[str, int]) -> None:
        """Wait until all clients are live. `began`: the seq of each session where they start."""
        super().__init__(process)
        self.began = began
        assert self.line() == "live"

    def _tell(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.line()

    def until(self, events: int) -> Heard:
        """Wait until each client has received this many events since its start."""
        count, size, *latencies = json.loads(self._tell(f"until {events}"))
        return Heard(count, size, *(math.nan if each is None else each for each in latencies))

    def until_told(self, server: Server) -> Heard:
        """Wait until each client has received the events that exist now.

        The bound is the smallest number of new events of a session: every client receives at least
        that many. Events after the end of a turn may arrive later and count in the next request.
        """
        return self.until(min(server.seq(session) - after for session, after in self.began.items()))

    def stop_reading(self) -> None:
        assert self._tell("stop") == "stopped"


@contextlib.contextmanager
def served(module: str = "banksman", **settings: Any) -> Generator[Server]:
    """Run a server on SQLite at the default level. `module`: what the interpreter runs.

    A long `stall_seconds` keeps the server from closing stalled streams, whose cost is measured.
    """
    with tempfile.TemporaryDirectory() as folder:
        own = {
            "port": 0,
            "store": f"sqlite:{folder}/store.db",
            "token": TOKEN,
            "log_level": "warning",
        }
        values = {**own, "stall_seconds": 600, **settings}
        lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
        Path(folder, "config.toml").write_text("\n".join(("[serve]", *lines)), encoding="utf-8")
        argv = [sys.executable, "-m", module, "serve", "--config", f"{folder}/config.toml"]
        with _running(argv, env={**os.environ, "XDG_STATE_HOME": folder}) as process:
            yield Server(process)


@contextlib.contextmanager
def followed(server: Server, sessions: Sequence[str]) -> Generator[Followers]:
    """Run one follower per listed session, from its current end. A session may be listed twice."""
    began = {session: server.seq(session) for session in set(sessions)}
    paths = [f"/v1/sessions/{session}/events?after={began[session]}" for session in sessions]
    with _running([*_FOLLOWERS, str(server.port), TOKEN, *paths]) as process:
        yield Followers(process, began)


@contextlib.contextmanager
def fed(server: Server, count: int) -> Generator[Followers]:
    """Run followers of the control server, which has no sessions."""
    with _running([*_FOLLOWERS, str(server.port), TOKEN, *["/"] * count]) as process:
        yield Followers(process, {})


@contextlib.contextmanager
def bare(*words: str) -> Generator[Server]:
    """Run the control server, which only writes bytes: see `bare_server.py`."""
    with _running([sys.executable, str(BARE), *words]) as process:
        yield Server(process)


@contextlib.contextmanager
def _running(argv: list[str], **more: Any) -> Generator[subprocess.Popen[str]]:
    """Run a process. At the end, send TERM up to twice, as to a server, then KILL."""
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, text=True, **more) as process:
        try:
            yield process
        finally:
            for _ in range(2):
                process.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5.0)
                    break
            else:
                process.kill()
