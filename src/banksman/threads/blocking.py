"""What the blocking classes are made of: an object with an async one behind it, an iterator and a hold that wait.

The base classes add what is written by hand for one class; the rest of the classes is generated.
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
from banksman.sessions.session import Session as AsyncSession
from banksman.sessions.turn import Turn as AsyncTurn
from banksman.threads.loop_thread import CallPolicy, LoopThread, ThreadPhase

A = TypeVar("A")
T = TypeVar("T")


class BlockingWrapper(Generic[A]):
    """A blocking object and the async one behind it. Two faces of one object are equal."""

    def __init__(self, bridge: LoopThread, inner: A) -> None:
        self._bridge = bridge
        self._inner = inner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockingWrapper) and self._inner is other._inner  # pyright: ignore[reportUnknownMemberType]

    def __hash__(self) -> int:
        return id(self._inner)

    def __repr__(self) -> str:
        # Of the async one only what it reads in one go from a value that never changes; nothing is waited for.
        return f"<blocking {repr(self._inner)[1:-1]}>"


@overload
def behind(given: BlockingWrapper[A] | str) -> A | str: ...
@overload
def behind(given: BlockingWrapper[A] | str | None) -> A | str | None: ...
def behind(given: BlockingWrapper[A] | str | None) -> A | str | None:
    """The async object behind a face that a caller passes; an id as it is."""
    return given._inner if isinstance(given, BlockingWrapper) else given  # pyright: ignore[reportPrivateUsage]


class BlockingIterator(Generic[T]):
    """The end of an async generator that is in the loop: one item at a time, for whoever asks, and none is lost."""

    END: Any = object()

    def __init__(self, items: AsyncGenerator[T]) -> None:
        self._items = items
        # Serialises those who want the next item, in the order in which they came. Held while it is waited for; `close`
        # ends that wait. Nothing else is taken inside it.
        self._lock = asyncio.Lock()
        self._fetching: asyncio.Task[T] | None = None
        self._returned: deque[T] = deque()
        self._is_closed = False

    async def next(self) -> T:
        """The next item or END. Cancelled, what is being fetched is kept for whoever asks next."""
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
                # Nobody asks for it any more, nor for its error.
                await asyncio.wait((self._fetching,))
                if not self._fetching.cancelled():
                    self._fetching.exception()
            await self._items.aclose()


class Reader(Iterator[T]):
    """A blocking iterator over what an async one gives. Several threads may share it: each item goes to one of them.

    It may be closed, by any thread: whoever waits in it finds its end. It may be left alone: what is behind it is ended
    when it is collected. Ctrl-C loses no item. `Closed` is raised if the host was closed before the end was reached.
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # Not waited for: a finaliser may run anywhere, in the loop's thread too.
        if self._bridge.is_mine and self._bridge.phase is ThreadPhase.RUNNING:
            self._bridge.post(functools.partial(_close_later, self._bridge, self._feed))


def _close_later(bridge: LoopThread, feed: BlockingIterator[Any]) -> None:
    if bridge.phase is not ThreadPhase.ENDED:
        bridge.own(feed.close())


class BlockingHold(AbstractContextManager[None]):
    """What `Session.hold` gives. What the thread that entered it asks inside it belongs to the hold."""

    def __init__(self, bridge: LoopThread, hold: AbstractAsyncContextManager[None]) -> None:
        self._bridge = bridge
        self._hold = hold
        self._context = bridge.context()

    def __enter__(self) -> None:
        # It is left in the context in which it was entered, by whichever thread.
        self._context = self._bridge.context()
        self._bridge.call(self._hold.__aenter__, undo=self._undo)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(Closed):  # Then it was given up with the session.
            self._bridge.call(self._leave, CallPolicy.FOLLOWS, context=self._context)

    async def _leave(self) -> None:
        # Not with the error of the block: that belongs to another thread, and is none of the hold's concern.
        await self._hold.__aexit__(None, None, None)

    def _undo(self, _entered: None) -> None:
        self._bridge.own(self._leave(), context=self._context)


# The blocking face of a pull reader: lines and bytes of a command's output, for any thread.
#
# What the loop's thread fetches is put where every thread finds it (`OutputReader.fetched` of the async one), and taken
# from there. So a caller that goes away, by Ctrl-C or at the end of its timeout, loses nothing, and all faces of one
# stream read on from the same place.


