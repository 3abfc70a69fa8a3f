"""Reader of an agent's stdout: splits bytes into frames and finds their meanings.

It also limits the output. `Backlog` handles a flood of lines in slices, and keeps later events of
the process behind them. `EndingOutput` bounds the output of a process that ends. `OversizeFrames`
writes frames that are too large for the log to files. `core/wire/framing.py` finds the lines, and
`agent_process.py` reads the pipe.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from banksman.commands.output import SpillFile
from banksman.core.dialects.dialect import Dialect
from banksman.core.dialects.meaning import Meaning, Noise
from banksman.core.session.state import ProcessState, Stdin
from banksman.core.wire.elided_text import cut
from banksman.core.wire.framing import (
    Framing,
    MixedChunk,
    OversizeBegan,
    OversizeEnded,
    OversizePart,
    OversizePiece,
)
from banksman.sessions.diagnostics import Counters

# Limits on an agent's output: floods of lines, output at the end of a process, and oversize frames.
#
# **A flood.** A read is bounded in bytes, but these may be half a million lines. A wrong command
# (`yes`) or a hostile agent would block every other session of the host. So `Backlog` takes lines
# in slices, for a few milliseconds, and takes the rest after other sessions had their turn. Until
# then the driver does not read the pipe and the agent blocks. Later events of the process wait
# behind the lines. For a normal agent, all lines of one read are taken in one pass.
#
# **The last output.** Backpressure stops working when the agent exits or is stopped. A process that
# is blocked on a full pipe cannot react to a signal, so from then on the pipe is read as fast as it
# fills. A flood would fill the memory of the host for as long as the stop ladder takes. Two rules
# bound it:
#
# 1. The driver stops an agent that floods. The rest of the flood is not logged (`drops_floods`).
# 2. The agent exits on its own initiative, or its stdin breaks because it is about to exit. The
#    result of its turn may already be in the pipe, so its output is still logged (`EndingOutput`).
#    But the output from before that moment is at most as large as a pipe. After `LAST_BYTES_MAX`
#    bytes the rest is dropped. The rest comes from an agent that has closed its stdin and does not
#    exit, or from a process that an exited agent has left behind.
#
# **Large frames.** A frame beyond `frame_bytes_max` is written to a file, and the log gets a line
# that refers to the file (`OversizeFrames`).
#
# `Counters.dropped` counts the dropped bytes.

log = logging.getLogger("banksman")

# More than an agent can have written before it ended. A pipe holds at most 1 MiB (`widen_stdout`),
# and the limit is twice that.
LAST_BYTES_MAX = 2 << 20

# Number of lines between two looks at the clock, and the time limit of one pass.
SLICE_LINES_MAX = 256
PASS_SECONDS_MAX = 0.02
# A backlog that lasts this long is a flood. A shorter gap than `PAUSE_SECONDS` does not interrupt
# it.
FLOOD_SECONDS = 1.0
PAUSE_SECONDS = 0.1
# Limit for all oversize frames of one session. Bytes beyond it are dropped and counted. A file
# always holds the beginning of a frame.
SPILLED_BYTES_MAX = 256 << 20
HEAD_SHOWN = 1024


class EndingOutput:
    """Decides which output of one process is logged.

    Each process needs a new instance.
    """

    def __init__(self) -> None:
        self._has_exited = False
        self._left = LAST_BYTES_MAX

    def note_exit(self) -> None:
        """Note the exit of the process, from which on the pipe has no backpressure.

        Called at the time of the exit, even if earlier output is not logged yet.
        """
        self._has_exited = True

    def admits(self, size: int, process: ProcessState) -> bool:
        """Return whether the lines of the next `size` bytes are logged."""
        if self._has_exited or process.stdin is Stdin.BROKEN:
            self._left -= size
        return self._left >= 0


def drops_floods(process: ProcessState) -> bool:
    """Return whether the rest of a flood is dropped.

    Only after the driver stopped the process. In all other cases the flood may hold the turn's
    result.
    """
    return (
        process.was_told_to_stop
        and not process.exited_by_itself
        and process.stdin is not Stdin.BROKEN
    )


class Backlog:
    """Ordered queue of agent output and process events that the session has not processed yet.

    Belongs to one event loop. `on_empty`: called when the queue becomes empty after steps had to
    wait.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_empty: Callable[[], None]) -> None:
        self._loop = loop
        self._on_empty = on_empty
        # The queued steps; only for looks from outside.
        self.steps: deque[Callable[[], None]] = deque()
        self._handle: asyncio.Handle | None = None
        self._is_going_on = False
        # When the current backlog began, ignoring short pauses; when the queue was last empty;
        # whether a backlog ever lasted too long.
        self._since = 0.0
        self._emptied_at = 0.0
        self.was_flood = False

    def take(self, *steps: Callable[[], None]) -> None:
        """Queue steps and run them in order, until the time limit of a pass is reached."""
        self.steps += steps
        if self._handle is None and not self._is_going_on:
            self._go_on()

    def clear(self) -> None:
        """Discard the queued steps."""
        self.steps.clear()

    def _go_on(self) -> None:
        had_waited, self._handle = self._handle is not None, None
        until = self._loop.time() + PASS_SECONDS_MAX
        self._is_going_on = True
        try:
            while self.steps and self._loop.time() < until:
                self.steps.popleft()()
        finally:
            self._is_going_on = False
        if self.steps:
            now = self._loop.time()
            if not had_waited and now - self._emptied_at > PAUSE_SECONDS:
                self._since = now
            self.was_flood = self.was_flood or now - self._since > FLOOD_SECONDS
            self._handle = self._loop.call_soon(self._go_on)
        elif had_waited:
            self._emptied_at = self._loop.time()
            self._on_empty()


