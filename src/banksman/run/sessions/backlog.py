"""What an agent has said and done, and is not yet told: in its order, as much at a time as keeps nobody waiting.

A read is bounded in bytes, and bytes may be half a million lines: a wrong command (`yes`) or a hostile agent would hold
up every other session of the host for as long as it takes to look at them. So what is read is taken in slices, for a
few milliseconds, and the rest when all others had their turn. Until then nothing more is read, and whatever else the
process does comes after it. Of an agent in its right mind all that one read has brought is told at once.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

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
