"""What the blocking classes are made of: an object with an async one behind it, an iterator and a hold that wait.

`blocking_base.py` adds what is written by hand for one class; the rest of the classes is generated.
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

from banksman.commands.output_streams import OutputReader as AsyncOutputReader
from banksman.commands.output_streams import check_size
from banksman.errors import Closed
from banksman.threads.loop_thread import CallPolicy, LoopThread, ThreadPhase

A = TypeVar("A")
T = TypeVar("T")


class Face(Generic[A]):
    """A blocking object and the async one behind it. Two faces of one object are equal."""

    def __init__(self, bridge: LoopThread, inner: A) -> None:
        self._bridge = bridge
        self._inner = inner

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Face) and self._inner is other._inner  # pyright: ignore[reportUnknownMemberType]

    def __hash__(self) -> int:
        return id(self._inner)

    def __repr__(self) -> str:
        # Of the async one only what it reads in one go from a value that never changes; nothing is waited for.
        return f"<blocking {repr(self._inner)[1:-1]}>"


@overload
def behind(given: Face[A] | str) -> A | str: ...
@overload
def behind(given: Face[A] | str | None) -> A | str | None: ...
def behind(given: Face[A] | str | None) -> A | str | None:
    """The async object behind a face that a caller passes; an id as it is."""
    return given._inner if isinstance(given, Face) else given  # pyright: ignore[reportPrivateUsage]


class Feed(Generic[T]):
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
        self._feed = Feed(items)

    def __next__(self) -> T:
        item = self._bridge.call(self._feed.next, CallPolicy.FOLLOWS, undo=self._feed.take_back)
        if item is Feed.END:
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


def _close_later(bridge: LoopThread, feed: Feed[Any]) -> None:
    if bridge.phase is not ThreadPhase.ENDED:
        bridge.own(feed.close())


class Holding(AbstractContextManager[None]):
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


class OutputReader(Face[AsyncOutputReader]):
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
