"""How a command ended: the value that `execute` returns."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from banksman.core.facts import Survivor, Swept
from banksman.run.commands.output import Output


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
