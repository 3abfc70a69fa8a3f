"""Who comes in by the listening sockets, as many at once as this process has room for.

asyncio's own server, when it is out of fds, fails as often as connections wait, logs each of them, and tries again a
second later; meanwhile the host cannot start anything either. So some fds are kept back for what the server is for, and
beyond that nobody is taken in until somebody has gone: who waits, waits in the kernel.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections.abc import Callable, Sequence

from banksman.serve.entrance.wire import Connection

log = logging.getLogger("banksman.serve")

BACKLOG = 1024
# Taken in by one callback: the loop is everybody's.
ACCEPTS_AT_ONCE_MAX = 64
# Of the fds of this process, what is kept back for the store, and for commands and agents with their pipes; no more
# than half of all.
FDS_KEPT_BACK = 256
# The machine is out of them for other reasons than us: it is tried again.
RETRY_SECONDS = 1.0

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def connections_max() -> int:
    fds = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if fds == resource.RLIM_INFINITY else fds - min(FDS_KEPT_BACK, fds // 2)


class Acceptor:
    """Makes a connection of each who comes. It owns the tasks that do so, and not the connections."""

    def __init__(self, listeners: Sequence[socket.socket], connection: Callable[[], Connection]) -> None:
        """By whichever they come, they are counted together: they take the same fds."""
        self._loop = asyncio.get_running_loop()
        self._listeners = listeners
        self._connection = connection
        self._connections_max = connections_max()
        self._count = 0
        self._was_full = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._is_listening = False
        self._is_closed = False

    def start(self) -> None:
        self._listen()

    async def close(self) -> None:
        """Nobody more. Who waits in the kernel is let go when the sockets are closed."""
        self._is_closed = True
        self._pause()
        if self._timer is not None:
            self._timer.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)  # A step or two each: nothing of it waits for the client.

    def _listen(self) -> None:
        self._timer = None
        if not self._is_listening and not self._is_closed:
            self._is_listening = True
            for listener in self._listeners:
                self._loop.add_reader(listener.fileno(), self._accept, listener)

    def _pause(self) -> None:
        if self._is_listening:
            self._is_listening = False
            for listener in self._listeners:
                self._loop.remove_reader(listener.fileno())

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_AT_ONCE_MAX):
            if self._count >= self._connections_max:
                if not self._was_full:
                    log.warning("! %d connections are open, and there is no room for more", self._count)
                self._was_full = True
                self._pause()  # Until somebody goes.
                return
            try:
                peer, _address = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if exc.errno not in _NO_ROOM:
                    raise
                log.warning("! nobody can be let in: %s", exc.strerror)
                self._pause()
                self._timer = self._loop.call_later(RETRY_SECONDS, self._listen)
                return
            self._take_in(peer)

    def _take_in(self, peer: socket.socket) -> None:
        peer.setblocking(False)
        self._count += 1
        task = self._loop.create_task(self._connect(peer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, peer: socket.socket) -> None:
        connection = self._connection()
        try:
            await self._loop.connect_accepted_socket(lambda: connection, peer)
        except OSError as exc:
            log.warning("! somebody who came in was lost at once: %s", exc)
            peer.close()
            self._on_lost()
        else:
            connection.lost.add_done_callback(lambda _: self._on_lost())

    def _on_lost(self) -> None:
        self._count -= 1
        # Said again only when there was room for a while in between.
        self._was_full = self._was_full and self._count > self._connections_max * 3 // 4
        if self._timer is None:
            self._listen()
