"""The one thread that reads histories, so that the loop does not wait for the disk, nor unpack what it finds there.

One is enough: a page takes a fraction of a millisecond, most of it in Python, of which only one thread runs at a time
anyway. It is a daemon for the same reason as the writer, and with less to lose.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import sqlite3
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from banksman.errors import BanksmanError, StoreError
from banksman.store.sqlite import open_file
from banksman.store.sqlite.maintenance import SqliteRetention
from banksman.store.sqlite.operations import AwaitedOperation, Operation, WriterContext
from banksman.store.sqlite.sqlite_errors import translate
from banksman.store.sqlite.tail_wait import Lookup
from banksman.store.sqlite.writer_thread import WriterThread


class ReadRequest:
    """A question. `settled` is called in the loop when there is an answer, or an error."""

    __slots__ = ("error", "function", "is_wanted", "settled", "value")

    def __init__(
        self,
        settled: Callable[[ReadRequest], None],
        function: Callable[[sqlite3.Connection], Any],
        is_wanted: Callable[[], bool],
    ) -> None:
        self.settled = settled
        self.function = function
        # Whether somebody still waits for it: a page nobody wants need not be read.
        self.is_wanted = is_wanted
        self.value: Any = None
        self.error: Exception | None = None


class ReaderThread:
    """`hand_over` is called in the thread, with a request to be settled in the loop's; with None at the end."""

    def __init__(
        self, connection: sqlite3.Connection, *, path: str, hand_over: Callable[[ReadRequest | None], None]
    ) -> None:
        self._connection = connection
        self._path = path
        self._hand_over = hand_over
        self._queue: queue.SimpleQueue[ReadRequest | None] = queue.SimpleQueue()
        self.put: Callable[[ReadRequest], None] = self._queue.put
        self.thread = threading.Thread(target=self._run, name="banksman-store-reader", daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """End, behind all that was asked. From any thread."""
        self._queue.put(None)

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            if request.is_wanted():
                self._answer(request)
                self._hand_over(request)
        self._hand_over(None)

    def _answer(self, request: ReadRequest) -> None:
        try:
            request.value = request.function(self._connection)
        except BanksmanError as exc:
            request.error = exc
        except (sqlite3.Error, OSError) as exc:
            request.error = translate(exc, self._path, "read")
            request.error.__cause__ = exc
        except Exception as exc:
            # A bug, or a session's id that is no text. It is the asker's to see, and not the thread's to die of.
            request.error = exc


# Between the loop and the two threads: what goes to them, and how it comes back settled.
#
# Operations and requests go by a queue each; what became of them comes back by one callback of the loop for a group.
# Nothing else is shared. The threads know this object weakly, so that a program that forgets its log can lose it: then
# they are told to end, as by a close, and nobody waits for them.


class StoreListener(Protocol):
    """The log, as its bridge sees it."""

    def on_group(self) -> None:
        """All of a group was settled."""
        ...

    def on_ended(self) -> None:
        """Both threads have ended, and all that they did was settled. The connections are still there."""
        ...


class StoreThreads:
    """The open store: its connections and its threads, from the first moment on. Made in the loop that it belongs to.

    `look` is for the loop's own thread.
    """

    def __init__(
        self, path: str, hears: StoreListener, *, level: str, address: str, retention: SqliteRetention
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._hears = hears
        self._opening = open_file.StoreOpening(path, level=level)
        try:
            writing = self._opening.open()
            looking = self._opening.connect(busy_seconds=open_file.LOOK_BUSY_SECONDS_MAX, is_writer=False)
            self.look = Lookup(looking, path)
            reading = self._opening.connect()
        except BaseException as exc:
            self._opening.close()
            if isinstance(exc, (sqlite3.Error, OSError)):
                raise translate(exc, path, "open") from exc
            raise
        self._unsettled: list[Operation] = []
        self._threads_left = 2
        self._work = WriterContext(writing, path, address)
        this: weakref.ReferenceType[StoreThreads] = weakref.ref(self)
        self._writer = WriterThread(
            self._work,
            path=path,
            presence=self._opening.presence,
            is_full=level == "full",
            is_writable=self._opening.is_writable,
            retention=retention,
            hand_over=partial(_hand_over, self._loop, this, StoreThreads._on_group),
        )
        self._reader = ReaderThread(
            reading, path=path, hand_over=partial(_hand_over, self._loop, this, StoreThreads._on_read)
        )
        self.put = self._writer.put
        self._lost = weakref.finalize(self, _stop, self._writer, self._reader)
        # Not at the interpreter's end: whoever closes the log there may come after us. If nobody does, it is a crash.
        self._lost.atexit = False
        self._writer.start()
        self._reader.start()

    @property
    def is_writable(self) -> bool:
        """Whether the file may be written at all."""
        return self._opening.is_writable

    @property
    def host(self) -> int | None:
        """Our id among the hosts, once there is one."""
        return self._work.host

    def check_presence(self) -> None:
        """`StoreError` if the file was removed, moved or replaced. See `open_file.py`."""
        try:
            self._opening.presence.check()
        except OSError as exc:
            raise translate(exc, self._opening.path, "look at") from exc

    def counters(self) -> Mapping[str, float]:
        """What the writer's thread has written. It never changes what it has given out."""
        return self._writer.written._asdict()

    async def call(
        self, function: Callable[[WriterContext], Any], *, then: Callable[[Any, bool], None] | None = None, **how: Any
    ) -> Any:
        """What the writer's thread makes of it. `then` hears of what was done, and whether somebody still waits."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def settled(call: AwaitedOperation) -> None:
            try:
                if call.error is None and then is not None:
                    then(call.value, not future.cancelled())
            finally:
                _resolve(future, call.value, call.error)

        self.put(AwaitedOperation(settled, function, **how))
        return await future

    async def ask(self, function: Callable[[sqlite3.Connection], Any]) -> Any:
        """What the reader's thread makes of it."""
        future: asyncio.Future[Any] = self._loop.create_future()

        def settled(request: ReadRequest) -> None:
            _resolve(future, request.value, request.error)

        self._reader.put(ReadRequest(settled, function, lambda: not future.cancelled()))
        return await future

    def _on_read(self, request: ReadRequest | None) -> None:
        if request is None:
            self._on_thread_ended()
        else:
            request.settled(request)

    def _on_group(self, group: list[Operation]) -> None:
        """In the loop: what became of a group, in the order of the calls."""
        if not group:
            self._on_thread_ended()
            return
        self._unsettled += group
        self._settle()

    def _settle(self) -> None:
        group, self._unsettled = self._unsettled, []
        settled = 0
        try:
            for operation in group:
                settled += 1
                operation.settled(operation)
            self._hears.on_group()
        finally:
            # Also reached when a callback let a KeyboardInterrupt through: the others are still owed their answers.
            if settled < len(group):
                self._unsettled[:0] = group[settled:]
                self._loop.call_soon(self._settle)

    def stop(self) -> None:
        """End the threads, behind all that was put. Not by the finaliser: it is dead at exit."""
        if self._lost.detach() is not None:
            _stop(self._writer, self._reader)

    def abandon(self) -> None:
        """The loop is closed, and will not be told anything: end the threads, and wait for them."""
        self.stop()
        self._writer.thread.join()
        self._reader.thread.join()
        self._close()

    def _on_thread_ended(self) -> None:
        self._threads_left -= 1
        if self._threads_left:
            return
        if self._unsettled:
            self._settle()
        # The last that they do is to say so: there is nothing to wait for.
        self._writer.thread.join()
        self._reader.thread.join()
        try:
            self._hears.on_ended()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            is_last = not self.look.has_live_hosts()
        except StoreError:
            is_last = False  # Whoever comes next can do what is left to the last.
        self.look.close()
        self._opening.close(is_last=is_last)


def _hand_over(
    loop: asyncio.AbstractEventLoop,
    this: weakref.ReferenceType[StoreThreads],
    method: Callable[[StoreThreads, Any], None],
    what: Any,
) -> None:
    """From one of the threads to the loop. In a loop that is closed nobody is left who waits."""

    def arrive() -> None:
        bridge = this()
        if bridge is not None:
            method(bridge, what)

    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(arrive)


def _stop(writer: WriterThread, reader: ReaderThread) -> None:
    writer.stop()
    reader.stop()


def _resolve(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return  # Its caller was cancelled.
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
