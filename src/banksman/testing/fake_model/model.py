"""`FakeModel`, the fake model server: threads, shutdown, agent settings, and seen requests.

One thread accepts connections, and each connection has its own thread. The server ends when its
eventfd becomes readable, and every wait of every thread watches that fd (see `http1`). `close`
joins all threads, so that no thread runs after it. `routes.py` serves a connection, `setups.py` has
the settings of each agent, and `record.py` keeps the requests.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import threading
from pathlib import Path
from typing import Self

from banksman.testing.fake_model.http1 import ModelConnection
from banksman.testing.fake_model.play import Chooser
from banksman.testing.fake_model.record import ModelRequest, RequestRecords
from banksman.testing.fake_model.routes import ModelServer, serve
from banksman.testing.fake_model.setups import setup

HOST = "127.0.0.1"
# An agent opens one or two connections. The server answers a connection beyond this limit with 503
# and closes it.
CONNECTIONS_MAX = 256
BACKLOG = 128
# Every wait of every thread ends immediately when the server ends. The remaining time is scheduling
# delay on a busy machine.
JOIN_SECONDS_MAX = 30.0
FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FakeModel:
    """A model API on loopback, for the duration of a `with` block.

    `port`: 0 lets the kernel choose. `log`: file that gets a JSON line when a request begins, with
    its body, and another when the request ends. All members except `close` may be used from any
    thread, and after the end.
    """

    def __init__(self, *, port: int = 0, log: Path | str | None = None) -> None:
        self._port = port
        self._log = Path(log) if log is not None else None
        self._running: _ServerThreads | None = None
        self._records: RequestRecords | None = None

    def __enter__(self) -> Self:
        assert self._records is None, "a FakeModel is started once"
        # The port comes first: if the bind fails, there is nothing to undo.
        listener = socket.create_server((HOST, self._port), backlog=BACKLOG)
        try:
            self._records = RequestRecords(log=self._log)
        except BaseException:
            listener.close()
            raise
        self._port = listener.getsockname()[1]
        self._running = _ServerThreads(listener, ModelServer(self._records, Chooser()))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "running" if self._running else "closed" if self._records else "not started"
        return f"<FakeModel {state} on port {self._port}>"

    @property
    def url(self) -> str:
        """Base URL of the server: `http://127.0.0.1:PORT`."""
        assert self._records is not None, "not started"
        return f"http://{HOST}:{self._port}"

    @property
    def requests(self) -> list[ModelRequest]:
        """Every request so far, in order of arrival."""
        assert self._records is not None, "not started"
        return self._records.all()

    def wait_request(self, n: int, timeout: float) -> ModelRequest:
        """Wait for the n-th request (from 1) that plays a script; return it as soon as it begins.

        A prompt without directives counts too: its script is empty. Blocks the thread; raises
        TimeoutError.
        """
        assert self._records is not None, "not started"
        return self._records.wait_play(n, timeout)

    def env(self, home: Path | str, agent: str = "claude") -> dict[str, str]:
        """Return the whole environment of an agent that uses this model and nothing else.

        Creates the folders and files that the agent needs. The result must replace the environment
        and not extend one: a key or a proxy of the machine must not reach the agent. Some agents
        also need `args` on their command line. `agent`: claude, codex, codex-acp, gemini or
        opencode; raises ValueError for any other.
        """
        home = Path(home).absolute()
        made = setup(agent, self.url, home)
        Path(made.variables["TMPDIR"]).mkdir(parents=True, exist_ok=True)
        for name, text in made.files.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # An unchanged file is not written again, because an agent may be reading it.
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        return dict(made.variables)

    def args(self, agent: str = "claude") -> list[str]:
        """Return the arguments, often none, that an agent needs at the end of its command line."""
        return list(setup(agent, self.url, Path("/")).arguments)

    def close(self) -> None:
        """End every thread and connection, including those that hang.

        Running requests get the outcome `stopped`. May be called again, from the same thread.
        """
        running, self._running = self._running, None
        if running is not None:
            assert self._records is not None
            running.end()
            self._records.close()


class _ServerThreads:
    """The threads of the server, and the two fds that they share."""

    def __init__(self, listener: socket.socket, server: ModelServer) -> None:
        self._listener = listener
        self._server = server
        self._stop_fd = os.eventfd(0)
        # Only the accepting thread uses this list, until `end` has joined that thread.
        self._threads: list[threading.Thread] = []
        # accept() must not block: the client may disconnect between poll() and accept().
        self._listener.setblocking(False)
        # Daemon threads, so that a program that forgot to close the server can still end.
        self._accepting = threading.Thread(target=self._accept_all, name="fake-model", daemon=True)
        self._accepting.start()

    def end(self) -> None:
        os.eventfd_write(self._stop_fd, 1)
        # The order matters: first the thread that creates threads, then those it created, then the
        # fds that they use.
        for thread in (self._accepting, *self._threads):
            thread.join(JOIN_SECONDS_MAX)
            assert not thread.is_alive(), f"{thread.name} did not hear the end"
        self._listener.close()
        os.close(self._stop_fd)

    def _accept_all(self) -> None:
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        poll.register(self._listener, select.POLLIN)
        while self._stop_fd not in dict(poll.poll()):
            try:
                sock, (_, port) = self._listener.accept()
            except BlockingIOError:
                continue
            except OSError as exc:
                # The client disconnected before it was accepted. Any other error is a problem of
                # the machine.
                if exc.errno != errno.ECONNABORTED:
                    raise
                continue
            self._take(sock, port)

    def _take(self, sock: socket.socket, port: int) -> None:
        for thread in [thread for thread in self._threads if not thread.is_alive()]:
            thread.join()
            self._threads.remove(thread)
        if len(self._threads) >= CONNECTIONS_MAX:
            with sock, contextlib.suppress(OSError):  # The client may have disconnected already.
                # The buffer of a new connection has room for it.
                sock.send(FULL)
            return
        connection = ModelConnection(sock, stop_fd=self._stop_fd)
        name = f"fake-model-{port}"
        thread = threading.Thread(
            target=serve, args=(connection, self._server), name=name, daemon=True
        )
        self._threads.append(thread)
        thread.start()
