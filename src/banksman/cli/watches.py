"""Watches of `banksman exec`: its caller, a hang-up of stdin, and the limits of the tree.

`guard` has the same watches without an event loop.
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import sys
from collections.abc import Callable

from banksman.commands.command import Command
from banksman.errors import UsageError
from banksman.process.tree_limits import LOOK_SECONDS, TreeLimits


class Watches:
    """Watches that begin with the command. Each begins its stop, in the way that a signal would.

    `caller`: a pidfd of the caller, or -1. This object closes it.

    `grace_after_eof`: seconds for the command to exit after stdin hung up; None does not watch
    stdin. A pipe that ends is normal for a command in a pipeline, so that is the default.
    """

    def __init__(
        self,
        *,
        caller: int,
        grace_after_eof: float | None,
        memory_bytes_max: int | None,
        processes_max: int | None,
    ) -> None:
        asked = (memory_bytes_max, processes_max, grace_after_eof)
        if sys.platform != "linux" and asked != (None, None, None):
            message = "cannot watch the command: --memory, --pids and --grace-after-eof need Linux"
            raise UsageError(message, hint="leave them out")
        self._grace_after_eof = grace_after_eof
        self._limits = memory_bytes_max, processes_max
        self._caller = caller
        self._stdin: select.epoll | None = None
        self._timers: list[asyncio.TimerHandle] = []
        self._command: Command | None = None
        # The name of the limit for which the tree was ended.
        self.exceeded: str | None = None

    def begin(self, command: Command, end: Callable[[int], bool]) -> None:
        """Start to watch.

        `command`: the limits are those of its tree. `end`: begins to end the command, as this
        signal to this process would. It returns False if something else has begun that before.
        """
        loop = asyncio.get_running_loop()
        if self._caller >= 0:
            loop.add_reader(self._caller, self._on_caller_gone, end)
        if self._grace_after_eof is not None:
            self._watch_stdin(end, self._grace_after_eof)
        if self._limits != (None, None):
            self._command = command
            self._look_later(end, None)

    def end(self) -> None:
        """Stop watching, and close the fds."""
        for timer in self._timers:
            timer.cancel()
        self._forget_caller()
        self._forget_stdin()

    def _on_caller_gone(self, end: Callable[[int], bool]) -> None:
        self._forget_caller()
        end(signal.SIGHUP)

    def _forget_caller(self) -> None:
        if self._caller >= 0:
            asyncio.get_running_loop().remove_reader(self._caller)
            os.close(self._caller)
            self._caller = -1

    def _watch_stdin(self, end: Callable[[int], bool], seconds: float) -> None:
        # An epoll of its own, because the loop can only wait for readable data. It reports a
        # hang-up even if data is unread.
        stdin = select.epoll()
        try:
            stdin.register(0, select.EPOLLRDHUP)
        except OSError:
            stdin.close()  # A regular file never hangs up.
            return
        self._stdin = stdin
        asyncio.get_running_loop().add_reader(stdin, self._on_hangup, end, seconds)

    def _on_hangup(self, end: Callable[[int], bool], seconds: float) -> None:
        self._forget_stdin()
        self._timers.append(asyncio.get_running_loop().call_later(seconds, end, signal.SIGHUP))

    def _forget_stdin(self) -> None:
        if self._stdin is not None:
            asyncio.get_running_loop().remove_reader(self._stdin)
            self._stdin.close()
            self._stdin = None

    def _look_later(self, end: Callable[[int], bool], limits: TreeLimits | None) -> None:
        loop = asyncio.get_running_loop()
        self._timers[:] = [timer for timer in self._timers if timer.when() > loop.time()]
        self._timers.append(loop.call_later(LOOK_SECONDS, self._look, end, limits))

    def _look(self, end: Callable[[int], bool], limits: TreeLimits | None) -> None:
        assert self._command is not None
        if limits is None and (keeper := self._command.keeper_pid) is not None:
            limits = TreeLimits(keeper, *self._limits)
        exceeded = None if limits is None else limits.exceeded()
        if exceeded is None:
            self._look_later(end, limits)
        elif end(signal.SIGTERM):
            self.exceeded = exceeded
