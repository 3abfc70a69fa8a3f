"""What went through a session, both ways."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from banksman.core.session.event import TURN_ENDED, TURN_QUEUED, TURN_STARTED, Entry


@dataclass(slots=True)
class Counters:
    """Both ways, since the session was opened.

    `noise`: lines that were no frames. `spilled`: frames too large to keep; `dropped`: bytes of those that are lost.
    `swept`: processes that had to be ended with the agent's own; `survivors`: those that could not be.
    """

    frames_in: int = 0
    bytes_in: int = 0
    frames_out: int = 0
    bytes_out: int = 0
    noise: int = 0
    spilled: int = 0
    dropped: int = 0
    processes: int = 0
    swept: int = 0
    survivors: int = 0


# Histograms of how long asks wait in the queue, and how long their turns take.
#
# Told by what is written to the log: queued, started, ended. An ask that was queued under another host is not measured,
# because the clocks of two hosts are not one.

# Upper bounds in seconds: an agent answers in a second, or works for an hour.
BOUNDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)
_MARKS = frozenset((TURN_QUEUED, TURN_STARTED, TURN_ENDED))


class Histogram:
    """`counts`: of each bound those at or below it and above the one before; the last: all that are longer."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def update(self, other: Histogram) -> None:
        self.counts = [mine + others for mine, others in zip(self.counts, other.counts, strict=True)]
        self.seconds += other.seconds


class TurnTimes:
    """Of one session, or of several together. `queue`: from acceptance to the first start. `turn`: from there to the
    end; a turn that was started again counts once."""

    __slots__ = ("_queued", "_started", "queue", "turn")

    def __init__(self) -> None:
        self.queue = Histogram()
        self.turn = Histogram()
        self._queued: dict[str, float] = {}
        self._started: dict[str, float] = {}

    def note(self, entries: Sequence[Entry], now: float) -> None:
        for turn, kind, _ in entries:
            if kind not in _MARKS or turn is None:
                continue
            if kind == TURN_QUEUED:
                self._queued[turn] = now
            elif kind == TURN_STARTED and turn in self._queued:
                self.queue.add(now - self._queued.pop(turn))
                self._started[turn] = now
            elif kind == TURN_ENDED:
                self._queued.pop(turn, None)
                if turn in self._started:
                    self.turn.add(now - self._started.pop(turn))

    def update(self, other: TurnTimes) -> None:
        self.queue.update(other.queue)
        self.turn.update(other.turn)
