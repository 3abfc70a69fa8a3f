"""Histogram of durations with fixed bucket limits, as Prometheus counts them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """Histogram of durations.

    `bounds`: the upper bucket limits in seconds, ascending. `counts`: the number of durations per
    bucket. A bucket holds durations up to and including its bound and above the previous bound. The
    last bucket holds all longer durations.
    """

    __slots__ = ("bounds", "counts", "seconds")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.seconds += seconds

    def update(self, other: Histogram) -> None:
        assert self.bounds == other.bounds
        self.counts = [
            mine + others for mine, others in zip(self.counts, other.counts, strict=True)
        ]
        self.seconds += other.seconds
