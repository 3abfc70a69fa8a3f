"""Limit the output that is logged of an agent that is ending.

The output of an agent that works is bounded by backpressure: while the log or the backlog is behind, the driver does
not read the pipe, and the agent waits. That stops working when the agent exits or is stopped. A process that is blocked
on a full pipe cannot react to a signal, so from then on the pipe is read as fast as it fills. A flood would fill the
memory of the host for as long as the stop ladder takes. Two rules bound it:

1. The driver stops an agent that floods. Nothing more of it is logged.
2. The agent exits by itself, or its stdin breaks because it is about to exit. The result of its turn may already be in
   the pipe, so output is logged on. But what the agent wrote before that moment is no more than a pipe holds. After
   `LAST_BYTES_MAX` bytes the rest is dropped: it comes from an agent that has closed its stdin and does not exit, or
   from a process that an exited agent has left behind.

Dropped lines are counted (`Counters.dropped`). Oversize frames have a bound of their own: see oversize_frames.py.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

from banksman.core.session.state import ProcessState, Stdin

# More than an agent can have written before it ended: a pipe holds at most 1 MiB (`widen_stdout`), and as much again is
# in reserve.
LAST_BYTES_MAX = 2 << 20


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


# What an agent has said and done, and is not yet told: in its order, as much at a time as keeps nobody waiting.
#
# A read is bounded in bytes, and bytes may be half a million lines: a wrong command (`yes`) or a hostile agent would
# hold up every other session of the host for as long as it takes to look at them. So what is read is taken in slices,
# for a few milliseconds, and the rest when all others had their turn. Until then nothing more is read, and whatever
# else the process does comes after it. Of an agent in its right mind all that one read has brought is told at once.

# How many lines are looked at before it is looked at the clock, and how long all of it may take.
SLICE_LINES_MAX = 256
PASS_SECONDS_MAX = 0.02
# Who keeps us busy for so long has nothing to say. A pause within it is none.
FLOOD_SECONDS = 1.0
PAUSE_SECONDS = 0.1

Step = Callable[[], None]


class Backlog:
    """For its loop only. `on_empty` is called when something had to wait, and nothing does any more."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_empty: Callable[[], None]) -> None:
        self._loop = loop
        self._on_empty = on_empty
        self._steps: deque[Step] = deque()
        self._handle: asyncio.Handle | None = None
        self._is_going_on = False
        # Since when something waits, again and again; when it last did not; and whether that was ever too long.
        self._since = 0.0
        self._emptied_at = 0.0
        self.was_flood = False

    def __bool__(self) -> bool:
        """Whether something waits."""
        return bool(self._steps)

    def take(self, *steps: Step) -> None:
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
