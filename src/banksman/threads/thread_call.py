"""One call from another thread into an event loop: posted, awaited, timed out or abandoned.

Every call is answered: by its result, by its error, or by `Closed`. `loop_thread.py` has the loop
and states why that holds even when a call races with `close`.

A caller that stops waiting (timeout or Ctrl-C) posts that to the inbox of the loop. The loop then
cancels the task of the call, so the async side learns about it. If the call was already answered
and the caller has not taken the answer, `undo` reverts the effect.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import logging
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from banksman.errors import BanksmanError

log = logging.getLogger("banksman")

R = TypeVar("R")
Work = Callable[[], Coroutine[Any, Any, R]]

# How long a caller waits for a cancelled call to end. That takes a few passes of the loop. It takes
# longer only if a callback of the program blocks the loop, and the caller must not wait for that.
SETTLE_SECONDS_MAX = 1.0


class CallPolicy(enum.Enum):
    """Behaviour of a call when its host closes."""

    # Refused as soon as closing has begun.
    ACTS = enum.auto()
    # Like ACTS, but the call may wait for an event that never comes. It is cancelled after the host
    # has closed.
    WAITS = enum.auto()
    # Started as long as the loop runs.
    FOLLOWS = enum.auto()
    # Like FOLLOWS, and also answered after the end if the answer needs no waiting: the state cannot
    # change after the end.
    READS = enum.auto()


class Latch:
    """One-shot event that one thread waits for.

    It uses a bare lock instead of `threading.Event`. An `Event` has an internal lock in Python
    code, which a signal handler or a finaliser of the waiting thread could find held.
    """

    def __init__(self) -> None:
        self.is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        assert not self.is_set
        self.is_set = True
        self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        if self.is_set:
            return True
        return self._lock.acquire(timeout=-1 if seconds is None else max(0.0, seconds))


class CallLoop(Protocol):
    """The loop thread, as far as a call uses it."""

    @property
    def is_ended(self) -> bool:
        """Whether the loop has ended, so that no task can run in it."""
        ...

    def post(self, act: Callable[[], None]) -> None:
        """Schedule `act` in the thread of the loop."""
        ...

    def begin(
        self, call: ThreadCall[R], work: Work[R], context: contextvars.Context
    ) -> asyncio.Task[R] | None:
        """Start the task of a call. None: the loop refuses it and has answered the call."""
        ...

    def closed(self) -> BanksmanError:
        """Return the error for a call that the end of the loop leaves without a result."""
        ...


class ThreadCall(Generic[R]):
    """One call on its way through the loop.

    Only the thread of the loop changes its state; the thread of the caller only waits.
    """

    def __init__(
        self,
        bridge: CallLoop,
        work: Work[R],
        manner: CallPolicy,
        *,
        context: contextvars.Context,
        undo: Callable[[R], None] | None,
    ) -> None:
        self.manner = manner
        # The loop ended before it started the call, so the call has had no effect.
        self.was_left = False
        self._bridge = bridge
        self._work = work
        self._context = context
        self._undo = undo
        self._task: asyncio.Task[R] | None = None
        self._value: tuple[R] | None = None
        self._error: BaseException | None = None
        self._is_expired = False
        self._is_abandoned = False
        self._answered = Latch()
        self._dropped = Latch()

    # ── In the thread of the caller ──
    def post(self, seconds: float | None) -> None:
        """Send the call and return when it is answered.

        If an exception ends the wait, the loop learns about it.
        """
        try:
            self._bridge.post(self._start)
            if not self._answered.wait(seconds):
                self._bridge.post(self._expire)
                if not self._answered.wait(SETTLE_SECONDS_MAX):
                    raise TimeoutError("timed out, and the event loop does not respond")
        except BaseException:
            # Ctrl-C, an exception of a signal handler, or the TimeoutError above. Post first, then
            # wait, so that the handler of the exception finds the ask withdrawn. A second Ctrl-C
            # ends this wait too.
            self._bridge.post(self._abandon)
            self._dropped.wait(SETTLE_SECONDS_MAX)
            raise

    def result(self) -> R:
        assert self._answered.is_set
        if self._error is not None:
            try:
                raise self._error
            finally:
                # The traceback of the error has this frame, and the frame has `self`. Keeping the
                # error here would make a reference cycle.
                self._error = None
        assert self._value is not None
        return self._value[0]

    # ── In the thread of the loop ──
    def leave(self) -> None:
        """Answer with `Closed` without starting: the loop has ended or accepts only reads."""
        self.was_left = True
        self._fail(self._bridge.closed())

    def end(self) -> None:
        """Answer with `Closed` if the call is still unanswered: the loop has ended."""
        if not self._answered.is_set:
            self._fail(self._bridge.closed())

    def _start(self) -> None:
        self._task = self._bridge.begin(self, self._work, self._context)
        if self._task is not None:
            self._task.add_done_callback(self._on_done)

    def _expire(self) -> None:
        """Cancel the call after its timeout, unless its answer arrives before the cancellation."""
        self._is_expired = True
        self._cancel_soon()

    def _abandon(self) -> None:
        """Cancel the call because its caller left, and revert an effect that no caller received."""
        self._is_abandoned = True
        if self._answered.is_set or self._task is None or self._bridge.is_ended:
            self._drop()
        else:
            self._cancel_soon()

    def _cancel_soon(self) -> None:
        # Cancel in the next pass and not in this one, so that a posted call always starts. A
        # timeout of 0 then gets an answer that is already available, and a release without a
        # waiting caller still releases.
        if self._task is not None and not self._answered.is_set and not self._bridge.is_ended:
            self._task.get_loop().call_soon(self._task.cancel)

    def _on_done(self, task: asyncio.Task[R]) -> None:
        if task.cancelled():
            self._fail(TimeoutError("timed out") if self._is_expired else self._bridge.closed())
        elif (error := task.exception()) is not None:
            self._fail(error)
        else:
            self._value = (task.result(),)
            self._answered.set()
        if self._is_abandoned:
            self._drop()

    def _fail(self, error: BaseException) -> None:
        self._error = error
        self._answered.set()

    def _drop(self) -> None:
        # After the end there is nothing to revert, and no loop to do it in.
        if self._value is not None and self._undo is not None and not self._bridge.is_ended:
            try:
                self._undo(self._value[0])
            except Exception:
                log.exception("cannot undo the result of an abandoned call")
        self._dropped.set()
