"""Accept loop with connection limits derived from RLIMIT_NOFILE.

When asyncio's own server runs out of fds, it fails once for each waiting connection, logs each
failure, and retries a second later. Meanwhile the host cannot start a process either. So this
module reserves some fds for the store and the processes.

Each listening socket has its own share of the rest, so that a flood at the port does not affect the
user's socket. Beyond its share a listener accepts nothing until a connection ends: clients wait in
the kernel's backlog.

A connection is a *stranger* until one of its requests is authenticated. Every user of this machine
can open strangers, so they must not keep other clients out. Their number is limited. When that
limit or the share is reached, the oldest stranger of the address with the most strangers is closed
for the next client. A stranger is never closed before `STRANGER_SECONDS_MIN`: a client with a token
sends it with its first bytes, and is a stranger for a moment only. A client in its TLS handshake is
a stranger, too.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import resource
import socket
from collections import Counter
from collections.abc import Callable, Sequence

from banksman.server.http.connection import HEAD_SECONDS_MAX, Connection
from banksman.server.http.tls import ServerCertificate

log = logging.getLogger("banksman.serve")

# Connections that one callback accepts. Other callbacks of the loop must run, too.
ACCEPTS_AT_ONCE_MAX = 64
# Fds that are reserved for the store, and for commands and agents with their pipes. At most half of
# the limit is reserved.
FDS_KEPT_BACK = 256
# Limit of strangers for one listener; at most half of its share.
STRANGERS_MAX = 256
# Minimum lifetime of a stranger, however many clients wait. It determines how long a client with a
# token waits behind a full backlog of strangers: a few seconds.
STRANGER_SECONDS_MIN = 0.25
# Delay after `accept` fails because the machine has no fds or memory left.
RETRY_SECONDS = 1.0

# How long the rest of the last response may take, and the client's answer to the end of TLS.
# asyncio aborts the connection then, whether the client reads or not.
TLS_CLOSE_SECONDS_MAX = 30.0

_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def connections_max() -> int:
    """Return how many connections this process may hold."""
    fds = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 20 if fds == resource.RLIM_INFINITY else fds - min(FDS_KEPT_BACK, fds // 2)


def shares(listeners: Sequence[socket.socket], total: int) -> list[int]:
    """Return the connection limit of each listener. Unix sockets beside a port share a quarter."""
    unix = [listener.family == socket.AF_UNIX for listener in listeners]
    if len(set(unix)) < 2:
        return [total // len(listeners) for _ in listeners]
    quarter = total // 4
    return [
        quarter // sum(unix) if is_unix else (total - quarter) // unix.count(False)
        for is_unix in unix
    ]


class Acceptor:
    """Accept clients on all listeners. Owns the accept tasks, but not the connections."""

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        connection: Callable[[], Connection],
        certificate: ServerCertificate | None = None,
    ) -> None:
        """Create an acceptor. `certificate`: of the TCP sockets; None for plain HTTP."""
        limits = shares(listeners, connections_max()) if listeners else []
        pairs = zip(listeners, limits, strict=True)
        self._queues = [
            _Queue(
                listener,
                limit,
                connection,
                None if listener.family == socket.AF_UNIX else certificate,
            )
            for listener, limit in pairs
        ]

    def start(self) -> None:
        for queue in self._queues:
            queue.listen()

    async def close(self) -> None:
        """Stop accepting.

        The kernel drops the clients in the backlog when the sockets are closed.
        """
        for queue in self._queues:
            await queue.close()


class _Queue:
    """One listening socket and the count of its connections."""

    def __init__(
        self,
        listener: socket.socket,
        connections_max: int,
        connection: Callable[[], Connection],
        certificate: ServerCertificate | None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._listener = listener
        self._connection = connection
        self._certificate = certificate
        self._connections_max = max(1, connections_max)
        self._strangers_max = max(1, min(STRANGERS_MAX, connections_max // 2))
        self._count = 0
        # Oldest first, with address and time. Authenticated connections are removed at the next
        # check.
        self._strangers: dict[Connection, tuple[str, float]] = {}
        self._was_full = False
        self._tasks: set[asyncio.Task[None]] = set()
        # The tasks of connections in their TLS handshake, which waits for the client.
        self._handshakes: dict[Connection, asyncio.Task[None]] = {}
        # While the retry timer runs, nothing is accepted. The room timer only fires when a stranger
        # is old enough to be closed.
        self._retry_timer: asyncio.TimerHandle | None = None
        self._room_timer: asyncio.TimerHandle | None = None
        self._is_listening = False
        self._is_closed = False

    def listen(self) -> None:
        if not self._is_listening and not self._is_closed and self._retry_timer is None:
            self._is_listening = True
            self._loop.add_reader(self._listener.fileno(), self._accept)

    async def close(self) -> None:
        self._is_closed = True
        self._pause()
        for timer in (self._retry_timer, self._room_timer):
            if timer is not None:
                timer.cancel()
        for task in self._handshakes.values():
            task.cancel()
        if self._tasks:
            # Each task ends within a few steps: without a handshake, none waits for the client.
            await asyncio.wait(self._tasks)

    def _pause(self) -> None:
        if self._is_listening:
            self._is_listening = False
            self._loop.remove_reader(self._listener.fileno())

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE_MAX):
            if not self._make_room():
                self._pause()  # `_on_lost` resumes the accept loop.
                return
            try:
                peer, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as exc:
                if exc.errno not in _NO_ROOM:
                    raise
                log.warning("accept failed: %s, retrying in %g s", exc.strerror, RETRY_SECONDS)
                self._pause()
                self._retry_timer = self._loop.call_later(RETRY_SECONDS, self._retry)
                return
            # The address of a Unix socket is a string: all its clients count as one address.
            self._take_in(peer, "" if isinstance(address, str | bytes) else str(address[0]))

    def _retry(self) -> None:
        self._retry_timer = None
        self.listen()

    def _make_room(self) -> bool:
        """Return whether one more connection fits. This may close a stranger to make room."""
        if self._count < self._connections_max and len(self._strangers) < self._strangers_max:
            return True
        self._strangers = {
            one: seen for one, seen in self._strangers.items() if not one.is_admitted
        }
        is_full = self._count >= self._connections_max
        if not is_full and len(self._strangers) < self._strangers_max:
            return True
        if not self._was_full:
            told = (self._count, len(self._strangers))
            log.warning("connection limit reached (open=%d, unauthenticated=%d)", *told)
        self._was_full = True
        return bool(self._strangers) and self._close_stranger()

    def _close_stranger(self) -> bool:
        """Close the oldest stranger of the busiest address.

        Returns False if that stranger is too young. A timer then resumes the accept loop.
        """
        ((most, _),) = Counter(address for address, _ in self._strangers.values()).most_common(1)
        oldest, since = next(
            (one, at) for one, (address, at) in self._strangers.items() if address == most
        )
        wait = since + STRANGER_SECONDS_MIN - self._loop.time()
        if wait > 0:
            if self._room_timer is not None:
                self._room_timer.cancel()
            self._room_timer = self._loop.call_later(wait, self.listen)
            return False
        del self._strangers[oldest]
        if (handshake := self._handshakes.get(oldest)) is None:
            oldest.abort()
        else:
            # The connection has no transport yet. The cancelled task closes it.
            handshake.cancel()
        # The loop closes the fd in its next iteration. The count is corrected now.
        self._count -= 1
        oldest.is_counted = False
        return True

    def _take_in(self, peer: socket.socket, address: str) -> None:
        peer.setblocking(False)
        self._count += 1
        task = self._loop.create_task(self._connect(peer, address))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, peer: socket.socket, address: str) -> None:
        connection = self._connection()
        try:
            if self._certificate is None:
                await self._loop.connect_accepted_socket(lambda: connection, peer)
            else:
                await self._shake_hands(connection, peer, address, self._certificate)
        except (OSError, asyncio.CancelledError) as exc:
            # Every client can fail in a handshake: a port scan, or a client without the CA.
            level = logging.WARNING if self._certificate is None else logging.DEBUG
            log.log(
                level, "connection lost during accept: %s", str(exc) or "no room, or a shutdown"
            )
            peer.close()
            self._on_lost(connection)
            if isinstance(exc, asyncio.CancelledError):
                raise
            return
        if not connection.is_admitted:
            self._strangers.setdefault(connection, (address, self._loop.time()))
        connection.lost.add_done_callback(lambda _: self._on_lost(connection))
        # The room may be full of strangers, and this one may be closed for the next client.
        self.listen()

    async def _shake_hands(
        self, connection: Connection, peer: socket.socket, address: str, own: ServerCertificate
    ) -> None:
        """Make the TLS handshake. Until its end `close` and `_close_stranger` may cancel it."""
        if self._is_closed:
            raise ConnectionAbortedError
        task = asyncio.current_task()
        assert task is not None
        self._handshakes[connection] = task
        self._strangers[connection] = (address, self._loop.time())
        try:
            await self._loop.connect_accepted_socket(
                lambda: connection,
                peer,
                ssl=own.context(),
                ssl_handshake_timeout=HEAD_SECONDS_MAX,
                ssl_shutdown_timeout=TLS_CLOSE_SECONDS_MAX,
            )
        finally:
            del self._handshakes[connection]

    def _on_lost(self, connection: Connection) -> None:
        self._strangers.pop(connection, None)
        self._count -= connection.is_counted
        # The warning is logged again only after the load has dropped in between.
        is_quiet = (
            self._count <= self._connections_max * 3 // 4
            and len(self._strangers) <= self._strangers_max // 2
        )
        self._was_full = self._was_full and not is_quiet
        self.listen()
