"""Queue that feeds facts to a state machine one at a time: sessions and commands share it.

It is synchronous: it uses no event loop, thread or lock. The owner passes a function that decides
about a fact and performs the effects: `sessions/driver.py`, `commands/running_command.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

FactT = TypeVar("FactT")


class Dispatcher(Generic[FactT]):
    """Passes facts to `handle` in the order of their arrival. For one thread; it never suspends.

    `handle` decides about a fact and performs the effects. An effect may produce the next fact: a
    pipe takes a frame immediately, a callback stops the command. Such a fact waits until `handle`
    has returned, so that each effect is performed in the state that decided it. `dispatch` returns
    when the queue is empty, unless it was called from inside `handle`.

    An exception of `handle` reaches the caller of the outermost `dispatch`. The next call handles
    the waiting facts before its fact, unless `clear` drops them.
    """

    __slots__ = ("_facts", "_handle", "_is_handling")

    def __init__(self, handle: Callable[[FactT], None]) -> None:
        self._handle = handle
        self._facts: deque[FactT] = deque()
        self._is_handling = False

    def dispatch(self, fact: FactT) -> None:
        self._facts.append(fact)
        if self._is_handling:
            return
        self._is_handling = True
        try:
            while self._facts:
                self._handle(self._facts.popleft())
        finally:
            self._is_handling = False

    def clear(self) -> None:
        """Drop the waiting facts."""
        self._facts.clear()