def slices(data: bytes) -> list[bytes]:
    """Split bytes into slices, each with at most so many newlines. Most reads fit into one."""
    if data.count(b"\n") <= SLICE_LINES_MAX:
        return [data]
    lines = data.split(b"\n")
    *parts, last = (
        b"\n".join(lines[begin : begin + SLICE_LINES_MAX])
        for begin in range(0, len(lines), SLICE_LINES_MAX)
    )
    return [*(part + b"\n" for part in parts), *([last] if last else [])]


class OversizeFrames:
    """Files of the oversize frames of one session.

    The files are deleted with the session.
    """

    def __init__(self) -> None:
        self._files: list[SpillFile] = []
        self._open: SpillFile | None = None
        self._left = SPILLED_BYTES_MAX

    def take(
        self, lines: MixedChunk, dialect: Dialect, counters: Counters
    ) -> tuple[list[bytes], list[tuple[int, Meaning]]]:
        """Return the lines for the log and their meanings.

        The meaning of a spilled frame is read from its beginning and its end.
        """
        plain: list[bytes] = []
        meanings: list[tuple[int, Meaning]] = []
        for item in lines.items:
            match item:
                case bytes():
                    meaning = dialect.read(item)
                    plain.append(item)
                case OversizeEnded(head=head, tail=tail):
                    meaning = dialect.read_head(head, tail)
                    plain += self.spill(item, counters)
                case _:
                    self.spill(item, counters)
                    continue
            if meaning is not None:
                meanings.append((len(plain) - 1, meaning))
        return plain, meanings

    def spill(self, item: OversizePart, counters: Counters) -> list[bytes]:
        """Write a part of an oversize frame to its file.

        The last part returns the line that refers to the file, and the others return nothing.
        """
        match item:
            case OversizeBegan():
                self._begin()
            case OversizePiece(data=data):
                self._add(data, counters)
            case OversizeEnded(length=length, head=head):
                counters.spilled += 1
                return [self._note(length, head)]
        return []

    def close(self) -> None:
        for spill in (*self._files, *([self._open] if self._open else [])):
            spill.delete()
        self._files.clear()
        self._open = None

    def _begin(self) -> None:
        if not self._left:
            return
        try:
            self._open = SpillFile()
        except OSError as exc:
            log.warning("cannot spill an oversize frame, dropping it: %s", exc)

    def _add(self, data: bytes, counters: Counters) -> None:
        kept = b"" if self._open is None else data[: self._left]
        counters.dropped += len(data) - len(kept)
        if self._open is None or not kept:
            return
        before = self._open.size
        try:
            self._open.add(kept)
            self._left -= len(kept)
        except OSError as exc:
            # A full disk must not end a session. The file is deleted, because a file with a gap
            # would be misread as the frame's beginning.
            log.warning("cannot spill the rest of an oversize frame, dropping it: %s", exc)
            counters.dropped += before + len(kept)
            self._left += before
            self._open.delete()
            self._open = None

    def _note(self, length: int, head: bytes) -> bytes:
        spill, self._open = self._open, None
        if spill is not None:
            spill.close()
            self._files.append(spill)
        note = {
            "type": "banksman.spilled",
            "bytes": length,
            "kept": 0 if spill is None else spill.size,
            "file": None if spill is None else spill.path,
            "head": cut(head.decode("utf-8", "replace"), HEAD_SHOWN),
        }
        return json.dumps(note).encode()


class FrameListener(Protocol):
    """Interface of the driver that the frame reader uses."""

    counters: Counters
    # When the last bytes came.
    last_in: float | None

    @property
    def process_state(self) -> ProcessState: ...
    @property
    def dialect(self) -> Dialect: ...
    def on_frames(
        self, process: int, lines: Sequence[bytes], meanings: Sequence[tuple[int, Meaning]]
    ) -> None:
        """Log frames and apply their meanings. A meaning has the index of its line."""
        ...

    def fail(self, exc: BaseException) -> None: ...
    def on_backlog(self) -> None:
        """The backlog has queued steps."""
        ...

    def on_caught_up(self) -> None:
        """The backlog is empty again."""
        ...


class ReadJournal(Protocol):
    """Notes what was read of a process that survives its host: see crash_journal.py."""

    def on_read(self, data: bytes) -> None:
        """These bytes were read, and their lines are about to be passed on."""
        ...

    def after_read(self, framing: Framing) -> None:
        """Their lines were passed on. `framing`: has the rest."""
        ...

    def on_end(self) -> None:
        """The output has ended, and its last line is about to be passed on."""
        ...


