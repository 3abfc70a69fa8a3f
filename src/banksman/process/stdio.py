"""Standard streams of a child: open both ends of pipes, files or a terminal, and read them.

`ChildStreams` owns the streams and reports data as facts; `pipes.py` reads and writes the host's
ends. `PtyInput` is the input of a pseudo-terminal.

With a pseudo-terminal, the child has its other side as stdin, stdout and stderr and as its
controlling terminal. This has three consequences:
- There is one stream of output, and it contains the echo of the input.
- Ctrl-C is a byte of the input.
- The end of the input is a byte too. The host cannot close the input while it still wants the
  output.

Stated limits of the kernel: a terminal in line mode (the default) cuts lines longer than 4,095
bytes. When no process has the terminal open, its output has ended, even if a process opens /dev/tty
again.
"""

from __future__ import annotations

import asyncio
import errno
import os
import struct
import termios
import time
from collections.abc import Callable, Mapping
from functools import partial

from banksman.core.process_facts import BytesRead, Stream, StreamEnded
from banksman.errors import UsageError
from banksman.process import syscalls
from banksman.process.input_mark import InputMark, MarkedWriter
from banksman.process.launch import PIPES, Source, Target
from banksman.process.pipes import PipeReader, PipeWrite, PipeWriter
from banksman.process.spool import Spool, SpooledReader

# The ioctl by which a session leader acquires a controlling terminal. The host sends the number to
# the keeper, which does not load this module.
TAKE_TERMINAL = termios.TIOCSCTTY
# After one of these bytes the input is at the start of a line: line ends, and the bytes that
# discard a line (Ctrl-C, -U, -Z, -\).
_LINE_STARTS = b"\n\r\x03\x04\x15\x1a\x1c"

Size = tuple[int, int]  # rows, columns
STDIN = "stdin"
# Names of the files that a child has besides its streams if it survives the crash of its host.
SPOOL, MARK = "{}-spool", "stdin-mark"


def open_terminal(size: Size) -> tuple[int, int]:
    """Open a terminal and return `(host's fd, child's fd)`, both above the standard streams."""
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
    """Set the size of a terminal. The kernel sends SIGWINCH to its foreground job on a change."""
    syscalls.ioctl(fd, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))


