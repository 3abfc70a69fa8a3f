"""Base classes of the blocking API: wrappers, iterators, output readers, holds and the host.

They have the methods of the blocking classes that need more than a call of the async method.
`tools/blocking_api.py` generates the other methods, in `blocking_session.py`, `blocking_command.py`
and `blocking_host.py`. `loop_thread.py` runs the event loop in its thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager, suppress
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, overload

from banksman.commands.command import Command as AsyncCommand
from banksman.commands.output_streams import OutputReader as AsyncOutputReader
from banksman.commands.output_streams import check_size
from banksman.commands.result import Ended, Finished
from banksman.core.session.outcome import Outcome
from banksman.errors import Closed
from banksman.host import Host as AsyncHost
from banksman.runtime.base_host import HOLD_SECONDS
from banksman.sessions.session import Session as AsyncSession
from banksman.sessions.turn import Turn as AsyncTurn
from banksman.threads.loop_thread import LoopThread, ThreadPhase
from banksman.threads.thread_call import CallPolicy

A = TypeVar("A")
T = TypeVar("T")


class BlockingWrapper(Generic[A]):
    """Blocking wrapper of an async object. Two wrappers of one object are equal."""

    def __init__(self, bridge: LoopThread, inner: A) -> None:
        self._bridge = bridge
        self._inner = inner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockingWrapper) and self._inner is other._inner  # pyright: ignore[reportUnknownMemberType]

    def __hash__(self) -> int:
        return id(self._inner)

    def __repr__(self) -> str:
        # The repr of the async object reads only values that never change, so this needs no call
        # through the loop.
        return f"<blocking {repr(self._inner)[1:-1]}>"


@overload
def behind(given: BlockingWrapper[A] | str) -> A | str: ...
@overload
def behind(given: BlockingWrapper[A] | str | None) -> A | str | None: ...
def behind(given: BlockingWrapper[A] | str | None) -> A | str | None:
    """Return the async object behind a wrapper; return an id unchanged."""
    return given._inner if isinstance(given, BlockingWrapper) else given  # pyright: ignore[reportPrivateUsage]


class BlockingIterator(Generic[T]):
    """The part of a `Reader` that lives in the loop.

    It hands the items of an async generator to the waiting threads one at a time, and loses none.
    """

    END: Any = object()

    def __init__(self, items: AsyncGenerator[T]) -> None:
        self._items = items
        # Serialises the callers of `next` in the order of their arrival. Held while an item is
        # fetched; `close` ends that wait. No other lock is acquired inside it.
        self._lock = asyncio.Lock()
        self._fetching: asyncio.Task[T] | None = None
        self._returned: deque[T] = deque()
        self._is_closed = False

    async def next(self) -> T:
        """Return the next item, or END.

        If this call is cancelled, the fetch continues, and the next caller gets the item.
        """
        async with self._lock:
            if self._is_closed:
                return self.END
            if self._returned:
                return self._returned.popleft()
            if self._fetching is None:
                self._fetching = asyncio.ensure_future(self._fetch())
            await asyncio.wait((self._fetching,))
            fetched, self._fetching = self._fetching, None
            return self.END if fetched.cancelled() else fetched.result()

    async def _fetch(self) -> T:
        return await anext(self._items, self.END)

    def take_back(self, item: T) -> None:
        self._returned.append(item)

    async def close(self) -> None:
        self._is_closed = True
        if self._fetching is not None:
            self._fetching.cancel()
        async with self._lock:
            if self._fetching is not None:
                # No caller wants the item, so its error is retrieved only to silence the warning of
                # asyncio.
                await asyncio.wait((self._fetching,))
                if not self._fetching.cancelled():
                    self._fetching.exception()
            await self._items.aclose()


class Reader(Iterator[T]):
    """Blocking iterator over an async generator.

    Several threads may share it; each item goes to one of them. Any thread may close it, which ends
    the iteration in all waiting threads. A reader that is garbage-collected closes its generator.
    Ctrl-C loses no item. Raises `Closed` if the host is closed before the end of the items.
    """

    def __init__(self, bridge: LoopThread, items: AsyncGenerator[T]) -> None:
        self._bridge = bridge
        self._feed = BlockingIterator(items)

    def __next__(self) -> T:
        item = self._bridge.call(self._feed.next, CallPolicy.FOLLOWS, undo=self._feed.take_back)
        if item is BlockingIterator.END:
            raise StopIteration
        return item

    def close(self) -> None:
        with suppress(Closed):
            self._bridge.call(self._feed.close, CallPolicy.FOLLOWS)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Does not wait: a finaliser may run anywhere, even in the thread of the loop.
        if self._bridge.is_mine and self._bridge.phase is ThreadPhase.RUNNING:
            self._bridge.post(functools.partial(_close_later, self._bridge, self._feed))


def _close_later(bridge: LoopThread, feed: BlockingIterator[Any]) -> None:
    if bridge.phase is not ThreadPhase.ENDED:
        bridge.own(feed.close())


class BlockingHold(AbstractContextManager[None]):
    """Context manager of `Session.hold`. Asks of the thread that entered it belong to the hold."""

    def __init__(self, bridge: LoopThread, hold: AbstractAsyncContextManager[None]) -> None:
        self._bridge = bridge
        self._hold = hold
        self._context = bridge.context()

    def __enter__(self) -> None:
        # Any thread may leave the hold. It must be left in the context in which it was entered.
        self._context = self._bridge.context()
        self._bridge.call(self._hold.__aenter__, undo=self._undo)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with suppress(Closed):  # The hold ended with the session.
            self._bridge.call(self._leave, CallPolicy.FOLLOWS, context=self._context)

    async def _leave(self) -> None:
        # The exception of the block belongs to another thread and does not affect the hold, so it
        # is not passed on.
        await self._hold.__aexit__(None, None, None)

    def _undo(self, _entered: None) -> None:
        self._bridge.own(self._leave(), context=self._context)


# Blocking pull reader: lines and bytes of the output of a command, for any thread.
#
# The thread of the loop puts fetched data into a buffer that every thread can reach (`fetched` of
# the async `OutputReader`), and callers take it from there. So a caller that leaves, by Ctrl-C or
# at its timeout, loses nothing. All wrappers of one stream continue from the same place.


class OutputReader(BlockingWrapper[AsyncOutputReader]):
    """One output stream of a command: `for line in command.stdout`, `command.stdout.read(n)`.

    See `banksman.OutputReader`. Several threads may read it; each line goes to one of them. Neither
    Ctrl-C nor a timeout loses data: the next caller gets the data that was fetched for a caller
    that left.
    """

    @property
    def missed(self) -> int:
        return self._inner.missed

    def at_eof(self) -> bool:
        """Whether the stream has ended and all of it was read."""
        return self._bridge.look(self._inner.at_eof)

    def read(self, size: int = -1, *, timeout: float | None = None) -> bytes:
        """Read up to `size` bytes, as soon as any are available; b"" at the end of the stream.

        `size`: -1 reads up to the end. `timeout`: seconds for the whole call; raises TimeoutError.
        """
        check_size(size)
        if size == -1:
            return self._read_all(timeout)
        fetched = self._inner.fetched

        async def fetch() -> bool:
            if not fetched and (data := await self._inner.read(size)):
                fetched.append(data)
            return bool(fetched)

        data = self._next(fetch, timeout)
        if len(data) > size:
            fetched.appendleft(data[size:])
        return data[:size]

    def _read_all(self, timeout: float | None) -> bytes:
        """Read up to the end in one call, so that one deadline covers all of it.

        A caller that leaves loses nothing. The async read puts its data back when it is cancelled,
        and `undo` puts the data back if the read has already returned.
        """
        fetched = self._inner.fetched

        async def fetch() -> bytes:
            rest = await self._inner.read(-1)
            parts: list[bytes] = []
            # Other threads may take from the buffer at the same time, so each piece is removed
            # separately.
            with contextlib.suppress(IndexError):
                while True:
                    parts.append(fetched.popleft())
            return b"".join((*parts, rest))

        return self._bridge.call(
            fetch, CallPolicy.READS, timeout=timeout, undo=self._inner.put_back
        )

    def readline(self, *, timeout: float | None = None) -> bytes:
        """Read one line with its newline; b"" at the end of the stream.

        The last line may lack the newline. A line of more than 32 MiB is returned in parts of that
        size. `timeout`: seconds; raises TimeoutError.
        """
        fetched = self._inner.fetched

        async def fetch() -> bool:
            # Fetch many lines in one call: each pass through the loop costs more than a line.
            if not fetched:
                fetched.extend(await self._inner.read_lines())
            return bool(fetched)

        return self._next(fetch, timeout)

    def _next(self, fetch: Callable[[], Coroutine[Any, Any, bool]], timeout: float | None) -> bytes:
        while True:
            try:
                return self._inner.fetched.popleft()
            except IndexError:
                if not self._bridge.call(fetch, CallPolicy.READS, timeout=timeout):
                    return b""

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> bytes:
        line = self.readline()
        if not line:
            raise StopIteration
        return line


# The methods of the blocking classes that do more than call the async method and wait for it.
#
# `tools/blocking_api.py` generates the others: `blocking_session.py`, `blocking_command.py` and
# `blocking_host.py`.


class BlockingSession(BlockingWrapper[AsyncSession]):
    """Hand-written methods of the blocking session."""

    async def _wait_outcome(self, ask: Callable[[], Coroutine[Any, Any, AsyncTurn]]) -> Outcome:
        """Ask and wait for the outcome. Cancelling this withdraws the ask."""
        turn = await ask()
        try:
            return await turn.outcome()
        except asyncio.CancelledError:
            self._inner.let_go(turn)
            raise


class BlockingCommand(BlockingWrapper[AsyncCommand]):
    """Hand-written methods of the blocking command."""

    def wait(self, *, timeout: float | None = None) -> Finished:
        """Wait for the end and return the result. Raises if the command could not be started.

        `timeout`: seconds until the call raises TimeoutError; the command continues to run.

        This reports the end: `Host.take_ended` does not return the command afterwards.
        """
        return self._bridge.call(
            self._wait, CallPolicy.READS, timeout=timeout, undo=self._return_report
        )[1]

    def stop(self, *, at_once: bool = False) -> Finished:
        """Stop the command by the ladder and return its result when it is over.

        `at_once`: use KILL immediately. This reports the end, as `wait` does.
        """

        async def work() -> tuple[bool, Finished]:
            self._inner.stop_nowait(at_once=at_once)
            return await self._wait()

        return self._bridge.call(work, undo=self._return_report)[1]

    async def _wait(self) -> tuple[bool, Finished]:
        await self._inner.wait_over()
        return self._inner.take_report(), self._inner.result()

    def _return_report(self, taken: tuple[bool, Finished]) -> None:
        # Ctrl-C arrived after this call took the report and before the caller received it.
        if taken[0]:
            self._inner.return_report()


class BlockingHost(BlockingWrapper[AsyncHost]):
    """Life cycle of the blocking host: starts the thread of its loop; `close` ends it."""

    def __init__(self, inner: AsyncHost) -> None:
        super().__init__(LoopThread("banksman-host", inner.close), inner)
        # Reports that were taken for a caller that left before it received them.
        self._returned: deque[AsyncCommand] = deque()

    def __repr__(self) -> str:
        return f"<blocking Host {self._bridge.phase.value}>"

    @property
    def is_usable(self) -> bool:
        """Whether the host belongs to this process and `close` has not been called."""
        return self._bridge.is_mine and self._bridge.phase is ThreadPhase.RUNNING

    def __enter__(self) -> Self:
        self._bridge.check_caller()
        if self._inner.settles_at_start:
            try:
                self._bridge.call(self._inner.__aenter__)
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # In a forked child there is nothing to close, and an error here would hide the first one.
        if self._bridge.is_mine:
            self.close()

    def close(self) -> None:
        """Close every session, stop every command by the ladder, and end the thread of the loop.

        May be called again, and by several threads at the same time. Ctrl-C only stops the waiting.
        """
        self._bridge.close()

    def drain(
        self,
        *,
        timeout: float | None = None,
        hand_over: bool = False,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        """Accept nothing new, finish running turns and commands, then close.

        `timeout`: seconds after which the remaining turns and commands are stopped. `hand_over`:
        leave the sessions with their open turns to the next host on this machine that opens the
        same store. Their processes wait `hold_seconds` for it. See `Host.drain`.
        """
        drain = functools.partial(
            self._inner.drain, timeout=timeout, hand_over=hand_over, hold_seconds=hold_seconds
        )
        self._bridge.call(drain, CallPolicy.FOLLOWS)
        self.close()

    async def _take_ended(self) -> list[AsyncCommand]:
        return [*self._take_returned(), *self._inner.take_ended()]

    async def _wait_ended(self) -> list[AsyncCommand]:
        return self._take_returned() or await self._inner.wait_ended()

    def _take_returned(self) -> list[AsyncCommand]:
        returned = list(self._returned)
        self._returned.clear()
        return returned

    def _return_reports(self, ended: list[AsyncCommand]) -> None:
        self._returned.extend(ended)


def close_unused(session: AsyncSession) -> None:
    """Close a session whose opener left before it received the session.

    A session that was already open also belongs to another caller, and stays open.
    """
    if session.openings == 1 and not session.status().queue:
        session.close_nowait()


def stop_untaken(started: AsyncCommand | Finished) -> None:
    """Stop a command whose caller left before it received the command."""
    if isinstance(started, AsyncCommand):
        started.stop_nowait(Ended.CANCELLED)
