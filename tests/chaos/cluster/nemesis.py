"""Kill and stop hosts and nodes at random.

The seed decides the actions; the machine decides the timing.

There is one thread for each host and one for the nodes, so several of them sometimes fail at the same time. At most one
node is dead at a time. Two nodes may be stopped for a moment, and then no client can write anywhere. This module also
measures stopped hosts, because only it knows when a host was stopped.
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import dataclass

from tests.chaos.cluster.history import History
from tests.chaos.cluster.world import LOOK_AGAIN_SECONDS, Found, Host, World

# Time beyond the lease until a process tree must be gone: a busy machine needs it to schedule the keepers and this
# test.
SLACK_SECONDS = 0.75
# Time until the last process of a killed host is gone: TERM, grace and KILL, by keepers that compete with a storm.
GONE_SECONDS_MAX = 20.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Duration of each kind of trouble and of the quiet between two, as a range in seconds."""

    host_quiet: tuple[float, float]
    node_quiet: tuple[float, float]
    host_down: tuple[float, float]
    host_stopped: tuple[float, float]
    node_down: tuple[float, float]
    node_stopped: tuple[float, float]
    majority_stopped: tuple[float, float]


class Nemesis:
    """Threads that disturb hosts and nodes.

    `is_over`: set when no new trouble may begin.
    """

    def __init__(self, world: World, history: History, plan: Plan, seed: int, is_over: threading.Event) -> None:
        self._world = world
        self._history = history
        self._plan = plan
        self._seed = seed
        self._is_over = is_over
        self.stops_measured = 0
        self.deaths_measured = 0

    def trouble_host(self, name: str) -> None:
        dice = random.Random(f"host {name} {self._seed}")
        while not self._is_over.wait(dice.uniform(*self._plan.host_quiet)):
            is_kill = dice.random() < 0.5
            seconds = dice.uniform(*(self._plan.host_down if is_kill else self._plan.host_stopped))
            (self._kill_host if is_kill else self._stop_host)(name, seconds)

    def trouble_nodes(self) -> None:
        dice = random.Random(f"nodes {self._seed}")
        while not self._is_over.wait(dice.uniform(*self._plan.node_quiet)):
            nodes = dice.sample(range(self._world.servers.nodes), k=2)
            dice.choice((self._kill_node, self._stop_node, self._stop_majority))(nodes, dice)

    # -- hosts ---------------------------------------------------------------------------------------------------------
    def _kill_host(self, name: str, seconds: float) -> None:
        host = self._world.hosts[name]
        life = host.life
        host.kill()
        self._history.notes(f"kill host {name}")
        began = time.monotonic()
        self._is_over.wait(seconds)
        host.start()
        self._history.notes(f"start host {name}")
        self.wait_gone(life, began)
        host.wait_ready()  # Waits however long the nodes are in trouble.

    def wait_gone(self, life: str, began: float) -> None:
        """Wait until no process of a killed host is left: no agent, keeper or zygote."""
        while left := [found for found in self._world.processes() if found.life == life]:
            assert time.monotonic() < began + GONE_SECONDS_MAX, f"left of {life}, which was killed: {left}"
            time.sleep(LOOK_AGAIN_SECONDS)
        self.deaths_measured += 1

    def _stop_host(self, name: str, seconds: float) -> None:
        host = self._world.hosts[name]
        host.stop()
        stopped_at = time.monotonic()
        self._history.notes(f"stop host {name}")
        try:
            if seconds > self._world.lease + SLACK_SECONDS:
                self.check_dead_by_lease(host, stopped_at)
            self._is_over.wait(max(0.0, stopped_at + seconds - time.monotonic()))
        finally:
            host.cont()
            self._history.notes(f"cont host {name}")

    def check_dead_by_lease(self, host: Host, stopped_at: float) -> None:
        """Check that all agents of a stopped host are dead when its lease ends, while the host stays stopped."""
        end = stopped_at + self._world.lease + SLACK_SECONDS
        left: list[Found] = []
        while left := self._world.agents_of(host.life):
            late = time.monotonic() - stopped_at
            assert time.monotonic() < end, f"{host.life} was stopped {late:.2f} s ago, and there are still {left}"
            time.sleep(LOOK_AGAIN_SECONDS)
        self.stops_measured += 1

    # -- nodes ---------------------------------------------------------------------------------------------------------
    def _kill_node(self, nodes: list[int], dice: random.Random) -> None:
        self._world.servers.kill(nodes[0])
        self._history.notes(f"kill node {nodes[0]}")
        self._is_over.wait(dice.uniform(*self._plan.node_down))
        self._world.servers.restart(nodes[0])
        self._history.notes(f"start node {nodes[0]}")
        for node in self._world.wait_nodes_ready():
            self._history.notes(f"restart node {node}")

    def _stop_node(self, nodes: list[int], dice: random.Random) -> None:
        self._stop_nodes(nodes[:1], dice.uniform(*self._plan.node_stopped))

    def _stop_majority(self, nodes: list[int], dice: random.Random) -> None:
        self._stop_nodes(nodes, dice.uniform(*self._plan.majority_stopped))

    def _stop_nodes(self, nodes: list[int], seconds: float) -> None:
        try:
            for node in nodes:
                self._world.servers.stop(node)
                self._history.notes(f"stop {'nodes' if len(nodes) > 1 else 'node'} {node}")
            self._is_over.wait(seconds)
        finally:
            for node in nodes:
                self._world.servers.cont(node)
                self._history.notes(f"cont node {node}")
