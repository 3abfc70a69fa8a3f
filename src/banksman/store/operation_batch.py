"""Group commit in the event loop: operations that may wait a moment are written with others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

# A batch of operations waits at most this long for others. It is short enough that no reader of a
# live session notices it, and long enough that a hundred sessions share a commit.
COALESCE_SECONDS = 0.010
# A batch of this size, in bytes or operations, is worth a commit.
BATCH_BYTES_MAX = 256 << 10
BATCH_OPERATIONS_MAX = 48


class BatchedOperation(Protocol):
    """An operation of a batch. `size`: the number of bytes to write.

    `can_wait`: no caller waits for the result, so it may wait a few milliseconds for others.
    """

    @property
    def size(self) -> int: ...
    @property
    def can_wait(self) -> bool: ...


T = TypeVar("T", bound=BatchedOperation)


class OperationBatch(Generic[T]):
    """Collects operations of the event loop and passes them on together, by `put`.

    A commit, the wakeup of a thread and the wakeup of the loop cost the same for one operation as
    for a hundred. So an operation that can wait is passed on in the next pass of the loop only if
    no other was in the last `seconds`. Otherwise it waits until that time has passed. An
    operation that cannot wait is passed on in the next pass of the loop, and all that wait go with
    it, in the order of the calls.

    `put` is called by the loop and never by `add`. So it may call back the callers of `add`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        put: Callable[[list[T]], None],
        *,
        seconds: float = COALESCE_SECONDS,
    ) -> None:
        self._loop = loop
        self._put = put
        self._seconds = seconds
        self._operations: list[T] = []
        self._bytes = 0
        self._flushed_at = -seconds
        self._timer: asyncio.Handle | None = None
        # Whether the next pass of the loop passes on what waits.
        self._is_due = False

    def add(self, operation: T) -> None:
        self._operations.append(operation)
        self._bytes += operation.size
        is_full = self._bytes > BATCH_BYTES_MAX or len(self._operations) >= BATCH_OPERATIONS_MAX
        if self._is_due:
            return
        due = self._flushed_at + self._seconds
        if is_full or not operation.can_wait or (self._timer is None and due <= self._loop.time()):
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self._loop.call_soon(self.flush)
            self._is_due = True
        elif self._timer is None:
            self._timer = self._loop.call_at(due, self.flush)

    def flush(self) -> None:
        """Pass on all operations that wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_due = False
        if self._operations:
            operations, self._operations = self._operations, []
            self._bytes = 0
            self._flushed_at = self._loop.time()
            self._put(operations)
