"""Run a command for `banksman exec`: pass its output and keys through, end it on a signal.

`run_foreground` runs the command on a host in this process. The first signal starts the ladder, and
the second kills at once. A watch (`watches.py`) only starts the ladder. `TerminalBridge` connects
the user's terminal to the terminal of the command. `OutputPump` writes the output. The flags and
exit codes are in `commands/exec.py`.

A thread writes the command's output to stdout and stderr, so that a slow reader blocks nothing
else. The shell shares stdout, so it cannot be made non-blocking, and a blocking write in the event
loop would stop every timer. The thread blocks instead. When it falls behind, the command's output
is not read, and the full pipe applies backpressure to the command.
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

from banksman.cli.watches import Watches
from banksman.commands.command import Command
from banksman.commands.options import Options
from banksman.commands.result import Ended, Finished
from banksman.errors import BanksmanError, MachineError
from banksman.process.caller import SECOND_SIGNAL_SECONDS
from banksman.process.launch import Launch
from banksman.runtime.base_host import Host

# Bytes that may wait to be written before the command has to wait.
BEHIND_BYTES_MAX = 1 << 20
_FDS = {"stdout": 1, "stderr": 2}
READ_BYTES_MAX = 4096
# Reads that the command has not taken yet. At this limit the thread stops reading stdin.
AHEAD_MAX = 64
# This many Ctrl-C within this time end the command.
ENDING_COUNT, ENDING_SECONDS = 3, 1.0
_CTRL_C = b"\x03"


class OutputPump:
    """Write the command's output from a thread, with backpressure.

    `put` and both callbacks run in the event loop. `on_behind(True)` asks the caller to stop
    reading, `on_behind(False)` to resume.
    """

    def __init__(
        self, on_behind: Callable[[bool], None], on_broken: Callable[[OSError], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_behind = on_behind
        self._on_broken = on_broken
        self._queue: queue.SimpleQueue[tuple[str, bytes] | None] = queue.SimpleQueue()
        self._behind_bytes = 0
        self._is_behind = False
        self._is_broken = False
        self._flushed = self._loop.create_future()
        # A daemon thread: a second Ctrl-C must end the program even if the reader never reads.
        threading.Thread(target=self._write, name="banksman-through", daemon=True).start()

    def put(self, stream: str, data: bytes) -> None:
        """Queue output for writing."""
        # Output still arrives while the pump is behind: the command is being stopped, and its pipe
        # is emptied so that it can make progress. Excess output is dropped, as it would be had the
        # command been killed a moment earlier.
        if self._is_broken or self._behind_bytes > 2 * BEHIND_BYTES_MAX:
            return
        self._behind_bytes += len(data)
        self._queue.put((stream, data))
        if not self._is_behind and self._behind_bytes > BEHIND_BYTES_MAX:
            self._is_behind = True
            self._on_behind(True)

    async def flush(self, seconds: float | None) -> None:
        """Wait until everything is written, the reader is gone, or the time is up."""
        self._queue.put(None)
        await asyncio.wait([self._flushed], timeout=seconds)

    def give_up(self) -> None:
        """Drop the remaining output.

        The reader does not read, and the user does not want to wait for it.
        """
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
            # The loop is closed because the program is ending. The result is not needed.
            pass

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


class TerminalBridge:
    """Connect the terminal of this process to the terminal of the command.

    The user's terminal is in raw mode, so a key acts in the command's terminal. Ctrl-C is SIGINT
    for the foreground process there, and a REPL survives it. Three Ctrl-C within a second end a
    command that ignores it.

    A thread reads stdin. A selector cannot wait for a regular file, and a terminal or pipe that the
    shell shares must not be made non-blocking. The thread is a daemon. It waits while the command
    takes no input.

    `on_end`: called for the third Ctrl-C in a row and every later one. It ends the command.
    """

    def __init__(self, command: Command, on_end: Callable[[], None]) -> None:
        self._command = command
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._typed: asyncio.Queue[bytes] = asyncio.Queue()
        # The thread acquires it for each read. The loop releases it when the command has taken the
        # bytes.
        self._room = threading.Semaphore(AHEAD_MAX)
        self._presses: deque[float] = deque(maxlen=ENDING_COUNT)
        self._is_ending = False
        self._mode: list[Any] | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def enter(self) -> None:
        """Set raw mode, and start to forward keys and window sizes."""
        if os.isatty(0):
            self._mode = termios.tcgetattr(0)
            self._set_raw()
            # After a stop (SIGTSTP) the shell may have put the terminal into another mode.
            self._loop.add_signal_handler(signal.SIGCONT, self._set_raw)
        self._loop.add_signal_handler(signal.SIGWINCH, lambda: self._own(self._resize()))
        self._own(self._type())
        threading.Thread(target=self._read, name="banksman-keys", daemon=True).start()

    async def leave(self) -> None:
        """Stop forwarding and restore the mode of the terminal."""
        for number in (signal.SIGCONT, signal.SIGWINCH):
            self._loop.remove_signal_handler(number)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._mode is not None:
            with contextlib.suppress(termios.error):  # The terminal is gone.
                # TCSANOW: waiting for the output to drain means waiting for a reader that may never
                # read.
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
        with contextlib.suppress(OSError, BanksmanError):  # The command has ended.
            while data := await self._typed.get():
                await self._command.write(data)
                self._room.release()
            await self._command.close_stdin()

    # -- thread -----------------------------------------------------------------------------------
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


# A command in the foreground of a terminal: its output passes through, and signals start the
# ladder.

# Signals by which a terminal, a service manager or a parent ends this process.
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def run_foreground(
    launch: Launch, options: Options, watches: Watches, *, is_quiet: bool
) -> tuple[Finished, int | None]:
    """Run the command to its end. Return its result and the signal that stopped it, or None.

    `is_quiet`: capture the output instead of passing it through.
    """
    with asyncio.Runner() as runner:
        # Create the loop first, because that may fail. A coroutine object created before would then
        # warn that it was never awaited.
        runner.get_loop()
        result = runner.run(_Foreground(launch, options, watches, is_quiet=is_quiet).run())
    # The command is over and this process is about to exit. A user who holds Ctrl-C must see the
    # result and not a traceback.
    for number in _ENDING:
        signal.signal(number, signal.SIG_IGN)
    return result


class _Foreground:
    def __init__(
        self, launch: Launch, options: Options, watches: Watches, *, is_quiet: bool
    ) -> None:
        self._watches = watches
        self._launch = launch
        self._options = options
        self._is_quiet = is_quiet
        self._command: Command | None = None
        self._through: OutputPump | None = None
        self._caught: int | None = None
        # When the first signal arrived that a second one may follow.
        self._signalled_at: float | None = None
        self._error: MachineError | None = None

    async def run(self) -> tuple[Finished, int | None]:
        loop = asyncio.get_running_loop()
        for number in _ENDING:
            # A signal that was ignored at the start stays ignored. That is how nohup works, and how
            # a shell keeps Ctrl-C from its background jobs.
            if signal.getsignal(number) is not signal.SIG_IGN:
                loop.add_signal_handler(number, self._on_signal, number)
        async with Host() as host:
            options = self._options
            if not self._is_quiet:
                self._through = OutputPump(self._on_behind, self._on_broken)
                options = dataclasses.replace(options, on_output=self._through.put)
            self._command = host.launch(self._launch, options)
            if self._caught is not None:
                # The signal came before the command.
                self._command.stop_nowait(Ended.STOPPED)
            self._watches.begin(self._command, self._begin_stop)
            try:
                if options.terminal is None or self._is_quiet:
                    finished = await self._finish(self._command)
                else:
                    finished = await self._finish_at_terminal(self._command)
            finally:
                self._watches.end()
        if self._error is not None:
            raise self._error
        return finished, self._caught

    async def _finish(self, command: Command) -> Finished:
        finished = await command.wait()
        if self._through is not None:
            # After a normal exit this process waits for a slow reader, as any program would. After
            # a timeout or a stop the user does not want to wait for the reader either.
            is_patient = finished.ended is Ended.EXITED and self._caught is None
            await self._through.flush(None if is_patient else self._options.drain)
        return finished

    async def _finish_at_terminal(self, command: Command) -> Finished:

        bridge = TerminalBridge(command, lambda: self._on_signal(signal.SIGINT))
        try:
            bridge.enter()
            return await self._finish(command)
        finally:
            await bridge.leave()

    def _on_signal(self, number: int) -> None:
        self._begin_stop(number)
        if number == signal.SIGHUP:
            # It often accompanies another signal or the death of the caller, and does not mean
            # more: a terminal that is closed sends it.
            return
        now = time.monotonic()
        if self._signalled_at is None:
            self._signalled_at = now
        elif now - self._signalled_at >= SECOND_SIGNAL_SECONDS and self._command is not None:
            self._command.stop_nowait(Ended.STOPPED, at_once=True)
            if self._through is not None:
                self._through.give_up()

    def _begin_stop(self, number: int) -> bool:
        """Begin to stop the command, as on this signal. Return whether no stop had begun before.

        A stop that has begun goes on as it is.
        """
        is_first = self._caught is None
        # Keep the first signal: it decides the exit code.
        self._caught = self._caught or number
        if self._command is not None:
            self._command.stop_nowait(Ended.STOPPED)
            # With the command over, only its output is pending. A signal then means: do not wait
            # for the reader.
            if self._through is not None and self._command.is_over:
                self._through.give_up()
        return is_first

    def _on_behind(self, is_behind: bool) -> None:
        assert self._command is not None
        if is_behind:
            self._command.pause_reading()
        else:
            self._command.resume_reading()

    def _on_broken(self, error: OSError) -> None:
        """Handle a failed write.

        If the reader is gone (`| head -1`), end like a program in a pipeline.
        """
        assert self._command is not None
        if error.errno == errno.EPIPE:
            self._caught = self._caught or signal.SIGPIPE
        else:
            self._error = MachineError(
                f"cannot write the command's output: {error.strerror}", number=error.errno
            )
        self._command.stop_nowait(Ended.STOPPED)
