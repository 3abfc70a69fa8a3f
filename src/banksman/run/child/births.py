"""What was born since a moment, in the two numbers by which that can be told of a process.

The kernel notes the birth of each process in ticks of 10 ms since the boot. A tool that is started in the same breath
as the prompt comes shares its tick with what was there before. But within a tick pids tell: they are given in ascending
order, and /proc/loadavg says which was the last. So at each write to the child both are noted, and whoever later asks
about a moment gets the note of the first write since. (Numbers are used again: of those that begin anew within that one
tick the first ones are taken for older.)

The clock of the births goes on while the machine sleeps, ours (CLOCK_MONOTONIC) does not. A note has the tick itself,
so that nothing has to be converted.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from banksman.run.child import system

# Writes within one turn are few: answers to questions, mostly. Of more the first is forgotten; the tick alone tells.
NOTES_MAX = 1024


@dataclass(frozen=True, slots=True)
class Mark:
    """Born since: in a later tick, or in this one with a higher pid."""

    tick: int
    pid: int


class Births:
    def __init__(self) -> None:
        self._notes: deque[tuple[float, Mark]] = deque(maxlen=NOTES_MAX)
        self._has_forgotten = False

    def note(self) -> None:
        """Something begins now that may be asked about."""
        self._has_forgotten = self._has_forgotten or len(self._notes) == NOTES_MAX
        # The clock first: who is born between the two looks was there before whatever is written now.
        tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * system.TICKS_PER_SECOND)
        self._notes.append((time.monotonic(), Mark(tick, _last_pid())))

    def since(self, moment: float) -> Mark:
        """What was noted first since this moment of our clock."""
        is_covered = not self._has_forgotten or self._notes[0][0] <= moment
        noted = next((mark for at, mark in self._notes if at >= moment), None) if is_covered else None
        if noted is not None:
            return noted
        # Of all that are born in its tick: better one too many than a tool that is left.
        apart = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        return Mark(max(0, int((moment + apart) * system.TICKS_PER_SECOND)), 0)


def _last_pid() -> int:
    """The last one that was given; 0: nobody says."""
    try:
        return int(system.read_proc("loadavg", 128).split()[-1])
    except (OSError, ValueError, IndexError):
        return 0
