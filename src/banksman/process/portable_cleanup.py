"""The same sweep without a keeper, as far as `ps` tells who was born when.

It counts births in seconds. Who was born in the very second that is asked about may have been there before, and is
spared: to leave a tool running is bad, to end an agent's server is worse.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterable

from banksman.core.process_facts import Survivor, SweepEnded, Swept
from banksman.process.keeper.kill_newer import GRACE_SECONDS, KILL_SECONDS_MAX

# pid, parent, group, start time as `ps` writes it, command
Row = tuple[int, int, int, str, str]

LOOK_SECONDS = 0.05
_MONTHS = "JanFebMarAprMayJunJulAugSepOctNovDec"


class PortableSweep:
    """One order to sweep. `members`: who of the tree is alive, but for its leader."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, members: Callable[[], list[Row]], tell: Callable[[SweepEnded], None]
    ) -> None:
        self._loop = loop
        self._members = members
        self._tell = tell
        self._met: dict[int, Row] = {}
        self._left: dict[int, Row] = {}
        self._began = time.monotonic()

    def begin(self, since: float, *, ends: bool) -> None:
        second = int(time.time() - (time.monotonic() - since))
        rows = self._members()
        self._left = _with_descendants((row for row in rows if born(row) > second), rows)
        if not ends:
            left = tuple(Survivor(row[0], row[4], "left as it is") for row in self._left.values())
            self._loop.call_soon(self._tell, SweepEnded(survivors=left))
            return
        self._met = dict(self._left)
        self._signal(signal.SIGTERM, signal.SIGCONT)
        self._loop.call_later(LOOK_SECONDS if self._left else 0, self._look)

    def _look(self) -> None:
        """Who is left of them, and what have they started meanwhile?"""
        rows = self._members() if self._left else []
        same = [row for row in rows if row[0] in self._left and row[3] == self._left[row[0]][3]]
        self._left = _with_descendants(same, rows)
        self._met |= self._left
        seconds = time.monotonic() - self._began
        if not self._left or seconds > GRACE_SECONDS + KILL_SECONDS_MAX:
            swept = tuple(Swept(row[0], row[4]) for row in self._met.values())
            self._tell(SweepEnded(swept, tuple(Survivor(row[0], row[4], "still dying") for row in self._left.values())))
            return
        if seconds > GRACE_SECONDS:
            self._signal(signal.SIGKILL)
        self._loop.call_later(LOOK_SECONDS, self._look)

    def _signal(self, *numbers: int) -> None:
        for pid in self._left:
            for number in numbers:
                with contextlib.suppress(OSError):
                    os.kill(pid, number)


def _with_descendants(roots: Iterable[Row], rows: list[Row]) -> dict[int, Row]:
    children: dict[int, list[Row]] = {}
    for row in rows:
        children.setdefault(row[1], []).append(row)
    found: dict[int, Row] = {}
    waiting = list(roots)
    while waiting:
        row = waiting.pop()
        if row[0] not in found:
            found[row[0]] = row
            waiting.extend(children.get(row[0], ()))
    return found


def born(row: Row) -> float:
    """The second of its birth. Read by hand: `ps` writes it in English here, whatever language this program speaks."""
    _day, month, day, clock, year = row[3].split()
    hours, minutes, seconds = clock.split(":")
    date = (int(year), _MONTHS.index(month) // 3 + 1, int(day), int(hours), int(minutes), int(seconds), 0, 0, -1)
    return time.mktime(date)
