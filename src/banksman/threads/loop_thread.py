"""The bridge: a loop in a thread of its own, and the way for other threads to have something done there.

It owns the thread, its loop and the task of every call. It promises that a call which was posted is answered: by its
result, by its error, or by `Closed`; also in the race with `close`.

How it works. Callers append to an inbox and wake the loop; the loop's thread takes from it, starts tasks, and moves the
phase. There is no lock, so a signal handler or a finaliser may come in at any moment. In its place there is an order: a
caller appends first and looks at the phase second, the loop's thread sets ENDED first and empties the inbox second. So
one of the two sees the other, whichever comes first, and `popleft` gives each item to one of them only. At the start it
is the same with `_loop` in the place of the phase.

A caller that stops waiting (its time is up, Ctrl-C came) says so by the same way. The loop cancels the call's task, and
by that the async side learns of it; if the call was answered already, and nobody had taken the answer, `undo` takes
back what was done.

The thread is a daemon, and `close_all` is called at exit by `atexit`: that is after the program's other threads were
waited for, so that those which outlive the main one can use their host to their end. Were it no daemon, the interpreter
would wait for it before that, for ever; and what comes earlier (`threading._register_atexit`) comes before all others.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Generic, TypeVar

from banksman.commands.options import check_seconds, clamp_timeout
from banksman.errors import BanksmanError, Closed, MachineError, UsageError

log = logging.getLogger("banksman")

R = TypeVar("R")
Work = Callable[[], Coroutine[Any, Any, R]]

# How long the end of a cancelled call is waited for. It takes a few passes of the loop; more only if a callback of the
# program's blocks the loop, and nobody is to wait for that.
SETTLE_SECONDS_MAX = 1.0
# How long the exit of the interpreter waits for hosts that nobody closed. Beyond it a callback blocks their loop; the
# spawner, which comes next at exit, ends every process without them.
EXIT_SECONDS_MAX = 30.0


class ThreadPhase(enum.Enum):
    """What is taken from the inbox: everything; what does not act; nothing; and ENDED, everything, by anybody."""

    RUNNING = "running"
    CLOSING = "closing"
    SETTLING = "settling"
    ENDED = "closed"


class CallPolicy(enum.Enum):
    """What becomes of a call that meets the end of its host."""

    # Refused as soon as closing has begun.
    ACTS = enum.auto()
    # The same, and it may wait for what never comes: cancelled when all else is over.
    WAITS = enum.auto()
    # Begun as long as there is a loop.
    FOLLOWS = enum.auto()
    # The same, and answered after the end too, if that takes no waiting: nothing moves any more.
    READS = enum.auto()


class Latch:
    """Set once, waited for by one thread.

    A bare lock and no `threading.Event`: that has a lock of its own, in Python, which a signal handler or a finaliser
    of the waiting thread could find held.
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


