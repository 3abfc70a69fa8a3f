"""What the session's process writes to stdout, cut into frames, read by the dialect and told as `FramesRead`."""

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
from banksman.core.session.facts import FramesRead
from banksman.core.session.state import ProcessState, Session, Stdin
from banksman.core.wire.framing import Framing, MixedChunk, OversizeBegan, OversizeEnded, OversizePiece
from banksman.sessions.diagnostics import Counters

# Limits on what an agent writes: floods of lines, the last output of an agent that ends, and frames too large to keep.
#
# **A flood.** A read is bounded in bytes, but these may be half a million lines. A wrong command (`yes`) or a hostile
# agent would hold up every other session of the host. So `Backlog` takes lines in slices, for a few milliseconds, and
# the rest after other sessions had their turn. Until then the driver does not read the pipe, the agent waits, and
# whatever else its process does comes after the lines. The lines of one read of a normal agent are all taken at once.
#
# **The last output.** Backpressure stops working when the agent exits or is stopped. A process that is blocked on a
# full pipe cannot react to a signal, so from then on the pipe is read as fast as it fills. A flood would fill the
# memory of the host for as long as the stop ladder takes. Two rules bound it:
#
# 1. The driver stops an agent that floods. Nothing more of it is logged (`drops_floods`).
# 2. The agent exits by itself, or its stdin breaks because it is about to exit. The result of its turn may already be
#    in the pipe, so output is logged on (`EndingOutput`). But what the agent wrote before that moment is no more than a
#    pipe holds. After `LAST_BYTES_MAX` bytes the rest is dropped: it comes from an agent that has closed its stdin and
#    does not exit, or from a process that an exited agent has left behind.
#
# **Large frames.** A frame beyond `frame_bytes_max` goes to a file, and a line that says so to the log
# (`OversizeFrames`).
#
# What is dropped is counted in `Counters.dropped`.

log = logging.getLogger("banksman")

# More than an agent can have written before it ended: a pipe holds at most 1 MiB (`widen_stdout`), and as much again is
# in reserve.
LAST_BYTES_MAX = 2 << 20

# How many lines are looked at before it is looked at the clock, and how long all of it may take.
SLICE_LINES_MAX = 256
PASS_SECONDS_MAX = 0.02
# Who keeps us busy for so long has nothing to say. A pause within it is none.
FLOOD_SECONDS = 1.0
PAUSE_SECONDS = 0.1
# Of all such frames of one session. Past it their bytes are dropped and counted; a file is always a frame's beginning.
SPILLED_BYTES_MAX = 256 << 20
HEAD_SHOWN = 1024


class EndingOutput:
    """Decides for the output of one process what is logged. Make another one for the next process."""

    def __init__(self) -> None:
        self._has_exited = False
        self._left = LAST_BYTES_MAX

    def note_exit(self) -> None:
        """The process has exited. Called when that happens, though output that was read before is not logged yet: from
        now on the pipe cannot push back."""
        self._has_exited = True

    def admits(self, size: int, process: ProcessState) -> bool:
        """Whether the lines of the next `size` bytes that were read are logged."""
        if self._has_exited or process.stdin is Stdin.BROKEN:
            self._left -= size
        return self._left >= 0


def drops_floods(process: ProcessState) -> bool:
    """Whether the rest of a flood is dropped: only after the driver itself chose to stop the process."""
    return process.was_told_to_stop and not process.exited_by_itself and process.stdin is not Stdin.BROKEN


