"""Nodes that several tests use: started once by each worker, and known to whoever looks what a test has left."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from banksman.testing.nats_servers import Servers

# Those that are up because some test of this worker needed them, by how many nodes they have. `leaves_nothing` of
# tests/conftest.py reads it.
SHARED: dict[int, Servers] = {}


def shared(nodes: int) -> Iterator[Servers]:
    """For a fixture of the session. Whoever uses it takes a prefix of its own, and leaves all nodes up.

    A fixture that two folders import is two to pytest; they still share the nodes, and the first one ends them: what
    was begun first ends last.
    """
    if nodes in SHARED:
        yield SHARED[nodes]
        return
    with Servers(nodes) as servers:
        SHARED[nodes] = servers
        try:
            yield servers
        finally:
            del SHARED[nodes]


def some_prefix() -> str:
    """For one test: what it makes is seen by no other."""
    return f"t{uuid.uuid4().hex[:10]}"


def keepers() -> set[int]:
    return {servers.keeper_pid for servers in SHARED.values()}


def fds() -> set[int]:
    return {fd for servers in SHARED.values() for fd in servers.fds()}
