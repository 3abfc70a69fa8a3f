"""The three standard streams of a child, from our side: pipes, or a terminal.

It owns the fds: ours in the loop's selector, the child's ends until they are handed over. What is read, and the end of
each stream, is told as facts. A terminal is one stream of output, and a copy of its fd is what is written to, so that
each end has an fd of its own, in the selector and to be closed.
"""

from __future__ import annotations

import asyncio
import errno
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

from banksman.core.facts import BytesRead, Stream, StreamEnded
from banksman.errors import UsageError
from banksman.run.child import system
from banksman.run.child.pipes import Reader, Writer
from banksman.run.child.terminal import Keyboard, Size, open_terminal, resize

Stdin = Literal["null", "pipe", "inherit"]


class Streams:
    """`theirs` are the child's ends, each with the number it has in the child; to be closed once the child has them."""

    def __init__(
        self, stdin: Stdin, on_fact: Callable[[BytesRead | StreamEnded], None], terminal: Size | None = None
    ) -> None:
        """`terminal`: of this size, in place of the pipes. It is under the child's number 0, and for all three."""
        self.theirs: list[tuple[int, int]] = []
        self.stdin: Writer | None = None
        self._on_fact = on_fact
        self._readers: list[Reader] = []
        loop = asyncio.get_running_loop()
        try:
            if terminal is not None:
                self._open_terminal(loop, terminal)
                return
            for stream, target in ((Stream.STDOUT, 1), (Stream.STDERR, 2)):
                ours, write_end = _pipe()
                self.theirs.append((write_end, target))
                told = partial(self._on_bytes, stream), partial(self._on_end, stream)
                self._readers.append(Reader(loop, ours, *told))
            if stdin == "pipe":
                read_end, ours = _pipe()
                self.theirs.append((read_end, 0))
                self.stdin = Writer(loop, ours)
            elif stdin == "inherit":
                self.theirs.append((_own_stdin(), 0))
        except BaseException:
            self.close()
            raise

    def _open_terminal(self, loop: asyncio.AbstractEventLoop, size: Size) -> None:
        ours, theirs = open_terminal(size)
        self.theirs.append((theirs, 0))
        told = partial(self._on_bytes, Stream.STDOUT), partial(self._on_end, Stream.STDOUT)
        self._readers.append(Reader(loop, ours, *told))
        self.stdin = Keyboard(loop, system.dup(ours))

    def resize(self, size: Size) -> None:
        """Of a terminal that is still there; else nothing happens."""
        ends = (*self._readers, *([] if self.stdin is None else [self.stdin]))
        fd = max(end.fileno() for end in ends)
        if fd >= 0:
            resize(fd, size)

    def widen_stdout(self) -> None:
        self._readers[0].widen()

    def resume(self) -> None:
        for reader in self._readers:
            reader.resume()

    def pause(self) -> None:
        for reader in self._readers:
            reader.pause()

    def read_now(self) -> None:
        for reader in self._readers:
            reader.read_now()

    def close_theirs(self) -> None:
        while self.theirs:
            system.close(self.theirs.pop()[0])

    def close_output(self) -> None:
        for reader in self._readers:
            reader.close()

    def close(self) -> None:
        self.close_output()
        if self.stdin is not None:
            self.stdin.close()
        self.close_theirs()

    def forget(self) -> None:
        """Close every fd without touching the loop."""
        for reader in self._readers:
            reader.forget()
        if self.stdin is not None:
            self.stdin.forget()
        self.close_theirs()

    def _on_bytes(self, stream: Stream, data: bytes) -> None:
        self._on_fact(BytesRead(stream, data, time.monotonic()))

    def _on_end(self, stream: Stream, is_whole: bool) -> None:
        self._on_fact(StreamEnded(stream, time.monotonic(), is_whole))


def _pipe() -> tuple[int, int]:
    """A pipe, `(read end, write end)`, neither under the number of a standard stream."""
    read_end, write_end = system.pipe()
    try:
        read_end = system.above_stdio(read_end)
    except OSError:
        system.close(write_end)
        raise
    try:
        return read_end, system.above_stdio(write_end)
    except OSError:
        system.close(read_end)
        raise


def _own_stdin() -> int:
    try:
        return system.dup(0)
    except OSError as exc:
        if exc.errno != errno.EBADF:
            raise
        raise UsageError('stdin="inherit", but this program has closed its own', hint="stdin=None") from exc
