"""A pseudo-terminal, from our side: what is on its screen comes out of it, what is typed goes in.

The child has the other side as stdin, stdout and stderr and as its controlling terminal. So there is one stream of
output, with the echo of what was typed in it; Ctrl-C is a byte; and the end of the input is one, too: nothing can be
closed while the output is still wanted.

Stated limits, which are the kernel's: in a terminal that collects lines (the default) a line longer than 4,095 bytes is
cut, and when no process has the terminal open any more, its output has ended, even if one opens /dev/tty again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import termios
import time
from collections.abc import Callable
from functools import partial
from typing import Literal

from banksman.core.process_facts import BytesRead, Stream, StreamEnded
from banksman.errors import UsageError
from banksman.process import syscalls
from banksman.process.launch import PIPES, Target
from banksman.process.pipes import PipeReader, PipeWrite, PipeWriter

# The number by which a session takes a terminal as its own. Sent to the keeper, which does not load this module.
TAKE_TERMINAL = termios.TIOCSCTTY
# After one of these there is no line that was begun: ends of a line, and what throws a line away (Ctrl-C, -U, -Z, -\).
_LINE_STARTS = b"\n\r\x03\x04\x15\x1a\x1c"

Size = tuple[int, int]  # rows, columns


def open_terminal(size: Size) -> tuple[int, int]:
    """`(ours, the child's)`, neither under the number of a standard stream."""
    ours, theirs = syscalls.open_pty()
    try:
        ours = syscalls.above_stdio(ours)
    except OSError:
        syscalls.close(theirs)
        raise
    try:
        theirs = syscalls.above_stdio(theirs)
    except OSError:
        syscalls.close(ours)
        raise
    try:
        resize(ours, size)
    except OSError:
        syscalls.close(ours)
        syscalls.close(theirs)
        raise
    return ours, theirs


def resize(fd: int, size: Size) -> None:
    """The kernel tells the foreground job by SIGWINCH, if the size is another one."""
    syscalls.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


class PtyInput(PipeWriter):
    """What is typed, one whole write after another. It has no end but that of the terminal."""

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        super().__init__(loop, fd)
        self._is_at_line_start = True

    def end(self) -> None:
        """Type the end of the input, after what is still to be written. More may be typed then: who reads decides what
        it means, and an end for the program that has the terminal now is none for the shell below it."""
        self._put(_End(b"", self._loop.create_future()))

    def _begin(self, writing: PipeWrite) -> None:
        if isinstance(writing, _End):
            writing.rest = memoryview(self._end_of_input())

    def _end_of_input(self) -> bytes:
        """In a line that was begun, the first one only hands that over, and it takes another for the end."""
        try:
            mode = termios.tcgetattr(self._fd)
        except termios.error:
            return b"\x04"
        character: bytes = mode[6][termios.VEOF]
        if character == b"\0":
            return b""  # Somebody has switched it off, and there is nothing else to type.
        collects_lines = bool(mode[3] & termios.ICANON)
        return character if self._is_at_line_start or not collects_lines else character * 2

    def _write(self, data: memoryview) -> int:
        taken = super()._write(data)
        if taken:
            self._is_at_line_start = data[taken - 1] in _LINE_STARTS
        return taken


class _End(PipeWrite):
    """An end of the input that is to be typed. Which bytes that is depends on what was typed before it."""


# The three standard streams of a child, from our side: pipes, files, or a terminal.
#
# It owns the fds: ours in the loop's selector, the child's ends until they are handed over. What is read, and the end
# of each stream, is told as facts. A terminal is one stream of output, and a copy of its fd is what is written to, so
# that each end has an fd of its own, in the selector and to be closed.

Stdin = Literal["null", "pipe", "inherit"]


class ChildStreams:
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
        self.stdin: PipeWriter | None = None
        self._on_fact = on_fact
        self._readers: dict[Stream, PipeReader] = {}
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
                self.stdin = PipeWriter(loop, ours)
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
            self.theirs.extend((syscalls.dup(fd), number) for fd, taken in self.theirs[:] if taken == 1)
        elif target != "null":
            self.theirs.append((_open_file(target) if isinstance(target, bytes) else syscalls.dup(target), number))

    def _read(self, loop: asyncio.AbstractEventLoop, stream: Stream, fd: int) -> None:
        told = partial(self._on_bytes, stream), partial(self._on_end, stream)
        self._readers[stream] = PipeReader(loop, fd, *told)

    def _open_terminal(self, loop: asyncio.AbstractEventLoop, size: Size) -> None:
        ours, theirs = open_terminal(size)
        self.theirs.append((theirs, 0))
        self._read(loop, Stream.STDOUT, ours)
        self.stdin = PtyInput(loop, syscalls.dup(ours))

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

    def _those(self, stream: Stream | None) -> list[PipeReader]:
        return [reader for of, reader in self._readers.items() if stream in (None, of)]

    def read_now(self) -> None:
        for reader in self._readers.values():
            reader.read_now()

    def close_theirs(self) -> None:
        while self.theirs:
            syscalls.close(self.theirs.pop()[0])

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
    read_end, write_end = syscalls.pipe()
    try:
        read_end = syscalls.above_stdio(read_end)
    except OSError:
        syscalls.close(write_end)
        raise
    try:
        return read_end, syscalls.above_stdio(write_end)
    except OSError:
        syscalls.close(read_end)
        raise


def _open_file(path: bytes) -> int:
    """A new or emptied file to write to."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        # A fifo that nobody reads would keep the loop waiting here; so it is an error.
        fd = syscalls.above_stdio(syscalls.open_fd(path, flags | os.O_NONBLOCK, 0o666))
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        hint = "a path that can be written to, or an open file"
        raise UsageError(f"cannot write output to {os.fsdecode(path)}: {exc.strerror}", hint=hint) from exc
    syscalls.set_blocking(fd, True)
    return fd


def _own_stdin() -> int:
    try:
        return syscalls.dup(0)
    except OSError as exc:
        if exc.errno != errno.EBADF:
            raise
        raise UsageError('stdin="inherit", but this program has closed its own', hint="stdin=None") from exc
