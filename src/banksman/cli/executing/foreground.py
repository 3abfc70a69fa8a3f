"""A command in the foreground of a terminal: output passed through, signals turned into the stop ladder."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import signal

from banksman.cli.executing.through import Through
from banksman.errors import MachineError
from banksman.run.child.launch import Launch
from banksman.run.commands.command import Command
from banksman.run.commands.finished import Ended, Finished
from banksman.run.commands.options import Options
from banksman.run.host import Host

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
        self._through: Through | None = None
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
                self._through = Through(self._on_behind, self._on_broken)
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
        from banksman.cli.executing.terminal_bridge import TerminalBridge  # noqa: PLC0415

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
