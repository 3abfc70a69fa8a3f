"""Sweeps of a part of a tree, from the host's side: since when, and who waits for the answer.

**Since when.** The kernel notes the birth of each process in ticks of 10 ms since the boot. A tool that is started in
the same breath as the prompt comes shares its tick with what was there before. But within a tick pids tell: they are
given in ascending order, and /proc/loadavg says which was the last. So at each write to the child both are noted, and
whoever later asks about a moment gets the note of the first write since. (Numbers are used again: of those that begin
anew within that one tick the first ones are taken for older.)

The clock of the births goes on while the machine sleeps, ours (CLOCK_MONOTONIC) does not. A note has the tick itself,
so that nothing has to be converted.

**The answer.** Each request is answered once, in a bounded time, whatever becomes of the keeper, unless the whole tree
ends before: then nothing is told here, and the end of the tree says the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from banksman.core.process_facts import Survivor, SweepEnded, Swept
from banksman.process import syscalls
from banksman.process.keeper.sweep import NEWER_GRACE_SECONDS, NEWER_KILL_SECONDS_MAX

# Writes within one turn are few: answers to questions, mostly. Of more the first is forgotten; the tick alone tells.
NOTES_MAX = 1024
# The keeper's own bounds, and a second and a half for one last look at a tree that forks without end. Past that it does
# not run, and nothing is known.
ANSWER_SECONDS_MAX = NEWER_GRACE_SECONDS + NEWER_KILL_SECONDS_MAX + 1.5
UNKNOWN = Survivor(0, "", "unknown: its keeper does not answer")


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """Born since: in a later tick, or in this one with a higher pid."""

    tick: int
    pid: int


class StartedSince:
    def __init__(self) -> None:
        self._notes: deque[tuple[float, ProcessMark]] = deque(maxlen=NOTES_MAX)
        self._has_forgotten = False

    def note(self) -> None:
        """Something begins now that may be asked about."""
        self._has_forgotten = self._has_forgotten or len(self._notes) == NOTES_MAX
        # The clock first: who is born between the two looks was there before whatever is written now.
        tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * syscalls.TICKS_PER_SECOND)
        self._notes.append((time.monotonic(), ProcessMark(tick, _last_pid())))

    def since(self, moment: float) -> ProcessMark:
        """What was noted first since this moment of our clock."""
        is_covered = not self._has_forgotten or self._notes[0][0] <= moment
        noted = next((mark for at, mark in self._notes if at >= moment), None) if is_covered else None
        if noted is not None:
            return noted
        # Of all that are born in its tick: better one too many than a tool that is left.
        apart = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        return ProcessMark(max(0, int((moment + apart) * syscalls.TICKS_PER_SECOND)), 0)


def _last_pid() -> int:
    """The last one that was given; 0: nobody says."""
    try:
        return int(syscalls.read_proc("loadavg", 128).split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


@dataclass(slots=True)
class _Open:
    timer: asyncio.TimerHandle
    swept: list[Swept] = field(default_factory=list[Swept])


class OpenSweeps:
    """Those that were asked for and are not answered. A late answer finds its question gone, and is not taken for that
    of another."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, look_now: Callable[[], None], on_ended: Callable[[SweepEnded], None]
    ) -> None:
        """`look_now`: hear what the keeper has said already."""
        self._loop = loop
        self._look_now = look_now
        self._on_ended = on_ended
        self._last = 0
        self._open: dict[int, _Open] = {}

    def begin(self) -> int:
        self._last += 1
        self._open[self._last] = _Open(self._loop.call_later(ANSWER_SECONDS_MAX, self._on_silence, self._last))
        return self._last

    def hear(
        self, number: int, swept: tuple[Swept, ...], survivors: tuple[Survivor, ...], *, is_over: bool
    ) -> tuple[Swept, ...]:
        """Take what the keeper says. Back come those whom nobody waits for any more: they were ended all the same."""
        sweep = self._open.get(number)
        if sweep is None:
            return swept
        sweep.swept.extend(swept)
        if is_over:
            self._answer(number, survivors)
        return ()

    def drop(self) -> None:
        """The whole tree has ended, or nobody listens."""
        for sweep in self._open.values():
            sweep.timer.cancel()
        self._open.clear()

    def _on_silence(self, number: int) -> None:
        # The timer may have run late, behind a busy loop, while the answer was waiting to be read.
        self._look_now()
        if number in self._open:
            self._answer(number, (UNKNOWN,))

    def _answer(self, number: int, survivors: tuple[Survivor, ...]) -> None:
        sweep = self._open.pop(number)
        sweep.timer.cancel()
        self._on_ended(SweepEnded(tuple(sweep.swept), survivors))
