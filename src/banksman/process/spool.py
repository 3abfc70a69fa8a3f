"""Output of a child that survives the crash of its host: every byte stays until it is durable.

A host that is killed between a read and its commit loses the bytes that it has read. So this reader
does not read the pipe into its own memory. `splice` moves the bytes into an unnamed file in memory,
the *spool*, and the host reads them there. The keeper has the spool too, and gives it to the next
host.

**Nothing is in doubt.** The kernel moves the bytes and the position of the file in one system call,
and it finishes a call that has begun before it ends a killed process. Host and keeper share one
open file, and so one position. It says how many bytes have left the pipe, whatever killed the host.
How many of them are durable is not recorded here: the log of the layer above says it.

**Offsets** count the bytes of the stream from its beginning. The layer above counts the bytes that
arrive, and calls `settle` with the offset up to which they are durable. A successor starts at the
offset that its log ends with.

**Memory.** At most `SPOOL_BYTES_MAX` are in the spool. Beyond it the reader waits, the pipe fills,
and the child gets backpressure. When everything is settled, the file is truncated, but its position
stays. The first bytes of the file say from which offset on it is complete: a log that ends before
that offset has lost bytes, and a successor must not continue it.

    file    | free_to: 8 bytes | offset 0 of the stream | offset 1 | … position
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from banksman.errors import MachineError
from banksman.process import syscalls
from banksman.process.pipes import PipeReader

# Bytes that a spool holds at most: a host that reads faster than it commits waits beyond this. It
# equals the largest pipe (`WIDE_PIPE_BYTES`).
SPOOL_BYTES_MAX = 1 << 20
# The spool is emptied when so much of it is settled. Emptying costs two system calls and the pages
# of the file, so it does not follow each commit.
FREE_BYTES = 1 << 18
_HEADER_BYTES = 8
_RETRY_SECONDS = 0.005


class Spool:
    """The unnamed file, and the offsets of this host in it.

    `taken`: the bytes that have left the pipe. `delivered`: those that this host was given.
    `settled`: those that are durable.
    """

    def __init__(self, fd: int) -> None:
        """Continue a spool. The object owns the fd."""
        self._fd = fd
        self._free_to = int.from_bytes(syscalls.pread(fd, _HEADER_BYTES, 0), "little")
        self.taken = syscalls.position(fd) - _HEADER_BYTES
        assert 0 <= self._free_to <= self.taken
        self.settled = self.delivered = self.taken

    @classmethod
    def create(cls) -> Spool:
        """Create an empty spool."""
        fd = syscalls.above_stdio(syscalls.memfd_create("banksman-spool"))
        try:
            # The page of the header exists from now on, so that no later note lacks memory.
            syscalls.pwrite(fd, bytes(_HEADER_BYTES), 0)
            syscalls.seek(fd, _HEADER_BYTES)
            return cls(fd)
        except OSError:
            syscalls.close(fd)
            raise

    def fileno(self) -> int:
        """The fd, or -1 if it is closed."""
        return self._fd

    @property
    def is_full(self) -> bool:
        """Whether no byte can be taken before more is settled."""
        return self.taken - self._free_to >= SPOOL_BYTES_MAX

    def start_at(self, offset: int) -> None:
        """Deliver the bytes from this offset on: the log of the former host ends there.

        Raises `MachineError` if those bytes are not here.
        """
        if not self._free_to <= offset <= self.taken:
            message = (
                f"cannot continue the output at offset {offset}: "
                f"its bytes {self._free_to} to {self.taken} are kept"
            )
            raise MachineError(message, hint="end the process; its output has a gap")
        self.settled = self.delivered = offset
        # The former host may have died between its commit and its note. A full spool would stay
        # full.
        self.settle(offset)

    def take(self, pipe: int, most: int) -> bytes:
        """Return bytes that were not delivered yet, or b"" at the end of the pipe.

        BlockingIOError: there are none now. The spool must not be full.
        """
        if self.delivered == self.taken:
            room = SPOOL_BYTES_MAX - (self.taken - self._free_to)
            assert room > 0
            self.taken += syscalls.splice(pipe, self._fd, min(most, room))
        size = min(most, self.taken - self.delivered)
        data = syscalls.pread(self._fd, size, _HEADER_BYTES + self.delivered) if size else b""
        assert len(data) == size
        self.delivered += size
        return data

    def settle(self, offset: int) -> None:
        """Note that the bytes before this offset are durable, and free their memory at times."""
        # A layer that settles what it was not given has lost count, and would lose bytes.
        assert self.settled <= offset <= self.delivered
        self.settled = offset
        if offset == self.taken and offset - self._free_to >= FREE_BYTES:
            # The note first: it must never promise bytes that are gone. Killed in between, the
            # bytes are merely not used.
            syscalls.pwrite(self._fd, offset.to_bytes(_HEADER_BYTES, "little"), 0)
            syscalls.ftruncate(self._fd, _HEADER_BYTES)
            self._free_to = offset

    def close(self) -> None:
        """Close the fd. The bytes stay as long as another process has the spool."""
        if self._fd >= 0:
            fd, self._fd = self._fd, -1
            syscalls.close(fd)

    # For a reader that was abandoned with its loop.
    __del__ = close


class SpooledReader(PipeReader):
    """Reads one pipe by way of a spool. Call `settle` when bytes are durable."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        fd: int,
        spool: Spool,
        on_data: Callable[[bytes], None],
        on_end: Callable[[bool], None],
    ) -> None:
        super().__init__(loop, fd, on_data, on_end)
        self.spool = spool
        # The spool is full. The loop does not watch the pipe until `settle` has made room.
        self._is_stalled = False

    def resume(self) -> None:
        super().resume()
        # Bytes that the former host has taken: no event of the pipe announces them.
        if self.is_reading and self.spool.delivered < self.spool.taken:
            self._loop.call_soon(self._read, True)

    def settle(self, offset: int) -> None:
        """Note that the bytes before this offset are durable."""
        self.spool.settle(offset)
        if self._is_stalled and not self.spool.is_full:
            self._is_stalled = False
            if self.is_reading:
                self._loop.add_reader(self._fd, self._read, True)

    def _take(self) -> bytes:
        if self.spool.is_full and self.spool.delivered == self.spool.taken:
            self._is_stalled = True
            self._loop.remove_reader(self._fd)
            raise BlockingIOError
        try:
            return self.spool.take(self._fd, self._read_bytes)
        except OSError:
            # These bytes have left the pipe, so no event of the pipe announces them.
            if self.spool.delivered < self.spool.taken:
                self._loop.call_later(_RETRY_SECONDS, self._read, True)
            raise

    def forget(self) -> None:
        super().forget()
        self.spool.close()