class ThreadCall(Generic[R]):
    """One call on its way through the loop. It is decided there and nowhere else; the caller's thread only waits."""

    def __init__(
        self,
        bridge: LoopThread,
        work: Work[R],
        manner: CallPolicy,
        *,
        context: contextvars.Context,
        undo: Callable[[R], None] | None,
    ) -> None:
        self.manner = manner
        # The loop ended without it: nothing of it was begun.
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

    # -- in the caller's thread --------------------------------------------------------------------------------------
    def post(self, seconds: float | None) -> None:
        """Send it, and return when it is answered. Whatever else ends the waiting, the loop is told."""
        try:
            self._bridge.post(self._start)
            if not self._answered.wait(seconds):
                self._bridge.post(self._expire)
                if not self._answered.wait(SETTLE_SECONDS_MAX):
                    raise TimeoutError("the time is up, and something keeps the loop from answering")
        except BaseException:
            # Ctrl-C, what a signal handler raised, or the line above. Told and then waited for, so that whoever catches
            # it finds the ask withdrawn; a second Ctrl-C ends this wait too.
            self._bridge.post(self._abandon)
            self._dropped.wait(SETTLE_SECONDS_MAX)
            raise

    def result(self) -> R:
        assert self._answered.is_set
        if self._error is not None:
            try:
                raise self._error
            finally:
                # It has this frame in its traceback, and the frame has us: a cycle, if we kept it.
                self._error = None
        assert self._value is not None
        return self._value[0]

    # -- in the loop's thread ----------------------------------------------------------------------------------------
    def leave(self) -> None:
        """It is not begun: the loop has ended, or takes only what reads."""
        self.was_left = True
        self._fail(self._bridge.closed())

    def end(self) -> None:
        """The loop has ended: whatever is unanswered will remain so."""
        if not self._answered.is_set:
            self._fail(self._bridge.closed())

    def _start(self) -> None:
        self._task = self._bridge.begin(self, self._work, self._context)
        if self._task is not None:
            self._task.add_done_callback(self._on_done)

    def _expire(self) -> None:
        """The caller's time is up. An answer that is there by now is given nevertheless."""
        self._is_expired = True
        self._cancel_soon()

    def _abandon(self) -> None:
        """The caller has gone: stop, and take back what was done for nobody."""
        self._is_abandoned = True
        if self._answered.is_set or self._task is None or self._bridge.phase is ThreadPhase.ENDED:
            self._drop()
        else:
            self._cancel_soon()

    def _cancel_soon(self) -> None:
        # Not in this pass but in the next: what was posted is begun in any case. So a timeout of 0 gets what is there
        # already, and a release that nobody waits for is a release.
        if self._task is not None and not self._answered.is_set and self._bridge.phase is not ThreadPhase.ENDED:
            self._task.get_loop().call_soon(self._task.cancel)

    def _on_done(self, task: asyncio.Task[R]) -> None:
        if task.cancelled():
            self._fail(TimeoutError("the time is up") if self._is_expired else self._bridge.closed())
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
        # After the end there is nothing to take back, and no loop to do it in.
        if self._value is not None and self._undo is not None and self._bridge.phase is not ThreadPhase.ENDED:
            try:
                self._undo(self._value[0])
            except Exception:
                log.exception("! what was done for a caller who had gone could not be undone")
        self._dropped.set()


