"""Nodes that several tests share. Each worker starts them once, and the leak check knows them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

from banksman.testing.nats_servers import Servers

# Nodes that are up because a test of this worker needed them, by their number. `leaves_nothing` of tests/conftest.py
# reads this.
SHARED: dict[int, Servers] = {}


def shared(nodes: int) -> Iterator[Servers]:
    """Yield the shared nodes, for a session fixture.

    Each test takes a separate prefix and leaves all nodes up.

    A fixture that two folders import is two fixtures to pytest. They still share the nodes, and the first one ends
    them: the fixture that started first ends last.
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
    """Return a prefix for one test. No other test sees the streams under it."""
    return f"t{uuid.uuid4().hex[:10]}"


def keepers() -> set[int]:
    return {servers.keeper_pid for servers in SHARED.values()}


def fds() -> set[int]:
    return {fd for servers in SHARED.values() for fd in servers.fds()}
