"""The two pipes to the editor: whole lines in, whole lines out.

Nothing but messages goes to stdout, ever: the pipe is taken away from everybody else at the beginning, and what a
library prints by accident goes nowhere.

Lines out are written by a thread, because whoever does not read us must not stop us from reading. How much waits there
is bounded. Who tells of a session waits then, and so falls behind its log, which is no loss: the log is the buffer.
Answers have room beyond that, so that an editor which sends much before it reads anything is not sent into a deadlock.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator

READ_BYTES_MAX = 1 << 16
# A prompt with pictures has some megabytes, and the server takes 32 MiB.
LINE_BYTES_MAX = 64 << 20
# What may wait to be written: of what the log has anyway, and of answers.
UPDATES_BYTES_MAX = 1 << 20
ANSWERS_BYTES_MAX = 8 << 20


def take_stdio() -> tuple[int, int]:
    """Stdin and stdout, for us alone: nobody who is started from here has them, and nobody else here can write there.
    Raises OSError if there is none."""
    # Both, before either is copied: a copy takes the lowest number that is free, and that may be the other's.
    os.fstat(0)
    os.fstat(1)
    stdin, stdout = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.close(null)
    return stdin, stdout


def lines(fd: int, *, line_bytes_max: int = LINE_BYTES_MAX) -> Iterator[bytes | None]:
    """Each line without its end, until there are no more; None: one that was too long to be kept. What comes after the
    last line end was never said."""
    pieces: list[bytes] = []
    size = 0
    while data := _read(fd):
        first, *rest = data.split(b"\n")
        for index, piece in enumerate((first, *rest)):
            if index:
                yield b"".join(pieces) if size <= line_bytes_max else None
                pieces, size = [], 0
            size += len(piece)
            if size <= line_bytes_max:
                pieces.append(piece)
            else:
                pieces = []


def _read(fd: int) -> bytes:
    try:
        return os.read(fd, READ_BYTES_MAX)
    except OSError:
        return b""  # A terminal that was hung up, say: nobody is there any more.


class Outbox:
    """What is on its way to the editor, in order. `on_gone` is called once, when nobody can be written to any more."""

    def __init__(self, fd: int, on_gone: Callable[[], None]) -> None:
        self._fd = fd
        self._on_gone = on_gone
        # For all that is below. Nothing is called and no other lock is taken while it is held.
        self._changed = threading.Condition()
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._is_gone = False
        # A daemon, as all threads here: it may stand in a write that never ends, and the program must be able to.
        threading.Thread(target=self._write, name="banksman-acp-out", daemon=True).start()

    def put(self, line: bytes, *, is_answer: bool = False) -> bool:
        """Waits for room. False: the editor is gone."""
        bytes_max = ANSWERS_BYTES_MAX if is_answer else UPDATES_BYTES_MAX
        with self._changed:
            self._changed.wait_for(lambda: self._is_gone or self._bytes < bytes_max)
            if self._is_gone:
                return False
            self._lines.append(line)
            self._bytes += len(line)
            self._changed.notify_all()
            return True

    def flush(self, seconds: float) -> None:
        """Until everything is written, nobody is left to write to, or the time is up."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_gone or not self._bytes, seconds)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._lines)
                line = self._lines.popleft()
            try:
                _write_all(self._fd, line)
            except OSError:
                with self._changed:
                    self._is_gone = True
                    self._changed.notify_all()
                self._on_gone()
                return
            with self._changed:
                self._bytes -= len(line)
                self._changed.notify_all()


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
