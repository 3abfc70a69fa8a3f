"""What happens to a process: frozen values, past tense. Each layer passes them up as they are.

A `Process` tells its command, a command tells the `AgentProcess` of a session, and that tells the session's driver. A
session wraps them in `ProcessReported`, which says which of its processes it was and when it was heard. Times (`at`)
are seconds of the machine's monotonic clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from banksman.errors import BanksmanError


class Stream(enum.StrEnum):
    STDOUT = "stdout"
    STDERR = "stderr"


@dataclass(frozen=True, slots=True)
class Swept:
    """A process that had to be ended besides the leader."""

    pid: int
    command: str


@dataclass(frozen=True, slots=True)
class Survivor:
    """A process that could not be ended, and why. `pid` 0: there is one, but the kernel does not show it to us."""

    pid: int
    command: str
    why: str


@dataclass(frozen=True, slots=True)
class Rung:
    """One of the stop ladder that was taken. `at` is a time of the wall's clock: it is only ever shown."""

    rung: str
    at: float


@dataclass(frozen=True, slots=True)
class Started:
    """`born`: by what it and its keeper can be known later, by another host: see `process/orphans.py`."""

    pid: int
    at: float
    born: tuple[str, int, int, int, int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class StartFailed:
    """Nothing runs, and nothing will."""

    error: BanksmanError


@dataclass(frozen=True, slots=True)
class NeverStarted:
    """It was stopped before it began: nothing ran."""

    at: float


@dataclass(frozen=True, slots=True)
class BytesRead:
    """A piece of its output, as it came."""

    stream: Stream
    data: bytes
    at: float


@dataclass(frozen=True, slots=True)
class StreamEnded:
    """Nothing more will be read. `is_whole` False: reading failed, and there may have been more."""

    stream: Stream
    at: float
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class Exited:
    """The leader has ended. Neither code nor signal: nobody could see how (its keeper was killed).

    `by_itself`: the keeper had not touched it before, so whatever was asked for meanwhile did not end it.
    """

    code: int | None
    signal: int | None
    at: float
    by_itself: bool = False


@dataclass(frozen=True, slots=True)
class KeeperActed:
    """The keeper took a rung by itself: we were silent past its deadline, or had hung up. `by_lease`: that we still
    have what it works for was not said again in time."""

    rung: str
    at: float
    by_lease: bool = False


@dataclass(frozen=True, slots=True)
class FrameWritten:
    """The pipe has taken a whole frame."""


@dataclass(frozen=True, slots=True)
class WriteFailed:
    """The process takes no more input. What it had of the frame is unknown."""

    error: BanksmanError


@dataclass(frozen=True, slots=True)
class ProcessesSwept:
    """Processes that were ended besides the leader, with the tree or by a sweep that nobody waits for any more."""

    processes: tuple[Swept, ...]


@dataclass(frozen=True, slots=True)
class SweepEnded:
    """What was started since a moment is gone, but for the survivors; or it was only looked for, and they are all."""

    swept: tuple[Swept, ...] = ()
    survivors: tuple[Survivor, ...] = ()


@dataclass(frozen=True, slots=True)
class TreeEnded:
    """No process of the tree is left but these. What it wrote may not have been read yet: see `ProcessGone`."""

    survivors: tuple[Survivor, ...]
    at: float


@dataclass(frozen=True, slots=True)
class Stderr:
    """What a process has written to stderr: all of it in `head`, or its two ends."""

    head: str = ""
    tail: str | None = None

    @property
    def text(self) -> str:
        return self.head if self.tail is None else f"{self.head}\n[…]\n{self.tail}"


_NO_STDERR = Stderr()


@dataclass(frozen=True, slots=True)
class ProcessGone:
    """Its tree has ended and everything it wrote has been told. `ladder`: the rungs that were taken with it."""

    swept: tuple[Swept, ...] = ()
    survivors: tuple[Survivor, ...] = ()
    drained: bool = True
    stderr: Stderr = _NO_STDERR
    ladder: tuple[Rung, ...] = ()


# What a `Process` tells its command.
ProcessFact = (
    Started
    | StartFailed
    | NeverStarted
    | BytesRead
    | StreamEnded
    | Exited
    | KeeperActed
    | ProcessesSwept
    | SweepEnded
    | TreeEnded
)
# What a session takes of the facts of its process. Its output comes to it as frames.
Report = Started | StartFailed | FrameWritten | WriteFailed | Exited | SweepEnded | ProcessGone
