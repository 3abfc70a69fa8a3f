"""The death of a leading node fences no session, and asks continue."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.chaos.cluster import invariants
from tests.chaos.cluster.world import World
from tests.server.kit import Served
from tests.server.streams.stream_clients import walk

# The default lease of a host.
LEASE_SECONDS = 15.0
SESSIONS = 3


@pytest.mark.thorough
def test_leader_death_fences_no_session(tmp_path: Path) -> None:
    with World(tmp_path / "world", sessions=SESSIONS, lease=LEASE_SECONDS) as world:
        front = world.fronts[0]
        world.open_all()
        for id in world.ids:
            assert front.outcome(id, front.ask(id, "before"))["kind"] == "done"
        # Each session has its process now. The same process must serve the rest of the test.
        epochs = {id: _last(front, id)["epoch"] for id in world.ids}
        before = {host.name: pids_of(world, host.life) for host in world.hosts.values()}
        for stream in ("events", "hosts"):
            leader = world.servers.leader_of(f"{world.prefix}-{stream}")
            world.servers.kill(leader)
            began = time.monotonic()
            for number, id in enumerate(world.ids):
                # Accepted and answered while that node is dead. The nodes elect the next leader meanwhile.
                turn = world.fronts[number % 2].ask(id, f"{stream} {number}")
                outcome = front.outcome(id, turn)
                assert (outcome["kind"], outcome["text"]) == ("done", f"{stream} {number}"), outcome
            print(f"without the leader of {stream}: {SESSIONS} asks in {time.monotonic() - began:.1f} s")
            world.servers.restart(leader)
            world.servers.wait_ready()
        for id in world.ids:
            events = invariants.events_of(walk(front, id))
            invariants.log(events)
            assert events[-1]["epoch"] == epochs[id], "it has another owner, or the same one again"
            kinds = [event["kind"] for event in events]
            # The process is the same, in the same conversation.
            assert kinds.count("process.started") == 1, kinds
            assert kinds.count("turn.ended") == 3, kinds
        for host in world.hosts.values():
            host.check_lives()
            assert before[host.name] == pids_of(world, host.life)
            assert ": lease lost: " not in host.log.read_text(encoding="utf-8")


def _last(front: Served, id: str) -> invariants.Event:
    return invariants.events_of(walk(front, id))[-1]


def pids_of(world: World, life: str) -> set[int]:
    return {found.pid for found in world.agents_of(life)}
