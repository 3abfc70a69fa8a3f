"""Commands of a host: running, recently ended, and each end to be reported once."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice

from banksman.commands.command import Command
from banksman.commands.output import Output
from banksman.errors import Closed, Moved, NotFound, Refused
from banksman.tasks import Waiters

log = logging.getLogger("banksman")

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
        # Ended commands, oldest first, each with the time of its end, and the number of older ones
        # that are not kept. Both give each end a number, from 1. `name`: tells the numbers of this
        # registry from those of another one.
        self._ended: deque[tuple[float, Command]] = deque()
        self._forgotten = 0
        self.name = os.urandom(6).hex()
        self._unreported: dict[str, Command] = {}
        # The commands that another host has now.
        self._handed_over: set[str] = set()
        # Statistics of all ended commands, including dropped ones: causes, swept and surviving
        # processes, and lost output.
        self.ended: Counter[str] = Counter()
        self.swept = 0
        self.survivors = 0
        self.output_dropped = 0
        self._endings = Waiters()
        self._is_over = False

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
        """Move a command from running to ended, or forget one that another host has now."""
        if command.is_handed_over:
            self._running.pop(command.id, None)
            self._unreported.pop(command.id, None)
            self._handed_over.add(command.id)
            self._endings.wake()
            return
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

    def background(self) -> list[Command]:
        """Return the running commands that another host can continue for their callers."""
        return [command for command in self._running.values() if command.is_background]

    def owes_report_of(self, command: Command) -> bool:
        """Return whether the end of this command is still to be reported."""
        return command.id in self._unreported

    def all(self) -> list[Command]:
        """Return the ended commands that are still kept, then the running ones."""
        self._forget_old()
        return [*(command for _at, command in self._ended), *self._running.values()]

    def find(self, id: str) -> Command:
        """Return a command by id. Raises `NotFound`, or `Moved` if another host has it now."""
        for command in self.all():
            if command.id == id:
                return command
        if id in self._handed_over:
            hint = "use the host that has it now"
            raise Moved(f"command {id} was handed over to another host", hint=hint, command=id)
        hint = "list the commands; a command that ended long ago is not kept"
        raise NotFound(f"there is no command {id!r}", hint=hint, command=id)

    async def wait_empty(self) -> None:
        """Wait until no command runs."""
        while self._running or self._asides:
            await self._wait_change(self._running.values())

    def end_waits(self) -> None:
        """Fail the calls that wait for an end: no command runs, and none will be started."""
        self._is_over = True
        self._endings.wake()

    # -- the order of all ends --------------------------------------------------------------------
    @property
    def ends(self) -> int:
        """The number of the last end."""
        return self._forgotten + len(self._ended)

    def ended_after(self, number: int) -> tuple[int, list[Command]]:
        """Return the number of the first kept end after an end, and the commands from there on."""
        first = max(self._forgotten, number)
        commands = islice(self._ended, first - self._forgotten, None)
        return first + 1, [command for _at, command in commands]

    async def wait_past(self, number: int) -> None:
        """Wait until a command has ended after the end of this number."""
        while self.ends <= number:
            await self._endings.wait()

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
        """Wait for at least one end without a report, and mark it as reported.

        `Closed`: the host has ended, so no command can end any more.
        """
        while not (ended := self.take_ended()):
            if self._is_over:
                message = "no command can end here: the host has ended"
                raise Closed(message, hint="use the next host")
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
            self._forgotten += 1
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
