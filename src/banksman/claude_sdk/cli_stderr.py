"""Stderr of the CLI: keep its end for errors, and copy it to the stderr of this program.

The SDK lets the CLI inherit stderr if the caller has no callback. The drop-in reads stderr in any
case, so `StderrCopy` writes the same bytes to the program's stderr. A thread does that: a write to
a full pipe blocks, and the event loop must not.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading

import anyio.to_thread

TAIL_BYTES_MAX = 64 << 10
# Bytes that may wait for the reader of the program's stderr. More are dropped.
WAITING_BYTES_MAX = 1 << 20
# A reader that reads has the rest within this time. It only bounds the wait for one that does not.
FLUSH_SECONDS_MAX = 1.0


class StderrTail:
    """The last bytes of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        del self._data[:-TAIL_BYTES_MAX]

    @property
    def text(self) -> str:
        """The end of the stream, without its last newline. At most TAIL_BYTES_MAX bytes."""
        return self._data.decode("utf-8", "ignore").rstrip("\n")


class StderrCopy:
    """Write bytes to an fd from a daemon thread. The thread ends when nothing waits."""

    def __init__(self, fd: int = 2) -> None:
        assert fd >= 0
        self._fd = fd
        self._lock = threading.Lock()
        self._waiting = bytearray()
        self._idle = threading.Event()
        self._idle.set()

    def put(self, data: bytes) -> None:
        """Queue bytes, and return immediately. Drops them if too many wait."""
        with self._lock:
            if len(self._waiting) + len(data) > WAITING_BYTES_MAX:
                return
            self._waiting += data
            if not self._idle.is_set():
                return
            self._idle.clear()
        # A daemon: a reader that never reads must not keep the program from its exit.
        threading.Thread(target=self._write, name="banksman-stderr", daemon=True).start()

    async def flush(self) -> None:
        """Wait until everything is written, or until the reader seems not to read."""
        if not self._idle.is_set():
            await anyio.to_thread.run_sync(self._idle.wait, FLUSH_SECONDS_MAX)

    def _write(self) -> None:
        while data := self._take():
            # The reader is gone, or the program has closed its stderr. The CLI would lose it too.
            with contextlib.suppress(OSError):
                _write_all(self._fd, data)

    def _take(self) -> bytes:
        with self._lock:
            data = bytes(self._waiting)
            self._waiting.clear()
            if not data:
                self._idle.set()
            return data


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(fd, view) :]
        except BlockingIOError:
            # Another program has made the shared terminal or pipe non-blocking.
            select.select([], [fd], [])
