"""What a command wrote: head and tail kept in memory, the whole in a file up to a bound, the rest counted.

A command can write for ever; what is kept of it cannot grow for ever. The beginning says what was done, the end says
how it ended; the middle goes to a file, and past the file's bound it is counted and dropped.
"""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

from banksman.commands.spill_file import Spill

OUTPUT_BYTES_MAX = 1 << 20
SPILL_BYTES_MAX = 64 << 20
# Smaller pieces are gathered: a command that writes single bytes would otherwise cost fifty times its output.
_GATHER_BYTES = 4096

log = logging.getLogger("banksman")


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of a command's output. `next` is where to read on; `missed` bytes before it are gone. `is_end`: the
    stream has ended here, whether or not the command has."""

    data: bytes
    next: int
    missed: int
    is_end: bool

    @property
    def text(self) -> str:
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class Output:
    """One stream of a finished command.

    `total` bytes were written; `dropped` of them, between `head` and `tail`, are not in memory. `file` has them from
    the start, up to 64 MiB; it is deleted with this object unless `keep()` was called.
    """

    head: bytes = b""
    tail: bytes = b""
    total: int = 0
    dropped: int = 0
    spill: Spill | None = field(default=None, repr=False, compare=False)

    @property
    def file(self) -> str | None:
        return None if self.spill is None else self.spill.path

    @property
    def text(self) -> str:
        """Head and tail as text, with a line in between that says how much is missing, if anything is."""
        if not self.dropped:
            return (self.head + self.tail).decode("utf-8", "replace")
        head, tail = self.head.decode("utf-8", "replace"), self.tail.decode("utf-8", "replace")
        return f"{head}\n[… {self.dropped} bytes left out …]\n{tail}"

    def keep(self) -> str | None:
        """Keep the file; deleting it is the caller's business from now on. None if there is none."""
        if self.spill is not None:
            self.spill.keep()
        return self.file


class Capture:
    """Takes one stream as it comes, in bounded memory."""

    def __init__(self, bytes_max: int = OUTPUT_BYTES_MAX, spill_bytes_max: int = SPILL_BYTES_MAX) -> None:
        assert bytes_max >= 0
        self.total = 0
        self._head_max = bytes_max - bytes_max // 2
        self._tail_max = bytes_max // 2
        self._head: bytearray | bytes = bytearray()
        self._tail: deque[bytes | bytearray] = deque()
        self._tail_bytes = 0
        self._spill: Spill | None = None
        self._spill_max = spill_bytes_max

    def add(self, data: bytes) -> None:
        self.total += len(data)
        if self.total > self._head_max + self._tail_max and self._spill_max:
            self._add_to_spill(data)
        room = self._head_max - len(self._head)
        if room > 0:
            self._head += data[:room]
            data = data[room:]
        if data and self._tail_max:
            self._add_to_tail(data)

    def read(self, after: int, bytes_max: int) -> tuple[bytes, int]:
        """What was written from byte `after` on, and where that really begins: later, if some of it is gone."""
        if self._spill is not None and after < self._spill.size:
            try:
                return self._spill.read(after, bytes_max), after
            except OSError:
                pass  # Somebody has moved or deleted the file. Head and tail are still there, and the gap is told.
        if after < len(self._head):
            return bytes(self._head[after : after + bytes_max]), after
        begin = self.total - self._tail_bytes
        after = max(after, begin)
        tail = b"".join(self._tail)
        return tail[after - begin :][:bytes_max], after

    def finish(self) -> Output:
        """The result. Nothing is added after this, but `read` still works."""
        head, tail = bytes(self._head), b"".join(self._tail)
        tail = tail[max(0, len(tail) - self._tail_max) :]
        dropped = self.total - len(head) - len(tail)
        assert dropped >= 0
        # One copy for both of us from here on.
        self._head, self._tail_bytes = head, len(tail)
        self._tail.clear()
        self._tail.append(tail)
        if self._spill is not None:
            self._spill.close()
        return Output(head, tail, self.total, dropped, self._spill)

    def discard(self) -> None:
        """There will be no result: delete the file."""
        if self._spill is not None:
            self._spill.delete()
            self._spill = None

    def _add_to_tail(self, data: bytes) -> None:
        last = self._tail[-1] if self._tail else None
        if isinstance(last, bytearray) and len(last) + len(data) <= _GATHER_BYTES:
            last += data
        else:
            self._tail.append(bytearray(data) if len(data) < _GATHER_BYTES else data)
        self._tail_bytes += len(data)
        while self._tail_bytes - len(self._tail[0]) >= self._tail_max:
            self._tail_bytes -= len(self._tail.popleft())

    def _add_to_spill(self, data: bytes) -> None:
        try:
            if self._spill is None:
                self._spill = Spill()
                # Nothing was dropped before this moment, so head and tail are all there has been.
                data = b"".join((self._head, *self._tail, data))
            room = self._spill_max - self._spill.size
            if room > 0:
                self._spill.add(data[:room])
        except OSError as exc:
            # A full disk must not end somebody's command. Head, tail and count are kept; the file is given up.
            log.warning("! output is no longer written to a file: %s", exc)
            self._spill_max = 0
            self.discard()
