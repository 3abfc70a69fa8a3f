"""The commands of a host: those that run, those that have ended and are still kept, and who was told of their end."""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Iterable

from banksman.errors import NotFound, Refused
from banksman.run.commands.command import Command
from banksman.run.commands.output import Output
from banksman.run.waiters import Waiters

log = logging.getLogger("banksman")

# Reports that are owed and never asked for. Whoever starts this many commands and takes no report does not want them.
UNREPORTED_MAX = 10_000
# Commands of our own at once: each is a small Python, for a search that might take long.
ASIDES_MAX = 64


class Shelf:
    """Finished commands are kept by count and by age; the end of each that a report is owed of is reported once."""

    def __init__(self, *, finished_max: int, finished_seconds_max: float) -> None:
        self._finished_max = finished_max
        self._finished_seconds_max = finished_seconds_max
        self._running: dict[str, Command] = {}
        # Commands of our own: they run and are ended like others, and nobody is told of them.
        self._asides: dict[str, Command] = {}
        # Those that have ended, oldest first, each with the time of its end.
        self._ended: deque[tuple[float, Command]] = deque()
        self._unreported: dict[str, Command] = {}
        # Of all that have ended, those that are forgotten included: how, and what was left or lost of them.
        self.ended: Counter[str] = Counter()
        self.swept = 0
        self.survivors = 0
        self.output_dropped = 0
        self._endings = Waiters()

    def __str__(self) -> str:
        return f"{len(self._running)} running, {len(self._ended)} ended"

    def add(self, command: Command) -> None:
        self._running[command.id] = command

    def check_room_aside(self, *, idle: int) -> None:
        """`idle`: how many of them wait for work; these are bounded elsewhere."""
        if len(self._asides) - idle >= ASIDES_MAX:
            hint = "wait for some of them; a pattern without repeats, alternatives and groups is not counted"
            raise Refused(f"{ASIDES_MAX} searches for patterns are under way", hint=hint)

    def add_aside(self, command: Command) -> None:
        self._asides[command.id] = command

    def end(self, command: Command) -> None:
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
        return [*self._running.values(), *self._asides.values()]

    def all(self) -> list[Command]:
        self._forget_old()
        return [*(command for _at, command in self._ended), *self._running.values()]

    def find(self, id: str) -> Command:
        for command in self.all():
            if command.id == id:
                return command
        raise NotFound(f"there is no command {id!r}", hint="it may have ended long ago; see commands()", command=id)

    async def wait_empty(self) -> None:
        """Until none runs."""
        while self._running or self._asides:
            await self._wait_change(self._running.values())

    # -- reports -----------------------------------------------------------------------------------------------------
    def owe_report(self, command: Command) -> None:
        """From here on its end is news, also if it has ended already."""
        self._unreported[command.id] = command
        if len(self._unreported) > UNREPORTED_MAX:
            oldest = next(iter(self._unreported))
            del self._unreported[oldest]
            log.warning("! nobody takes the reports of ended commands: that of %s is dropped", oldest)
        self._endings.wake()

    def take_report(self, command: Command) -> bool:
        """The caller of `wait` or `stop` has seen this end. False if it was reported before, or need not be."""
        return self._unreported.pop(command.id, None) is not None

    def take_ended(self) -> list[Command]:
        ended = [command for command in self._unreported.values() if command.is_over]
        for command in ended:
            del self._unreported[command.id]
        return ended

    async def wait_ended(self) -> list[Command]:
        while not (ended := self.take_ended()):
            await self._wait_change(self._unreported.values())
        return ended

    async def _wait_change(self, commands: Iterable[Command]) -> None:
        """Wait until a command ends or another report is owed. Meanwhile the caller waits for the end of `commands`."""
        with contextlib.ExitStack() as awaited:
            # Few hold their output, and each end of a command wakes every task that waits here.
            for command in commands:
                if command.holds_output:
                    awaited.enter_context(command.awaiting_end())
            await self._endings.wait()

    def _forget_old(self) -> None:
        oldest = time.monotonic() - self._finished_seconds_max
        while self._ended and (len(self._ended) > self._finished_max or self._ended[0][0] < oldest):
            self._ended.popleft()
        # A report is owed however many there are, but not for ever to somebody who never asks.
        for command in [command for command in self._unreported.values() if command.ended_before(oldest)]:
            del self._unreported[command.id]

    def abandon(self) -> None:
        """The loop is closed: see `Command.abandon`."""
        # One by one: hosts of several threads may notice this at the same time.
        for commands in (self._running, self._asides):
            with contextlib.suppress(KeyError):
                while True:
                    commands.popitem()[1].abandon()


def _lost(output: Output) -> int:
    """What is neither in memory nor in the file, which has the beginning."""
    kept = max(len(output.head), 0 if output.spill is None else output.spill.size)
    return max(0, output.total - len(output.tail) - kept)
