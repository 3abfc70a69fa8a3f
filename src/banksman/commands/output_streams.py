"""Output streams of a command: pull readers and flow control.

`OutputReader` reads one stream. `CommandOutput` has the captures (output.py) and the readers of all
streams, and pauses or resumes the pipes.

**Pull readers.** `Command.read` and `on_output` never slow a command down. A late reader gets the
kept output, and other output is lost. `OutputReader` is the opposite: from its first read on, the
stream waits for it. At `HELD_BYTES` of unread data the host stops reading the pipe. The pipe fills,
and the command blocks in `write()`, as on any pipe with a slow reader. Invariants:

- `_buffer` ends at byte `_next` of the stream. While `_next` equals the stream's total, new output
  is appended to it.
- While `_next` is behind the total, the rest comes from the capture, and the stream is paused.
  Bytes that the capture has dropped are counted in `missed`. This happens only to output from
  before the first read, and to output that arrives during a stop. A child that is blocked on a full
  pipe cannot react to a signal. Therefore a stop ends the pause, and beyond `OVERRUN_BYTES_MAX` the
  buffer accepts nothing.

**Flow control.** A pipe that is not read fills and exerts backpressure on the command. There are
two reasons for a pause. The owner of the command requests it (`pause`), for both streams. Or the
pull reader of one stream is behind, for that stream. A stop ends both.

Output that nothing keeps is held for a possible reader (`hold`), and its stream waits for that
reader. A caller that waits for the end of the command (`awaiting_end`) would wait forever if no
reader came. Therefore the first `HELD_BYTES` of the stream stay held while this caller waits, and
the rest is dropped. Only `awaiting_end` announces this wait. Every call that waits for an end, of
one command or of all commands of a host, waits inside it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Generator, Mapping
from typing import Any, Protocol

from banksman.commands.options import Options
from banksman.commands.output import Capture, CaptureState
from banksman.commands.result import ResultBuilder
from banksman.core.process_facts import BytesRead, Stream
from banksman.errors import UsageError
from banksman.tasks import Waiters

# Unread bytes at which the host stops reading the pipe.
HELD_BYTES = 1 << 18
# Bytes beyond `HELD_BYTES` that are accepted although the reader is behind: a pipe of the largest
# size, and the read of one callback.
OVERRUN_BYTES_MAX = 2 << 20
# A longer line is returned in parts of this size.
LINE_BYTES_MAX = 32 << 20


class OutputSource(Protocol):
    """The part of `CommandOutput` that a reader needs."""

    def has_ended(self, stream: Stream) -> bool: ...
    def update(self, stream: Stream) -> None: ...
    async def wait_changed(self) -> None: ...


class OutputReader:
    """Pull reader of one output stream: `async for line in command.stdout`.

    The reader starts at the first byte of the stream and ends with the stream, which may be long
    before the end of the command. From the first read on, a command whose output is not read
    blocks, and nothing is lost. `missed` counts bytes lost before the first read, because they were
    not kept. It also counts bytes that arrived faster than they were read after a stop.

    Cancelling a read loses nothing. Several tasks may read, and each byte goes to one of them. All
    methods belong to the event loop of the command.
    """

    def __init__(self, source: OutputSource, stream: Stream, capture: Capture) -> None:
        self.missed = 0
        # `is_attached`: a caller reads. `is_holding`: the output is held for a possible reader,
        # because nothing else keeps it.
        self.is_attached = False
        self.is_holding = False
        # Lines that were fetched for other threads, and that no thread has taken yet.
        self.fetched: deque[bytes] = deque()
        self._source = source
        self._stream = stream
        self._capture = capture
        self._buffer = bytearray()
        self._next = 0
        self._room = HELD_BYTES
        # Bytes at the end of the buffer that were accepted beyond its limit and are still unread.
        self._overrun = 0

    def __repr__(self) -> str:
        return (
            f"<OutputReader of {self._stream.value}: "
            f"{len(self._buffer)} bytes to be read, {self.missed} missed>"
        )

    # -- for callers ------------------------------------------------------------------------------
    def at_eof(self) -> bool:
        """Return whether the stream has ended and all of it was read."""
        is_read = not self._buffer and not self.fetched and self._next >= self._capture.total
        return is_read and self._source.has_ended(self._stream)

    async def read(self, size: int = -1) -> bytes:
        """Read up to `size` bytes as soon as any arrive; b"" at the end. -1 reads up to the end."""
        check_size(size)
        if size < 0:
            return await self._read_all()
        self._attach()
        while not self._buffer:
            if not await self._more():
                return b""
        return self._take(size)

    async def readline(self) -> bytes:
        """Read one line with its newline; b"" at the end.

        The last line may have no newline. A line of more than 32 MiB is returned in parts of that
        size.
        """
        self._attach()
        # Where the search for the newline resumes, as a byte of the stream: another task may take
        # bytes meanwhile.
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
        """Read all complete lines in the buffer, at least one; an empty list at the end."""
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

    # -- for the blocking API ---------------------------------------------------------------------
    def put_back(self, data: bytes) -> None:
        """Return data to the front of the stream. It was read for a caller that is gone."""
        self._buffer[:0] = data
        # The buffer may now exceed its limit and would not accept the next output. The stream must
        # pause immediately.
        self._source.update(self._stream)

    # -- for the command --------------------------------------------------------------------------
    @property
    def is_behind(self) -> bool:
        """Whether the stream should pause."""
        is_full = len(self._buffer) >= self._room
        return (is_full and self.is_holding) or (
            self.is_attached and (is_full or self._next < self._capture.total)
        )

    def feed(self, data: bytes) -> None:
        """Append data that was just added to the capture, if it follows the buffer."""
        is_wanted = self.is_attached or self.is_holding
        follows = self._next == self._capture.total - len(data)
        if is_wanted and follows and self._overrun < OVERRUN_BYTES_MAX:
            if len(self._buffer) >= self._room:
                self._overrun += len(data)
            self._buffer += data
            self._next += len(data)

    # -- internals --------------------------------------------------------------------------------
    def _attach(self) -> None:
        if not self.is_attached:
            self.is_attached, self.is_holding = True, False
            self._source.update(self._stream)

    def _take(self, size: int) -> bytes:
        data = bytes(self._buffer[:size])
        del self._buffer[:size]
        self._room = HELD_BYTES
        self._overrun = max(0, min(self._overrun, len(self._buffer) - HELD_BYTES))
        # Update only when the buffer becomes half empty and not for each line, because pausing and
        # resuming cost a system call each.
        if len(self._buffer) < HELD_BYTES // 2 <= len(self._buffer) + len(data):
            self._source.update(self._stream)
        return data

    async def _more(self) -> bool:
        """Wait until the buffer has grown. False means that the stream has ended."""
        before = self._next
        while self._next == before:
            if self._next < self._capture.total:
                self._fill()
                if not self._source.has_ended(self._stream):
                    await asyncio.sleep(0)  # All data may be there already. Let other tasks run.
            elif self._source.has_ended(self._stream):
                return False
            else:
                self._source.update(self._stream)
                await self._source.wait_changed()
        return True

    def _fill(self) -> None:
        """Fetch the missing bytes from the capture, as far as there is room."""
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
    """Raise `UsageError` for an invalid size of a read."""
    if isinstance(size, bool) or not isinstance(size, int) or size < -1 or size == 0:
        hint = "pass 1 or more, or -1 to read to the end"
        raise UsageError(f"cannot read {size!r:.60} bytes", hint=hint)


class ProcessPipes(Protocol):
    """The part of the process that flow control needs. `stream`: None means both streams."""

    def pause_reading(self, stream: Stream | None = None) -> None: ...
    def resume_reading(self, stream: Stream | None = None) -> None: ...


class CommandOutput:
    """The output streams of one command. Kept output stays readable after the command's end."""

    def __init__(self, options: Options, account: ResultBuilder) -> None:
        self._account = account
        self._pipes: ProcessPipes | None = None
        # A terminal has one stream for both. A stream that is not captured is empty, and has ended.
        self.open = {
            stream for stream, to in zip(Stream, options.outputs, strict=True) if to == "pipe"
        }
        if options.terminal is not None:
            self.open.discard(Stream.STDERR)
        kept = (
            (options.output_bytes_max, options.spill_bytes_max) if options.keep_output else (0, 0)
        )
        self.captures = {stream: Capture(*kept) for stream in Stream}
        if not options.keeps_stdout:
            self.captures[Stream.STDOUT] = Capture(0, 0)
        self.readers = {
            stream: OutputReader(self, stream, self.captures[stream]) for stream in Stream
        }
        # Woken by more output, or by the end of a stream.
        self.changed = Waiters()
        # Number of tasks that wait for the end of the command: see `awaiting_end`.
        self._end_waiters = 0
        # False once the command is being stopped or has exited. Then no stream is paused.
        self.may_wait = True
        self._is_paused = False
        self._held_back: set[Stream] = set()

    @property
    def total(self) -> int:
        """Bytes written to both streams."""
        return sum(capture.total for capture in self.captures.values())

    def has_ended(self, stream: Stream) -> bool:
        """Return whether a stream has ended. The command may continue without it."""
        return stream not in self.open

    async def wait_changed(self) -> None:
        await self.changed.wait()

    # -- hand-over --------------------------------------------------------------------------------
    @property
    def has_reader(self) -> bool:
        """Whether a caller of this process reads a stream, or output is held for one."""
        return self.is_holding or any(reader.is_attached for reader in self.readers.values())

    def states(self) -> dict[Stream, CaptureState]:
        """Return the kept output, for another host."""
        return {stream: capture.state() for stream, capture in self.captures.items()}

    def restore(self, states: Mapping[Stream, CaptureState]) -> None:
        """Continue with the output that another host has kept."""
        for stream, state in states.items():
            self.captures[stream].restore(state)

    # -- facts ------------------------------------------------------------------------------------
    def begin(self, pipes: ProcessPipes) -> None:
        """Attach the pipes of the process."""
        self._pipes = pipes

    def add(self, fact: BytesRead) -> None:
        """Add data that was read from a pipe."""
        # While the host pauses a stream, the command is not idle.
        if not self._is_paused and not self._held_back:
            self._account.last_output = fact.at
        self.captures[fact.stream].add(fact.data)
        self.readers[fact.stream].feed(fact.data)
        self.update(fact.stream)

    def end(self, stream: Stream) -> None:
        """Mark one stream as ended."""
        self.open.discard(stream)
        self._held_back.discard(stream)
        self.changed.wake()

    def end_all(self) -> None:
        """Mark all streams as ended, because the command is over."""
        self.open.clear()
        self.changed.wake()

    def discard(self) -> None:
        """Delete the spill files, because there will be no result."""
        for capture in self.captures.values():
            capture.discard()

    # -- backpressure -----------------------------------------------------------------------------
    def pause(self) -> None:
        """Stop reading until `resume`. The idle clock is suspended."""
        if self.may_wait and self._pipes is not None:
            self._pipes.pause_reading()
            self._is_paused = True
            self._account.last_output = math.inf

    def resume(self) -> None:
        """Read both streams. A stream whose reader is still behind pauses after its next piece."""
        if self._pipes is not None:
            self._pipes.resume_reading()
        self._is_paused = False
        self._held_back.clear()
        self._account.last_output = min(self._account.last_output, time.monotonic())

    def hold(self) -> None:
        """Hold the first output for a possible reader, because nothing else keeps it.

        Then the stream pauses until that reader comes.
        """
        for stream in self.open:
            self.readers[stream].is_holding = True

    @property
    def is_holding(self) -> bool:
        """Whether a stream is held for a reader that has not come."""
        return any(reader.is_holding for reader in self.readers.values())

    @contextlib.contextmanager
    def awaiting_end(self) -> Generator[None]:
        """Mark that a caller waits for the end of the command inside this block.

        A full stream without a reader then does not keep the command from ending.
        """
        self._end_waiters += 1
        try:
            for stream in Stream:
                self.update(stream)
            yield
        finally:
            self._end_waiters -= 1

    def update(self, stream: Stream) -> None:
        """Pause or resume a stream, as its pull reader requires."""
        if self._pipes is None:
            return
        reader = self.readers[stream]
        if reader.is_holding and reader.is_behind and self._end_waiters:
            # No caller reads, and a caller waits for an end that cannot come while this stream is
            # full.
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
