"""One connection of a client: bytes in and out, where every wait also hears the client leave and the server stop.

A blocking recv() hears neither. So the socket never blocks, and each wait is a poll() of three things: what is awaited,
the client's hang-up, and an eventfd that the server writes once, at its end, and that nobody reads: it stays readable
for every thread.
"""

from __future__ import annotations

import enum
import select
import socket
import struct
import time

# A client is on the same machine. One that sends half a request, or reads nothing, for so long is stuck.
READ_SECONDS_MAX = 60.0
WRITE_SECONDS_MAX = 300.0
# What is read at once.
CHUNK_BYTES = 1 << 16


class Gone(Exception):
    """The client closed or reset its end."""


class Stopped(Exception):
    """The server is ending."""


class Stuck(Exception):
    """The client stopped in the midst of something, and its time is up."""


class TooLong(Exception):
    """More bytes came than there may be before what was looked for."""


class Ending(enum.Enum):
    """How a connection is closed: so that the client gets what was sent, or so that it sees a reset."""

    ORDERLY, RESET = range(2)


class ModelConnection:
    """The server's end of one connection. Used by one thread only."""

    def __init__(self, sock: socket.socket, *, stop_fd: int) -> None:
        self._sock = sock
        self._sock.setblocking(False)
        # A delta is to be seen when it is said, not when enough of them fill a packet.
        self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stop_fd = stop_fd
        self._buffer = bytearray()

    def has_bytes(self, timeout: float) -> bool:
        """Wait for the next byte; False if there will be none, or none in time."""
        if self._buffer:
            return True
        try:
            return self._fill(time.monotonic() + timeout)
        except (Gone, Stuck):
            return False

    def read_until(self, end: bytes, *, bytes_max: int) -> bytes:
        """Everything up to and with `end`."""
        deadline = time.monotonic() + READ_SECONDS_MAX
        while (at := self._buffer.find(end)) < 0:
            if len(self._buffer) > bytes_max:
                raise TooLong
            if not self._fill(deadline):
                raise Gone
        if at + len(end) > bytes_max:
            raise TooLong
        return self._take(at + len(end))

    def read_exactly(self, size: int) -> bytes:
        deadline = time.monotonic() + READ_SECONDS_MAX
        while len(self._buffer) < size:
            if not self._fill(deadline):
                raise Gone
        return self._take(size)

    def write(self, data: bytes) -> None:
        """Hand all of it to the kernel."""
        deadline = time.monotonic() + WRITE_SECONDS_MAX
        view = memoryview(data)
        while view:
            self._poll(select.POLLOUT, deadline)
            try:
                view = view[self._sock.send(view) :]
            except BlockingIOError:
                continue
            except OSError as exc:
                raise Gone from exc

    def wait(self, seconds: float) -> None:
        """Let time pass, unless the client leaves (Gone) or the server ends (Stopped)."""
        try:
            self._poll(0, time.monotonic() + seconds)
        except Stuck:
            return
        raise AssertionError("a poll for nothing came true")

    def close(self, ending: Ending) -> None:
        """Close it, at once."""
        if ending is Ending.RESET:
            # Lingering for no time at all is how close() sends a reset instead of a FIN.
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._sock.close()

    def drain(self, *, bytes_max: int, timeout: float) -> None:
        """Say that we are done, and read what the client still sends, up to a point.

        To close a socket with bytes unread is to reset it, and a reset may overtake the answer that explains it.
        """
        deadline = time.monotonic() + timeout
        try:
            self._sock.shutdown(socket.SHUT_WR)
            drained = len(self._take(len(self._buffer)))
            while drained < bytes_max and self._fill(deadline):
                drained += len(self._take(len(self._buffer)))
        except (Gone, Stopped, Stuck, OSError):
            pass  # It is being closed in any case.

    def _take(self, size: int) -> bytes:
        taken = bytes(memoryview(self._buffer)[:size])
        del self._buffer[:size]
        return taken

    def _fill(self, deadline: float) -> bool:
        """Wait for more bytes; False at the end of the client's."""
        while True:
            self._poll(select.POLLIN, deadline)
            try:
                data = self._sock.recv(CHUNK_BYTES)
            except BlockingIOError:
                continue
            except OSError as exc:
                raise Gone from exc
            self._buffer += data
            return bool(data)

    def _poll(self, wanted: int, deadline: float) -> None:
        """Return when the socket is ready for what is wanted; raise if something else ends the wait."""
        poll = select.poll()
        poll.register(self._stop_fd, select.POLLIN)
        # RDHUP, and not a look whether recv() would give nothing: bytes of a next request may be waiting before the
        # end. While reading it is not wanted, since what was sent before the end is still to be read.
        is_reading = wanted == select.POLLIN
        poll.register(self._sock, wanted if is_reading else wanted | select.POLLRDHUP)
        left = max(0.0, deadline - time.monotonic())
        # Rounded up, so that a rest of less than a millisecond is no busy loop.
        ready = dict(poll.poll(int(left * 1000) + 1))
        if self._stop_fd in ready:
            raise Stopped
        if not ready:
            raise Stuck
        (events,) = ready.values()
        if not is_reading and events & (select.POLLRDHUP | select.POLLHUP | select.POLLERR):
            raise Gone
