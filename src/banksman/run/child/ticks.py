"""When a moment of our own clock was, in the ticks by which the kernel notes the birth of a process.

Our clock (CLOCK_MONOTONIC) stands still while the machine sleeps, the kernel's (CLOCK_BOOTTIME) goes on. How far they
are apart *now* is therefore not how far they were apart *then*: a lid that was closed in the middle of a turn lies
between. So it is noted while it is true, and a moment is told by what was noted nearest to it.
"""

from __future__ import annotations

import time

from banksman.run.child import system

# Less than this is the time that passes between looking at the one clock and at the other; no sleep is that short.
SLEEP_SECONDS_MIN = 0.005
# A moment may be somewhat older than what was noted for it: a prompt is noted when it is written, a little after it was
# decided on.
NOTED_LATE_SECONDS_MAX = 1.0
# Each note is one sleep of the machine. Those who ask, ask about the last turn.
NOTES_MAX = 64
_ATTEMPTS = 5


class Ticks:
    """How the two clocks stood to each other, as far as it was noted."""

    def __init__(self) -> None:
        # Since when they are so far apart; oldest first, and a new one only if it differs.
        self._notes: list[tuple[float, float]] = []

    def note(self) -> None:
        self.add(time.monotonic(), _apart())

    def add(self, at: float, apart: float) -> None:
        if not self._notes or abs(apart - self._notes[-1][1]) > SLEEP_SECONDS_MIN:
            self._notes.append((at, apart))
            del self._notes[:-NOTES_MAX]

    def at(self, moment: float) -> int:
        """The tick of a moment of our clock."""
        if not self._notes:
            self.note()
        apart = self._notes[0][1]
        for noted, then in self._notes:
            if noted <= moment + NOTED_LATE_SECONDS_MAX:
                apart = then
        return max(0, int((moment + apart) * system.TICKS_PER_SECOND))


def _apart() -> float:
    """How far the clocks are apart: looked at so quickly that nothing came between."""
    best = float("inf"), 0.0
    for _ in range(_ATTEMPTS):
        before = time.monotonic()
        boot = time.clock_gettime(time.CLOCK_BOOTTIME)
        after = time.monotonic()
        best = min(best, (after - before, boot - after))
        if best[0] < SLEEP_SECONDS_MIN / 50:
            break
    return best[1]
