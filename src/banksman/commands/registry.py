"""Commands of a host: start, run, list, and report each end once.

`CommandRegistry` holds the running and the recently ended commands. `CommandStarter` is the half of
a host that owns commands. The other half, sessions and the host's lifecycle, is in
runtime/base_host.py. `StartOptions` has the keywords of `start` and `execute`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import logging
import os
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar, Unpack, overload

from banksman.commands.command import Command
from banksman.commands.options import (
    OnOutput,
    Options,
    Pty,
    Redirect,
    Stdin,
    check_seconds,
    clamp_timeout,
)
from banksman.commands.output import Output
from banksman.commands.output_watch import MatcherPool
from banksman.commands.result import Ended, Finished
from banksman.core.process_facts import ProcessFact
from banksman.errors import Closed, NotFound, Refused
from banksman.process.attributes import check_helper
from banksman.process.launch import Argv, Launch, prepare
from banksman.tasks import Waiters

log = logging.getLogger("banksman")

F = TypeVar("F", bound=Callable[..., Any])

# Maximum number of untaken reports. A caller that starts this many commands and takes no report
# does not want them.
UNREPORTED_MAX = 10_000
# Maximum number of concurrent internal commands. Each is a small Python process for a search that
# may take long.
ASIDES_MAX = 64


class CommandRegistry:
    """Running commands, recently ended commands, and unreported ends.

    Ended commands are kept up to a number and an age. Each end that needs a report is reported
    once.
    """

    def __init__(self, *, finished_max: int, finished_seconds_max: float) -> None:
        self._finished_max = finished_max
        self._finished_seconds_max = finished_seconds_max
        self._running: dict[str, Command] = {}
        # Internal commands. They run and end like others, but have no report.
        self._asides: dict[str, Command] = {}
        # Ended commands, oldest first, each with the time of its end.
        self._ended: deque[tuple[float, Command]] = deque()
        self._unreported: dict[str, Command] = {}
        # Statistics of all ended commands, including dropped ones: causes, swept and surviving
        # processes, and lost output.
        self.ended: Counter[str] = Counter()
        self.swept = 0
        self.survivors = 0
        self.output_dropped = 0
        self._endings = Waiters()

    def __str__(self) -> str:
        return f"{len(self._running)} running, {len(self._ended)} ended"

    def add(self, command: Command) -> None:
        """Add a running command."""
        self._running[command.id] = command

    def check_room_aside(self, *, idle: int) -> None:
        """Raise `Refused` if too many internal commands run.

        `idle`: the number of helpers that wait for work. Another limit bounds them.
        """
        if len(self._asides) - idle >= ASIDES_MAX:
            hint = (
                "wait for a search to end, "
                "or use a pattern without repeats, alternatives and groups"
            )
            message = f"cannot watch for the pattern: {ASIDES_MAX} searches are running"
            raise Refused(message, hint=hint)

    def add_aside(self, command: Command) -> None:
        """Add an internal command."""
        self._asides[command.id] = command

    def end(self, command: Command) -> None:
        """Move a command from running to ended."""
        if self._asides.pop(command.id, None) is not None:
            self._endings.wake()
            return
        self._running.pop(command.id, None)
        self._ended.append((time.monotonic(), command))
        self._count(command)
        self._forget_old()
        self._endings.wake()

    def _count(self, command: Command) -> None:
        finished = command.finished
        self.ended["not_started" if finished is None else finished.ended.value] += 1
        if finished is not None:
            self.swept += len(finished.swept)
            self.survivors += len(finished.survivors)
            if command.keeps_output:
                self.output_dropped += _lost(finished.stdout) + _lost(finished.stderr)

    def running(self) -> list[Command]:
        """Return all running commands, including internal ones."""
        return [*self._running.values(), *self._asides.values()]

    def all(self) -> list[Command]:
        """Return the ended commands that are still kept, then the running ones."""
        self._forget_old()
        return [*(command for _at, command in self._ended), *self._running.values()]

    def find(self, id: str) -> Command:
        """Return a command by id. Raises `NotFound`."""
        for command in self.all():
            if command.id == id:
                return command
        hint = "list the commands; a command that ended long ago is not kept"
        raise NotFound(f"there is no command {id!r}", hint=hint, command=id)

    async def wait_empty(self) -> None:
        """Wait until no command runs."""
        while self._running or self._asides:
            await self._wait_change(self._running.values())

    # -- reports ----------------------------------------------------------------------------------
    def owe_report(self, command: Command) -> None:
        """Require a report of this command's end, even if it has already ended."""
        self._unreported[command.id] = command
        if len(self._unreported) > UNREPORTED_MAX:
            oldest = next(iter(self._unreported))
            del self._unreported[oldest]
            log.warning("report of an ended command dropped: too many unread (command=%s)", oldest)
        self._endings.wake()

    def take_report(self, command: Command) -> bool:
        """Mark an end as reported by `wait` or `stop`. False if no report was due."""
        return self._unreported.pop(command.id, None) is not None

    def take_ended(self) -> list[Command]:
        """Return the ended commands without a report, and mark them as reported."""
        ended = [command for command in self._unreported.values() if command.is_over]
        for command in ended:
            del self._unreported[command.id]
        return ended

    async def wait_ended(self) -> list[Command]:
        """Wait for at least one end without a report, and mark it as reported."""
        while not (ended := self.take_ended()):
            await self._wait_change(self._unreported.values())
        return ended

    async def _wait_change(self, commands: Iterable[Command]) -> None:
        """Wait until a command ends or another report is required.

        Meanwhile the caller counts as waiting for the end of `commands`.
        """
        with contextlib.ExitStack() as awaited:
            # Only the few commands that hold output, because each end wakes every task that waits
            # here.
            for command in commands:
                if command.holds_output:
                    awaited.enter_context(command.awaiting_end())
            await self._endings.wait()

    def _forget_old(self) -> None:
        oldest = time.monotonic() - self._finished_seconds_max
        while self._ended and (len(self._ended) > self._finished_max or self._ended[0][0] < oldest):
            self._ended.popleft()
        # A report is due for any number of commands, but not forever if no caller takes it.
        for command in [
            command for command in self._unreported.values() if command.ended_before(oldest)
        ]:
            del self._unreported[command.id]

    def abandon(self) -> None:
        """Give up all commands, because the event loop is closed: see `Command.abandon`."""
        # Pop one command at a time: hosts of several threads may detect this at the same time.
        for commands in (self._running, self._asides):
            with contextlib.suppress(KeyError):
                while True:
                    commands.popitem()[1].abandon()