class Backlog:
    """What an agent has said and done, and the session was not told yet, in its order. For its loop only.

    `on_empty` is called when something had to wait, and nothing does any more.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, on_empty: Callable[[], None]) -> None:
        self._loop = loop
        self._on_empty = on_empty
        self._steps: deque[Callable[[], None]] = deque()
        self._handle: asyncio.Handle | None = None
        self._is_going_on = False
        # Since when something waits, again and again; when it last did not; and whether that was ever too long.
        self._since = 0.0
        self._emptied_at = 0.0
        self.was_flood = False

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._steps)

    def take(self, *steps: Callable[[], None]) -> None:
        """Do these, after all that waits."""
        self._steps += steps
        if self._handle is None and not self._is_going_on:
            self._go_on()

    def clear(self) -> None:
        """Nobody wants to know any more."""
        self._steps.clear()

    def _go_on(self) -> None:
        had_waited, self._handle = self._handle is not None, None
        until = self._loop.time() + PASS_SECONDS_MAX
        self._is_going_on = True
        try:
            while self._steps and self._loop.time() < until:
                self._steps.popleft()()
        finally:
            self._is_going_on = False
        if self._steps:
            now = self._loop.time()
            if not had_waited and now - self._emptied_at > PAUSE_SECONDS:
                self._since = now
            self.was_flood = self.was_flood or now - self._since > FLOOD_SECONDS
            self._handle = self._loop.call_soon(self._go_on)
        elif had_waited:
            self._emptied_at = self._loop.time()
            self._on_empty()


def slices(lines: Sequence[bytes]) -> list[Sequence[bytes]]:
    """Nearly always the whole."""
    if len(lines) <= SLICE_LINES_MAX:
        return [lines]
    return [lines[begin : begin + SLICE_LINES_MAX] for begin in range(0, len(lines), SLICE_LINES_MAX)]


class OversizeFrames:
    """The spilled frames of one session. Their files go with it."""

    def __init__(self) -> None:
        self._files: list[SpillFile] = []
        self._open: SpillFile | None = None
        self._left = SPILLED_BYTES_MAX

    def take(
        self, lines: MixedChunk, dialect: Dialect, counters: Counters
    ) -> tuple[list[bytes], list[tuple[int, Meaning]]]:
        """The lines for the log, and what they mean. What a spilled one means is told by its two ends."""
        plain: list[bytes] = []
        meanings: list[tuple[int, Meaning]] = []
        for item in lines.items:
            match item:
                case bytes():
                    meaning = dialect.read(item)
                    plain.append(item)
                case OversizeBegan():
                    self._begin()
                    continue
                case OversizePiece(data=data):
                    self._add(data, counters)
                    continue
                case OversizeEnded(length=length, head=head, tail=tail):
                    counters.spilled += 1
                    meaning = dialect.read_head(head, tail)
                    plain.append(self._note(length, head))
            if meaning is not None:
                meanings.append((len(plain) - 1, meaning))
        return plain, meanings

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
            log.warning("! a frame too large to keep cannot be spilled either: %s", exc)

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
            # A full disk must not end a session, and a file with a hole would be a lie.
            log.warning("! a frame too large to keep is no longer spilled: %s", exc)
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
            "head": head[:HEAD_SHOWN].decode("utf-8", "replace"),
        }
        return json.dumps(note).encode()


class FrameListener(Protocol):
    """The driver, as far as it is needed here."""

    state: Session
    counters: Counters

    def dispatch(self, fact: FramesRead) -> None: ...
    def fail(self, exc: BaseException) -> None: ...
    def on_backlog(self) -> None:
        """Something waits."""
        ...

    def on_caught_up(self) -> None:
        """All that was read is told."""
        ...


class FrameReader:
    """Of one session: of one process after the other.

    Everything is told in the order in which it happened. Work on one read is bounded: what does not fit waits in the
    backlog, and so does whatever else the process does meanwhile (`after`). While something waits, the listener is to
    leave the pipe alone, so that it pushes back on the agent.
    """

    def __init__(self, listener: FrameListener) -> None:
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._framing = Framing()
        self._ending = EndingOutput()
        self._oversize = OversizeFrames()
        self._backlog = Backlog(self._loop, listener.on_caught_up)

    @property
    def is_behind(self) -> bool:
        """Whether something waits."""
        return bool(self._backlog)

    def begin(self, frame_bytes_max: int) -> None:
        """Another process begins to speak."""
        self._framing = Framing(frame_bytes_max=frame_bytes_max)
        self._ending = EndingOutput()
        self._backlog.was_flood = False

    def feed(self, process: int, data: bytes) -> None:
        lines = self._framing.feed(data)
        if not self._ending.admits(len(data), self._listener.state.process) and not isinstance(lines, MixedChunk):
            self._drop(lines)
        elif not self._backlog and (isinstance(lines, MixedChunk) or len(lines) <= SLICE_LINES_MAX):
            self._read(process, lines)
        else:
            parts = [lines] if isinstance(lines, MixedChunk) else slices(lines)
            self._backlog.take(*(partial(self._read, process, part) for part in parts))
            if self._backlog:
                self._listener.on_backlog()

    def note_exit(self) -> None:
        """The process has exited: from now on the pipe cannot push back."""
        self._ending.note_exit()

    def end(self, process: int) -> None:
        """Its stdout has ended. In its place, whatever waits behind it: it is a line at most, and the exit must not
        come before it."""
        last = self._framing.end()
        if self._ending.admits(0, self._listener.state.process) or isinstance(last, MixedChunk):
            self._read(process, last)
        else:
            self._drop(last)

    def after(self, step: Callable[[], None]) -> None:
        """Do this once all that was read before is told."""
        self._backlog.take(step)

    def clear(self) -> None:
        """Nobody wants to know any more what waits."""
        self._backlog.clear()

    def close(self) -> None:
        """Remove the files of oversize frames."""
        self._oversize.close()

    def _drop(self, lines: Sequence[bytes]) -> None:
        self._listener.counters.dropped += sum(map(len, lines))

    def _read(self, process: int, lines: Sequence[bytes] | MixedChunk) -> None:
        """The path of every token. What is not plain is rare, and goes the long way."""
        listener = self._listener
        state = listener.state
        if self._backlog.was_flood and drops_floods(state.process) and not isinstance(lines, MixedChunk):
            self._drop(lines)
            return
        dialect, counters = state.config.dialect, listener.counters
        read = dialect.read
        try:
            if isinstance(lines, MixedChunk):
                plain, meanings = self._oversize.take(lines, dialect, counters)
            else:
                plain = lines
                meanings = [(index, meaning) for index, line in enumerate(lines) if (meaning := read(line)) is not None]
        except Exception as exc:
            # A dialect never raises, whatever it reads. One that does is a bug, and we are not inside the door yet.
            listener.fail(exc)
            return
        if plain:
            counters.frames_in += len(plain)
            counters.noise += sum(isinstance(meaning, Noise) for _, meaning in meanings)
            listener.dispatch(FramesRead(self._loop.time(), process, plain, meanings))
