"""Distribution of the time from the death of a host to the next answer in its sessions."""

from __future__ import annotations

import math
import os
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.chaos.cluster.world import START_SECONDS_MAX, Host, World, until

# `make chaos` sets the minutes of the storm, and then this test kills more hosts.
IS_LONG = float(os.environ.get("BANKSMAN_CHAOS_CLUSTER", "0")) > 0
SEED = int(os.environ.get("BANKSMAN_CHAOS_SEED", "9"))
KILLS = 25 if IS_LONG else 3
LEASE_SECONDS = 5.0 if IS_LONG else 2.0
SESSIONS = 12 if IS_LONG else 6
# Goal beyond the lease for the slowest of a hundred take-overs. `make chaos` demands it on an otherwise idle machine.
# On a busy machine, as in `make test`, the test only detects a broken take-over.
GOAL_SECONDS = 2.0
BROKEN_SECONDS = 15.0


@pytest.mark.thorough
def test_killed_host_session_answers_elsewhere_within_lease_and_two_seconds(tmp_path: Path) -> None:
    dice = random.Random(SEED)
    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    with World(tmp_path / "world", sessions=SESSIONS, lease=LEASE_SECONDS) as world:
        world.open_all()
        for id in world.ids:
            _done(world, id, "first")
        seconds: list[float] = []
        for kill in range(KILLS):
            host, theirs = _victim(world, dice)
            killed_at = host.kill()
            with ThreadPoolExecutor(len(theirs)) as pool:
                words = [f"after death {kill}"] * len(theirs)
                seconds += [at - killed_at for at in pool.map(_done, [world] * len(theirs), theirs, words)]
            host.start()
            host.wait_ready()
            until(lambda name=host.name: _is_known(world, name), START_SECONDS_MAX, "it is one of them again")
        assert not world.overlaps()
    shown = f"p50 {_part(seconds, 0.5):.2f} s, p90 {_part(seconds, 0.9):.2f} s, p99 {_part(seconds, 0.99):.2f} s"
    shown += f", most {max(seconds):.2f} s"
    shown += f" (load {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores)"
    print(f"take-over, lease {LEASE_SECONDS:g} s, {KILLS} deaths, {len(seconds)} sessions: {shown}", flush=True)
    is_held = _part(seconds, 0.99) < LEASE_SECONDS + GOAL_SECONDS
    if not is_held:
        print(
            f"not within the lease and {GOAL_SECONDS:g} s" + (", on a machine that was busy before" if is_busy else "")
        )
    assert _part(seconds, 0.99) < LEASE_SECONDS + BROKEN_SECONDS, shown
    assert is_held or is_busy or not IS_LONG, shown


def _victim(world: World, dice: random.Random) -> tuple[Host, list[str]]:
    """Return a host that owns sessions, and the ids of those sessions."""
    owners = {id: world.fronts[0].get(f"/v1/sessions/{id}")["host"] for id in world.ids}
    name = dice.choice(sorted(set(owners.values())))
    return world.hosts[name], [id for id, owner in owners.items() if owner == name]


def _done(world: World, id: str, words: str) -> float:
    """Ask once, with all the patience of a front end; return the time of the answer."""
    front = random.choice(world.fronts)
    outcome = front.outcome(id, front.ask(id, words))
    assert (outcome["kind"], outcome["text"]) == ("done", words), outcome
    return time.monotonic()


def _is_known(world: World, name: str) -> bool:
    return name in {host["name"] for host in world.fronts[0].get("/v1/hosts")["hosts"] if host["room"]}


def _part(seconds: list[float], part: float) -> float:
    return sorted(seconds)[math.ceil(part * len(seconds)) - 1]
