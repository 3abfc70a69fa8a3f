"""Helpers for the cluster benchmarks: stores on SQLite and on real NATS nodes, and their CPU use.

The nodes sync before they acknowledge, as docs/cluster.md requires. The file has the default level,
which does not sync. The level `full` does, so it is the fair comparison.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from banksman.cluster import store_address
from banksman.cluster.log import ClusterLog
from banksman.store.log import Log
from banksman.store.sqlite import SqliteLog
from banksman.testing.nats_servers import Servers

FILE, FULL, ONE, THREE = "sqlite", "sqlite, full", "NATS, 1 node", "NATS, 3 nodes"


@dataclass(frozen=True)
class Store:
    """A store to measure. `name`: its label in the output. `url`: the address for a host."""

    name: str
    url: str
    servers: Servers | None = None

    def open(self) -> Log:
        """Open the log without a host. Call it in an event loop."""
        if self.servers is None:
            path, _, level = self.url.removeprefix("sqlite:").partition("?level=")
            return SqliteLog(path, level="full" if level else "normal")
        where = store_address.parse(self.url)
        assert where.journal is not None
        return ClusterLog(where, Path(where.journal))

    def servers_cpu_seconds(self) -> float:
        """Return the CPU seconds of all nodes since their start."""
        if self.servers is None:
            return 0.0
        pids = [self.servers.pid(node) for node in range(self.servers.nodes)]
        return sum(cpu_seconds(pid) for pid in pids if pid is not None)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process with all its threads: see clock_getcpuclockid(3)."""
    return time.clock_gettime((~pid << 3) | 2)


def memory_bytes(pid: int | str = "self") -> int:
    """Return the PSS: the private pages, and a share of each shared page."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))


@contextlib.contextmanager
def nodes(count: int, prefix: str = "bench", **settings: object) -> Generator[Store]:
    """Run this many nodes, with a folder for the journals of all hosts. The exit removes both."""
    with tempfile.TemporaryDirectory() as folder, Servers(count) as servers:
        url = servers.store(prefix, replicas=count, journal=folder, **settings)
        yield Store(ONE if count == 1 else THREE, url, servers)


@contextlib.contextmanager
def stores() -> Generator[dict[str, Store]]:
    """Provide one empty store of each kind."""
    with tempfile.TemporaryDirectory() as folder, nodes(1) as one, nodes(3) as three:
        found = [
            Store(FILE, f"sqlite:{folder}/normal.db"),
            Store(FULL, f"sqlite:{folder}/full.db?level=full"),
        ]
        yield {store.name: store for store in (*found, one, three)}