class FrameReader:
    """Frame reader of one session, for one process after another.

    Frames and process events are reported in the order in which they happened. The work per read is
    bounded. Lines beyond the bound wait in the backlog, and so do later events of the process
    (`after`). While the backlog is not empty, the listener must not read the pipe, so that the full
    pipe blocks the agent.
    """

    def __init__(self, listener: FrameListener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._framing = Framing()
        self._ending = EndingOutput()
        self._oversize = OversizeFrames()
        self._journal: ReadJournal | None = None
        self._backlog = Backlog(self._loop, listener.on_caught_up)
        # Called after the oversize frame that is being read.
        self._on_oversize_end: Callable[[], None] | None = None

    @property
    def is_behind(self) -> bool:
        """Whether steps wait in the backlog."""
        return bool(self._backlog.steps)

    @property
    def partial(self) -> bytes | None:
        """The incomplete line of the process; None: see `Framing.partial`."""
        return self._framing.partial

    @property
    def is_oversize(self) -> bool:
        """Whether an oversize frame has begun and not ended."""
        return self._framing.is_oversize

    def after_oversize(self, call: Callable[[], None]) -> None:
        """Call a function when the oversize frame that is being read has ended."""
        self._on_oversize_end = call

    def begin(
        self, frame_bytes_max: int, partial: bytes = b"", journal: ReadJournal | None = None
    ) -> None:
        """Reset for the output of another process, of which `partial` was read before.

        `journal`: notes what was read of a process that survives its host.
        """
        self._journal = journal
        self._framing = Framing(frame_bytes_max=frame_bytes_max)
        self._framing.feed(partial)
        self._ending = EndingOutput()
        self._backlog.was_flood = False

    def feed(self, process: int, data: bytes) -> None:
        listener = self._listener
        listener.last_in = self._loop.time()
        listener.counters.bytes_in += len(data)
        is_logged = self._ending.admits(len(data), listener.process_state)
        backlog = self._backlog
        if not backlog.steps and data.count(b"\n") <= SLICE_LINES_MAX:
            self._split(process, data, is_logged)
            return
        backlog.take(*(partial(self._split, process, part, is_logged) for part in slices(data)))
        if backlog.steps:
            listener.on_backlog()

    def _split(self, process: int, data: bytes, is_logged: bool) -> None:
        """Find the lines of a slice, and read them."""
        journal = self._journal
        if journal is not None:
            journal.on_read(data)
        lines = self._framing.feed(data)
        if is_logged or isinstance(lines, MixedChunk):
            self._read(process, lines)
        else:
            self._drop(lines)
        if journal is not None:
            journal.after_read(self._framing)

    def note_exit(self) -> None:
        """Note the exit of the process. From now on the pipe has no backpressure."""
        self._ending.note_exit()

    def end(self, process: int) -> None:
        """Process the end of stdout, after all output before it: see `after`."""
        last = self._framing.end()
        if self._journal is not None:
            self._journal.on_end()
        if self._ending.admits(0, self._listener.process_state) or isinstance(last, MixedChunk):
            self._read(process, last)
        else:
            self._drop(last)

    def after(self, step: Callable[[], None]) -> None:
        """Run a step after all output that was read before has been processed."""
        self._backlog.take(step)

    def clear(self) -> None:
        """Discard the steps in the backlog."""
        self._backlog.clear()

    def close(self) -> None:
        """Remove the files of oversize frames."""
        self._oversize.close()

    def _drop(self, lines: Sequence[bytes]) -> None:
        self._listener.counters.dropped += sum(map(len, lines))

    def _read(self, process: int, lines: Sequence[bytes] | MixedChunk) -> None:
        """Pass lines and their meanings to the listener.

        This is the hot path of every token. A `MixedChunk` is rare and takes the slow path.
        """
        listener = self._listener
        if (
            self._backlog.was_flood
            and drops_floods(listener.process_state)
            and not isinstance(lines, MixedChunk)
        ):
            self._drop(lines)
            return
        dialect, counters = listener.dialect, listener.counters
        read = dialect.read
        try:
            if isinstance(lines, MixedChunk):
                plain, meanings = self._oversize.take(lines, dialect, counters)
                if self._on_oversize_end is not None and not self.is_oversize:
                    # After the listener has the frame.
                    self._loop.call_soon(self._on_oversize_end)
                    self._on_oversize_end = None
            else:
                plain = lines
                meanings: list[tuple[int, Meaning]] = []
                # Not a comprehension, which would be one more call: most reads are one line.
                for index, line in enumerate(lines):
                    if (meaning := read(line)) is not None:
                        meanings.append((index, meaning))
        except Exception as exc:
            # A dialect never raises, whatever it reads. An exception is a bug. This code runs
            # outside `dispatch`, so the listener must fail the session here.
            listener.fail(exc)
            return
        if plain:
            counters.frames_in += len(plain)
            for _, meaning in meanings:
                if isinstance(meaning, Noise):
                    counters.noise += 1
            listener.on_frames(process, plain, meanings)
