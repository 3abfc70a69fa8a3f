"""How a command ended: the value that `execute` returns."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from banksman.commands.options import Options
from banksman.commands.output import Output
from banksman.core.process_facts import Exited, Survivor, Swept


class Ended(enum.StrEnum):
    """Why. EXITED is by itself, or by a signal that was not ours; the others name who ended it."""

    EXITED = "exited"
    TIMEOUT = "timeout"
    IDLE_TIMEOUT = "idle_timeout"
    STOPPED = "stopped"
    HOST_CLOSED = "host_closed"
    OUTPUT_LIMIT = "output_limit"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Step:
    """A rung of the stop ladder that was taken, `at` seconds after the start."""

    rung: str
    at: float


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that is over: no process of its tree is left but `survivors`.

    `code` is None if a signal ended it (`signal`), or if nobody could see how it ended (then `signal` is None too).
    `seconds` is the time from the call to here. `drained` is False if somebody outside the tree still held a pipe, so
    that there may have been more to read. `swept` are the processes that had to be ended besides the leader.
    """

    ended: Ended
    code: int | None
    signal: int | None
    seconds: float
    stdout: Output
    stderr: Output
    drained: bool = True
    swept: tuple[Swept, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    ladder: tuple[Step, ...] = ()


# What has happened to a command, as far as is known: in the end, its result.
#
# It answers one question that is harder than it looks: who ended it? Not whoever was heard first, for a loop can be
# late. The keeper says whether it had touched the command before the exit, and stamps the exit with the machine's
# clock.


class ResultBuilder:
    def __init__(self, began: float, options: Options) -> None:
        self.began = self.last_output = began
        self.exit: Exited | None = None
        self.is_output_whole = True
        # None until the tree is proven gone, or those who are left of it are known.
        self.survivors: tuple[Survivor, ...] | None = None
        self.swept: list[Swept] = []
        self._options = options
        self._steps: list[Step] = []
        self._cause: Ended | None = None

    @property
    def has_cause(self) -> bool:
        return self._cause is not None

    def blame(self, cause: Ended) -> None:
        """Say who ended it. The first one stays, and after the exit there is nothing more to end."""
        if self._cause is None and (self.exit is None or cause is Ended.OUTPUT_LIMIT):
            self._cause = cause

    def took_rung(self, rung: str, at: float) -> None:
        self._steps.append(Step(rung, at - self.began))

    def exited(self, fact: Exited) -> None:
        """The leader's end. A command that had finished was not stopped, however soon after that the stop came.

        But it may have passed a deadline that nobody has noticed, and output past its limit is past it in any case.
        """
        self.exit = fact
        # The end of its stdin, the one rung that is not the keeper's, is a touch as well.
        was_left_alone = fact.by_itself and not any(step.rung == "eof" for step in self._steps)
        if was_left_alone and self._cause is not Ended.OUTPUT_LIMIT:
            self._cause = None
        self._cause = self._cause or self.passed_deadline(fact.at)

    def passed_deadline(self, at: float) -> Ended | None:
        """Which clock had run out by `at`, whether or not its timer has."""
        timeout, idle = self._options.timeout, self._options.idle_timeout
        if timeout is not None and at > self.began + timeout:
            return Ended.TIMEOUT
        if idle is not None and at > self.last_output + idle:
            return Ended.IDLE_TIMEOUT
        return None

    def idle_seconds_left(self, at: float) -> float:
        assert self._options.idle_timeout is not None
        return self.last_output + self._options.idle_timeout - at

    def result(self, at: float, *, stdout: Output, stderr: Output, drained: bool, leader: Survivor) -> Finished:
        """`leader` is named if nobody has told what became of the tree: what is not proven gone is not called gone."""
        return Finished(
            ended=self._cause or Ended.EXITED,
            code=None if self.exit is None else self.exit.code,
            signal=None if self.exit is None else self.exit.signal,
            seconds=at - self.began,
            stdout=stdout,
            stderr=stderr,
            drained=drained and self.is_output_whole,
            swept=tuple(self.swept),
            survivors=(leader,) if self.survivors is None else self.survivors,
            ladder=tuple(self._steps),
        )
