"""Flow control of a command's output: which streams are open, what is kept of them, and when a pipe is not read.

A pipe that is not read fills, and pushes back on the command. There are two reasons for that. The owner of the command
says so (`pause`), for both streams; or the pull reader of one stream is behind, for that stream. Being stopped ends
both: a child that is blocked on a full pipe cannot react to a signal.

Output that nothing keeps is held for a reader that may come (`hold`), and its stream waits for that reader. A caller
that waits for the end of the command (`awaiting_end`) would wait for ever if none comes. So the first `HELD_BYTES` of
the stream stay held while such a caller waits, and the rest is dropped. `awaiting_end` is the only place that says so:
every call that waits for an end, of one command or of all commands of a host, waits inside it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator
from typing import Protocol

from banksman.commands.options import Options
from banksman.commands.output import Capture
from banksman.commands.output_reader import OutputReader
from banksman.commands.result import Account
from banksman.core.process_facts import BytesRead, Stream
from banksman.tasks import Waiters


class Pipes(Protocol):
    """The process, as far as it is needed here. None: both streams."""

    def pause_reading(self, stream: Stream | None = None) -> None: ...
    def resume_reading(self, stream: Stream | None = None) -> None: ...


class Flow:
    """The output streams of one command, from its start to its end and beyond: what was kept can still be read."""

    def __init__(self, options: Options, account: Account) -> None:
        self._account = account
        self._pipes: Pipes | None = None
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
    def begin(self, pipes: Pipes) -> None:
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
