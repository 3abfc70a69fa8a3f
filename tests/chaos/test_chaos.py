"""Clients cut off a thousand times, a server killed three times, and still everybody has seen everything once."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.chaos.storm import Size, Storm
from tests.thorough import thorough

pytestmark = thorough

# `make chaos` goes on for so many minutes, with a new seed each time.
MINUTES = float(os.environ.get("BANKSMAN_CHAOS", "0"))
SEED = int(os.environ.get("BANKSMAN_CHAOS_SEED", "6"))


@pytest.mark.thorough
def test_views_join_exactly_through_a_thousand_cuts_and_three_deaths(tmp_path: Path) -> None:
    end = time.monotonic() + 60 * MINUTES
    seed, size = SEED, Size()
    while True:
        print(f"seed {seed}: BANKSMAN_CHAOS_SEED={seed}", flush=True)  # Shown when it fails.
        toll = Storm(tmp_path / f"storm-{seed}", seed, size).rage()
        print(toll, flush=True)
        assert toll.cuts >= size.cuts
        assert toll.kills == size.kills
        # It was a storm: they were cut by the deaths as well, asks went on, and there was something to see.
        assert toll.asks >= 2 * size.sessions
        assert toll.events > 500
        if time.monotonic() >= end:
            return
        seed = random.SystemRandom().randrange(1 << 32)
