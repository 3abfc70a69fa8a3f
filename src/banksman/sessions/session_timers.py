"""Timers of one session, by the event loop's clock and by the wall clock.

Each timer has one subject. A restart replaces the timer. `SessionTimers` runs them, and the driver
decides what happens when one is due.

All timers of a session share one timer of the event loop, the alarm. A turn starts several timers
and cancels nearly all of them, and each change of the loop's queue costs many calls. The alarm is
due when the earliest timer is, or before: a cancelled timer leaves it where it is. So an alarm may
find no timer that is due, and is then set again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from banksman.core.session.facts import Subject

# Interval at which a wait for a wall clock time looks at that clock. The event loop's clock stands
# still while the machine is suspended, and does not follow a wall clock that is set.
WALL_SECONDS_MAX = 60.0


class SessionTimers:
    """Timers of one session. Belongs to one event loop.

    `look`: called when a timer is due. It reads what has already happened, and calls its argument
    behind that. `fire`: called with the subject of a timer that still runs then.
    """

    def __init__(
        self, look: Callable[[Callable[[], None]], None], fire: Callable[[Subject], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._look = look
        self._fire = fire
        # When each timer is due by the event loop's clock; for one by the wall clock, when it looks
        # at that clock next.
        self.running: dict[Subject, float] = {}
        # When the timers by the wall clock are due.
        self.walls: dict[Subject, float] = {}
        # The alarm, at or before the earliest timer.
        self._alarm: asyncio.TimerHandle | None = None

    @property
    def dues(self) -> dict[Subject, float]:
        """When the timers by the event loop's clock are due."""
        return {each: at for each, at in self.running.items() if each not in self.walls}

    def start(self, subject: Subject, at: float) -> None:
        """Start a timer, or restart it."""
        if self.walls:
            self.walls.pop(subject, None)
        self.running[subject] = at
        self._wake_by(at)

    def wait_until(self, subject: Subject, due: float, seconds_min: float = 0.0) -> None:
        """Start a timer that fires once the wall clock has passed `due`.

        If it has passed already, the timer fires after `seconds_min`.
        """
        left = due - time.time()
        seconds = min(left, WALL_SECONDS_MAX) if left > 0.0 else seconds_min
        self.start(subject, self._loop.time() + seconds)
        self.walls[subject] = due

    def cancel(self, subject: Subject) -> None:
        if self.walls:
            self.walls.pop(subject, None)
        self.running.pop(subject, None)

    def cancel_all(self) -> None:
        """Cancel all timers, and the alarm."""
        self.walls.clear()
        self.running.clear()
        self._stop_alarm()

    def _wake_by(self, at: float) -> None:
        """Make sure that the alarm comes at this time or earlier."""
        if self._alarm is None or at < self._alarm.when():
            self._stop_alarm()
            self._alarm = self._loop.call_at(at, self._on_alarm)

    def _stop_alarm(self) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None

    def _on_alarm(self) -> None:
        assert self._alarm is not None
        # The loop's clock may be a little behind: it runs a timer up to its resolution early.
        now = max(self._alarm.when(), self._loop.time())
        self._alarm = None
        due = sorted((at, subject) for subject, at in self.running.items() if at <= now)
        later = [at for at in self.running.values() if at > now]
        if later:
            self._wake_by(min(later))
        for at, subject in due:
            # Each by itself, so that none depends on what the others do.
            self._loop.call_soon(self._on_time, subject, at)

    def _on_time(self, subject: Subject, at: float) -> None:
        if self.running.get(subject) != at:
            return  # Another timer has cancelled or restarted it.
        wall = self.walls.get(subject)
        if wall is not None and time.time() < wall:
            self.wait_until(subject, wall)
        else:
            self._on_due(subject)

    def _on_due(self, subject: Subject) -> None:
        # The timer may run late, behind a busy loop, while the agent's answer waits in the pipe.
        # Events that have already happened must be processed before a conclusion is drawn from
        # their absence. So the pipe is read first, and the timer fires behind the frames that were
        # read. They may cancel or restart the timer. Then this one is stale.
        at = self.running.get(subject)

        def fire() -> None:
            if at is not None and self.running.get(subject) == at:
                del self.running[subject]
                self.walls.pop(subject, None)
                self._fire(subject)

        self._look(fire)
