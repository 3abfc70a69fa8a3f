"""Reader thread of the store, and the bridge between its two threads and the event loop.

`StoreThreads`, the bridge, opens the store, starts both threads, and settles their results in the
loop. It collects operations (`operation_batch.py`), commits them in the loop (`group_writer.py`) or
passes them to the writer thread (`writer_thread.py`).

The reader thread reads and decodes histories, so that the event loop waits neither for the disk nor
for the decoding. One reader is enough: a page takes a fraction of a millisecond, most of it in
Python code, and only one thread runs Python at a time. The thread is a daemon for the same reason
as the writer (`writer_thread.py`), and it has less to lose.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import sqlite3
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from banksman.errors import BanksmanError, NotOwner, StoreError
from banksman.histogram import Histogram
from banksman.store.log_values import Done
from banksman.store.operation_batch import OperationBatch
from banksman.store.sqlite import open_file
from banksman.store.sqlite.group_writer import GroupWriter
from banksman.store.sqlite.maintenance import SqliteRetention
from banksman.store.sqlite.operations import AwaitedOperation, Operation, WriterContext
from banksman.store.sqlite.sqlite_errors import translate
from banksman.store.sqlite.tail_wait import Lookup
from banksman.store.sqlite.writer_thread import WriterThread

log = logging.getLogger("banksman")


class ReadRequest:
    """A query for the reader thread.

    `settled`: called in the event loop with the answer or the error.
    """

    __slots__ = ("error", "function", "is_wanted", "settled", "value")

    def __init__(
        self,
        settled: Callable[[ReadRequest], None],
        function: Callable[[sqlite3.Connection], Any],
        is_wanted: Callable[[], bool],
    ) -> None:
        self.settled = settled
        self.function = function
        # Whether the caller still waits. A page for a cancelled caller need not be read.
        self.is_wanted = is_wanted
        self.value: Any = None
        self.error: Exception | None = None


class ReaderThread:
    """The thread that runs read queries.

    `hand_over`: called in this thread with a request for the event loop to settle, and with None at
    the end.
    """

    def __init__(
        self,
        connection: sqlite3.Connection,
        *,
        path: str,
        hand_over: Callable[[ReadRequest | None], None],
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
        """End after all queued requests. Callable from any thread."""
        self._queue.put(None)

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            if request.is_wanted():
                self._answer(request)
                self._hand_over(request)
            # The thread waits for the next request. Its caller may be gone by then.
            del request
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
            # A bug, or a session id that is not valid text. The caller gets the exception, and the
            # thread lives.
            request.error = exc


# The bridge between the event loop and the two threads.
#
# Operations and requests go through one queue each. Results come back by one loop callback per
# group. The threads share nothing else. They hold only a weak reference to this object, so that a
# program that drops its log can free it. The finalizer then tells the threads to end, as a close
# does, and waits for neither.


class StoreListener(Protocol):
    """Callbacks of the bridge to its log."""

    def on_group(self) -> None:
        """React to a group whose operations are all settled."""
        ...

    def on_ended(self) -> None:
        """React to the end of both threads.

        All operations are settled, and the connections are still open.
        """
        ...


class StoreThreads:
    """An open store: its connections and its two threads.

    Created in the event loop that it belongs to.

    `look`: the lookups for the loop's own thread.
    """

    def __init__(
        self,
        path: str,
        hears: StoreListener,
        *,
        level: str,
        address: str,
        retention: SqliteRetention,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._hears = hears
        self._opening = open_file.StoreOpening(path, level=level)
        try:
            writing = self._opening.open()
            looking = self._opening.connect(
                busy_seconds=open_file.LOOK_BUSY_SECONDS_MAX, is_writer=False
            )
            self.look = Lookup(looking, path)
            reading = self._opening.connect()
        except BaseException as exc:
            self._opening.close()
            if isinstance(exc, (sqlite3.Error, OSError)):
                raise translate(exc, path, "open") from exc
            raise
        self._unsettled: list[Operation] = []
        # Operations in the writer thread whose results have not arrived.
        self._in_thread = 0
        self._threads_left = 2
        self._work = WriterContext(writing, path, address)
        this: weakref.ReferenceType[StoreThreads] = weakref.ref(self)
        self._group_writer = GroupWriter(
            self._work,
            path=path,
            presence=self._opening.presence,
            is_full=level == "full",
            is_writable=self._opening.is_writable,
        )
        # Retention is applied after each commit, and reads the file.
        self._is_threaded = level == "full" or bool(retention)
        self._writer = WriterThread(
            self._work,
            self._group_writer,
            path=path,
            presence=self._opening.presence,
            is_writable=self._opening.is_writable,
            retention=retention,
            hand_over=partial(_hand_over, self._loop, this, StoreThreads._on_group),
        )
        self._reader = ReaderThread(
            reading,
            path=path,
            hand_over=partial(_hand_over, self._loop, this, StoreThreads._on_read),
        )
        self._batch = OperationBatch(self._loop, self._write)
        self.put = self._batch.add
        self._lost = weakref.finalize(self, _stop, self._writer, self._reader)
        # Not at interpreter exit: an exit handler that closes the log may run after this finalizer.
        # If none does, the exit counts as a crash.
        self._lost.atexit = False
        self._writer.start()
        self._reader.start()

    @property
    def is_writable(self) -> bool:
        """Whether this user can write the file."""
        return self._opening.is_writable

    @property
    def host(self) -> int | None:
        """This host's id in the store, or None before the first claim."""
        return self._work.host

    def check_presence(self) -> None:
        """Raise `StoreError` if the file was removed, moved or replaced. See `open_file.py`."""
        try:
            self._opening.presence.check()
        except OSError as exc:
            raise translate(exc, self._opening.path, "check") from exc

    def counters(self) -> Mapping[str, float]:
        """Return the writer's totals. The writer never changes an object that it has published."""
        return self._group_writer.written._asdict()

    @property
    def commit_times(self) -> Histogram:
        return self._group_writer.commit_times

    async def call(
        self,
        function: Callable[[WriterContext], Any],
        *,
        then: Callable[[Any, bool], None] | None = None,
        **how: Any,
    ) -> Any:
        """Run a function in the writer thread and return its result.

        `then`: called in the loop after success, with the result and whether the caller still
        waits.
        """
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
        """Run a function in the reader thread and return its result."""
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

    def _write(self, group: list[Operation]) -> None:
        """Commit a group here if that is quick, or pass it to the writer thread."""
        is_done = False
        try:
            if not self._in_thread and not self._is_threaded:
                is_done = self._group_writer.try_now(group)
        except BaseException:
            # A KeyboardInterrupt. The callers of the group still need their completions.
            is_done = self._group_writer.has_committed
            raise
        finally:
            if is_done:
                self._unsettled += group
                self._settle()
            else:
                self._in_thread += len(group)
                self._writer.put(group)

    def _on_group(self, group: list[Operation]) -> None:
        """Settle a group in the event loop, in the order of the calls.

        An empty group ends the thread.
        """
        if not group:
            self._on_thread_ended()
            return
        self._in_thread -= len(group)
        self._unsettled += group
        self._settle()

    def _settle(self) -> None:
        group, self._unsettled = self._unsettled, []
        settled = 0
        try:
            for operation in group:
                settled += 1
                operation.settled(operation)
        finally:
            # This also runs when a callback raised a KeyboardInterrupt. The other operations still
            # need their completions, and the readers of the settled ones their wakeup.
            if settled < len(group):
                self._unsettled[:0] = group[settled:]
                self._loop.call_soon(self._settle)
            self._hears.on_group()

    def stop(self) -> None:
        """End the threads after all queued work.

        This does not use the finalizer, which is dead at exit.
        """
        if self._lost.detach() is not None:
            # A commit here would call back into the caller.
            self._is_threaded = True
            self._batch.flush()
            _stop(self._writer, self._reader)

    def abandon(self) -> None:
        """End the threads and wait for them.

        For a closed event loop, which receives no callbacks.
        """
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
        # A thread hands over its end as its last action, so these joins return immediately.
        self._writer.thread.join()
        self._reader.thread.join()
        try:
            self._hears.on_ended()
        finally:
            self._close()

    def _close(self) -> None:
        try:
            # This host's row is gone here: `stop_being_host` has deleted it. If that failed, the
            # host lock is dropped, so the check does not count this host as alive.
            is_last = not self.look.has_live_hosts()
        except StoreError:
            # Unknown. Another host that closes the store later can do the last host's work.
            is_last = False
        self.look.close()
        self._opening.close(is_last=is_last)


def _hand_over(
    loop: asyncio.AbstractEventLoop,
    this: weakref.ReferenceType[StoreThreads],
    method: Callable[[StoreThreads, Any], None],
    what: Any,
) -> None:
    """Pass a result from a thread to the event loop. In a closed loop no caller waits."""

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
        return  # The caller was cancelled.
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)


def complete(session: str, done: Done, error: StoreError | NotOwner | None) -> None:
    """Tell a caller in the event loop how its change ended."""
    try:
        done(error)
    except Exception:
        # This is a bug of one writer. The other writers still need their completions.
        log.exception("callback of a writer failed (session=%s)", session)
