"""What went through the sessions of a host, those that are over included.

Each session counts for itself, and what it counted goes with it when it is forgotten. A number that somebody follows
for days must not fall because of that: so when a session ends here, its numbers are added to those of all that have
ended before. Nothing is added up while it lives, and a frame costs no more for being counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from banksman.core.outcome import Kind
from banksman.run.sessions.counters import Counters
from banksman.run.sessions.turn_times import TurnTimes

if TYPE_CHECKING:
    from banksman.run.sessions.life import Life


class Totals:
    """For one loop. None of the sums ever falls."""

    def __init__(self) -> None:
        self._open: dict[Life, None] = {}
        self._counters: Counter[str] = Counter(dict.fromkeys(Counters.__slots__, 0))
        self._turns: Counter[str] = Counter({kind.value: 0 for kind in Kind})
        self._times = TurnTimes()

    def follow(self, life: Life) -> None:
        """Until its end, and what it had counted by then for ever."""
        self._open[life] = None
        life.promises.finished.add_done_callback(partial(self._end, life))

    def _end(self, life: Life, _: object) -> None:
        del self._open[life]
        self._counters.update(_counted(life))
        self._turns.update(life.promises.outcomes)
        self._times.update(life.driver.turn_times)

    def counters(self) -> Mapping[str, int]:
        """The fields of `Counters`, of all together."""
        total = self._counters.copy()
        for life in self._open:
            total.update(_counted(life))
        return total

    def turns(self) -> Mapping[str, int]:
        """How many asks ended, by the kind of their outcome."""
        total = self._turns.copy()
        for life in self._open:
            total.update(life.promises.outcomes)
        return total

    def times(self) -> TurnTimes:
        """How long asks have waited, and turns taken."""
        total = TurnTimes()
        for times in (self._times, *(life.driver.turn_times for life in self._open)):
            total.update(times)
        return total


def _counted(life: Life) -> dict[str, int]:
    counters = life.driver.counters
    return {name: getattr(counters, name) for name in counters.__slots__}
