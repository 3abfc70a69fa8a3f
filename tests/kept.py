"""Pids of servers that the tests of a module share.

The fixture `leaves_nothing` of tests/conftest.py ignores these servers. tests/server/kit.py starts them. The set is a
separate module because tests/conftest.py imports it before pytest rewrites assertions.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

# Pids of the servers that run now. The processes that they start belong to them.
SERVERS: set[int] = set()


@contextmanager
def shared(*pids: int) -> Generator[None]:
    """Register these pids while the block runs. A fixture that outlives a test uses it."""
    SERVERS.update(pids)
    try:
        yield
    finally:
        SERVERS.difference_update(pids)
