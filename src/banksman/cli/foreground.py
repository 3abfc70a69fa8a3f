"""Output passed through to our own stdout and stderr by a thread, so that whoever reads us slowly blocks nothing else.

Our stdout is shared with the shell that started us, so it cannot be made non-blocking; a blocking write in the loop
would stop every timer. The thread blocks instead. When it falls behind, the command's output is no longer read, and the
pipe pushes back on the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import os
import queue
import signal
import termios
import threading
import time
import tty
from collections import deque
from collections.abc import Callable
from typing import Any

from banksman.commands.command import Command
from banksman.commands.options import Options
from banksman.commands.result import Ended, Finished
from banksman.errors import BanksmanError, MachineError
from banksman.process.launch import Launch
from banksman.runtime.base_host import Host

# What may wait to be written before the command is made to wait.
BEHIND_BYTES_MAX = 1 << 20
_FDS = {"stdout": 1, "stderr": 2}


class OutputPump:
    """`put` and the callbacks belong to the loop; `on_behind(True)` asks to stop reading, False to go on."""

    def __init__(self, on_behind: Callable[[bool], None], on_broken: Callable[[OSError], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_behind = on_behind
        self._on_broken = on_broken
        self._queue: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._behind_bytes = 0
        self._is_behind = False
        self._is_broken = False
        self._flushed = self._loop.create_future()
        # A daemon: if nobody ever reads us, a second Ctrl-C must still be able to end the program.
        threading.Thread(target=self._write, name="banksman-through", daemon=True).start()

    def put(self, stream: str, data: bytes) -> None:
        # Behind, and still given more: the command is being stopped, and its pipe is emptied so that it can move. What
        # does not fit is dropped, as it would be had it been killed a moment earlier.
        if self._is_broken or self._behind_bytes > 2 * BEHIND_BYTES_MAX:
            return
        self._behind_bytes += len(data)
        self._queue.put((stream, data))
        if not self._is_behind and self._behind_bytes > BEHIND_BYTES_MAX:
            self._is_behind = True
            self._on_behind(True)

    async def flush(self, seconds: float | None) -> None:
        """Until everything is written, nobody is left to write to, or the time is up."""
        self._queue.put(None)
        await asyncio.wait([self._flushed], timeout=seconds)

    def give_up(self) -> None:
        """Nobody reads us, and the user does not want to wait for that to change."""
        self._is_broken = True
        self._on_flushed()

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            stream, data = item
            try:
                _write_all(_FDS[stream], data)
            except OSError as exc:
                self._call(self._on_write_failed, exc)
            self._call(self._on_written, len(data))
        self._call(self._on_flushed)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            pass  # The loop is closed: the program is ending, and nobody wants to know.

    def _on_written(self, size: int) -> None:
        self._behind_bytes -= size
        if self._is_behind and self._behind_bytes <= BEHIND_BYTES_MAX // 2:
            self._is_behind = False
            self._on_behind(False)

    def _on_write_failed(self, error: OSError) -> None:
        if not self._is_broken:
            self._is_broken = True
            self._on_broken(error)

    def _on_flushed(self) -> None:
        if not self._flushed.done():
            self._flushed.set_result(None)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# Join our terminal to the command's own: keys go in, the window size follows, and our mode is restored at the end.
#
# Our terminal is in raw mode meanwhile, so a key acts in the command's terminal and not in ours: Ctrl-C is SIGINT for
# whatever is in the foreground there, and a REPL lives on. A command that does not listen to it is ended by three
# within a second.
#
# stdin is read by a thread: a selector cannot wait for a file, and a terminal or pipe that is shared with the shell
# must not be made non-blocking. The thread is a daemon, and waits while the command takes no input.

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


# A command in the foreground of a terminal: output passed through, signals turned into the stop ladder.

# What a terminal, a service manager or a parent sends to end us.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_foreground(launch: Launch, options: Options, *, is_quiet: bool) -> tuple[Finished, int | None]:
    """Run it to its end. Also returns the signal that made us stop it, if one did. Quiet: nothing is passed through."""
    with asyncio.Runner() as runner:
        runner.get_loop()  # First, because it may fail, and a coroutine that was made for it would complain.
        result = runner.run(_Foreground(launch, options, is_quiet=is_quiet).run())
    # It is over, and so are we in a moment. Somebody who leans on Ctrl-C shall see the result and not a traceback.
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    return result


class _Foreground:
    def __init__(self, launch: Launch, options: Options, *, is_quiet: bool) -> None:
        self._launch = launch
        self._options = options
        self._is_quiet = is_quiet
        self._command: Command | None = None
        self._through: OutputPump | None = None
        self._caught: int | None = None
        self._error: MachineError | None = None

    async def run(self) -> tuple[Finished, int | None]:
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            # A signal that was ignored when we were started stays ignored: that is how nohup works, and how a shell
            # keeps its Ctrl-C from the jobs in the background.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        async with Host() as host:
            options = self._options
            if not self._is_quiet:
                self._through = OutputPump(self._on_behind, self._on_broken)
                options = dataclasses.replace(options, on_output=self._through.put)
            self._command = host.launch(self._launch, options)
            if options.terminal is None or self._is_quiet:
                finished = await self._finish(self._command)
            else:
                finished = await self._finish_at_terminal(self._command)
        if self._error is not None:
            raise self._error
        return finished, self._caught

    async def _finish(self, command: Command) -> Finished:
        finished = await command.wait()
        if self._through is not None:
            # After an exit of its own a slow reader is waited for, as any program would. Whoever has set a limit, or
            # wants it stopped, does not want to wait for that either.
            is_patient = finished.ended is Ended.EXITED and self._caught is None
            await self._through.flush(None if is_patient else self._options.drain)
        return finished

    async def _finish_at_terminal(self, command: Command) -> Finished:
        # Only for who has a terminal: every import is a part of the start.

        bridge = TerminalBridge(command, lambda: self._on_signal(signal.SIGINT))
        try:
            bridge.enter()
            return await self._finish(command)
        finally:
            await bridge.leave()

    def _on_signal(self, number: int) -> None:
        is_second = self._caught is not None
        self._caught = self._caught or number
        if self._command is not None:
            self._command.stop_nowait(Ended.STOPPED, at_once=is_second)
            if self._through is not None and (is_second or self._command.is_over):
                self._through.give_up()

    def _on_behind(self, is_behind: bool) -> None:
        assert self._command is not None
        if is_behind:
            self._command.pause_reading()
        else:
            self._command.resume_reading()

    def _on_broken(self, error: OSError) -> None:
        """Our output cannot be written. If its reader is gone (`| head -1`), end as a program in a pipeline does."""
        assert self._command is not None
        if error.errno == errno.EPIPE:
            self._caught = self._caught or signal.SIGPIPE
        else:
            self._error = MachineError(f"cannot write the command's output: {error.strerror}", number=error.errno)
        self._command.stop_nowait(Ended.STOPPED)
