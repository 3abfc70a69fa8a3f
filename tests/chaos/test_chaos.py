"""Every client sees every event once, through a thousand cut connections and three killed servers."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.chaos.storm import Size, Storm
from tests.thorough import thorough

pytestmark = thorough

# Number of minutes in `make chaos`, with a new seed for each storm.
MINUTES = float(os.environ.get("BANKSMAN_CHAOS", "0"))
SEED = int(os.environ.get("BANKSMAN_CHAOS_SEED", "6"))


@pytest.mark.thorough
def test_views_join_exactly_through_a_thousand_cuts_and_three_deaths(tmp_path: Path) -> None:
    end = time.monotonic() + 60 * MINUTES
    seed, size = SEED, Size()
    while True:
        print(f"seed {seed}: BANKSMAN_CHAOS_SEED={seed}", flush=True)  # Shown when the test fails.
        toll = Storm(tmp_path / f"storm-{seed}", seed, size).rage()
        print(toll, flush=True)
        assert toll.cuts >= size.cuts
        assert toll.kills == size.kills
        # The storm had an effect: server deaths cut connections too, asks continued, and there were events to see.
        assert toll.asks >= 2 * size.sessions
        assert toll.events > 500
        if time.monotonic() >= end:
            return
        seed = random.SystemRandom().randrange(1 << 32)
