"""The commands of a host: started, run to their end, listed, reported.

Half of what a host is; the other half, its sessions and its own life, is in run/host.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypedDict, Unpack, overload

from banksman.errors import Closed
from banksman.run.child.launch import Argv, Launch, prepare
from banksman.run.child.users import check_helper
from banksman.run.commands.command import Command
from banksman.run.commands.finished import Ended, Finished
from banksman.run.commands.options import OnOutput, Options, Pty, Stdin, check_seconds, endless_beyond
from banksman.run.commands.output import OUTPUT_BYTES_MAX
from banksman.run.commands.redirects import Redirect
from banksman.run.commands.shelf import Shelf
from banksman.run.commands.watching import Matchers


class How(TypedDict, total=False):
    """The keywords of `start`, for type checkers: what it returns depends on `yield_after` alone."""

    timeout: float | None
    idle_timeout: float | None
    grace: float
    linger: float
    drain: float
    stdin: Stdin
    pty: Pty
    stdout: Redirect
    stderr: Redirect
    eof: float | None
    user: str | int | None
    cwd: str | os.PathLike[str] | None
    env: Mapping[str, str] | None
    inherit_env: bool
    scrub: Iterable[str]
    limits: Mapping[Any, Any] | None
    pass_fds: Sequence[int]
    output_bytes_max: int
    output_total_max: int | None
    keep_output: bool
    on_output: OnOutput | None


class Starter(ABC):
    """Starts commands and owns them until they are over."""

    def __init__(
        self, *, finished_max: int, finished_seconds_max: float, user_helper: Sequence[str] | None = None
    ) -> None:
        self._shelf = Shelf(finished_max=finished_max, finished_seconds_max=finished_seconds_max)
        self._matchers = Matchers(self._launch_aside)
        self._user_helper = check_helper(user_helper)
        # False: no caller has this host, so that none could take a report.
        self.owes_reports = True
        # It takes nothing new, and lets what runs finish; it ends what runs.
        self._is_draining = False
        self._is_closing = False

    @abstractmethod
    def _bind(self) -> None:
        """It belongs to the loop that is running, from now on or already."""

    # -- starting ----------------------------------------------------------------------------------------------------
    @overload
    async def start(self, argv: Argv, *, yield_after: None = None, **how: Unpack[How]) -> Command: ...
    @overload
    async def start(self, argv: Argv, *, yield_after: float, **how: Unpack[How]) -> Command | Finished: ...
    async def start(
        self,
        argv: Argv,
        *,
        yield_after: float | None = None,
        timeout: float | None = None,
        idle_timeout: float | None = None,
        grace: float = 5.0,
        linger: float = 0.3,
        drain: float = 2.0,
        stdin: Stdin = None,
        pty: Pty = False,
        stdout: Redirect = None,
        stderr: Redirect = None,
        eof: float | None = None,
        user: str | int | None = None,
        cwd: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
        inherit_env: bool = True,
        scrub: Iterable[str] = (),
        limits: Mapping[Any, Any] | None = None,
        pass_fds: Sequence[int] = (),
        output_bytes_max: int = OUTPUT_BYTES_MAX,
        output_total_max: int | None = None,
        keep_output: bool = True,
        on_output: OnOutput | None = None,
    ) -> Command | Finished:
        """Start a command in the background and return it once it runs. It lives until it ends, is stopped, or the host
        closes.

        With `yield_after`, wait that many seconds first: if it ends within them, its result is returned instead, and
        that is its one report. Cancelled while it waits, the command is stopped: nobody has it yet.

        `pty`: True, or (rows, columns): it has a terminal, and all that is on it is its stdout. `user`: it runs as
        another user, by name or number; that takes root, or the host's `user_helper`.

        `stdout`, `stderr`: None: captured. `subprocess.DEVNULL`, a path (created or emptied), an open file or its fd,
        "inherit": there instead, and nothing of it is seen here. `stderr=subprocess.STDOUT`: where stdout goes.

        `keep_output` False: of what is captured nothing is kept, in memory or on disk. Read `command.stdout` and
        `command.stderr`, or pass `on_output`. Up to 256 KiB of a stream are held for a reader, and then the command
        waits for one. While a caller waits for its end (`wait`, `wait_ended`, `drain`), the rest is dropped instead.

        `eof`: a stop closes its stdin first, and waits so many seconds before TERM.
        """
        if yield_after is not None:
            check_seconds("yield_after", yield_after)
        options = Options(
            timeout=timeout,
            idle_timeout=idle_timeout,
            grace=grace,
            linger=linger,
            drain=drain,
            stdin=stdin,
            pty=pty,
            stdout=stdout,
            stderr=stderr,
            eof=eof,
            output_bytes_max=output_bytes_max,
            output_total_max=output_total_max,
            keep_output=keep_output,
            on_output=on_output,
        )
        launch = prepare(
            argv,
            cwd=cwd,
            env=env,
            inherit_env=inherit_env,
            scrub=scrub,
            limits_wanted=limits,
            pass_fds=pass_fds,
            has_terminal=options.terminal is not None,
            user=user,
            helper=self._user_helper,
        )
        command = self.launch(launch, options)
        if not keep_output and on_output is None:
            command.hold_output()
        try:
            await command.wait_started()
            if yield_after is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(endless_beyond(yield_after)):
                        # The caller that would read its output does not have the command yet: hold the output for it.
                        await command.wait_settled()
                        return command.result()
        except asyncio.CancelledError:
            command.stop_nowait(Ended.CANCELLED)
            self._owe_report(command)
            raise
        self._owe_report(command)
        return command

    def _owe_report(self, command: Command) -> None:
        if self.owes_reports:
            self._shelf.owe_report(command)

    async def run(self, launch: Launch, options: Options) -> Finished:
        """Run to the end; what `execute` does. Cancelling goes through at once and the teardown goes on, owned here."""
        command = self.launch(launch, options)
        try:
            await command.wait_over()
            return command.result()
        except asyncio.CancelledError:
            command.stop_nowait(Ended.CANCELLED)
            raise

    def launch(self, launch: Launch, options: Options) -> Command:
        self._bind()
        if self._is_closing or self._is_draining:
            raise Closed("the host is closing; it starts nothing more", hint="open another Host")
        command = Command(
            launch,
            options,
            id=os.urandom(6).hex(),
            on_end=self._on_end,
            matchers=self._matchers,
            reports=self._shelf,
        )
        self._shelf.add(command)
        return command

    def _launch_aside(self, launch: Launch, options: Options) -> Command:
        """For what a command of ours needs itself. A host that drains lets what runs go on, and so with what that
        needs."""
        if self._is_closing:
            raise Closed("the host is closing; it watches nothing more", hint="open another Host")
        self._bind()
        self._shelf.check_room_aside(idle=len(self._matchers))
        command = Command(launch, options, id=os.urandom(6).hex(), on_end=self._on_end)
        self._shelf.add_aside(command)
        return command

    def _on_end(self, command: Command) -> None:
        self._matchers.end(command.id)
        # Ours, and not the shelf's: a host that was dropped lives as long as its commands, for it is the one that knows
        # of the end of its loop.
        self._shelf.end(command)

    # -- listing and endings -----------------------------------------------------------------------------------------
    def commands(self) -> list[Command]:
        """Every command that runs, and those that have ended and are still kept, oldest first."""
        return self._shelf.all()

    def command(self, id: str) -> Command:
        return self._shelf.find(id)

    def take_ended(self) -> list[Command]:
        """Return the background commands that have ended and were not reported before.

        Each end is reported once: by this, by `wait_ended`, or by the `wait` or `stop` that returned it. Looking at
        `is_over` or `finished` reports nothing.
        """
        return self._shelf.take_ended()

    async def wait_ended(self) -> list[Command]:
        """Like `take_ended`, but waits until there is one. Output of background commands that is neither kept
        (`keep_output=False`) nor read by a caller is dropped while this waits."""
        return await self._shelf.wait_ended()