class OutputReader(BlockingWrapper[AsyncOutputReader]):
    """One output stream of a command: `for line in command.stdout`, `command.stdout.read(n)`. See
    `banksman.OutputReader`.

    Several threads may read it: each line goes to one of them. Neither Ctrl-C nor a timeout loses anything: what was
    fetched for a caller that has gone is there for the next one.
    """

    @property
    def missed(self) -> int:
        return self._inner.missed

    def at_eof(self) -> bool:
        """Whether the stream has ended and all of it was read."""
        return self._bridge.look(self._inner.at_eof)

    def read(self, size: int = -1, *, timeout: float | None = None) -> bytes:
        """Up to `size` bytes, as soon as there are any; b"" at the end of the stream. -1: all up to the end. Past
        `timeout` seconds in all: TimeoutError."""
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
        """One call for all of it, so that there is one deadline. A caller that goes away leaves all of it to the next
        one: the async read puts back what it has when it is cancelled, and `undo` does once it has answered."""
        fetched = self._inner.fetched

        async def fetch() -> bytes:
            rest = await self._inner.read(-1)
            parts: list[bytes] = []
            # Other threads may take from it at the same time, so each piece is taken by itself.
            with contextlib.suppress(IndexError):
                while True:
                    parts.append(fetched.popleft())
            return b"".join((*parts, rest))

        return self._bridge.call(fetch, CallPolicy.READS, timeout=timeout, undo=self._inner.put_back)

    def readline(self, *, timeout: float | None = None) -> bytes:
        """One line with its newline; the last one may have none; b"" at the end. Past `timeout` seconds: TimeoutError.
        A line of more than 32 MiB is returned in parts of that size."""
        fetched = self._inner.fetched

        async def fetch() -> bool:
            # Many at once: each way through the loop costs more than a line.
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


# The parts of the blocking classes that do more than call the async method and wait for it.
#
# `tools/blocking_api.py` generates the rest: `blocking_session.py`, `blocking_command.py` and `blocking_host.py`.


class BlockingSession(BlockingWrapper[AsyncSession]):
    async def _wait_outcome(self, ask: Callable[[], Coroutine[Any, Any, AsyncTurn]]) -> Outcome:
        """Cancelled, it withdraws the turn."""
        turn = await ask()
        try:
            return await turn.outcome()
        except asyncio.CancelledError:
            self._inner.let_go(turn)
            raise


class BlockingCommand(BlockingWrapper[AsyncCommand]):
    def wait(self, *, timeout: float | None = None) -> Finished:
        """Wait for the end and return the result. Past `timeout` seconds: TimeoutError, and the command runs on. Raises
        if it could not be started.

        This reports the end: `Host.take_ended` does not return the command any more.
        """
        return self._bridge.call(self._wait, CallPolicy.READS, timeout=timeout, undo=self._return_report)[1]

    def stop(self, *, at_once: bool = False) -> Finished:
        """End it by the ladder, or `at_once` by KILL; returns when it is over. This reports the end, as `wait` does."""

        async def work() -> tuple[bool, Finished]:
            self._inner.stop_nowait(at_once=at_once)
            return await self._wait()

        return self._bridge.call(work, undo=self._return_report)[1]

    async def _wait(self) -> tuple[bool, Finished]:
        await self._inner.wait_over()
        return self._inner.take_report(), self._inner.result()

    def _return_report(self, taken: tuple[bool, Finished]) -> None:
        # Ctrl-C came after the end was taken here and before the caller had it.
        if taken[0]:
            self._inner.return_report()


class BlockingHost(BlockingWrapper[AsyncHost]):
    """The life of a host: its thread is started here, and ended by `close`."""

    def __init__(self, inner: AsyncHost) -> None:
        super().__init__(LoopThread("banksman-host", inner.close), inner)
        # Reports whose taker had gone before it had them.
        self._returned: deque[AsyncCommand] = deque()

    def __repr__(self) -> str:
        return f"<blocking Host {self._bridge.phase.value}>"

    @property
    def is_usable(self) -> bool:
        """Whether it belongs to this process, and is not closed or being closed."""
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
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # In a fork there is nothing of it to be closed, and an error would hide the one that came first.
        if self._bridge.is_mine:
            self.close()

    def close(self) -> None:
        """Close every session, stop every command by the ladder, end the loop's thread. May be called again, and by
        several at once; Ctrl-C only stops the waiting."""
        self._bridge.close()

    def drain(self, *, timeout: float | None = None) -> None:
        """Take nothing new, finish what runs, then close. Past `timeout` seconds what still runs is stopped."""
        self._bridge.call(functools.partial(self._inner.drain, timeout=timeout), CallPolicy.FOLLOWS)
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
    """Its opener has gone before it had the session. One that was open already belongs to another caller, too."""
    if session.openings == 1 and not session.status().queue:
        session.close_nowait()


def stop_untaken(started: AsyncCommand | Finished) -> None:
    """The caller that started it has gone before it had the command."""
    if isinstance(started, AsyncCommand):
        started.stop_nowait(Ended.CANCELLED)
