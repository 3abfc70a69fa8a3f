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

    __slots__ = ("_facts", "_handle", "is_handling")

    def __init__(self, handle: Callable[[FactT], None]) -> None:
        self._handle = handle
        self._facts: deque[FactT] = deque()
        # Whether a fact is being handled, or its effects performed.
        self.is_handling = False

    def dispatch(self, fact: FactT) -> None:
        facts = self._facts
        if self.is_handling or facts:
            facts.append(fact)
            if self.is_handling:
                return
            fact = facts.popleft()
        self.is_handling = True
        try:
            self._handle(fact)
            while facts:
                self._handle(facts.popleft())
        finally:
            self.is_handling = False

    def clear(self) -> None:
        """Drop the waiting facts."""
        self._facts.clear()
