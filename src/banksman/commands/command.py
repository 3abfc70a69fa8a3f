"""Methods of a command (a program that runs): wait, stop, signal, read, watch, write, hand over.

`Command` inherits the methods that do not wait, such as `state` and `stop_nowait`, from
running_command.py, which owns the process and orders all events of its life.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from banksman.commands.options import check_seconds, check_size, clamp_timeout
from banksman.commands.output import Piece
from banksman.commands.output_streams import OutputReader
from banksman.commands.output_watch import Match, check_pattern, watch
from banksman.commands.result import Finished
from banksman.commands.running_command import RunningCommand
from banksman.core.process_facts import Stream
from banksman.errors import CommandError, Moved, Refused, UsageError

if TYPE_CHECKING:
    from banksman.commands.command_state import CommandState


class Command(RunningCommand):
    """A started command. The host creates it. All methods belong to the event loop of its start."""

    @property
    def stdout(self) -> OutputReader:
        """Stdout as a pull reader: `async for line in command.stdout`.

        The first read starts at the first byte. From then on the command blocks while its output is
        not read, and nothing is lost.
        """
        return self._flow.readers[Stream.STDOUT]

    @property
    def stderr(self) -> OutputReader:
        """Stderr as a pull reader, like `stdout`."""
        return self._flow.readers[Stream.STDERR]

    async def wait(self) -> Finished:
        """Wait for the end and return the result. Raises if the command could not be started.

        Cancelling this call only stops the wait. The call reports the end, so `Host.take_ended`
        does not return the command again. Output that is neither kept (`keep_output=False`) nor
        read by a caller is dropped during the wait.
        """
        await self.wait_over()
        self.take_report()
        return self.result()

    async def wait_over(self) -> None:
        """Wait for the end like `wait`, but do not report it."""
        with self.awaiting_end():
            await self.wait_settled()

    async def wait_settled(self) -> None:
        """Wait for the end without reporting it and without dropping output.

        If nothing keeps the output, a full stream blocks until a caller reads it. This call may
        then wait forever.
        """
        while not self.is_over:
            await self._progress.wait()

    async def wait_started(self) -> None:
        """Wait until the process has started. Raises if it could not be started."""
        while self.pid is None and not self.is_over:
            await self._progress.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)

    async def stop(self, *, at_once: bool = False) -> Finished:
        """Stop the command by the ladder and wait for its end. `at_once`: send KILL immediately.

        Repeated and concurrent calls are allowed.
        """
        self.stop_nowait(at_once=at_once)
        return await self.wait()

    async def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the leader, or to its process group. No effect after the end."""
        wanted: Any = number
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= 64:
            hint = "use a member of signal.Signals"
            raise UsageError(f"cannot send signal {number!r}: there is no such signal", hint=hint)
        await self.wait_started()
        self.signal_nowait(int(number), to_group=group)

    async def read(
        self, *, after: int = 0, stream: str = "stdout", bytes_max: int = 65536
    ) -> Piece:
        """Read output from byte `after` on; continue at `next` of the returned piece.

        The call waits for output or for the end of the stream (`is_end`), which may come long
        before the end of the command.

        This call never slows the command down. Bytes that the reader is late for and that were not
        kept are counted in `missed`. Callers that must not miss anything use `stdout` and `stderr`.
        Raises `UsageError` with `keep_output=False`.
        """
        which = _stream(stream)
        if not self.keeps_output:
            raise UsageError(
                "cannot read by position: this output is not kept",
                hint=f"read command.{which.value}",
            )
        if after < 0 or bytes_max < 1:
            hint = "pass 0 or more as after, and 1 or more as bytes_max"
            raise UsageError(f"cannot read {bytes_max!r} bytes after byte {after!r}", hint=hint)
        while not self.has_output(which, after):
            await self._flow.wait_changed()
        if self._error is not None:
            raise self._error.with_traceback(None)
        capture = self._flow.captures[which]
        data, begin = capture.read(min(after, capture.total), bytes_max)
        following = begin + len(data)
        is_end = self._flow.has_ended(which) and following >= capture.total
        return Piece(data, following, max(0, begin - after), is_end)

    async def watch(
        self,
        pattern: str | bytes,
        *,
        after: int = 0,
        stream: str = "stdout",
        timeout: float | None = None,
    ) -> Match | None:
        """Return the first match of a regular expression in the output from byte `after` on.

        The call returns immediately if the match is already there, else as soon as it arrives. None
        means that the stream ended without a match, or that `timeout` seconds passed.

        `^` and `$` match at the ends of a line. A match of more than 64 KiB may be missed.
        Cancelling leaves nothing behind, and any number of callers may watch at the same time.
        Raises `UsageError` for an invalid pattern, or for a pattern that takes longer than 10 s for
        one piece of output.
        """
        which = _stream(stream)
        check_pattern(pattern)
        first: Any = after
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            hint = "pass 0 or more as after"
            raise UsageError(f"cannot watch the output after byte {after!r}", hint=hint)
        if timeout is not None:
            check_seconds("timeout", timeout)
        seconds = clamp_timeout(timeout)
        return await watch(
            self, pattern, after=after, stream=which, timeout=seconds, matchers=self._matchers
        )

    async def write(self, data: bytes, *, timeout: float | None = None) -> None:
        """Write to stdin or to the terminal, whole and in order.

        After `timeout` seconds the call raises `Refused`. Then nothing was written; or, if the pipe
        has taken a part, stdin is closed, because nothing may follow half a write. A cancelled call
        withdraws its write. A write that has begun is finished in the background.
        """
        stdin = self._process.stdin
        if stdin is None or isinstance(self._options.stdin, bytes):
            message = f"cannot write to command {self.id}: its stdin is not a pipe"
            raise UsageError(message, hint='start it with stdin="pipe" or pty=True')
        if not isinstance(data, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"cannot write {data!r:.60}", hint="pass bytes; encode text first")
        if timeout is not None:
            check_seconds("timeout", timeout)
        writing = self.put_nowait(bytes(data))
        try:
            async with asyncio.timeout(clamp_timeout(timeout)):
                await asyncio.shield(writing.done)
        except TimeoutError:
            if writing.done.done():
                # The pipe took the whole write in the same loop iteration in which the timeout
                # fired.
                return writing.done.result()
            if stdin.withdraw(writing):
                message = f"cannot write to command {self.id}: timed out; nothing was written"
                raise Refused(message) from None
            stdin.close()
            message = (
                f"cannot write all data to command {self.id}: timed out; its stdin is now closed"
            )
            raise Refused(message) from None
        except asyncio.CancelledError:
            stdin.withdraw(writing)
            raise

    async def close_stdin(self) -> None:
        """Close stdin after all pending writes.

        A terminal gets the end-of-input key (Ctrl-D at the start of a line), and accepts further
        input after it.
        """
        if self._process.stdin is not None:
            self._process.stdin.end()

    async def resize(self, rows: int, columns: int) -> None:
        """Resize the terminal. Its foreground processes get SIGWINCH. No effect after the end."""
        if self._options.terminal is None:
            message = f"cannot resize the terminal of command {self.id}: it has no terminal"
            raise UsageError(message, hint="start it with pty=True")
        size = check_size(rows, columns)
        await self.wait_started()
        try:
            self._process.resize(size)
        except OSError as exc:
            message = f"cannot resize the terminal of command {self.id}: {exc.strerror}"
            raise CommandError(message, command=self.id) from exc

    # -- hand-over --------------------------------------------------------------------------------
    def hand_over_nowait(
        self, hold_seconds: float, secret: bytes, record: bytes = b""
    ) -> asyncio.Future[str]:
        """Begin to give the process to another host: see `KeptProcess.hand_over`.

        Output that was not reported yet goes to the successor. Once the result is there, this
        command is over, with an error that says so. If the future raises, the command continues.
        """
        if not self._ladder.is_running:
            message = f"cannot hand over command {self.id}: it has exited or is being stopped"
            raise Refused(message, hint="wait for its end", command=self.id)
        handed = self._process.hand_over(hold_seconds, secret, record)
        handed.add_done_callback(self._on_handed_over)
        return handed

    def _on_handed_over(self, handed: asyncio.Future[str]) -> None:
        if handed.cancelled() or handed.exception() is not None or self.is_over:
            return
        hint = "use the host that has it now"
        message = f"command {self.id} was handed over to another host"
        self._settle(Moved(message, hint=hint, command=self.id))

    @property
    def is_handed_over(self) -> bool:
        """Whether another host has the process now."""
        return isinstance(self._error, Moved)

    @property
    def needs_this_process(self) -> bool:
        """Whether a callback or a reader of this process takes its output."""
        options = self._options
        return options.on_output is not None or not options.keep_output or self._flow.has_reader

    async def wait_written(self) -> None:
        """Wait until the last write to stdin has ended."""
        if self._last_write is not None:
            await asyncio.wait((self._last_write.done,))

    def state_for(self, scope: str, secret: bytes, *, owes_report: bool) -> CommandState:
        """Return what the next host needs. Call this right before `hand_over_nowait`."""
        # Few hosts hand a command over, and the import takes milliseconds.
        from banksman.commands.command_state import CommandOptions, CommandState  # noqa: PLC0415

        return CommandState(
            id=self.id,
            scope=scope,
            secret=secret,
            argv=self.argv,
            options=CommandOptions.of(self._options),
            last_output=self._account.last_output,
            is_output_whole=self._account.is_output_whole,
            swept=tuple(self._account.swept),
            captures=self._flow.states(),
            owes_report=owes_report,
        )


def _stream(name: str) -> Stream:
    try:
        return Stream(name)
    except ValueError:
        raise UsageError(f"stream cannot be {name!r}", hint='pass "stdout" or "stderr"') from None
