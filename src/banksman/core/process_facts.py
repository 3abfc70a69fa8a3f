"""What the world tells the core about a process: frozen values, past tense.

Times (`at`) are seconds of the machine's monotonic clock. A fact names its subject where there could be two. What it
tells about a session is in `session_facts`.
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
class ProcessesSwept:
    """What was ended after an interrupt, and what could not be."""

    processes: tuple[Swept, ...]


@dataclass(frozen=True, slots=True)
class TreeEnded:
    """No process of the tree is left but these."""

    survivors: tuple[Survivor, ...]
    at: float


ProcessFact = (
    Started | StartFailed | NeverStarted | BytesRead | StreamEnded | Exited | KeeperActed | ProcessesSwept | TreeEnded
)
