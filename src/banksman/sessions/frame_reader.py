"""What the session's process writes to stdout, cut into frames, read by the dialect and told as `FramesRead`.

Everything is told in the order in which it happened. Work on one read is bounded: what does not fit waits in the
backlog, and so does whatever else the process does meanwhile (`after`). While something waits, the listener is to leave
the pipe alone, so that it pushes back on the agent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from banksman.core.dialects.meaning import Noise
from banksman.core.session.facts import FramesRead
from banksman.core.session.state import Session
from banksman.core.wire.framing import Framing, Mixed
from banksman.sessions.diagnostics import Counters
from banksman.sessions.output_limits import SLICE_LINES_MAX, Backlog, EndingOutput, OversizeFrames, drops_floods, slices


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
    """Of one session: of one process after the other."""

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
        if not self._ending.admits(len(data), self._listener.state.process) and not isinstance(lines, Mixed):
            self._drop(lines)
        elif not self._backlog and (isinstance(lines, Mixed) or len(lines) <= SLICE_LINES_MAX):
            self._read(process, lines)
        else:
            parts = [lines] if isinstance(lines, Mixed) else slices(lines)
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
        if self._ending.admits(0, self._listener.state.process) or isinstance(last, Mixed):
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

    def _read(self, process: int, lines: Sequence[bytes] | Mixed) -> None:
        """The path of every token. What is not plain is rare, and goes the long way."""
        listener = self._listener
        state = listener.state
        if self._backlog.was_flood and drops_floods(state.process) and not isinstance(lines, Mixed):
            self._drop(lines)
            return
        dialect, counters = state.config.dialect, listener.counters
        read = dialect.read
        try:
            if isinstance(lines, Mixed):
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
