"""Real server in another process, and a minimal client that is a socket and bytes.

The server starts as a user starts it, with a settings file and a store in the test's folder. A test can kill it and
start it again at the same address. This module imports nothing of the server.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tests import kept
from tests.server import passing

from banksman.testing import fake_agent

TOKEN = "a-token-of-the-tests"
AUTHORIZATION = {"Authorization": f"Bearer {TOKEN}"}
SECONDS_MAX = 60.0
# Time for running turns at the end of a test, when no client waits for them.
AT_THE_END_SECONDS = 0.1


def no_drain(seconds: float | None = None, hold_seconds: float | None = None) -> bool:
    """Stand in for the shutdown of a server that no test drains."""
    del seconds, hold_seconds
    return True


class Answer(NamedTuple):
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def terminate(process: subprocess.Popen[str], patience: float) -> None:
    """Send TERM repeatedly, after each `patience` seconds.

    The second TERM that a server receives stops its running turns. A TERM that arrives before the handler of the first
    has run is lost, so two are not always enough.
    """
    for _ in range(int(SECONDS_MAX / patience)):
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            continue
        return


class Served:
    """One server.

    `settings`: its `[serve]` table. `fds_max`: its limit on open files. `variables`: added to the environment of this
    process. `listeners`: sockets that are passed to it, as a service manager does. `prefix`: a program
    that starts the server in its place, with the same pid.
    """

    def __init__(
        self,
        folder: Path,
        *,
        fds_max: int | None = None,
        variables: Mapping[str, str] | None = None,
        listeners: Sequence[socket.socket] = (),
        prefix: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        self._prefix = prefix
        self._fds_max = fds_max
        self._listeners = listeners
        self._variables = dict(variables or {})
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.settings: dict[str, Any] = {
            "port": 0,
            "store": f"sqlite:{folder / 'store.db'}",
            "token": TOKEN,
            **settings,
        }
        self.process: subprocess.Popen[str] | None = None
        self.log = folder / "log.txt"
        self.port = 0
        # The first line that the server prints.
        self.printed = ""

    def __enter__(self) -> Served:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(patience=AT_THE_END_SECONDS)

    def cli(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a verb of the command line, which finds this server."""
        env = {**os.environ, "XDG_STATE_HOME": str(self.folder / "state"), "BANKSMAN_TOKEN": TOKEN}
        return subprocess.run(
            [sys.executable, "-m", "banksman", *words],
            capture_output=True,
            text=True,
            env=env,
            timeout=SECONDS_MAX,
            check=False,
        )

    @property
    def url(self) -> str:
        return f"{'http' if self.settings.get('tls_cert') is None else 'https'}://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def start(self) -> None:
        """Start the server, and return when it serves. A restart uses the same address."""
        config = self.folder / "config.toml"
        lines = (f"{name} = {json.dumps(value)}\n" for name, value in self.settings.items() if value is not None)
        config.write_text("[serve]\n" + "".join(lines), encoding="utf-8")
        with self.log.open("ab") as log:
            argv = [*self._prefix, *self._limited, sys.executable, "-m", "banksman", "serve", "--config", str(config)]
            self.process = subprocess.Popen(
                passing.words(self._listeners, argv) if self._listeners else argv,
                pass_fds=[listener.fileno() for listener in self._listeners],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **self._variables, "XDG_STATE_HOME": str(self.folder / "state")},
            )
        assert self.process.stdout is not None
        line = self.printed = self.process.stdout.readline()
        assert "://" in line, (line, self.log.read_text(encoding="utf-8"))
        self.port = port_of(line)
        self.settings["port"] = self.port

    @property
    def _limited(self) -> list[str]:
        return [] if self._fds_max is None else ["prlimit", f"--nofile={self._fds_max}:{self._fds_max}", "--"]

    def kill(self) -> None:
        """Kill the server, as the kernel does when memory is short."""
        assert self.process is not None
        self.process.kill()
        self._reap()

    def stop(self, patience: float = 1.0) -> int:
        """Stop the server as a service manager does. `patience`: seconds that running turns get."""
        if self.process is None:
            return 0
        terminate(self.process, patience)
        return self._reap()

    def _reap(self) -> int:
        assert self.process is not None
        assert self.process.stdout is not None
        try:
            code = self.process.wait(SECONDS_MAX)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        finally:
            self.process.stdout.close()
        self.process = None
        return code

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        token: bool = True,
    ) -> Answer:
        connection = self.connection()
        sent = {**(AUTHORIZATION if token else {}), **(headers or {})}
        data: bytes | None = body if isinstance(body, bytes) else None
        if body is not None and data is None:
            data = msgspec.json.encode(body)
            sent.setdefault("Content-Type", "application/json")
        try:
            connection.request(method, path, data, sent)
            response = connection.getresponse()
            return Answer(response.status, {k.lower(): v for k, v in response.getheaders()}, response.read())
        finally:
            connection.close()

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection that is made with its first request. A certificate of the settings is its own CA."""
        ca: str | None = self.settings.get("tls_cert")
        if ca is None:
            return http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS_MAX)
        context = ssl.create_default_context(cafile=ca)
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=SECONDS_MAX, context=context)

    def get(self, path: str, **more: Any) -> Any:
        answer = self.request("GET", path, **more)
        assert answer.status == 200, answer
        return answer.json

    def post(self, path: str, body: Any = None, status: int | None = None, **more: Any) -> Any:
        answer = self.request("POST", path, {} if body is None else body, **more)
        assert answer.status in ((200, 201, 202) if status is None else (status,)), answer
        return answer.json if answer.body else None

    def link(self, url: str | None = None) -> str:
        """Return an address that logs a browser in, as `banksman page` prints it."""
        return f"{url or self.url}/#code={self.post('/v1/login/code')['code']}"

    # -- sessions with the scripted agent ----------------------------------------------------------------------------
    def open(self, script: Mapping[str, Sequence[str]] | None = None, **more: Any) -> str:
        """Open a session and return its id."""
        return self.post("/v1/sessions", {"command": fake_agent.command(script or {}), **more})["id"]

    def ask(self, session: str, prompt: str, **more: Any) -> str:
        """Ask, and return the id of the turn."""
        return self.post(f"/v1/sessions/{session}/turns", {"prompt": prompt, **more})["turn"]

    def outcome(self, session: str, turn: str) -> Any:
        """Wait for the outcome of a turn."""
        shown = self.get(f"/v1/sessions/{session}/turns/{turn}?wait=60")
        assert shown["outcome"] is not None, shown
        return shown["outcome"]

    # -- streams -----------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def stream(
        self,
        path: str,
        *,
        after: str | None = None,
        accept: str = "text/event-stream",
        host: str | None = None,
        token: str = TOKEN,
        user: str | None = None,
    ) -> Generator[Stream]:
        headers = {"Host": host or f"127.0.0.1:{self.port}", "Accept": accept, "Authorization": f"Bearer {token}"}
        if user is not None:
            headers["X-Forwarded-User"] = user
        if after is not None:
            headers["Last-Event-ID"] = after
        with socket.create_connection(("127.0.0.1", self.port), SECONDS_MAX) as peer:
            head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            peer.sendall(f"GET {path} HTTP/1.1\r\n{head}\r\n".encode())
            stream = Stream(peer)
            try:
                yield stream
            finally:
                stream.close()


@contextlib.contextmanager
def shared(folder: Path, **settings: Any) -> Generator[Served]:
    """Serve one server for all tests of a module; `leaves_nothing` ignores it. No test may end it.

    It starts before a test has its folders for settings, so it gets a separate one.
    """
    with Served(folder, variables={"XDG_CONFIG_HOME": str(folder / "config")}, **settings) as served:
        with kept.shared(pid := served.pid):
            yield served
        assert served.pid == pid, "a test has started the server again that others share"


def port_of(line: str) -> int:
    """Return the port of the address that a server prints."""
    return int(line[line.index("http") :].split(":")[2].partition("/")[0])


class Sent(NamedTuple):
    """A message of a stream.

    `id` and `event` are None if the message lacks them.
    """

    id: str | None
    event: str | None
    data: Any


class Stream:
    """The bytes of one answer, decoded by hand: head, chunks, messages."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self._file = peer.makefile("rb")
        status = self._file.readline().split()
        self.status = int(status[1]) if len(status) > 1 else 0
        self.headers: dict[str, str] = {}
        while (line := self._file.readline().rstrip()) != b"":
            name, _, value = line.decode().partition(":")
            self.headers[name.lower()] = value.strip()
        self._rest = b""

    def close(self) -> None:
        """Close the file and the socket: the connection stays open until both are closed."""
        self._file.close()
        self.peer.close()

    def chunk(self) -> bytes:
        """Return the next bytes. Empty bytes mean the end, or a lost connection."""
        size = self._file.readline().strip()
        if not size or int(size, 16) == 0:
            return b""
        data = self._file.read(int(size, 16))
        self._file.readline()
        return data

    def messages(self) -> Iterator[Sent]:
        """Yield each message when it arrives, until the end."""
        while data := self.chunk():
            self._rest += data
            *blocks, self._rest = self._rest.split(b"\n\n")
            for block in blocks:
                fields = dict(line.split(b": ", 1) for line in block.split(b"\n"))
                if b"data" in fields:
                    id, event = (fields[name].decode() if name in fields else None for name in (b"id", b"event"))
                    yield Sent(id, event, json.loads(fields[b"data"]))

    def until_live(self) -> list[Sent]:
        """Return the events of the replay, up to the `stream.live` mark."""
        found: list[Sent] = []
        for message in self.messages():
            if message.event == "stream.live":
                return found
            if message.id is not None:
                found.append(message)
        raise AssertionError(f"the stream has ended before it was live; it had {len(found)} events")


# -- raw bytes ---------------------------------------------------------------------------------------------------------
def talk(port: int, *pieces: bytes, is_ended: bool = False) -> bytes:
    """Return the server's answer to these bytes, up to the close of the connection.

    It must close: send `Connection: close`, or a request that it refuses.
    """
    with socket.create_connection(("127.0.0.1", port), SECONDS_MAX) as peer:
        try:
            for piece in pieces:
                peer.sendall(piece)
            if is_ended:
                peer.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # The server closed before it had all bytes. Its answer can still be read.
        said = b""
        try:
            while data := peer.recv(1 << 16):
                said += data
        except ConnectionResetError:
            pass
        return said


def statuses(said: bytes) -> list[int]:
    """Return the statuses of the answers in these bytes, in order."""
    return [int(status) for status in re.findall(rb"HTTP/1\.1 ([0-9]{3}) ", said)]


def head(line: str, *headers: str, port: int, host: str | None = None, token: bool = True) -> bytes:
    """Return the head of a request that is the last of its connection."""
    lines = [line, f"Host: {host or f'127.0.0.1:{port}'}", "Connection: close"]
    lines += [f"Authorization: Bearer {TOKEN}"] if token else []
    return "\r\n".join([*lines, *headers, "", ""]).encode()
