"""Every ask has one outcome and every log is dense although hosts and nodes are killed and stopped at random."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

import pytest
from tests.chaos.cluster.nemesis import Plan
from tests.chaos.cluster.storm import Size, Storm

# Number of minutes in `make chaos`, with sixty sessions.
MINUTES = float(os.environ.get("BANKSMAN_CHAOS_CLUSTER", "0"))
# This seed kills two hosts and stops another for longer than its lease, all in the first seconds.
SEED = int(os.environ.get("BANKSMAN_CHAOS_SEED", "79"))

SHORT = Size(
    sessions=12,
    seconds=12.0,
    lease=2.0,
    think=0.5,
    plan=Plan(
        host_quiet=(0.5, 5.0),
        node_quiet=(2.0, 5.0),
        host_down=(0.2, 2.0),
        host_stopped=(1.0, 5.0),
        node_down=(0.3, 1.5),
        node_stopped=(0.3, 2.0),
        majority_stopped=(0.2, 1.0),
    ),
)
LONG = Size(
    sessions=60,
    seconds=60 * MINUTES,
    lease=5.0,
    think=3.0,
    manies=4,
    plan=Plan(
        host_quiet=(3.0, 25.0),
        node_quiet=(5.0, 20.0),
        host_down=(0.5, 8.0),
        host_stopped=(0.5, 12.0),
        node_down=(0.5, 5.0),
        node_stopped=(0.5, 8.0),
        majority_stopped=(0.3, 3.0),
    ),
)


@pytest.mark.thorough
def test_cluster_storm_gives_every_ask_one_outcome_and_loses_no_event(tmp_path: Path) -> None:
    size = LONG if MINUTES else SHORT
    seed = SEED if not MINUTES or "BANKSMAN_CHAOS_SEED" in os.environ else random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}: BANKSMAN_CHAOS_SEED={seed}", flush=True)  # Shown when the test fails.
    began = time.monotonic()
    toll = Storm(tmp_path / "storm", seed, size).rage()
    print(f"{time.monotonic() - began:.0f} s: {toll}", flush=True)
    # The storm had an effect: hosts and nodes were disturbed, sessions moved, and turns still ended.
    assert toll["take_overs"] > 0
    assert toll["outcomes"]["done"] >= 2 * size.sessions
    assert any(deed.startswith(("kill host", "stop host")) for deed in toll["deeds"])
    assert any(deed.startswith(("kill node", "stop node")) for deed in toll["deeds"])
