"""Join our terminal to the command's own: keys go in, the window size follows, and our mode is restored at the end.

Our terminal is in raw mode meanwhile, so a key acts in the command's terminal and not in ours: Ctrl-C is SIGINT for
whatever is in the foreground there, and a REPL lives on. A command that does not listen to it is ended by three within
a second.

stdin is read by a thread: a selector cannot wait for a file, and a terminal or pipe that is shared with the shell must
not be made non-blocking. The thread is a daemon, and waits while the command takes no input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable
from typing import Any

from banksman.errors import BanksmanError
from banksman.run.commands.command import Command

READ_BYTES_MAX = 4096
# Reads that the command has not taken yet. Then our stdin is not read any more.
AHEAD_MAX = 64
# So many Ctrl-C within so long end the command.
ENDING_COUNT, ENDING_SECONDS = 3, 1.0
_CTRL_C = b"\x03"


class TerminalBridge:
    """`on_end` is called for each Ctrl-C that is to end the command: the third in a row, and every one after it."""

    def __init__(self, command: Command, on_end: Callable[[], None]) -> None:
        self._command = command
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._typed: asyncio.Queue[bytes] = asyncio.Queue()
        # Taken by the thread for each read, given back when that is written.
        self._room = threading.Semaphore(AHEAD_MAX)
        self._presses: deque[float] = deque(maxlen=ENDING_COUNT)
        self._is_ending = False
        self._mode: list[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(self) -> None:
        if os.isatty(0):
            self._mode = termios.tcgetattr(0)
            self._set_raw()
            # Whoever brings us back after a stop may have put the terminal into another mode.
            self._loop.add_signal_handler(signal.SIGCONT, self._set_raw)
        self._loop.add_signal_handler(signal.SIGWINCH, lambda: self._own(self._resize()))
        self._own(self._type())
        threading.Thread(target=self._read, name="banksman-keys", daemon=True).start()

    async def leave(self) -> None:
        for number in (signal.SIGCONT, signal.SIGWINCH):
            self._loop.remove_signal_handler(number)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._mode is not None:
            with contextlib.suppress(termios.error):  # The terminal is gone.
                # At once: to wait for the output would be to wait for a reader who may never read.
                termios.tcsetattr(0, termios.TCSANOW, self._mode)

    def _set_raw(self) -> None:
        with contextlib.suppress(termios.error):
            tty.setraw(0, termios.TCSANOW)

    def _own(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _resize(self) -> None:
        with contextlib.suppress(OSError, BanksmanError):
            size = os.get_terminal_size(1)
            await self._command.resize(size.lines, size.columns)

    async def _type(self) -> None:
        with contextlib.suppress(OSError, BanksmanError):  # It has ended.
            while data := await self._typed.get():
                await self._command.write(data)
                self._room.release()
            await self._command.close_stdin()

    # -- the thread --------------------------------------------------------------------------------------------------
    def _read(self) -> None:
        data = b"\0"
        while data:
            self._room.acquire()
            try:
                data = os.read(0, READ_BYTES_MAX)
            except OSError:
                data = b""  # The terminal is gone.
            try:
                self._loop.call_soon_threadsafe(self._take, data)
            except RuntimeError:
                return  # The loop is closed: the program is ending.

    def _take(self, data: bytes) -> None:
        if self._mode is not None:
            for _ in range(data.count(_CTRL_C)):
                self._press()
        self._typed.put_nowait(data)

    def _press(self) -> None:
        now = time.monotonic()
        self._presses.append(now)
        is_third = len(self._presses) == ENDING_COUNT and now - self._presses[0] <= ENDING_SECONDS
        if is_third or self._is_ending:
            self._is_ending = True
            self._on_end()
