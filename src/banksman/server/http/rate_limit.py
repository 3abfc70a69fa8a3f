"""Limit the requests of each token: a token bucket for each, in the memory of this process.

A bucket holds at most `burst` requests and gains `per_second` of them each second. A request takes
one at its begin, whatever it does: an event stream counts once, however long it lasts. A request
that finds its bucket empty is refused before anything of it is done, and takes nothing.

A bucket is one number, the time at which it will be full (the generic cell rate algorithm). A full
bucket is the same as none, so it needs no memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from banksman.server.problems import Problem

# Limit of buckets. A token that only the administrator can make has one, so there are few. Beyond
# the limit the bucket that was used least recently is dropped, as if it were full.
BUCKETS_MAX = 10_000


class RateLimit:
    """The buckets of one server. Belongs to its event loop.

    `refused`: requests that were refused since the start.
    """

    def __init__(
        self, per_second: float, burst: int, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        assert per_second > 0
        assert burst >= 1
        self._seconds = 1 / per_second
        self._burst = burst
        self._per_second = per_second
        self._clock = clock
        # Maps a token's hash to the time at which its bucket is full. The last used one comes last.
        self._full_at: dict[bytes, float] = {}
        self.refused = 0

    def take(self, bucket: bytes) -> None:
        """Take a request from this bucket. Raises a `Problem` if it is empty."""
        now = self._clock()
        full_at = max(now, self._full_at.get(bucket, now)) + self._seconds
        # The room below the full bucket is `burst` requests.
        wait = full_at - now - self._burst * self._seconds
        # A nanosecond of tolerance: the sum of many intervals is not exact.
        if wait > 1e-9:
            self.refused += 1
            seconds = max(1, math.ceil(wait))
            limit = f"{self._per_second:g} requests a second, {self._burst} at once"
            raise Problem(
                429,
                "RateLimited",
                f"too many requests with this token: at most {limit}",
                hint=f"send the request again in {seconds} s; nothing of it was done",
                headers={"Retry-After": str(seconds)},
            )
        self._full_at.pop(bucket, None)
        self._full_at[bucket] = full_at
        if len(self._full_at) > BUCKETS_MAX:
            self._full_at = {key: at for key, at in self._full_at.items() if at > now}
            while len(self._full_at) > BUCKETS_MAX:
                del self._full_at[next(iter(self._full_at))]
