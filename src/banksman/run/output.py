"""What a command wrote: head and tail kept in memory, the whole in a file up to a bound, the rest counted.

A command can write for ever; what is kept of it cannot grow for ever. The beginning says what was done, the end says
how it ended; the middle goes to a file, and past the file's bound it is counted and dropped.
"""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import weakref
from collections import deque
from dataclasses import dataclass, field

from banksman.run import system

OUTPUT_BYTES_MAX = 1 << 20
SPILL_BYTES_MAX = 64 << 20
# Smaller pieces are gathered: a command that writes single bytes would otherwise cost fifty times its output.
_GATHER_BYTES = 4096

log = logging.getLogger("banksman")


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Output:
    """One stream of a finished command.

    `total` bytes were written; `dropped` of them, between `head` and `tail`, are not in memory. `file` has them from
    the start, up to 64 MiB; it is deleted with this object unless `keep()` was called.
    """

    head: bytes = b""
    tail: bytes = b""
    total: int = 0
    dropped: int = 0
    file: str | None = None
    _unlink: weakref.finalize[[str], Output] | None = field(default=None, repr=False, compare=False)

    @property
    def text(self) -> str:
        """Head and tail as text, with a line in between that says how much is missing, if anything is."""
        if not self.dropped:
            return (self.head + self.tail).decode("utf-8", "replace")
        head, tail = self.head.decode("utf-8", "replace"), self.tail.decode("utf-8", "replace")
        return f"{head}\n[… {self.dropped} bytes left out …]\n{tail}"

    def keep(self) -> str | None:
        """Keep the file; deleting it is the caller's business from now on. None if there is none."""
        if self._unlink is not None:
            self._unlink.detach()
        return self.file


class Capture:
    """Takes one stream as it comes, in bounded memory."""

    def __init__(self, bytes_max: int = OUTPUT_BYTES_MAX, spill_bytes_max: int = SPILL_BYTES_MAX) -> None:
        assert bytes_max >= 0
        self.total = 0
        self._head_max = bytes_max - bytes_max // 2
        self._tail_max = bytes_max // 2
        self._spill_max = spill_bytes_max
        self._head = bytearray()
        self._tail: deque[bytes | bytearray] = deque()
        self._tail_bytes = 0
        self._spill_fd = -1
        self._spill_path: str | None = None
        self._spilled = 0

    def add(self, data: bytes) -> None:
        self.total += len(data)
        if self.total > self._head_max + self._tail_max and self._spilled < self._spill_max:
            self._spill(data)
        room = self._head_max - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_max:
            self._add_to_tail(data)

    def read(self, after: int, bytes_max: int) -> tuple[bytes, int]:
        """What was written from byte `after` on, and where that really begins: later, if some of it is gone."""
        if after < self._spilled:
            return self._read_spilled(after, min(bytes_max, self._spilled - after)), after
        if after < len(self._head):
            return bytes(self._head[after : after + bytes_max]), after
        begin = self.total - self._tail_bytes
        after = max(after, begin)
        pieces: list[bytes] = []
        at, left = begin, bytes_max
        for chunk in self._tail:
            piece = bytes(chunk[max(0, after - at) :][:left]) if after < at + len(chunk) else b""
            pieces.append(piece)
            left -= len(piece)
            at += len(chunk)
            if left <= 0:
                break
        return b"".join(pieces), after

    def finish(self) -> Output:
        """The result. Nothing is added after this; `read` still works, as long as the result lives."""
        tail = b"".join(self._tail)
        tail = tail[max(0, len(tail) - self._tail_max) :]
        dropped = self.total - len(self._head) - len(tail)
        assert dropped >= 0
        path = self._spill_path
        output = Output(bytes(self._head), tail, self.total, dropped, path)
        if path is not None:
            object.__setattr__(output, "_unlink", weakref.finalize(output, _unlink, path))
            self._close_spill()
        return output

    def discard(self) -> None:
        """There will be no result: delete the file."""
        self._close_spill()
        if self._spill_path is not None:
            _unlink(self._spill_path)
            self._spill_path = None
            self._spilled = 0

    def _close_spill(self) -> None:
        if self._spill_fd >= 0:
            os.close(self._spill_fd)
            self._spill_fd = -1

    def _read_spilled(self, after: int, size: int) -> bytes:
        assert self._spill_path is not None
        # Opened anew: a finished command that is kept for reading must not keep an fd.
        fd = os.open(self._spill_path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.pread(fd, size, after)
        finally:
            os.close(fd)

    def _add_to_tail(self, data: bytes) -> None:
        last = self._tail[-1] if self._tail else None
        if isinstance(last, bytearray) and len(last) + len(data) <= _GATHER_BYTES:
            last += data
        else:
            self._tail.append(bytearray(data) if len(data) < _GATHER_BYTES else data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= self._tail_max:
            self._tail_bytes -= len(self._tail.popleft())

    def _spill(self, data: bytes) -> None:
        try:
            if self._spill_fd < 0:
                self._spill_fd, self._spill_path = tempfile.mkstemp(prefix="banksman-", suffix=".out")
                # Nothing was dropped before this moment, so head and tail are all there has been.
                data = b"".join((self._head, *self._tail, data))
            data = data[: self._spill_max - self._spilled]
            self._spilled += _write_all(self._spill_fd, data)
        except OSError as exc:
            # A full disk must not end somebody's command. Head, tail and count are kept; the file is given up.
            log.warning("! output is no longer written to a file: %s", exc)
            self._spill_max = 0
            self.discard()


def _write_all(fd: int, data: bytes) -> int:
    view = memoryview(data)
    while view:
        view = view[system.write(fd, view) :]
    return len(data)


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
