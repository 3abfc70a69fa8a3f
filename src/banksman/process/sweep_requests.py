"""Host side of partial sweeps: marks of past moments, and pending requests to the keeper.

A partial sweep ends the processes that a tree has started since a moment. The keeper does that
(`keeper/newer_sweep.py`).

**Marks.** The kernel records the start of each process in ticks of 10 ms since the boot. A tool
that starts immediately after the prompt shares its tick with older processes. Within a tick the
pids decide: the kernel assigns them in ascending order, and /proc/loadavg shows the last one. So
each write to the child notes both the tick and the last pid. A later request about a moment uses
the note of the first write since that moment. (Pids wrap around: if they do so within that tick,
the first new processes are taken for older ones.)

The clock of the start times keeps running while the machine sleeps, and CLOCK_MONOTONIC does not. A
note stores the tick, so that no conversion is needed.

**Answers.** Each request is answered exactly once, within a bounded time, whatever happens to the
keeper. The exception is the end of the whole tree: then the requests get no answer, and the report
about the tree says the rest.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from banksman.core.process_facts import Survivor, SweepEnded, Swept
from banksman.process import syscalls
from banksman.process.keeper.newer_sweep import NEWER_GRACE_SECONDS, NEWER_KILL_SECONDS_MAX

# A turn has few writes, mostly answers to questions. Beyond this number the oldest note is dropped;
# then only the tick decides.
NOTES_MAX = 1024
# The bounds of the keeper, plus 1.5 s for a last look at a tree that forks without end. After that
# the keeper does not run, and nothing is known about the sweep.
ANSWER_SECONDS_MAX = NEWER_GRACE_SECONDS + NEWER_KILL_SECONDS_MAX + 1.5
UNKNOWN = Survivor(0, "", "unknown: its keeper does not answer")


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """A moment: processes started in a later tick, or in this tick with a higher pid, are newer."""

    tick: int
    pid: int


class StartedSince:
    """Notes of the writes to a child, to find the mark for a moment."""

    def __init__(self, *, has_forgotten: bool = False) -> None:
        """`has_forgotten`: another host has written to the child before, and its notes are gone."""
        self._notes: deque[tuple[float, ProcessMark]] = deque(maxlen=NOTES_MAX)
        self._has_forgotten = has_forgotten

    def note(self) -> None:
        """Note the current moment. A later sweep may ask about processes started after it."""
        self._has_forgotten = self._has_forgotten or len(self._notes) == NOTES_MAX
        # The clock before the pid: a process that starts between the two reads is older than the
        # write that follows.
        tick = int(time.clock_gettime(time.CLOCK_BOOTTIME) * syscalls.TICKS_PER_SECOND)
        self._notes.append((time.monotonic(), ProcessMark(tick, _last_pid())))

    def since(self, moment: float) -> ProcessMark:
        """Return the first mark noted since this moment (CLOCK_MONOTONIC)."""
        # If a note older than the moment is still there, no note after the moment has been dropped.
        is_covered = not self._has_forgotten or (bool(self._notes) and self._notes[0][0] <= moment)
        noted = (
            next((mark for at, mark in self._notes if at >= moment), None) if is_covered else None
        )
        if noted is not None:
            return noted
        # No note covers the moment. The mark includes all processes of its tick: ending one too
        # many is better than leaving a tool running.
        apart = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
        return ProcessMark(max(0, int((moment + apart) * syscalls.TICKS_PER_SECOND)), 0)


def _last_pid() -> int:
    """Return the last pid that the kernel has assigned; 0 if it cannot be read."""
    try:
        return int(syscalls.read_proc("loadavg", 128).split()[-1])
    except (OSError, ValueError, IndexError):
        return 0


@dataclass(slots=True)
class _Open:
    """A request without an answer yet, with the processes reported so far."""

    timer: asyncio.TimerHandle
    swept: list[Swept] = field(default_factory=list[Swept])


class OpenSweeps:
    """Sweep requests that have no answer yet.

    Each request has a number. A late answer finds its request gone, and is not taken for the answer
    to another one.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        look_now: Callable[[], None],
        on_ended: Callable[[SweepEnded], None],
    ) -> None:
        """`look_now`: reads the messages that the keeper has already sent.

        `on_ended`: gets the answer of each request.
        """
        self._loop = loop
        self._look_now = look_now
        self._on_ended = on_ended
        self._last = 0
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def begin(self) -> int:
        """Register a request and return its number."""
        self._last += 1
        self._open[self._last] = _Open(
            self._loop.call_later(ANSWER_SECONDS_MAX, self._on_silence, self._last)
        )
        return self._last

    def hear(
        self,
        number: int,
        swept: tuple[Swept, ...],
        survivors: tuple[Survivor, ...],
        *,
        is_over: bool,
    ) -> tuple[Swept, ...]:
        """Take a report of the keeper.

        Returns the swept processes that belong to no pending request. They were ended all the same,
        so the caller has to report them.
        """
        sweep = self._open.get(number)
        if sweep is None:
            return swept
        sweep.swept.extend(swept)
        if is_over:
            self._answer(number, survivors)
        return ()

    def drop(self) -> None:
        """Drop all requests without an answer: the whole tree has ended, or the child is closed."""
        for sweep in self._open.values():
            sweep.timer.cancel()
        self._open.clear()

    def _on_silence(self, number: int) -> None:
        # The timer may be late, because of a busy loop, and the answer may already wait in the
        # socket.
        self._look_now()
        if number in self._open:
            self._answer(number, (UNKNOWN,))

    def _answer(self, number: int, survivors: tuple[Survivor, ...]) -> None:
        sweep = self._open.pop(number)
        sweep.timer.cancel()
        self._on_ended(SweepEnded(tuple(sweep.swept), survivors))