class LoopThread:
    """`at_end` is what closes whatever the loop is for; it runs in it, after the last call that acts was begun."""

    def __init__(self, name: str, at_end: Work[None] | None = None) -> None:
        # Written by the loop's thread only.
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
            hint = "too many threads for this user or control group, or the program is ending"
            raise MachineError("the loop's thread cannot be started", hint=hint) from exc

    def __repr__(self) -> str:
        return f"<Bridge {self._thread.name} {self.phase.value}, {len(self._calls)} calls>"

    # -- from any thread ---------------------------------------------------------------------------------------------
    def call(
        self,
        work: Work[R],
        manner: CallPolicy = CallPolicy.ACTS,
        *,
        timeout: float | None = None,
        context: contextvars.Context | None = None,
        undo: Callable[[R], None] | None = None,
    ) -> R:
        """Have it done in the loop, and wait for it.

        Past `timeout` seconds the work is cancelled and `TimeoutError` raised; Ctrl-C does the same. `undo` is then
        called in the loop if the work was done already.
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
        """The same for what never waits; so it may be called by callbacks, in the loop's own thread, too."""
        if self.is_inside and self.is_mine:
            return function()

        async def work() -> R:
            return function()

        return self.call(work, manner)

    def post(self, act: Callable[[], None]) -> None:
        """Have it called in the loop's thread, soon; after the end, by whoever comes first. Never waits."""
        self._inbox.append(act)
        loop = self._loop
        if loop is not None:
            try:
                loop.call_soon_threadsafe(self._take)
            except RuntimeError:
                pass  # It is closed. Then ENDED is set, or about to be, and the inbox is emptied after that.
        if self.phase is ThreadPhase.ENDED:
            self._take()

    def close(self) -> None:
        """End the loop and its thread. May be called again, and by several; Ctrl-C only stops the waiting."""
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
        """For the thread itself too, which has nothing left to do when it has said that it is gone."""
        if gone.wait(seconds):
            self._thread.join()

    def context(self) -> contextvars.Context:
        """The one in which all calls of this thread run: what one of them enters (a hold), the next ones are in."""
        known: contextvars.Context | None = getattr(self._local, "context", None)
        if known is None:
            known = self._local.context = contextvars.Context()
        return known

    def closed(self) -> BanksmanError:
        if isinstance(self._failure, BanksmanError):
            return self._failure
        return Closed("the host is closed, or is being closed", hint="open another Host")

    @property
    def is_mine(self) -> bool:
        """Whether this process made it: a fork inherits the object, and not the thread."""
        return self._pid == os.getpid()

    @property
    def is_inside(self) -> bool:
        """Whether this is the loop's own thread."""
        # Not by its number, which another thread may have once this one has ended.
        return threading.current_thread() is self._thread

    def check_caller(self) -> None:
        if not self.is_mine:
            hint = "make a Host after the fork, in the process that uses it"
            raise UsageError("this host belongs to the process that was forked; its thread is not here", hint=hint)
        if self.is_inside:
            hint = "callbacks run there: let another thread do it, or use an async callback and what it can await"
            raise UsageError("a blocking call in the loop's own thread would wait for itself", hint=hint)

    def _read_without_loop(self, work: Work[R]) -> R:
        """What has nothing to wait for needs no loop."""
        reading = work()
        try:
            reading.send(None)
        except StopIteration as stop:
            return stop.value
        reading.close()
        raise self.closed()

    # -- in the loop's thread ----------------------------------------------------------------------------------------
    def begin(self, call: ThreadCall[R], work: Work[R], context: contextvars.Context) -> asyncio.Task[R] | None:
        acts = call.manner in (CallPolicy.ACTS, CallPolicy.WAITS)
        if self.phase is ThreadPhase.ENDED or (acts and self.phase is not ThreadPhase.RUNNING):
            call.leave()
            return None
        assert self._loop is not None
        task = self._loop.create_task(_perform(work), context=context)
        self._calls[task] = call
        task.add_done_callback(self._calls.pop)
        return task

    def own(self, work: Coroutine[Any, Any, None], *, context: contextvars.Context | None = None) -> None:
        """Something to be done for nobody who waits. It is cancelled if the end comes first."""
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
            # No fd for a loop, or a bug. Callers get it; nobody else could.
            self._failure = MachineError(f"the host's loop failed: {exc!r}", hint="see the cause")
            self._failure.__cause__ = exc
        finally:
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
        except Exception as exc:  # It is raised by `close`; the loop ends nevertheless.
            self._failure = exc
        # What waited for the host has been woken by its end, and needs a few passes to say so. Nothing more is begun,
        # so this comes to an end; what is left then is cancelled with the loop.
        self.phase = ThreadPhase.SETTLING
        for task, call in self._calls.items():
            if call.manner is CallPolicy.WAITS:
                task.cancel()
        if self._calls:
            await asyncio.wait(list(self._calls), timeout=SETTLE_SECONDS_MAX)


async def _perform(work: Work[R]) -> R:
    """In the task, so that a call with wrong arguments fails itself and not the one who takes from the inbox."""
    return await work()


# Every bridge whose thread runs. Adding and removing are atomic, and a copy is taken to go through them.
_open: set[LoopThread] = set()


def is_in_a_loop_thread() -> bool:
    return any(bridge.is_inside for bridge in list(_open) if bridge.is_mine)


def close_all() -> None:
    """At interpreter exit: all at once, so that it takes as long as the longest."""
    closing = [(bridge, bridge.close_nowait()) for bridge in list(_open) if bridge.is_mine]
    deadline = time.monotonic() + EXIT_SECONDS_MAX
    for bridge, gone in closing:
        bridge.wait_gone(gone, deadline - time.monotonic())
