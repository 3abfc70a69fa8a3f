"""Host ends of a child's pipes: a reader and a writer of plain fds, closed immediately on demand.

`stdio.py` opens the pipes. asyncio's stream objects are not used. Closing them does not close the
fd immediately, and waiting for a process with them also waits for the pipes. A pipe here is an int
in the loop's selector, and closing it is `close()`.
"""

from __future__ import annotations

import asyncio
import errno
import signal
from collections import deque
from collections.abc import Callable

from banksman.errors import CommandError
from banksman.process import syscalls

# A pipe holds 64 KiB unless it was enlarged, so a read never returns more. A larger buffer would
# cost an allocation for each read.
READ_BYTES = 65536
# An agent's stdout gets a larger pipe: fewer, larger reads cost its reader a quarter less. The
# kernel grants each user 64 MiB for all pipes, and makes further pipes tiny, even for other
# programs. So the number of large pipes is bounded here.
WIDE_PIPE_BYTES = 1 << 20
WIDE_PIPES_MAX = 16
WIDE_READ_BYTES = 1 << 18
# Bound of one readiness callback: a child that floods its output must not starve the loop.
READ_BYTES_MAX = 1 << 20


class PipeReader:
    """Reads one pipe and passes the data on.

    `on_end`: called once, at the end of the stream, and not after a `close`. Its argument is False
    if reading failed and more data may exist.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        on_data: Callable[[bytes], None],
        on_end: Callable[[bool], None],
    ) -> None:
        self._fd = fd
        self._loop = loop
        self._on_data = on_data
        self._on_end = on_end
        self._is_paused = True
        self._read_bytes = READ_BYTES
        syscalls.set_blocking(fd, False)

    @property
    def is_open(self) -> bool:
        return self._fd >= 0

    @property
    def is_reading(self) -> bool:
        return self.is_open and not self._is_paused

    def fileno(self) -> int:
        """The fd, or -1 if it is closed."""
        return self._fd

    def widen(self) -> None:
        """Enlarge the pipe, if the budget has room. A refusal of the kernel is fine."""
        if len(_wide) < WIDE_PIPES_MAX and self.is_open:
            try:
                syscalls.set_pipe_size(self._fd, WIDE_PIPE_BYTES)
            except OSError:
                return
            _wide.add(id(self))
            self._read_bytes = WIDE_READ_BYTES

    def resume(self) -> None:
        """Start or resume reading."""
        if self._is_paused and self.is_open:
            # A short read has emptied the pipe, and the loop calls again if more comes. A second
            # read that finds nothing would double the cost of a lone line.
            self._loop.add_reader(self._fd, self._read, True)
            self._is_paused = False

    def pause(self) -> None:
        """Stop reading: the pipe fills, and the child gets backpressure."""
        if not self._is_paused:
            self._is_paused = True
            if self.is_open:
                self._loop.remove_reader(self._fd)

    def read_now(self) -> None:
        """Read the available data, up to the bound.

        For callers that must know the data, and the end of the stream, before a decision. A pause
        holds for them too, because the pause is a promise to its caller.
        """
        self._read(False)

    def _read(self, until_short: bool) -> None:
        taken = 0
        while taken < READ_BYTES_MAX and self._fd >= 0 and not self._is_paused:
            try:
                data = self._take()
            except BlockingIOError:
                return
            except OSError as exc:
                # After a temporary error the fd is still readable, so the loop calls again.
                if exc.errno not in syscalls.PASSING:
                    self.close()
                    # EIO is how a terminal reports that its other side is gone.
                    self._on_end(exc.errno == errno.EIO)
                return
            if not data:
                self.close()
                self._on_end(True)
                return
            taken += len(data)
            self._on_data(data)
            if until_short and len(data) < self._read_bytes:
                return

    def _take(self) -> bytes:
        """Return data, or b"" at the end of the stream."""
        return syscalls.read(self._fd, self._read_bytes)

    def close(self) -> None:
        """Stop reading and close the fd. `on_end` is not called."""
        self.pause()
        self.forget()

    def forget(self) -> None:
        """Close the fd without touching the loop."""
        _wide.discard(id(self))
        if self.is_open:
            fd, self._fd = self._fd, -1
            syscalls.close(fd)

    # For a reader that was abandoned with its loop: its host was dropped, and no other code can
    # close the fd.
    __del__ = forget


# Ids of the enlarged pipes that are still open, across all loops: the kernel's budget is per user,
# not per loop.
_wide: set[int] = set()


class PipeWrite:
    """One write: written completely and in order, or not at all."""

    def __init__(self, data: bytes, done: asyncio.Future[None]) -> None:
        self.rest = memoryview(data)
        self.is_begun = False
        self.done = done

    def fail(self, error: Exception) -> None:
        """Fail the write, unless it is done."""
        if not self.done.done():
            self.done.set_exception(error)
            # If the caller has stopped waiting, the error is never retrieved. Reading it here
            # avoids asyncio's warning.
            self.done.exception()


class PipeWriter:
    """Writes to a child's stdin, one whole write after another.

    No write follows a partial one: once a write has begun, it is finished or the pipe is closed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, fd: int) -> None:
        self._fd = fd
        self._loop = loop
        self._queue: deque[PipeWrite] = deque()
        self._is_waiting = False
        self._is_ending = False
        syscalls.set_blocking(fd, False)

    @property
    def is_open(self) -> bool:
        return self._fd >= 0 and not self._is_ending

    def fileno(self) -> int:
        """The fd, or -1 if it is closed."""
        return self._fd

    @property
    def is_writing(self) -> bool:
        """Whether a queued write is not finished."""
        return bool(self._queue)

    def put(self, data: bytes) -> PipeWrite:
        """Queue a write. Its `done` is set when the pipe has taken the last byte."""
        return self._put(PipeWrite(data, self._loop.create_future()))

    def _put(self, writing: PipeWrite) -> PipeWrite:
        if not self.is_open:
            message = "cannot write to the command's stdin: it is closed"
            writing.fail(CommandError(message, hint="write before stdin is closed"))
            return writing
        self._queue.append(writing)
        if not self._is_waiting:
            self._write_now()
        return writing

    def withdraw(self, writing: PipeWrite) -> bool:
        """Take a queued write back.

        False if the pipe has already taken a byte: then it must be finished.
        """
        if writing.is_begun or writing not in self._queue:
            return False
        self._queue.remove(writing)
        return True

    def end(self) -> None:
        """Close the pipe once everything queued is written."""
        self._is_ending = True
        if not self._queue:
            self.close()

    def close(self) -> None:
        """Close the pipe now. Unfinished writes fail."""
        if self._is_waiting and self._fd >= 0:
            self._loop.remove_writer(self._fd)
        self._is_waiting = False
        self.forget()
        for writing in self._queue:
            message = "cannot write to the command's stdin: it was closed before the write ended"
            writing.fail(CommandError(message))
        self._queue.clear()

    def forget(self) -> None:
        """Close the fd without touching the loop."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            syscalls.close(fd)

    __del__ = forget

    def _write_now(self) -> None:
        """Write as much of the queue as the pipe takes, then wait until it is writable."""
        while self._queue:
            writing = self._queue[0]
            if not writing.is_begun:
                self._begin(writing)
            if writing.rest:
                try:
                    taken = self._write(writing.rest)
                except BlockingIOError:
                    self._wait()
                    return
                except OSError as exc:
                    if exc.errno in syscalls.PASSING:
                        self._wait()
                        return
                    message = f"cannot write to the command's stdin: {exc.strerror}"
                    writing.fail(CommandError(message))
                    # The reader is gone. The writes after this one must fail too, so the pipe is
                    # closed.
                    self._queue.popleft()
                    self.close()
                    return
                writing.is_begun = True
                writing.rest = writing.rest[taken:]
                continue
            self._queue.popleft()
            self._finish()
            if not writing.done.done():
                writing.done.set_result(None)
        if self._is_waiting:
            self._loop.remove_writer(self._fd)
            self._is_waiting = False
        if self._is_ending:
            self.close()

    def _begin(self, writing: PipeWrite) -> None:
        """Hook before the first byte of a write, for writes whose bytes depend on that moment."""

    def _finish(self) -> None:
        """Hook after the last byte of a write."""

    def _write(self, data: memoryview) -> int:
        return _write_without_sigpipe(self._fd, data)

    def _wait(self) -> None:
        if not self._is_waiting:
            self._loop.add_writer(self._fd, self._write_now)
            self._is_waiting = True


def _write_without_sigpipe(fd: int, data: memoryview) -> int:
    """Write to a pipe. A missing reader raises, even if SIGPIPE has its default action."""
    if signal.getsignal(signal.SIGPIPE) is not signal.SIG_DFL:
        return syscalls.write(fd, data)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
    try:
        return syscalls.write(fd, data)
    except BrokenPipeError:
        # The signal is pending for this thread. Consume it here, so that unblocking does not
        # deliver it.
        signal.sigwait([signal.SIGPIPE])
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
