"""Result of a command: the value that `execute` returns, and its construction from facts."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from banksman.commands.options import Options
from banksman.commands.output import Output
from banksman.core.process_facts import Exited, Survivor, Swept


class Ended(enum.StrEnum):
    """Cause of the end.

    EXITED means that the command exited without Banksman, or died of a foreign signal. Each other
    value names the cause.
    """

    EXITED = "exited"
    TIMEOUT = "timeout"
    IDLE_TIMEOUT = "idle_timeout"
    STOPPED = "stopped"
    HOST_CLOSED = "host_closed"
    OUTPUT_LIMIT = "output_limit"
    CANCELLED = "cancelled"
    # The kernel killed the command because memory ran out, mostly at its limit `memory_bytes`.
    OUT_OF_MEMORY = "out_of_memory"


@dataclass(frozen=True, slots=True)
class Step:
    """A rung of the stop ladder that was taken, `at` seconds after the start."""

    rung: str
    at: float


@dataclass(frozen=True, slots=True)
class Finished:
    """Result of a command that is over. No process of its tree is left except `survivors`.

    - `code`: None if a signal ended the command (`signal`). If both are None, the exit status could
      not be observed.
    - `seconds`: time from the call to the result.
    - `drained`: False if a process outside the tree still held a pipe. Then there may have been
      more output to read.
    - `swept`: processes besides the leader that had to be ended.
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


class ResultBuilder:
    """Collects the facts about a command, and builds its result.

    The hard question is the cause of the end. The first fact to arrive is no proof, because an
    event loop can be late. The keeper reports whether it had acted on the command before the exit,
    and stamps the exit with the machine's clock.
    """

    def __init__(self, began: float, options: Options) -> None:
        self.began = self.last_output = began
        self.exit: Exited | None = None
        self.is_output_whole = True
        # None until the tree is proven gone, or its survivors are known.
        self.survivors: tuple[Survivor, ...] | None = None
        self.swept: list[Swept] = []
        self._options = options
        self._steps: list[Step] = []
        self._cause: Ended | None = None

    @property
    def has_cause(self) -> bool:
        return self._cause is not None

    def blame(self, cause: Ended) -> None:
        """Set the cause of the end, once. After the exit, only an exceeded output limit counts."""
        if self._cause is None and (self.exit is None or cause is Ended.OUTPUT_LIMIT):
            self._cause = cause

    def took_rung(self, rung: str, at: float) -> None:
        """Record a rung of the ladder."""
        self._steps.append(Step(rung, at - self.began))

    def keeper_acted(self, rung: str, at: float) -> None:
        """Record a rung that the keeper took without an order, and its cause."""
        self.took_rung(rung, at)
        # The control group is killed as a part of KILL, whatever the cause of that is. The keeper
        # takes the other rungs in two cases. The timeout has passed while this host was frozen, or
        # the host closed the connection or lost its lease.
        if rung != "cgroup":
            self.blame(self.passed_deadline(at) or Ended.HOST_CLOSED)

    def exited(self, fact: Exited) -> None:
        """Record the exit of the leader, and correct the cause.

        A command that had already finished was not stopped, however soon the stop followed. But it
        may have passed a deadline before any timer noticed. Exceeded output limits always count.
        """
        self.exit = fact
        # Order of facts: a stop may reach this process before the exit that preceded it. Only the
        # keeper knows whether it had acted, so its report overrides an earlier cause.
        # The end of stdin is the only rung that the keeper does not take, and it counts too.
        was_left_alone = fact.by_itself and not any(step.rung == "eof" for step in self._steps)
        if was_left_alone and self._cause is not Ended.OUTPUT_LIMIT:
            self._cause = None
        if fact.is_out_of_memory and was_left_alone:
            self._cause = self._cause or Ended.OUT_OF_MEMORY
        self._cause = self._cause or self.passed_deadline(fact.at)

    def passed_deadline(self, at: float) -> Ended | None:
        """Return which timeout had passed at the time `at`, even if its timer has not fired."""
        timeout, idle = self._options.timeout, self._options.idle_timeout
        if timeout is not None and at > self.began + timeout:
            return Ended.TIMEOUT
        if idle is not None and at > self.last_output + idle:
            return Ended.IDLE_TIMEOUT
        return None

    def idle_seconds_left(self, at: float) -> float:
        """Return the seconds until the idle timeout."""
        assert self._options.idle_timeout is not None
        return self.last_output + self._options.idle_timeout - at

    def result(
        self, at: float, *, stdout: Output, stderr: Output, drained: bool, leader: Survivor
    ) -> Finished:
        """Build the result.

        `leader`: the survivor to report if the state of the tree is unknown. A process counts as
        gone only with proof.
        """
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
