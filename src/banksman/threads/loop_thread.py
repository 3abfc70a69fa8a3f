"""Event loop in a dedicated thread, and calls into it from other threads.

`LoopThread` owns the thread, its loop and the task of every call (`thread_call.py`). It guarantees
that every posted call is answered: by its result, by its error, or by `Closed`. This holds even
when a call races with `close`.

Theory of operation. Callers append to an inbox and wake the loop. The thread of the loop takes
items from the inbox, starts tasks, and changes the phase. There is no lock, so a signal handler or
a finaliser may post at any moment. An ordering rule replaces the lock:

- A caller appends first and reads the phase second.
- The thread of the loop sets ENDED first and empties the inbox second.

So at least one of the two sees the other in every interleaving, and `popleft` gives each item to
only one of them. The same rule holds at the start, with `_loop` in place of the phase.

The thread is a daemon, and `atexit` calls `close_all`. atexit handlers run after the interpreter
has joined the other non-daemon threads. Threads that outlive the main thread can therefore use
their host until they end. If this thread were not a daemon, the interpreter would wait for it
before the atexit handlers, forever. `threading._register_atexit` is no alternative, because it runs
before the other threads are joined.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from banksman.commands.options import check_seconds, clamp_timeout
from banksman.errors import BanksmanError, Closed, MachineError, UsageError
from banksman.threads import thread_call
from banksman.threads.thread_call import CallPolicy, Latch, ThreadCall, Work

R = TypeVar("R")

# How long the exit of the interpreter waits for hosts that were not closed. After this time a
# callback must be blocking their loop. The spawner, whose exit handler runs next, ends every
# process without them.
EXIT_SECONDS_MAX = 30.0


class ThreadPhase(enum.Enum):
    """Phase of the thread, which decides the items that are taken from the inbox.

    - RUNNING: the loop starts every call.
    - CLOSING: the loop starts only calls that do not act (see `CallPolicy`).
    - SETTLING: the loop takes nothing from the inbox.
    - ENDED: any thread may empty the inbox; every call in it is answered with `Closed`.
    """

    RUNNING = "running"
    CLOSING = "closing"
    SETTLING = "settling"
    ENDED = "closed"


class LoopThread:
    """Event loop in a dedicated thread.

    `at_end`: coroutine function that closes the owner of the loop. It runs in the loop, after the
    last acting call was started.
    """

    def __init__(self, name: str, at_end: Work[None] | None = None) -> None:
        # Only the thread of the loop writes this.
        self.phase = ThreadPhase.RUNNING
        self._at_end = at_end
        self._pid = os.getpid()
        self._inbox: deque[Callable[[], None]] = deque()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Future[None] | None = None
        self._calls: dict[asyncio.Task[Any], ThreadCall[Any]] = {}
        self._owned: set[asyncio.Task[Any]] = set()
        self._closers: list[Latch] = []
        self._failure: Exception | None = None
        self._local = threading.local()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        _open.add(self)
        try:
            self._thread.start()
        except RuntimeError as exc:
            _open.discard(self)
            hint = (
                "check the limit on threads (ulimit -u, pids.max); the program may also be exiting"
            )
            raise MachineError("cannot start the thread of the event loop", hint=hint) from exc

    def __repr__(self) -> str:
        return f"<LoopThread {self._thread.name} {self.phase.value}, {len(self._calls)} calls>"

    # ── From any thread ──
    def call(
        self,
        work: Work[R],
        manner: CallPolicy = CallPolicy.ACTS,
        *,
        timeout: float | None = None,
        context: contextvars.Context | None = None,
        undo: Callable[[R], None] | None = None,
    ) -> R:
        """Run `work` in the loop and wait for its result.

        `timeout`: seconds until the work is cancelled and the call raises `TimeoutError`. Ctrl-C
        also cancels the work. `undo`: called in the loop with the result if the work had already
        ended at that time.
        """
        self.check_caller()
        if timeout is not None:
            check_seconds("timeout", timeout)
        if self.phase is not ThreadPhase.ENDED:
            call = ThreadCall(self, work, manner, context=context or self.context(), undo=undo)
            call.post(clamp_timeout(timeout))
            if not call.was_left:
                return call.result()
        if manner is not CallPolicy.READS:
            raise self.closed()
        return self._read_without_loop(work)

    def look(self, function: Callable[[], R], manner: CallPolicy = CallPolicy.READS) -> R:
        """Call a function that never waits in the loop; return its result.

        Callbacks, which run in the thread of the loop, may use this too.
        """
        if self.is_inside and self.is_mine:
            return function()

        async def work() -> R:
            return function()

        return self.call(work, manner)

    def post(self, act: Callable[[], None]) -> None:
        """Schedule `act` in the thread of the loop. Never waits.

        After the end of the loop, the first thread that gets there calls `act`.
        """
        self._inbox.append(act)
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._take)
            except RuntimeError:
                # The loop is closed. Then ENDED is set or about to be set, and the inbox is emptied
                # after that.
                pass
        # Reading the phase after the append is the caller's half of the ordering rule. Without it,
        # an item appended after the last `_take` of the loop would stay unanswered.
        if self.phase is ThreadPhase.ENDED:
            self._take()

    def close(self) -> None:
        """End the loop and its thread. May be called again; Ctrl-C only stops the waiting."""
        self.check_caller()
        self.wait_gone(self.close_nowait())
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def close_nowait(self) -> Latch:
        gone = Latch()
        self.post(partial(self._stop, gone))
        return gone

    def wait_gone(self, gone: Latch, seconds: float | None = None) -> None:
        """Wait for the latch of `close_nowait`, and then for the thread to end.

        The thread does nothing more after it has set the latch, so the join is short.
        """
        if gone.wait(seconds):
            self._thread.join()

    def context(self) -> contextvars.Context:
        """Return the context of all calls from this thread.

        A hold that one call enters therefore applies to the later calls of the thread.
        """
        known: contextvars.Context | None = getattr(self._local, "context", None)
        if known is None:
            known = self._local.context = contextvars.Context()
        return known

    def closed(self) -> BanksmanError:
        if isinstance(self._failure, BanksmanError):
            return self._failure
        return Closed("the host is closed or closing", hint="open another Host")

    @property
    def is_ended(self) -> bool:
        """Whether the loop has ended."""
        return self.phase is ThreadPhase.ENDED

    @property
    def is_mine(self) -> bool:
        """Whether this process made the object.

        A forked child inherits the object, but not the thread.
        """
        return self._pid == os.getpid()

    @property
    def is_inside(self) -> bool:
        """Whether the current thread is the thread of the loop."""
        # Compared by object, not by ident: another thread may get the ident after this one has
        # ended.
        return threading.current_thread() is self._thread

    def check_caller(self) -> None:
        if not self.is_mine:
            hint = "make a Host after the fork, in the process that uses it"
            message = "this host belongs to the parent process: a fork has no copy of its thread"
            raise UsageError(message, hint=hint)
        if self.is_inside:
            hint = "callbacks run there: make the call in another thread, or use an async callback"
            message = "a blocking call in the thread of the event loop would wait for itself"
            raise UsageError(message, hint=hint)

    def _read_without_loop(self, work: Work[R]) -> R:
        """Run work that has nothing to wait for, without a loop."""
        reading = work()
        try:
            reading.send(None)
        except StopIteration as stop:
            return stop.value
        reading.close()
        raise self.closed()

    # ── In the thread of the loop ──
    def begin(
        self, call: ThreadCall[R], work: Work[R], context: contextvars.Context
    ) -> asyncio.Task[R] | None:
        acts = call.manner in (CallPolicy.ACTS, CallPolicy.WAITS)
        if self.phase is ThreadPhase.ENDED or (acts and self.phase is not ThreadPhase.RUNNING):
            call.leave()
            return None
        assert self._loop is not None
        task = self._loop.create_task(_perform(work), context=context)
        self._calls[task] = call
        task.add_done_callback(self._calls.pop)
        return task

    def own(
        self, work: Coroutine[Any, Any, None], *, context: contextvars.Context | None = None
    ) -> None:
        """Run a task that no caller waits for. It is cancelled if the loop ends first."""
        assert self._loop is not None
        task = self._loop.create_task(work, context=context)
        self._owned.add(task)
        task.add_done_callback(self._owned.discard)

    def _take(self) -> None:
        while self.phase is not ThreadPhase.SETTLING:
            try:
                act = self._inbox.popleft()
            except IndexError:
                return
            act()

    def _stop(self, gone: Latch) -> None:
        if self.phase is ThreadPhase.ENDED:
            gone.set()
            return
        self._closers.append(gone)
        if self.phase is ThreadPhase.RUNNING:
            self.phase = ThreadPhase.CLOSING
            assert self._stopping is not None
            self._stopping.set_result(None)

    def _run(self) -> None:
        try:
            with asyncio.Runner() as runner:
                runner.run(self._main())
        except Exception as exc:
            # No fd for a loop, or a bug. Only the callers can report it.
            self._failure = MachineError(f"the host's loop failed: {exc!r}", hint="see the cause")
            self._failure.__cause__ = exc
        finally:
            # ENDED before the last `_take`: this is the loop's half of the ordering rule in the
            # module docstring.
            self.phase = ThreadPhase.ENDED
            self._take()
            for call in list(self._calls.values()):
                call.end()
            _open.discard(self)
            for gone in self._closers:
                gone.set()

    async def _main(self) -> None:
        self._stopping = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._take()
        await self._stopping
        try:
            if self._at_end is not None:
                await self._at_end()
        except Exception as exc:  # `close` raises it; the loop ends in any case.
            self._failure = exc
        # The end of the host has woken the calls that waited for it, and they need a few passes to
        # answer. Nothing new is started in this phase, so it ends. The remaining calls are
        # cancelled with the loop.
        self.phase = ThreadPhase.SETTLING
        for task, call in self._calls.items():
            if call.manner is CallPolicy.WAITS:
                task.cancel()
        if self._calls:
            await asyncio.wait(list(self._calls), timeout=thread_call.SETTLE_SECONDS_MAX)


async def _perform(work: Work[R]) -> R:
    """Call `work` inside the task: wrong arguments then fail this call and not the inbox loop."""
    return await work()


# Every `LoopThread` whose thread runs. Adding and removing are atomic; iteration uses a copy.
_open: set[LoopThread] = set()


def is_in_a_loop_thread() -> bool:
    return any(bridge.is_inside for bridge in list(_open) if bridge.is_mine)


def close_all() -> None:
    """Close all loop threads at interpreter exit, concurrently: the longest close sets the time."""
    closing = [(bridge, bridge.close_nowait()) for bridge in list(_open) if bridge.is_mine]
    deadline = time.monotonic() + EXIT_SECONDS_MAX
    for bridge, gone in closing:
        bridge.wait_gone(gone, deadline - time.monotonic())
