"""Group commit of the in-memory log: one flush per pass of the loop commits for all sessions.

The engine (`memory.py`) decides each call immediately and queues its completion. The flush then
does three things in this order:

- It commits the accepted appends of all sessions.
- It wakes the tasks that wait past the old heads.
- It runs the completions, in the order of the calls.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from banksman.core.session.event import Entry
from banksman.errors import NotOwner, StoreError
from banksman.histogram import Histogram
from banksman.store.log_values import COMMIT_BOUNDS, Done
from banksman.store.memory_session import BEGINNING, MemorySession, Place
from banksman.store.tails import Tails

log = logging.getLogger("banksman")

Point = TypeVar("Point", int, Place)


class Completion(NamedTuple):
    """The answer to one call. `error`: None if the call succeeded."""

    done: Done
    error: StoreError | NotOwner | None
    session: MemorySession | None


class PointWaiters(Generic[Point]):
    """Tasks that wait until the log has passed a point, each with its point."""

    def __init__(self) -> None:
        # The future's result is the error to raise. A cancelled task then leaves no unretrieved
        # exception.
        self._points: dict[asyncio.Future[StoreError | None], Point] = {}

    def __len__(self) -> int:
        return len(self._points)

    async def past(self, point: Point) -> None:
        """Wait until the log has passed the point."""
        future: asyncio.Future[StoreError | None] = asyncio.get_running_loop().create_future()
        self._points[future] = point
        try:
            error = await future
        finally:
            self._points.pop(future, None)
        if error is not None:
            raise error

    def reach(self, end: Point) -> None:
        """Wake the tasks whose point lies before `end`."""
        for future, point in self._points.items():
            if point < end and not future.done():
                future.set_result(None)

    def fail(self, error: StoreError) -> None:
        """Make every waiting task raise the error."""
        for future in self._points:
            if not future.done():
                future.set_result(error)


class GroupCommit:
    """Base class of the in-memory engine: accepted chunks, waiting tasks and completions.

    `bytes_max`: the memory limit of each session.
    """

    def __init__(self, bytes_max: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._bytes_max = bytes_max
        # The sessions with uncommitted data. A dict keeps each once, in insertion order.
        self._behind: dict[MemorySession, None] = {}
        self._answers: deque[Completion] = deque()
        self._is_flush_due = False
        # A separate mapping by id, because a task may wait for a session that does not exist yet.
        self._waiters: dict[str, PointWaiters[int]] = {}
        self._order_waiters: PointWaiters[Place] = PointWaiters()
        self._tails = Tails()
        # The number of the last chunk, and the end of the commit order.
        self._number = 0
        self._end = BEGINNING
        self.commit_times = Histogram(COMMIT_BOUNDS)
        # See `Log.counters`. `failures` stays 0, because an accepted append cannot fail to commit.
        self._counters: dict[str, float] = dict.fromkeys(
            ("commits", "events", "bytes", "failures"), 0.0
        )

    def _decided(
        self,
        state: MemorySession | None,
        epoch: int,
        error: StoreError | NotOwner | None,
        done: Done,
    ) -> None:
        """Queue the completion of an append or advance, and record its failure."""
        answer = Completion(done, error, state)
        # A call of a former owner must not fail the calls of the current one.
        if (
            error is not None
            and state is not None
            and epoch == state.epoch
            and state.failed is None
        ):
            state.failed = answer
        self._answer(answer)

    def _accept(
        self, state: MemorySession, at: float, entries: Sequence[Entry], snapshot: bytes | None
    ) -> None:
        if entries:
            self._number += 1
            state.accept(self._number, at, entries)
            self._behind[state] = None
        if snapshot is not None:
            state.accept_snapshot(snapshot)
            self._behind[state] = None

    def _answer(self, answer: Completion) -> None:
        self._answers.append(answer)
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Commit all accepted appends, then run the queued completions."""
        self._commit()
        try:
            # Completions queued by these callbacks run in the next pass. A writer that appends in
            # each callback must not block the event loop.
            for _ in range(len(self._answers)):
                self._give(self._answers.popleft())
        finally:
            # This also runs when a `done` raised a KeyboardInterrupt. The other calls still need
            # their completions.
            self._is_flush_due = bool(self._answers)
            if self._is_flush_due:
                self._loop.call_soon(self._flush)

    def _give(self, answer: Completion) -> None:
        # Reset before the callback runs, so that the writer can append again from inside its
        # `done`.
        if answer.session is not None and answer.session.failed is answer:
            answer.session.failed = None
        try:
            answer.done(answer.error)
        except Exception:
            # This is a bug of one writer. The other writers still need their completions.
            session = None if answer.session is None else answer.session.id
            log.exception("callback of a writer failed (session=%s)", session)

    def _commit(self) -> None:
        if not self._behind:
            return
        began = time.perf_counter()
        for state in self._behind:
            state.commit()
            state.drop_beyond(self._bytes_max)
            self._end = max(self._end, state.end)
            if (waiters := self._waiters.get(state.id)) is not None:
                waiters.reach(state.seq)
            self._tails.advance(state.id, state.seq)
        self._behind.clear()
        self._tails.wake()
        self._order_waiters.reach(self._end)
        self._counters["commits"] += 1
        self.commit_times.add(time.perf_counter() - began)
