"""Mark on a write to the stdin of a child that survives the crash of its host.

A host that is killed in the middle of a write leaves a part of it in the pipe, and no process knows
how much. So the host notes before the first byte that a write is under way, and after the last byte
that it is not. The note is eight bytes in an unnamed file in memory. The keeper has that file too,
and gives it to the next host. If no write was under way, that host continues. If one was, it cannot
know what the child has got.

The eight bytes are one number: twice the count of finished writes, plus one during a write. So the
count and the flag cannot contradict each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from banksman.process import syscalls
from banksman.process.pipes import PipeWrite, PipeWriter

_BYTES = 8


class InputState(NamedTuple):
    """The writes to a stdin: how many are finished, and whether another one is under way."""

    finished: int
    is_writing: bool


class InputMark:
    """The unnamed file with the note. The object owns the fd."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.state = self.look(fd)

    @classmethod
    def create(cls) -> InputMark:
        """Create the mark of a stdin that nothing was written to."""
        fd = syscalls.above_stdio(syscalls.memfd_create("banksman-input"))
        try:
            # Its page exists from now on, so that no later note lacks memory.
            syscalls.pwrite(fd, bytes(_BYTES), 0)
            return cls(fd)
        except OSError:
            syscalls.close(fd)
            raise

    @staticmethod
    def look(fd: int) -> InputState:
        """Return the state that is noted in this file."""
        number = int.from_bytes(syscalls.pread(fd, _BYTES, 0), "little")
        return InputState(number >> 1, bool(number & 1))

    def fileno(self) -> int:
        """The fd, or -1 if it is closed."""
        return self._fd

    def note(self, finished: int, *, is_writing: bool) -> None:
        """Note the state of the writes."""
        state = InputState(finished, is_writing)
        if state != self.state:
            number = 2 * finished + is_writing
            syscalls.pwrite(self._fd, number.to_bytes(_BYTES, "little"), 0)
            self.state = state

    def close(self) -> None:
        """Close the fd."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            syscalls.close(fd)

    __del__ = close


class MarkedWriter(PipeWriter):
    """Writes to a stdin, and marks each write. `on_close`: called when the pipe is closed."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        mark: InputMark,
        on_close: Callable[[], None],
    ) -> None:
        self.mark = mark
        self._on_close = on_close
        super().__init__(loop, fd)

    def withdraw(self, writing: PipeWrite) -> bool:
        is_withdrawn = super().withdraw(writing)
        # It may have waited for its first byte.
        if is_withdrawn and not self._queue:
            self.mark.note(self.mark.state.finished, is_writing=False)
        return is_withdrawn

    def _begin(self, writing: PipeWrite) -> None:
        self.mark.note(self.mark.state.finished, is_writing=True)

    def _finish(self) -> None:
        self.mark.note(self.mark.state.finished + 1, is_writing=False)

    def close(self) -> None:
        was_open = self._fd >= 0
        super().close()
        if was_open:
            self._on_close()

    def forget(self) -> None:
        super().forget()
        self.mark.close()