def _lost(output: Output) -> int:
    """Return the number of bytes that are neither in memory nor in the spill file.

    The spill file holds the beginning of the stream.
    """
    kept = max(len(output.head), 0 if output.spill is None else output.spill.size)
    return max(0, output.total - len(output.tail) - kept)


class StartOptions(TypedDict, total=False):
    """The keywords of `start` and `execute`. `Options` and `prepare` define defaults and checks."""

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


# The keywords that `prepare` checks, with its name for each. `Options` checks the others.
_OF_LAUNCH = {"limits": "limits_wanted"} | {
    name: name for name in ("user", "cwd", "env", "inherit_env", "scrub", "pass_fds")
}


def options_of(how: StartOptions, *, ends_input: bool = False) -> Options:
    """Check the keywords and build the options."""
    if unknown := how.keys() - StartOptions.__annotations__.keys():
        raise TypeError(f"got an unexpected keyword argument {min(unknown)!r}")
    wanted: dict[str, Any] = {name: value for name, value in how.items() if name not in _OF_LAUNCH}
    return Options(**wanted, ends_input=ends_input)


def launch_of(
    argv: Argv, how: StartOptions, options: Options, *, helper: Sequence[str] = ()
) -> Launch:
    """Check the keywords and build the launch."""
    wanted: dict[str, Any] = {
        _OF_LAUNCH[name]: value for name, value in how.items() if name in _OF_LAUNCH
    }
    return prepare(argv, **wanted, has_terminal=options.terminal is not None, helper=helper)


def explicit(function: F) -> F:
    """Show the keywords of `StartOptions` in place of `**how` in `inspect.signature` and `help`.

    Editors do this without help.
    """
    checks = [inspect.signature(Options).parameters, inspect.signature(prepare).parameters]
    defaults = {
        name: parameter.default for parameters in checks for name, parameter in parameters.items()
    }
    *first, _how = (shown := inspect.signature(function)).parameters.values()
    keywords = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=defaults[_OF_LAUNCH.get(name, name)],
            annotation=kind,
        )
        for name, kind in _annotations(StartOptions).items()
    ]
    vars(function)["__signature__"] = shown.replace(parameters=[*first, *keywords])
    return function


def _annotations(typed_dict: type) -> dict[str, str]:
    """Return the annotations as written: an alias is shorter than its definition."""
    return {name: kind.__forward_arg__ for name, kind in typed_dict.__annotations__.items()}


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

    # -- lists and ends ---------------------------------------------------------------------------
    def commands(self) -> list[Command]:
        """Return the ended commands that are still kept, oldest first, then the running ones."""
        return self._command_registry.all()

    def command(self, id: str) -> Command:
        """Return a command by id. Raises `NotFound`."""
        return self._command_registry.find(id)

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
        """
        return await self._command_registry.wait_ended()
