"""The output streams of a command: their pull readers, and when a pipe is not read.

**Pull readers.** `Command.read` and `on_output` never slow a command down: what a reader is late for comes from what
was kept, and what was not kept is gone. `OutputReader` is the opposite. From its first read on the stream waits for it:
as soon as `HELD_BYTES` are unread, the host stops reading the pipe, the pipe fills, and the command blocks in
`write()`, as it would on any pipe with a slow reader. Invariants:
- `_buffer` ends at byte `_next` of the stream. While `_next` is the stream's total, new output is appended here.
- While `_next` is behind the total, the rest is taken from the capture, and the stream is paused. What the capture does
  not have any more is counted in `missed`. That happens only to output from before the first read, and to output that
  came while the command was being stopped: a child that is blocked on a full pipe cannot react to a signal, so a stop
  ends the pause, and past `OVERRUN_BYTES_MAX` the buffer takes no more.

**Flow control.** A pipe that is not read fills, and pushes back on the command. There are two reasons for that. The
owner of the command says so (`pause`), for both streams; or the pull reader of one stream is behind, for that stream.
Being stopped ends both.

Output that nothing keeps is held for a reader that may come (`hold`), and its stream waits for that reader. A caller
that waits for the end of the command (`awaiting_end`) would wait for ever if none comes. So the first `HELD_BYTES` of
the stream stay held while such a caller waits, and the rest is dropped. `awaiting_end` is the only place that says so:
every call that waits for an end, of one command or of all commands of a host, waits inside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Generator
from typing import Any, Protocol

from banksman.commands.options import Options
from banksman.commands.output import Capture
from banksman.commands.result import ResultBuilder
from banksman.core.process_facts import BytesRead, Stream
from banksman.errors import UsageError
from banksman.tasks import Waiters

# Unread bytes at which the host stops reading the pipe.
HELD_BYTES = 1 << 18
# Beyond that, for output that is read though the reader is behind: a pipe of the largest size, and one callback's read.
OVERRUN_BYTES_MAX = 2 << 20
# A longer line is returned in parts of this size.
LINE_BYTES_MAX = 32 << 20


class OutputSource(Protocol):
    """The output of a command (`CommandOutput`), as far as it is needed here."""

    def has_ended(self, stream: Stream) -> bool: ...
    def update(self, stream: Stream) -> None: ...
    async def wait_changed(self) -> None: ...


class OutputReader:
    """One output stream of a command: `async for line in command.stdout`, `await command.stdout.read(n)`.

    It begins at the first byte of the stream, and ends when the stream does: that may be long before the command ends.
    From the first read on, a command whose output is not read waits, and nothing is lost. `missed` counts bytes that
    were lost before the first read because they were not kept, or that came faster than they were read after a stop.

    Cancelling a read loses nothing. Several tasks may read: each byte goes to one of them. For the loop of the command.
    """

    def __init__(self, source: OutputSource, stream: Stream, capture: Capture) -> None:
        self.missed = 0
        # A caller reads; or the output is held for one that may come, since nothing else keeps it.
        self.is_attached = False
        self.is_holding = False
        # Lines that were fetched for other threads, and that none of them has taken yet.
        self.fetched: deque[bytes] = deque()
        self._source = source
        self._stream = stream
        self._capture = capture
        self._buffer = bytearray()
        self._next = 0
        self._room = HELD_BYTES
        # How many bytes at the end of the buffer were taken though it was full, and are not read yet.
        self._overrun = 0

    def __repr__(self) -> str:
        return f"<OutputReader of {self._stream.value}: {len(self._buffer)} bytes to be read, {self.missed} missed>"

    # -- for callers -------------------------------------------------------------------------------------------------
    def at_eof(self) -> bool:
        """Whether the stream has ended and all of it was read."""
        is_read = not self._buffer and not self.fetched and self._next >= self._capture.total
        return is_read and self._source.has_ended(self._stream)

    async def read(self, size: int = -1) -> bytes:
        """Up to `size` bytes, as soon as there are any; b"" at the end of the stream. -1: all up to the end."""
        check_size(size)
        if size < 0:
            return await self._read_all()
        self._attach()
        while not self._buffer:
            if not await self._more():
                return b""
        return self._take(size)

    async def readline(self) -> bytes:
        """One line with its newline; the last one may have none; b"" at the end. A line of more than 32 MiB is returned
        in parts of that size."""
        self._attach()
        # Where the search for the newline goes on, as a byte of the stream: another task may take some meanwhile.
        searched = 0
        while True:
            begin = self._next - len(self._buffer)
            end = self._buffer.find(b"\n", max(0, searched - begin)) + 1
            if end or len(self._buffer) >= LINE_BYTES_MAX:
                return self._take(end or LINE_BYTES_MAX)
            searched = self._next
            if len(self._buffer) >= self._room:
                self._room = min(2 * self._room, LINE_BYTES_MAX)
            if not await self._more():
                return self._take(len(self._buffer))

    async def read_lines(self) -> list[bytes]:
        """Every whole line that is there, and at least one; an empty list at the end."""
        first = await self.readline()
        end = self._buffer.rfind(b"\n") + 1
        rest = [] if not end else [line + b"\n" for line in self._take(end)[:-1].split(b"\n")]
        return [first, *rest] if first else []

    def __aiter__(self) -> OutputReader:
        return self

    async def __anext__(self) -> bytes:
        line = await self.readline()
        if not line:
            raise StopAsyncIteration
        return line

    # -- for the shell -----------------------------------------------------------------------------------------------
    def put_back(self, data: bytes) -> None:
        """Make this the next to be read: it was read for a caller that has gone."""
        self._buffer[:0] = data
        # The buffer may be far over its bound now, and would not take what comes next: the stream has to wait at once.
        self._source.update(self._stream)

    # -- for the command ---------------------------------------------------------------------------------------------
    @property
    def is_behind(self) -> bool:
        """Whether the stream should wait."""
        is_full = len(self._buffer) >= self._room
        return (is_full and self.is_holding) or (self.is_attached and (is_full or self._next < self._capture.total))

    def feed(self, data: bytes) -> None:
        """Take what was just added to the capture, if it follows what is here."""
        is_wanted = self.is_attached or self.is_holding
        follows = self._next == self._capture.total - len(data)
        if is_wanted and follows and self._overrun < OVERRUN_BYTES_MAX:
            if len(self._buffer) >= self._room:
                self._overrun += len(data)
            self._buffer += data
            self._next += len(data)

    # -- inside ------------------------------------------------------------------------------------------------------
    def _attach(self) -> None:
        if not self.is_attached:
            self.is_attached, self.is_holding = True, False
            self._source.update(self._stream)

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._room = HELD_BYTES
        self._overrun = max(0, min(self._overrun, len(self._buffer) - HELD_BYTES))
        # Not for every line: only where it has become half empty, since pausing and resuming costs a system call each.
        if len(self._buffer) < HELD_BYTES // 2 <= len(self._buffer) + len(data):
            self._source.update(self._stream)
        return data

    async def _more(self) -> bool:
        """Wait until the buffer has grown. False: the stream has ended, and there is no more."""
        before = self._next
        while self._next == before:
            if self._next < self._capture.total:
                self._fill()
                if not self._source.has_ended(self._stream):
                    await asyncio.sleep(0)  # All of it may be there already, and others have work, too.
            elif self._source.has_ended(self._stream):
                return False
            else:
                self._source.update(self._stream)
                await self._source.wait_changed()
        return True

    def _fill(self) -> None:
        """Take what is behind from the capture, as far as there is room."""
        room = max(1, self._room - len(self._buffer))
        data, begin = self._capture.read(self._next, room)
        self.missed += begin - self._next
        self._buffer += data
        self._next = begin + len(data)
        self._source.update(self._stream)

    async def _read_all(self) -> bytes:
        parts: list[bytes] = []
        try:
            while data := await self.read(HELD_BYTES):
                parts.append(data)
        except BaseException:
            self.put_back(b"".join(parts))
            raise
        return b"".join(parts)


def check_size(size: Any) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < -1 or size == 0:
        raise UsageError(f"cannot read {size!r:.60} bytes", hint="at least 1; or -1, for all up to the end")


class ProcessPipes(Protocol):
    """The process, as far as it is needed here. None: both streams."""

    def pause_reading(self, stream: Stream | None = None) -> None: ...
    def resume_reading(self, stream: Stream | None = None) -> None: ...


class CommandOutput:
    """The output streams of one command, from its start to its end and beyond: what was kept can still be read."""

    def __init__(self, options: Options, account: ResultBuilder) -> None:
        self._account = account
        self._pipes: ProcessPipes | None = None
        # A terminal has one stream for both. A stream that is not captured is empty here, and has ended.
        self.open = {stream for stream, to in zip(Stream, options.outputs, strict=True) if to == "pipe"}
        if options.terminal is not None:
            self.open.discard(Stream.STDERR)
        kept = (options.output_bytes_max, options.spill_bytes_max) if options.keep_output else (0, 0)
        self.captures = {stream: Capture(*kept) for stream in Stream}
        if not options.keeps_stdout:
            self.captures[Stream.STDOUT] = Capture(0, 0)
        self.readers = {stream: OutputReader(self, stream, self.captures[stream]) for stream in Stream}
        # More output, or the end of a stream.
        self.changed = Waiters()
        # How many tasks wait for the end of the command: see `awaiting_end`.
        self._end_waiters = 0
        # Once the command is being stopped, or has exited, no stream is made to wait any more.
        self.may_wait = True
        self._is_paused = False
        self._held_back: set[Stream] = set()

    @property
    def total(self) -> int:
        return sum(capture.total for capture in self.captures.values())

    def has_ended(self, stream: Stream) -> bool:
        """Whether no more of it will come. The command may run on without this stream."""
        return stream not in self.open

    async def wait_changed(self) -> None:
        await self.changed.wait()

    # -- what happens ------------------------------------------------------------------------------------------------
    def begin(self, pipes: ProcessPipes) -> None:
        self._pipes = pipes

    def add(self, fact: BytesRead) -> None:
        # While a stream waits for us, it is not the command that is idle.
        if not self._is_paused and not self._held_back:
            self._account.last_output = fact.at
        self.captures[fact.stream].add(fact.data)
        self.readers[fact.stream].feed(fact.data)
        self.update(fact.stream)

    def end(self, stream: Stream) -> None:
        self.open.discard(stream)
        self._held_back.discard(stream)
        self.changed.wake()

    def end_all(self) -> None:
        """The command is over."""
        self.open.clear()
        self.changed.wake()

    def discard(self) -> None:
        """There will be no result: delete the files."""
        for capture in self.captures.values():
            capture.discard()

    # -- waiting -----------------------------------------------------------------------------------------------------
    def pause(self) -> None:
        """Read nothing, until `resume`. The idle clock stands still."""
        if self.may_wait and self._pipes is not None:
            self._pipes.pause_reading()
            self._is_paused = True
            self._account.last_output = math.inf

    def resume(self) -> None:
        """Read both streams. One whose reader is still behind waits again with its next piece."""
        if self._pipes is not None:
            self._pipes.resume_reading()
        self._is_paused = False
        self._held_back.clear()
        self._account.last_output = min(self._account.last_output, time.monotonic())

    def hold(self) -> None:
        """Nothing keeps the output: hold the beginning for a reader that may come, and let the rest wait for it."""
        for stream in self.open:
            self.readers[stream].is_holding = True

    @property
    def is_holding(self) -> bool:
        """Whether some stream is held for a reader that has not come yet."""
        return any(reader.is_holding for reader in self.readers.values())

    @contextlib.contextmanager
    def awaiting_end(self) -> Generator[None]:
        """Inside this block a caller waits for the end of the command, and a full stream without a reader does not
        keep the command from ending."""
        self._end_waiters += 1
        try:
            for stream in Stream:
                self.update(stream)
            yield
        finally:
            self._end_waiters -= 1

    def update(self, stream: Stream) -> None:
        """Let a stream wait, or go on, as its pull reader needs it."""
        if self._pipes is None:
            return
        reader = self.readers[stream]
        if reader.is_holding and reader.is_behind and self._end_waiters:
            # No caller reads, and one waits for an end that would never come while this stream is full.
            reader.is_holding = False
        if reader.is_behind:
            if self.may_wait and stream in self.open:
                self._pipes.pause_reading(stream)
                self._held_back.add(stream)
                self._account.last_output = math.inf
        elif stream in self._held_back:
            self._held_back.discard(stream)
            if not self._is_paused:
                self._pipes.resume_reading(stream)
                if not self._held_back:
                    self._account.last_output = min(self._account.last_output, time.monotonic())
