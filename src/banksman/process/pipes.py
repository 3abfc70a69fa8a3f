"""Our ends of a child's pipes: plain fds in the loop's selector, closed the moment we say so.

asyncio's own stream objects are not used: closing them does not close the fd at once, and waiting for a process with
them waits for the pipes. A pipe here is an int, and closing it is `close()`.
"""

from __future__ import annotations

import asyncio
import errno
import signal
from collections import deque
from collections.abc import Callable

from banksman.errors import CommandError
from banksman.process import syscalls

# A pipe holds 64 KiB unless it was made larger, so a read never returns more, and asking for more costs an allocation
# each time.
READ_BYTES = 65536
# An agent's stdout is worth a larger pipe: fewer, larger reads cost its reader a quarter less. The kernel gives a user
# 64 MiB for all pipes and then makes new ones tiny, also those of others; so what is taken of it is bounded here.
WIDE_PIPE_BYTES = 1 << 20
WIDE_PIPES_MAX = 16
WIDE_READ_BYTES = 1 << 18
# One readiness callback reads at most this much: one flood must not starve the loop.
READ_BYTES_MAX = 1 << 20


class PipeReader:
    """Reads one pipe and passes on what it reads.

    `on_end` is called once, at its end and not on our own close; with False if reading failed and more may be there.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, fd: int, on_data: Callable[[bytes], None], on_end: Callable[[bool], None]
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

    def fileno(self) -> int:
        """The fd, or -1 if it is closed."""
        return self._fd

    def widen(self) -> None:
        """Make the pipe larger, if there is room for one more such; a kernel that refuses is right, too."""
        if len(_wide) < WIDE_PIPES_MAX and self.is_open:
            try:
                syscalls.set_pipe_size(self._fd, WIDE_PIPE_BYTES)
            except OSError:
                return
            _wide.add(id(self))
            self._read_bytes = WIDE_READ_BYTES

    def resume(self) -> None:
        if self._is_paused and self.is_open:
            self._loop.add_reader(self._fd, self.read_now)
            self._is_paused = False

    def pause(self) -> None:
        """Stop reading: the pipe fills, and pushes back on the child."""
        if not self._is_paused:
            self._is_paused = True
            if self.is_open:
                self._loop.remove_reader(self._fd)

    def read_now(self) -> None:
        """Read what is there, up to the bound. Also called by those who must know what is there before they decide.

        A pause holds for them too: it is a promise to whoever asked for it.
        """
        taken = 0
        while taken < READ_BYTES_MAX and self.is_open and not self._is_paused:
            try:
                data = syscalls.read(self._fd, self._read_bytes)
            except BlockingIOError:
                return
            except OSError as exc:
                if exc.errno not in syscalls.PASSING:
                    self.close()
                    # EIO is how a terminal says that its other side is gone.
                    self._on_end(exc.errno == errno.EIO)
                return
            if not data:
                self.close()
                self._on_end(True)
                return
            taken += len(data)
            self._on_data(data)

    def close(self) -> None:
        self.pause()
        self.forget()

    def forget(self) -> None:
        """Close the fd without touching the loop."""
        _wide.discard(id(self))
        if self.is_open:
            fd, self._fd = self._fd, -1
            syscalls.close(fd)

    # For one that was abandoned with its loop: its host was dropped, and nobody else can close it.
    __del__ = forget


# The ids of those that were widened and are still open, of every loop: the budget is the user's, not a loop's.
_wide: set[int] = set()


class PipeWrite:
    """One write: whole, in its turn, or not at all."""

    def __init__(self, data: bytes, done: asyncio.Future[None]) -> None:
        self.rest = memoryview(data)
        self.is_begun = False
        self.done = done

    def fail(self, error: Exception) -> None:
        if not self.done.done():
            self.done.set_exception(error)
            # A writer that no longer waits does not collect the error; that is not worth a warning.
            self.done.exception()


class PipeWriter:
    """Writes to a child's stdin, one whole write after another.

    Nothing is written after a write that was cut: once a write has begun it is finished, or the pipe is closed.
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

    def put(self, data: bytes) -> PipeWrite:
        """Queue a write. Its `done` is set when the pipe has taken the last byte."""
        return self._put(PipeWrite(data, self._loop.create_future()))

    def _put(self, writing: PipeWrite) -> PipeWrite:
        if not self.is_open:
            writing.fail(CommandError("stdin is closed", hint="nothing more can be written to this command"))
            return writing
        self._queue.append(writing)
        if not self._is_waiting:
            self._write_now()
        return writing

    def withdraw(self, writing: PipeWrite) -> bool:
        """Take a write back. False if a byte of it was taken already: then it must be finished."""
        if writing.is_begun or writing not in self._queue:
            return False
        self._queue.remove(writing)
        return True

    def end(self) -> None:
        """Close once everything queued is written."""
        self._is_ending = True
        if not self._queue:
            self.close()

    def close(self) -> None:
        """Close now. What was not written fails."""
        if self._is_waiting and self._fd >= 0:
            self._loop.remove_writer(self._fd)
        self._is_waiting = False
        self.forget()
        for writing in self._queue:
            writing.fail(CommandError("stdin was closed before this was written"))
        self._queue.clear()

    def forget(self) -> None:
        """Close the fd without touching the loop."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            syscalls.close(fd)

    __del__ = forget

    def _write_now(self) -> None:
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
                    writing.fail(CommandError(f"the command does not take its stdin any more: {exc.strerror}"))
                    self._queue.popleft()
                    self.close()
                    return
                writing.is_begun = True
                writing.rest = writing.rest[taken:]
                continue
            self._queue.popleft()
            if not writing.done.done():
                writing.done.set_result(None)
        if self._is_waiting:
            self._loop.remove_writer(self._fd)
            self._is_waiting = False
        if self._is_ending:
            self.close()

    def _begin(self, writing: PipeWrite) -> None:
        """The turn of this one has come, and not a byte of it is taken yet. For those whose bytes depend on that."""

    def _write(self, data: memoryview) -> int:
        return _write_without_sigpipe(self._fd, data)

    def _wait(self) -> None:
        if not self._is_waiting:
            self._loop.add_writer(self._fd, self._write_now)
            self._is_waiting = True


def _write_without_sigpipe(fd: int, data: memoryview) -> int:
    """Write; a reader that is gone is an error, even in a program that has restored SIGPIPE's deadly default."""
    if signal.getsignal(signal.SIGPIPE) is not signal.SIG_DFL:
        return syscalls.write(fd, data)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPIPE])
    try:
        return syscalls.write(fd, data)
    except BrokenPipeError:
        # The signal is pending for this thread: taken here, so that unblocking does not deliver it.
        signal.sigwait([signal.SIGPIPE])
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
