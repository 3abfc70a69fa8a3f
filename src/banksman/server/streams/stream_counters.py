"""What went out by event streams, in numbers: added up where it happens, read when somebody asks (`ops/metrics.py`)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field

# A stream is of one session, or of many at once.
KINDS = ("session", "many")


def _nobody() -> dict[str, int]:
    return dict.fromkeys(KINDS, 0)


@dataclass(slots=True)
class Counts:
    """Of one server, from its start. For its loop only.

    `followers`: who follows now, by kind. `cut`: streams that were cut off because nobody took their bytes. `gaps`: how
    often a follower was told that retention had taken what it wanted.
    """

    followers: dict[str, int] = field(default_factory=_nobody)
    events: int = 0
    bytes: int = 0
    cut: int = 0
    gaps: int = 0

    @contextmanager
    def following(self, kind: str) -> Generator[None]:
        """One more follows, as long as this is entered."""
        assert kind in self.followers, kind
        self.followers[kind] += 1
        try:
            yield
        finally:
            self.followers[kind] -= 1
            assert self.followers[kind] >= 0
