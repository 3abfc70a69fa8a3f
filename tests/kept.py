"""Servers that the tests of a module share, and that `leaves_nothing` of tests/conftest.py therefore passes over.

Apart from tests/server/kit.py, which starts them: tests/conftest.py imports this before it has assertions rewritten.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

# Pids of those that are up. What they have started belongs to them.
SERVERS: set[int] = set()


@contextmanager
def shared(*pids: int) -> Generator[None]:
    """For a fixture that outlives a test: these are known as long as it does."""
    SERVERS.update(pids)
    try:
        yield
    finally:
        SERVERS.difference_update(pids)
