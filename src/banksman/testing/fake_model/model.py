"""The server: its threads, and their end.

One thread accepts; each connection has one of its own. They are ended by one fact, the eventfd becoming readable, which
every wait of every thread hears (see `http1`). Who closes the server joins them all, so that nothing runs after.
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
# An agent has one or two. One more than this is answered with 503 and closed.
CONNECTIONS_MAX = 256
BACKLOG = 128
# Every wait of every thread ends at once when the server does; what remains is to be scheduled, on a busy machine.
JOIN_SECONDS_MAX = 30.0
FULL = b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


class FakeModel:
    """A model API on loopback, from `with` to the end of its block.

    `port` 0 lets the kernel choose. `log` gets a JSON line for each request as it begins, with its body, and one as it
    ends. All members but `close` may be used from any thread, and after the end too.
    """

    def __init__(self, *, port: int = 0, log: Path | str | None = None) -> None:
        self._port = port
        self._log = Path(log) if log is not None else None
        self._running: _ServerThreads | None = None
        self._records: RequestRecords | None = None

    def __enter__(self) -> Self:
        assert self._records is None, "a FakeModel is started once"
        # The port first: if that fails there is nothing to undo.
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
        """Where it listens: `http://127.0.0.1:PORT`."""
        assert self._records is not None, "not started"
        return f"http://{HOST}:{self._port}"

    @property
    def requests(self) -> list[ModelRequest]:
        """Every request so far, in order of arrival."""
        assert self._records is not None, "not started"
        return self._records.all()

    def wait_request(self, n: int, timeout: float) -> ModelRequest:
        """The n-th request, from 1, that plays a script, as soon as it begins. Raises TimeoutError; blocks the thread.

        A prompt without directives plays a script too: an empty one.
        """
        assert self._records is not None, "not started"
        return self._records.wait_play(n, timeout)

    def env(self, home: Path | str, agent: str = "claude") -> dict[str, str]:
        """The whole environment in which an agent uses this model and nothing else; its folders and files are made.

        Meant to replace the environment, not to be added to one: a key or a proxy of the machine must not get through.
        Some agents need words on their command line, too: `args`. `agent` is one of claude, codex, codex-acp, gemini,
        opencode; ValueError for any other.
        """
        home = Path(home).absolute()
        made = setup(agent, self.url, home)
        Path(made.variables["TMPDIR"]).mkdir(parents=True, exist_ok=True)
        for name, text in made.files.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not again if it is the same: an agent may be reading it.
            if not path.exists() or path.read_text() != text:
                path.write_text(text)
        return dict(made.variables)

    def args(self, agent: str = "claude") -> list[str]:
        """The words of an agent's command line that make it use this model, to be added at its end; often none."""
        return list(setup(agent, self.url, Path("/")).arguments)

    def close(self) -> None:
        """End every thread and connection, also those that hang; requests under way get the outcome `stopped`.

        May be called again, from the same thread.
        """
        running, self._running = self._running, None
        if running is not None:
            assert self._records is not None
            running.end()
            self._records.close()


class _ServerThreads:
    """The threads, and the two fds that they need."""

    def __init__(self, listener: socket.socket, server: ModelServer) -> None:
        self._listener = listener
        self._server = server
        self._stop_fd = os.eventfd(0)
        # Only the accepting thread touches it, until that one is joined.
        self._threads: list[threading.Thread] = []
        # Accepting must not block: between poll() and accept() the client may have left.
        self._listener.setblocking(False)
        # Daemons, so that a program that forgot to close us can still end.
        self._accepting = threading.Thread(target=self._accept_all, name="fake-model", daemon=True)
        self._accepting.start()

    def end(self) -> None:
        os.eventfd_write(self._stop_fd, 1)
        # First the one that makes threads, then those it made, then what they used.
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
                # The client left before it was accepted. Anything else is for whoever runs the machine.
                if exc.errno != errno.ECONNABORTED:
                    raise
                continue
            self._take(sock, port)

    def _take(self, sock: socket.socket, port: int) -> None:
        for thread in [thread for thread in self._threads if not thread.is_alive()]:
            thread.join()
            self._threads.remove(thread)
        if len(self._threads) >= CONNECTIONS_MAX:
            with sock, contextlib.suppress(OSError):  # It may have left already.
                # The buffer of a new connection has room for it.
                sock.send(FULL)
            return
        connection = ModelConnection(sock, stop_fd=self._stop_fd)
        name = f"fake-model-{port}"
        thread = threading.Thread(target=serve, args=(connection, self._server), name=name, daemon=True)
        self._threads.append(thread)
        thread.start()
