"""A command's face: what callers may wait for. What happens to it, and in which order, is in running_command.py."""

from __future__ import annotations

import asyncio
from typing import Any

from banksman.commands.options import check_seconds, check_size, clamp_timeout
from banksman.commands.output import Piece
from banksman.commands.output_streams import OutputReader
from banksman.commands.output_watch import Match, check_pattern, watch
from banksman.commands.result import Finished
from banksman.commands.running_command import RunningCommand
from banksman.core.process_facts import Stream
from banksman.errors import CommandError, Refused, UsageError


class Command(RunningCommand):
    """A command that was started. Made by the host; all methods are for the loop it was started in."""

    @property
    def stdout(self) -> OutputReader:
        """Its stdout, to be read at the caller's pace: `async for line in command.stdout`. The first read begins at the
        first byte; from then on the command waits while its output is not read, and nothing is lost."""
        return self._flow.readers[Stream.STDOUT]

    @property
    def stderr(self) -> OutputReader:
        """Its stderr, in the same way."""
        return self._flow.readers[Stream.STDERR]

    async def wait(self) -> Finished:
        """Wait for the end and return the result. Cancelling this only stops waiting. Raises if the command could not
        be started.

        This reports the end: `Host.take_ended` does not return the command any more. Output that is neither kept
        (`keep_output=False`) nor read by a caller is dropped while this waits.
        """
        await self.wait_over()
        self.take_report()
        return self.result()

    async def wait_over(self) -> None:
        """Wait for the end, as `wait` does, and leave the report of it to others."""
        with self.awaiting_end():
            await self.wait_settled()

    async def wait_settled(self) -> None:
        """Wait for the end and leave the report of it, and the output, to others. If nothing keeps the output, a full
        stream waits for a reader, and this may wait for ever."""
        while not self.is_over:
            await self._progress.wait()

    async def wait_started(self) -> None:
        while self.pid is None and not self.is_over:
            await self._progress.wait()
        if self._error is not None:
            raise self._error.with_traceback(None)

    async def stop(self, *, at_once: bool = False) -> Finished:
        """End it by the ladder, or `at_once` by KILL; returns when it is over. May be called again, and by several."""
        self.stop_nowait(at_once=at_once)
        return await self.wait()

    async def signal(self, number: int, *, group: bool = False) -> None:
        """Send a signal to the leader, or to its process group. Nothing happens if it has ended."""
        wanted: Any = number
        if isinstance(wanted, bool) or not isinstance(wanted, int) or not 1 <= wanted <= 64:
            raise UsageError(f"there is no signal {number!r}", hint="use a member of signal.Signals")
        await self.wait_started()
        self._process.signal(int(number), to_group=group)

    async def read(self, *, after: int = 0, stream: str = "stdout", bytes_max: int = 65536) -> Piece:
        """Output from byte `after` on; waits until there is some or the stream has ended (`is_end`), which may be long
        before the command ends. Read on from `next`.

        This never slows the command down: what it is late for and was not kept is counted in `missed`. `stdout` and
        `stderr` are for callers that must not miss anything. `UsageError` with `keep_output=False`.
        """
        which = _stream(stream)
        if not self.keeps_output:
            raise UsageError("cannot read by position: this output is not kept", hint=f"read command.{which.value}")
        if after < 0 or bytes_max < 1:
            hint = "after is a byte's number from 0 on, bytes_max at least 1"
            raise UsageError(f"cannot read {bytes_max!r} bytes after {after!r}", hint=hint)
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
        self, pattern: str | bytes, *, after: int = 0, stream: str = "stdout", timeout: float | None = None
    ) -> Match | None:
        """The first match of a regular expression in the output from byte `after` on: at once, if it is there already,
        else as soon as it is. None if the stream ends without one, or `timeout` seconds pass.

        `^` and `$` are the ends of a line. A match of more than 64 KiB may be missed. Cancelling leaves nothing; and
        any number may watch at once. `UsageError` for a pattern that is none, or takes longer than 10 s for one piece
        of the output.
        """
        which = _stream(stream)
        check_pattern(pattern)
        first: Any = after
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise UsageError(f"cannot watch after {after!r}", hint="after is a byte's number from 0 on")
        if timeout is not None:
            check_seconds("timeout", timeout)
        seconds = clamp_timeout(timeout)
        return await watch(self, pattern, after=after, stream=which, timeout=seconds, matchers=self._matchers)

    async def write(self, data: bytes, *, timeout: float | None = None) -> None:
        """Write to stdin, or type at its terminal, whole and in order.

        Past `timeout` seconds: `Refused`, and nothing of it was written; or, if the pipe had taken a part, stdin is
        closed, because nothing may follow half a write. Cancelled, it is taken back, or if it has begun, finished in
        the background.
        """
        stdin = self._process.stdin
        if stdin is None or isinstance(self._options.stdin, bytes):
            raise UsageError("this command has no stdin to write to", hint='start it with stdin="pipe" or pty=True')
        if not isinstance(data, bytes | bytearray | memoryview):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(f"cannot write {data!r:.60}", hint="bytes; encode text first")
        if timeout is not None:
            check_seconds("timeout", timeout)
        writing = stdin.put(bytes(data))
        try:
            async with asyncio.timeout(clamp_timeout(timeout)):
                await asyncio.shield(writing.done)
        except TimeoutError:
            if writing.done.done():
                return writing.done.result()  # Taken whole, in the very pass of the loop in which the time was up.
            if stdin.withdraw(writing):
                raise Refused("the command did not take its stdin in time; nothing was written") from None
            stdin.close()
            raise Refused("the command took only a part of it in time; its stdin is now closed") from None
        except asyncio.CancelledError:
            stdin.withdraw(writing)
            raise

    async def close_stdin(self) -> None:
        """End its stdin, after what is still to be written. At a terminal the end of the input is typed (Ctrl-D at the
        start of a line), and more may be typed after it."""
        if self._process.stdin is not None:
            self._process.stdin.end()

    async def resize(self, rows: int, columns: int) -> None:
        """Give its terminal another size; what runs in the foreground there gets SIGWINCH. Nothing happens if it has
        ended."""
        if self._options.terminal is None:
            raise UsageError("this command has no terminal to resize", hint="start it with pty=True")
        size = check_size(rows, columns)
        await self.wait_started()
        try:
            self._process.resize(size)
        except OSError as exc:
            raise CommandError(f"its terminal cannot be resized any more: {exc.strerror}", command=self.id) from exc


def _stream(name: str) -> Stream:
    try:
        return Stream(name)
    except ValueError:
        raise UsageError(f"there is no stream {name!r}", hint='it is "stdout" or "stderr"') from None
