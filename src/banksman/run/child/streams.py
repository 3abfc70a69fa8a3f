"""The three standard streams of a child, from our side: pipes, files, or a terminal.

It owns the fds: ours in the loop's selector, the child's ends until they are handed over. What is read, and the end of
each stream, is told as facts. A terminal is one stream of output, and a copy of its fd is what is written to, so that
each end has an fd of its own, in the selector and to be closed.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

from banksman.core.facts import BytesRead, Stream, StreamEnded
from banksman.errors import UsageError
from banksman.run.child import system
from banksman.run.child.launch import PIPES, Target
from banksman.run.child.pipes import Reader, Writer
from banksman.run.child.terminal import Keyboard, Size, open_terminal, resize

Stdin = Literal["null", "pipe", "inherit"]


class Streams:
    """`theirs` are the child's ends, each with the number it has in the child; to be closed once the child has them."""

    def __init__(
        self,
        stdin: Stdin,
        on_fact: Callable[[BytesRead | StreamEnded], None],
        terminal: Size | None = None,
        outputs: tuple[Target, Target] = PIPES,
    ) -> None:
        """`terminal`: of this size, in place of the pipes. It is under the child's number 0, and for all three.
        `outputs`: where stdout and stderr go."""
        self.theirs: list[tuple[int, int]] = []
        self.stdin: Writer | None = None
        self._on_fact = on_fact
        self._readers: dict[Stream, Reader] = {}
        loop = asyncio.get_running_loop()
        try:
            if terminal is not None:
                self._open_terminal(loop, terminal)
                return
            for stream, target, number in zip(Stream, outputs, (1, 2), strict=True):
                self._open_output(loop, stream, target, number)
            if stdin == "pipe":
                read_end, ours = _pipe()
                self.theirs.append((read_end, 0))
                self.stdin = Writer(loop, ours)
            elif stdin == "inherit":
                self.theirs.append((_own_stdin(), 0))
        except BaseException:
            self.close()
            raise

    def _open_output(self, loop: asyncio.AbstractEventLoop, stream: Stream, target: Target, number: int) -> None:
        if target == "pipe":
            ours, write_end = _pipe()
            self.theirs.append((write_end, number))
            self._read(loop, stream, ours)
        elif target == "stdout":
            # Not there: stdout is /dev/null, as everything is that a child is not given.
            self.theirs.extend((system.dup(fd), number) for fd, taken in self.theirs[:] if taken == 1)
        elif target != "null":
            self.theirs.append((_open_file(target) if isinstance(target, bytes) else system.dup(target), number))

    def _read(self, loop: asyncio.AbstractEventLoop, stream: Stream, fd: int) -> None:
        told = partial(self._on_bytes, stream), partial(self._on_end, stream)
        self._readers[stream] = Reader(loop, fd, *told)

    def _open_terminal(self, loop: asyncio.AbstractEventLoop, size: Size) -> None:
        ours, theirs = open_terminal(size)
        self.theirs.append((theirs, 0))
        self._read(loop, Stream.STDOUT, ours)
        self.stdin = Keyboard(loop, system.dup(ours))

    def resize(self, size: Size) -> None:
        """Of a terminal that is still there; else nothing happens."""
        ends = (*self._readers.values(), *([] if self.stdin is None else [self.stdin]))
        fd = max(end.fileno() for end in ends)
        if fd >= 0:
            resize(fd, size)

    def widen_stdout(self) -> None:
        self._readers[Stream.STDOUT].widen()

    def resume(self, stream: Stream | None = None) -> None:
        """Read this stream; None: both."""
        for reader in self._those(stream):
            reader.resume()

    def pause(self, stream: Stream | None = None) -> None:
        for reader in self._those(stream):
            reader.pause()

    def _those(self, stream: Stream | None) -> list[Reader]:
        return [reader for of, reader in self._readers.items() if stream in (None, of)]

    def read_now(self) -> None:
        for reader in self._readers.values():
            reader.read_now()

    def close_theirs(self) -> None:
        while self.theirs:
            system.close(self.theirs.pop()[0])

    def close_output(self) -> None:
        for reader in self._readers.values():
            reader.close()

    def close(self) -> None:
        self.close_output()
        if self.stdin is not None:
            self.stdin.close()
        self.close_theirs()

    def forget(self) -> None:
        """Close every fd without touching the loop."""
        for reader in self._readers.values():
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


def _open_file(path: bytes) -> int:
    """A new or emptied file to write to."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        # A fifo that nobody reads would keep the loop waiting here; so it is an error.
        fd = system.above_stdio(system.open_fd(path, flags | os.O_NONBLOCK, 0o666))
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        hint = "a path that can be written to, or an open file"
        raise UsageError(f"cannot write output to {os.fsdecode(path)}: {exc.strerror}", hint=hint) from exc
    system.set_blocking(fd, True)
    return fd


def _own_stdin() -> int:
    try:
        return system.dup(0)
    except OSError as exc:
        if exc.errno != errno.EBADF:
            raise
        raise UsageError('stdin="inherit", but this program has closed its own', hint="stdin=None") from exc