class PtyInput(PipeWriter):
    """Input of a terminal, one whole write after another.

    It ends only with the terminal.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        super().__init__(loop, fd)
        self._is_at_line_start = True

    def end(self) -> None:
        """Type the end-of-input character, after the writes that are still queued.

        More input may follow. The reader decides what the end means: it may end the program in the
        foreground, but not the shell below it.
        """
        self._put(_End(b"", self._loop.create_future()))

    def _begin(self, writing: PipeWrite) -> None:
        """Choose the bytes of an end of input, now that all writes before it are done."""
        if isinstance(writing, _End):
            writing.rest = memoryview(self._end_of_input())

    def _end_of_input(self) -> bytes:
        """Return the bytes that end the input now.

        In the middle of a line, the first end character only submits that line. A second one ends
        the input.
        """
        try:
            mode = termios.tcgetattr(self._fd)
        except termios.error:
            return b"\x04"
        character: bytes = mode[6][termios.VEOF]
        if character == b"\0":
            return b""  # A program has disabled the character, so no byte can end the input.
        collects_lines = bool(mode[3] & termios.ICANON)
        return character if self._is_at_line_start or not collects_lines else character * 2

    def _write(self, data: memoryview) -> int:
        taken = super()._write(data)
        if taken:
            self._is_at_line_start = data[taken - 1] in _LINE_STARTS
        return taken


class _End(PipeWrite):
    """A queued end of input. Its bytes depend on the writes before it."""


# ChildStreams owns the fds: the host's ends in the selector of the loop, and the child's ends until
# they are handed over. It reports data and the end of each stream as facts. A terminal is one
# stream of output. Its input uses a copy of the fd, so that each end has a separate fd, in the
# selector and for closing.


class ChildStreams:
    """The three standard streams of a child.

    `theirs`: the child's ends as `(fd, number in the child)`. The caller closes them once the child
    has them.
    """

    def __init__(
        self,
        stdin: Source,
        on_fact: Callable[[BytesRead | StreamEnded], None],
        terminal: Size | None = None,
        outputs: tuple[Target, Target] = PIPES,
        *,
        survives: bool = False,
    ) -> None:
        """Open the streams. On an error nothing stays open.

        `terminal`: its size; the child gets a terminal at fd 0, for all three streams, instead of
        pipes. `outputs`: targets of stdout and stderr. `survives`: read by spools and mark the
        writes, for a child that survives the crash of its host.
        """
        self.theirs: list[tuple[int, int]] = []
        self.stdin: PipeWriter | None = None
        self._on_fact = on_fact
        self._readers: dict[Stream, PipeReader] = {}
        # Called with the name of a stream that this host closes although it may go on.
        self.on_closed: Callable[[str], None] = _ignore
        # A terminal is no pipe, and splice moves only between a pipe and a file.
        assert not (survives and terminal is not None)
        loop = asyncio.get_running_loop()
        try:
            if terminal is not None:
                self._open_terminal(loop, terminal)
                return
            for stream, target, number in zip(Stream, outputs, (1, 2), strict=True):
                self._open_output(loop, stream, target, number, survives=survives)
            if stdin == "pipe":
                mark = InputMark.create() if survives else None
                read_end, ours = open_pipe()
                self.theirs.append((read_end, 0))
                self._write(loop, ours, mark)
            elif stdin == "inherit":
                self.theirs.append((_own_stdin(), 0))
            elif isinstance(stdin, int):
                self.theirs.append((syscalls.dup(stdin), 0))
        except BaseException:
            self.close()
            raise

    @classmethod
    def adopted(
        cls,
        on_fact: Callable[[BytesRead | StreamEnded], None],
        fds: dict[str, int],
        *,
        has_terminal: bool,
    ) -> ChildStreams:
        """Take the host's ends of another host out of `fds`: see `shared`.

        On an error those that were taken are closed.
        """
        streams = cls("null", on_fact, None, ("null", "null"))
        loop = asyncio.get_running_loop()
        try:
            for stream in Stream:
                if stream in fds:
                    spool = fds.pop(SPOOL.format(stream), None)
                    streams._read(
                        loop, stream, fds.pop(stream), None if spool is None else Spool(spool)
                    )
            if STDIN in fds and has_terminal:
                streams.stdin = PtyInput(loop, fds.pop(STDIN))
            elif STDIN in fds:
                mark = fds.pop(MARK, None)
                streams._write(loop, fds.pop(STDIN), None if mark is None else InputMark(mark))
            # The mark of a stdin that is closed, and the spool of an output that is.
            while fds:
                syscalls.close(fds.popitem()[1])
        except BaseException:
            streams.close()
            raise
        return streams

    def shared(self) -> list[tuple[str, int]]:
        """Return the host's ends by name, for another host; -1 for an output that has ended."""
        ends = [(stream.value, reader.fileno()) for stream, reader in self._readers.items()]
        if self.stdin is not None and self.stdin.is_open:
            ends.append((STDIN, self.stdin.fileno()))
            if isinstance(self.stdin, MarkedWriter):
                ends.append((MARK, self.stdin.mark.fileno()))
        for stream, reader in self._spooled.items():
            if reader.is_open:
                ends.append((SPOOL.format(stream), reader.spool.fileno()))
        return ends

    def start_at(self, offsets: Mapping[Stream, int]) -> None:
        """Begin each output at this offset: what the log of the former host ends with.

        Raises `MachineError` if the bytes from there on are not kept.
        """
        for stream, offset in offsets.items():
            if stream in self._spooled:
                self._spooled[stream].spool.start_at(offset)

    def settle(self, stream: Stream, offset: int | None) -> None:
        """Note that the bytes of this output before the offset are durable; None: all reported."""
        reader = self._readers.get(stream)
        if isinstance(reader, SpooledReader) and reader.is_open:
            reader.settle(reader.spool.delivered if offset is None else offset)

    @property
    def _spooled(self) -> dict[Stream, SpooledReader]:
        return {
            stream: reader
            for stream, reader in self._readers.items()
            if isinstance(reader, SpooledReader)
        }

    @property
    def is_writing(self) -> bool:
        """Whether a write to stdin is not finished."""
        return self.stdin is not None and self.stdin.is_writing

    def _open_output(
        self,
        loop: asyncio.AbstractEventLoop,
        stream: Stream,
        target: Target,
        number: int,
        *,
        survives: bool,
    ) -> None:
        if target == "pipe":
            spool = Spool.create() if survives else None
            ours, write_end = open_pipe()
            self.theirs.append((write_end, number))
            self._read(loop, stream, ours, spool)
        elif target == "stdout":
            # If stdout is not in `theirs`, it is /dev/null, like every stream that the child does
            # not get. Then stderr is /dev/null too.
            self.theirs.extend(
                (syscalls.dup(fd), number) for fd, taken in self.theirs[:] if taken == 1
            )
        elif target != "null":
            self.theirs.append(
                (_open_file(target) if isinstance(target, bytes) else syscalls.dup(target), number)
            )

    def _read(
        self, loop: asyncio.AbstractEventLoop, stream: Stream, fd: int, spool: Spool | None
    ) -> None:
        told = partial(self._on_bytes, stream), partial(self._on_end, stream)
        self._readers[stream] = (
            PipeReader(loop, fd, *told) if spool is None else SpooledReader(loop, fd, spool, *told)
        )

    def _write(self, loop: asyncio.AbstractEventLoop, fd: int, mark: InputMark | None) -> None:
        if mark is None:
            self.stdin = PipeWriter(loop, fd)
        else:
            self.stdin = MarkedWriter(loop, fd, mark, lambda: self.on_closed(STDIN))

    def _open_terminal(self, loop: asyncio.AbstractEventLoop, size: Size) -> None:
        ours, theirs = open_terminal(size)
        self.theirs.append((theirs, 0))
        self._read(loop, Stream.STDOUT, ours, None)
        self.stdin = PtyInput(loop, syscalls.dup(ours))

    def resize(self, size: Size) -> None:
        """Resize the terminal, if it is still open. Otherwise nothing happens."""
        ends = (*self._readers.values(), *([] if self.stdin is None else [self.stdin]))
        # Either end may be closed already. A closed end has the number -1.
        fd = max(end.fileno() for end in ends)
        if fd >= 0:
            resize(fd, size)

    def widen_stdout(self) -> None:
        self._readers[Stream.STDOUT].widen()

    def resume(self, stream: Stream | None = None) -> None:
        """Resume reading this stream; None resumes both."""
        for reader in self._those(stream):
            reader.resume()

    def reading(self) -> list[Stream]:
        """Return the streams that are being read: open, and not paused."""
        return [stream for stream, reader in self._readers.items() if reader.is_reading]

    def pause(self, stream: Stream | None = None) -> None:
        """Stop reading this stream, so that the child gets backpressure; None stops both."""
        for reader in self._those(stream):
            reader.pause()

    def _those(self, stream: Stream | None) -> list[PipeReader]:
        return [reader for of, reader in self._readers.items() if stream in (None, of)]

    def read_now(self) -> None:
        """Read the data that is already in the pipes."""
        for reader in self._readers.values():
            reader.read_now()

    def close_theirs(self) -> None:
        """Close the child's ends."""
        while self.theirs:
            syscalls.close(self.theirs.pop()[0])

    def close_output(self) -> None:
        """Stop reading and close the outputs."""
        for stream, reader in self._readers.items():
            if reader.is_open:
                reader.close()
                self.on_closed(stream.value)

    def close(self) -> None:
        """Close every fd."""
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


def _ignore(_name: str) -> None:
    pass


def open_pipe() -> tuple[int, int]:
    """Open a pipe and return `(read end, write end)`, both above the standard streams."""
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
    """Create or truncate a file for output, and return its fd."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    try:
        # Opening a FIFO without a reader would block the event loop here. With O_NONBLOCK it is an
        # error.
        fd = syscalls.above_stdio(syscalls.open_fd(path, flags | os.O_NONBLOCK, 0o666))
    except OSError as exc:
        if exc.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
            raise
        hint = "pass a path that can be written to, or an open file"
        raise UsageError(
            f"cannot write output to {os.fsdecode(path)}: {exc.strerror}", hint=hint
        ) from exc
    syscalls.set_blocking(fd, True)
    return fd


def _own_stdin() -> int:
    """Return a copy of this program's stdin."""
    try:
        return syscalls.dup(0)
    except OSError as exc:
        if exc.errno != errno.EBADF:
            raise
        message = "cannot inherit stdin: this program has closed it"
        raise UsageError(message, hint="pass stdin=None") from exc
