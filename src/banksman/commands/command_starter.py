"""Start commands and own them until they are over: the half of a host that has commands.

The other half, sessions and the host's lifecycle, is in runtime/base_host.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Unpack, overload

from banksman.commands.command import Command
from banksman.commands.options import (
    Options,
    StartOptions,
    check_seconds,
    clamp_timeout,
    explicit,
    launch_of,
    options_of,
)
from banksman.commands.output_watch import MatcherPool
from banksman.commands.registry import CommandRegistry
from banksman.commands.result import Ended, Finished
from banksman.core.process_facts import ProcessFact
from banksman.errors import Closed
from banksman.process.attributes import check_helper
from banksman.process.launch import Argv, Launch


class CommandStarter(ABC):
    """Starts commands and owns them until they are over."""

    def __init__(
        self,
        *,
        finished_max: int,
        finished_seconds_max: float,
        user_helper: Sequence[str] | None = None,
    ) -> None:
        self._command_registry = CommandRegistry(
            finished_max=finished_max, finished_seconds_max=finished_seconds_max
        )
        self._matchers = MatcherPool(self._launch_aside)
        self._user_helper = check_helper(user_helper)
        # False if no caller has this host, so no caller could take a report.
        self.owes_reports = True
        # Draining: no new commands, and running ones may finish. Closing: running commands are
        # ended.
        self._is_draining = False
        self._is_closing = False

    @abstractmethod
    def _bind(self) -> None:
        """Bind the host to the running event loop, if it is not bound already."""

    # -- start ------------------------------------------------------------------------------------
    @overload
    async def start(
        self, argv: Argv, *, yield_after: None = None, **how: Unpack[StartOptions]
    ) -> Command: ...
    @overload
    async def start(
        self, argv: Argv, *, yield_after: float, **how: Unpack[StartOptions]
    ) -> Command | Finished: ...
    @explicit
    async def start(
        self, argv: Argv, *, yield_after: float | None = None, **how: Unpack[StartOptions]
    ) -> Command | Finished:
        """Start a command in the background and return it once it runs.

        The command lives until it ends, is stopped, or the host closes.

        `yield_after`: wait this many seconds first. If the command ends within them, its result is
        returned instead, and that is its only report. If this call is cancelled during the wait,
        the command is stopped, because no caller has it yet.

        `pty`: True, or (rows, columns). The command gets a terminal, and the terminal's output is
        its stdout. `user`: run as another user, by name or number. This requires root, or the
        host's `user_helper`.

        `stdout`, `stderr`: None captures the stream. `subprocess.DEVNULL`, a path (created or
        truncated), an open file or its fd, or "inherit" redirect it, and Banksman sees nothing of
        it. `stderr=subprocess.STDOUT`: use the target of stdout.

        `keep_output`: False keeps nothing of the captured output, in memory or on disk. Read
        `command.stdout` and `command.stderr`, or pass `on_output`. Up to 256 KiB of a stream are
        held for a reader, and then the command blocks until it comes. While a caller waits for the
        end (`wait`, `wait_ended`, `drain`), the rest is dropped instead.

        `eof`: a stop closes stdin first, and waits up to this many seconds before TERM.
        """
        if yield_after is not None:
            check_seconds("yield_after", yield_after)
        options = options_of(how)
        command = self.launch(launch_of(argv, how, options, helper=self._user_helper), options)
        if not options.keep_output and options.on_output is None:
            command.hold_output()
        try:
            await command.wait_started()
            if yield_after is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(clamp_timeout(yield_after)):
                        # The caller that would read the output does not have the command yet: hold
                        # the output for it.
                        await command.wait_settled()
                        return command.result()
        except asyncio.CancelledError:
            command.stop_nowait(Ended.CANCELLED)
            self._owe_report(command)
            raise
        self._owe_report(command)
        command.is_background = True
        return command

    def _owe_report(self, command: Command) -> None:
        if self.owes_reports:
            self._command_registry.owe_report(command)

    async def run(self, launch: Launch, options: Options) -> Finished:
        """Run a command to its end, for `execute`.

        A cancel takes effect immediately. The teardown continues, owned by this host.
        """
        command = self.launch(launch, options)
        try:
            await command.wait_over()
            return command.result()
        except asyncio.CancelledError:
            # The registry owns the command, so its teardown needs no task of the caller.
            command.stop_nowait(Ended.CANCELLED)
            raise

    def launch(
        self,
        launch: Launch,
        options: Options,
        *,
        on_fact: Callable[[ProcessFact], None] | None = None,
        on_end: Callable[[Command], None] | None = None,
    ) -> Command:
        """Start a command and register it. Raises `Closed` on a draining or closing host.

        `on_fact`: called with each process fact. `on_end`: called once, when the command is over.
        """
        self._bind()
        if self._is_closing or self._is_draining:
            raise Closed("cannot start a command: the host is closing", hint="open another Host")
        end = self._on_end if on_end is None else functools.partial(self._on_end, then=on_end)
        command = Command(
            launch,
            options,
            id=os.urandom(6).hex(),
            on_end=end,
            on_fact=on_fact,
            matchers=self._matchers,
            reports=self._command_registry,
        )
        self._command_registry.add(command)
        return command

    def _launch_aside(self, launch: Launch, options: Options) -> Command:
        """Start an internal command that a command needs.

        A draining host lets running commands finish, so it also starts the helpers that they need.
        """
        if self._is_closing:
            raise Closed("cannot watch the output: the host is closing", hint="open another Host")
        self._bind()
        self._command_registry.check_room_aside(idle=len(self._matchers))
        command = Command(launch, options, id=os.urandom(6).hex(), on_end=self._on_end)
        self._command_registry.add_aside(command)
        return command

    def _on_end(self, command: Command, then: Callable[[Command], None] | None = None) -> None:
        self._matchers.end(command.id)
        # This callback is a method of the host and not of the registry. The bound method keeps a
        # dropped host alive as long as its commands, because the host detects the closing of its
        # event loop.
        self._command_registry.end(command)
        if then is not None:
            then(command)

    # -- hand-over --------------------------------------------------------------------------------
    async def hand_over_commands(self, hold_seconds: float, *, scope: str) -> int:
        """Hand the background commands over to the next host of this scope, and start no more.

        `hold_seconds`: a command that no host has taken over within this time is ended. `scope`:
        names the server that continues them.

        Returns the number of commands that stay here, with the reasons in the log.
        """
        from banksman.commands import command_hand_over  # noqa: PLC0415

        self._is_draining = True
        return await command_hand_over.give_all(self._command_registry, hold_seconds, scope)

    async def take_over_commands(self, scope: str) -> int:
        """Continue the commands that another host of this scope has handed over.

        Returns their number. Why a command could not be taken over is in the log.
        """
        from banksman.commands import command_hand_over  # noqa: PLC0415

        self._bind()
        taken = [found async for found in command_hand_over.claim_all(scope)]
        for state, claimed in taken:
            command = Command(
                claimed,
                state.options.restored(),
                id=state.id,
                on_end=self._on_end,
                matchers=self._matchers,
                reports=self._command_registry,
                state=state,
            )
            command.is_background = True
            self._command_registry.add(command)
            if state.owes_report:
                self._owe_report(command)
        return len(taken)

    # -- lists and ends ---------------------------------------------------------------------------
    def commands(self) -> list[Command]:
        """Return the ended commands that are still kept, oldest first, then the running ones."""
        return self._command_registry.all()

    def command(self, id: str) -> Command:
        """Return a command by id. Raises `NotFound`, or `Moved` if another host has it now."""
        return self._command_registry.find(id)

    @property
    def command_registry(self) -> CommandRegistry:
        """The commands of this host, with the order of their ends."""
        return self._command_registry

    def take_ended(self) -> list[Command]:
        """Return the background commands that have ended and were not reported before.

        Each end is reported once: by this call, by `wait_ended`, or by the `wait` or `stop` that
        returned it. Looking at `is_over` or `finished` reports nothing.
        """
        return self._command_registry.take_ended()

    async def wait_ended(self) -> list[Command]:
        """Wait for the next ends, and return the commands like `take_ended`.

        During the wait, output of background commands that is neither kept (`keep_output=False`)
        nor read by a caller is dropped.

        `Closed`: the host has ended, and every end was reported.
        """
        return await self._command_registry.wait_ended()
